"""Outcome of self-labeling: how stable a model's labels are, its state, and warnings if the second one seems worse.

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

WORSE = 0.1  # drop of the label-free score above which the user is warned


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


def worries(before: State, after: State) -> list[str]:
    """Return warnings if the second model seems worse than the first, judged without true labels."""
    warnings = []
    if after.information < before.information - WORSE:
        warnings.append(
            "the clusters are less stable under random changes of the images (label-free score "
            f"{before.information:.3f} before, {after.information:.3f} now): keep the previous run, or lower optim.lr"
        )
    for cluster, (then, now) in enumerate(zip(before.sizes, after.sizes, strict=True)):
        if now < then / 2:
            warnings.append(
                f"cluster {cluster} fell from {then:,} to {now:,} images: "
                "raise selflabel.smallest, or keep the previous run"
            )
    return warnings
