"""Outcome of self-labeling: the state of a model, and warnings if the second one seems worse."""

from dataclasses import dataclass

import torch
from torch import Tensor

from secu.cluster.metrics import calibration_known, score_known
from secu.data import Images
from secu.methods.consistency import Consistency
from secu.methods.predictor import Predictor

WORSE = 0.1  # drop of the label-free score above which the user is warned


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
    found = predictor.choose(cosines_NK)
    judged = found if scored is None else predictor.predict(scored)
    targets = images.targets if scored is None else scored.targets
    scores = score_known(targets, judged.cluster)
    sizes = torch.bincount(found.cluster, minlength=len(predictor.centers)).tolist()
    state = State(
        information=seen.information,
        agreement=seen.agreement,
        confidence=float(found.confidence.mean()),
        confident=float((found.confidence > limit).float().mean()),
        sizes=tuple(sizes),
        largest=max(sizes),
        smallest=min(sizes),
        calibration_error=calibration_known(targets, judged.cluster, judged.confidence),
        acc=scores.acc if scores else None,
    )
    return state, found.cluster


def worries(before: State, after: State) -> list[str]:
    """Return warnings if the second model seems worse than the first, judged without true labels."""
    found = []
    if after.information < before.information - WORSE:
        found.append(
            "the clusters are less stable under random changes of the images (label-free score "
            f"{before.information:.3f} before, {after.information:.3f} now): keep the previous run, or lower optim.lr"
        )
    for cluster, (then, now) in enumerate(zip(before.sizes, after.sizes, strict=True)):
        if now < then / 2:
            found.append(
                f"cluster {cluster} fell from {then:,} to {now:,} images: "
                "raise selflabel.smallest, or keep the previous run"
            )
    return found
