"""Outcome of self-labeling: how stable a model's labels are, its state, and reasons to doubt the second model.

Stability under random augmentation is a score that needs no true labels.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from secu.cluster.metrics import calibration_known, mutual_information, score_known
from secu.data import Images
from secu.methods.predictor import Predictor, batches_of, evaluation_mode, to_device
from secu.views.augment import Augmentation

# Drops above which the second model is not trusted (docs/lab/self-labeling.md).
LESS_INFORMATION = 0.1
LESS_AGREEMENT = 0.08
FEW = 5  # images; the loss of a smaller cluster may be chance


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


@dataclass(frozen=True)
class State:
    """Statistics of a model on a set of images; most need no true labels."""

    information: float  # label-free score: mutual information of the labels of images and of random views, 0 to 1
    agreement: float  # share of random views with the label of their image, for the kind of view that agrees more
    confidence: float  # mean over all images
    confident: float  # share of images more confident than selflabel.confidence
    sizes: tuple[int, ...]
    largest: int
    smallest: int
    calibration_error: float | None  # on images whose true class is known
    acc: float | None = None  # on images whose true class is known


def state_of(
    predictor: Predictor,
    seen: Consistency,
    images: Images,
    cosines_NK: Tensor,
    scored: Images | None,
    limit: float,
) -> tuple[State, Tensor]:
    """Return the state of a model and the labels of the images, given their cosines.

    Calibration error and ACC are computed on ``scored``, or on ``images`` if that is None.
    """
    predictions = predictor.choose(cosines_NK)
    judged = predictions if scored is None else predictor.predict(scored)
    targets = images.targets if scored is None else scored.targets
    scores = score_known(targets, judged.cluster)
    sizes = torch.bincount(predictions.cluster, minlength=len(predictor.centers)).tolist()
    state = State(
        information=seen.information,
        agreement=seen.agreement,
        confidence=float(predictions.confidence.mean()),
        confident=float((predictions.confidence > limit).float().mean()),
        sizes=tuple(sizes),
        largest=max(sizes),
        smallest=min(sizes),
        calibration_error=calibration_known(targets, judged.cluster, judged.confidence),
        acc=scores.acc if scores else None,
    )
    return state, predictions.cluster


def doubts(before: State, after: State) -> list[str]:
    """Return the reasons, without true labels, to believe that the second model is worse than the first."""
    found = []
    if after.information < before.information - LESS_INFORMATION:
        found.append(f"the label-free score fell from {before.information:.3f} to {after.information:.3f}")
    if after.agreement < before.agreement - LESS_AGREEMENT:
        found.append(
            "random views of an image are in its cluster less often than before "
            f"({after.agreement:.1%}, {before.agreement:.1%} before)"
        )
    for cluster, (then, now) in enumerate(zip(before.sizes, after.sizes, strict=True)):
        if then >= FEW and now < then / 2:
            found.append(f"cluster {cluster} fell from {then:,} to {now:,} images")
    return found
