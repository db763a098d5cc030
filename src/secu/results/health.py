"""Health checks of a finished run: warnings in plain language, each with a suggested fix."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from secu.config import Config
from secu.methods.predictor import Predictions

DOMINANT = 4.0  # a cluster this many times larger than an equal share, or with more than half of all images
DOMINANT_OF_TWO = 0.9  # share for K = 2, where one cluster always has at least half
# A cluster with less than this share of its guaranteed size. At the default balance, data sets whose group sizes differ
# by a factor of ten end at 0.24 to 0.36 and gain from a lower balance; those with equal groups end at 0.48 or more
# (docs/defaults.md).
STARVED = 0.4
UNSETTLED = 0.1  # share of images that still changed cluster in the last epoch
UNSETTLED_BY_NEIGHBORS = 0.5  # likewise if a view is a random neighbor: 15 to 25% then change in the best of runs
CROWDED = 0.5  # share of images in one cluster of a finer head
UNCERTAIN = 3.0  # mean confidence below this multiple of a random guess
CONFIDENT = 0.6  # mean confidence that is high enough for any number of clusters
LISTED = 10  # maximum number of clusters listed in a warning


def warnings_of(metrics: Sequence[Mapping[str, Any]], predictions: Predictions, config: Config) -> tuple[str, ...]:
    """Return warnings about possible problems with the clusters; of the metrics, only the last record is used."""
    sizes = torch.bincount(predictions.cluster, minlength=config.clusters).tolist()
    confidence = float(predictions.confidence.mean())
    last = metrics[-1] if metrics else {}
    found = [
        _empty(sizes, config),
        _dominant(sizes, config) or _starved(sizes, config),
        _uncertain(confidence, config.clusters),
        _crowded(last.get("crowded", 0.0), config),
        _unsettled(last.get("changed", 0.0), UNSETTLED_BY_NEIGHBORS if config.neighbors.count else UNSETTLED),
    ]
    return tuple(text for text in found if text)


def _balance(config: Config) -> float | None:
    """Return the requested balance of cluster sizes; None if the constraint has no such setting."""
    return config.constraint.lower if config.constraint.kind == "size" and config.answer == "head" else None


def _more_equal(config: Config) -> str:
    """Return advice on how to make cluster sizes more equal."""
    if config.answer == "number":  # which sets no bounds
        return "choose one number of clusters (-k) and raise balance"
    has_previous_run = config.init_from is not None
    return "keep the previous run" if has_previous_run and _balance(config) is None else "raise balance"


def _listed(clusters: Sequence[int]) -> str:
    return ", ".join(map(str, clusters[:LISTED]))


def _empty(sizes: Sequence[int], config: Config) -> str:
    empty = [cluster for cluster, size in enumerate(sizes) if size == 0]
    if not empty:
        return ""
    count = f"{len(empty)} of {len(sizes)} clusters are empty ({_listed(empty)})"
    return f"{count}: ask for fewer clusters, or {_more_equal(config)}"


def _dominant(sizes: Sequence[int], config: Config) -> str:
    clusters = len(sizes)
    images = sum(sizes)
    largest = max(sizes)
    balance = _balance(config)
    # Largest possible share of one cluster if all others have their guaranteed size.
    allowed = 0.0 if balance is None else 1 - balance * (clusters - 1) / clusters
    usual = DOMINANT_OF_TWO if clusters == 2 else min(0.5, DOMINANT / clusters)
    if config.answer != "head":  # which is for groups of different sizes
        usual = max(usual, 0.5)
    if not max(usual, allowed) * images < largest < images:
        return ""
    share = f"cluster {sizes.index(largest)} contains {largest / images:.0%} of all images"
    return f"{share}: {_more_equal(config)} if your groups should be more equal in size"


def _starved(sizes: Sequence[int], config: Config) -> str:
    share = sum(sizes) / len(sizes)
    balance = _balance(config) or 0
    starved = [cluster for cluster, size in enumerate(sizes) if 0 < size < STARVED * balance * share]
    if not starved:
        return ""
    count = f"{len(starved)} of {len(sizes)} clusters are far smaller than balance asks for ({_listed(starved)})"
    return f"{count}: lower balance if your groups differ widely in size, or ask for fewer clusters"


def _uncertain(confidence: float, clusters: int) -> str:
    if confidence < min(UNCERTAIN / clusters, CONFIDENT):
        return (
            f"the clusters are barely distinguishable (mean confidence {confidence:.2f}): "
            "train longer (optim.epochs), or use a smaller batch (optim.batch_size)"
        )
    return ""


def _crowded(crowded: float, config: Config) -> str:
    balance = _balance(config)
    if crowded > (CROWDED if balance is None else max(CROWDED, 1 - balance)):
        return (
            f"an additional, finer head put {crowded:.0%} of all images into one cluster: "
            f"train longer (optim.epochs), {_more_equal(config)}, or train a single head (heads=[number of clusters])"
        )
    return ""


def _unsettled(changed: float, limit: float) -> str:
    if changed > limit:
        return f"{changed:.0%} of the images still changed cluster in the last epoch: train longer (optim.epochs)"
    return ""
