"""Stability of a model's labels under random augmentation: a score that needs no true labels."""

from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

import torch
from torch import Tensor

from secu.cluster.metrics import mutual_information
from secu.data import Images
from secu.methods.predictor import Predictor, batches_of, evaluation_mode, to_device
from secu.views.augment import Augmentation


class Consistency(NamedTuple):
    """How well the labels of random views match the labels of their images."""

    agreement: float  # share of random views with the label of their image
    information: float  # mutual information of the two labels, 0 to 1; also drops when clusters vanish


def consistency(
    predictor: Predictor, views: Augmentation, images: Images, index_N: Tensor, numbers: Sequence[int] = (0, 1)
) -> Consistency:
    """Compare the labels of some images with those of random views of them; the views are the same in every call.

    ``numbers`` are the positions of the views to use, of the two that ``views`` renders.
    """
    device = predictor.all_centers.device
    encoder = predictor.encoder
    clusters = len(predictor.centers)
    generator = torch.Generator(device).manual_seed(0)
    counts = torch.zeros(clusters**2, dtype=torch.int64)
    parts = batches_of(index_N, images, device)
    with torch.inference_mode(), evaluation_mode(encoder), closing(images.fetch_ahead(parts)) as batches:
        for inputs in batches:
            batch = to_device(inputs, device)
            changed = views.render(batch, views.draw(len(batch), generator))
            seen = (views.plain(batch), *(changed[number] for number in numbers))  # possibly of different sizes
            plain_B, *labels = (predictor.compare(encoder.embed(view)).argmax(-1) for view in seen)
            for label_B in labels:
                counts += torch.bincount(plain_B * clusters + label_B, minlength=clusters**2).cpu()
    table_KK = counts.view(clusters, clusters)
    return Consistency(float(table_KK.trace() / counts.sum()), mutual_information(table_KK))
