"""Is the result to be trusted? What went wrong, in plain words, with what to do."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from secu.config import Config
from secu.evaluate import Predictions

SWALLOWING = 4.0  # a cluster this many times larger than an equal share, or with more than half of all images
OF_TWO = 0.9  # the same for two clusters, of which one always has half
# A cluster with less than this part of what balance promises it. At the default balance, sets whose groups differ ten
# times end at 0.24 to 0.36 of it, and gain by a lower one; sets of equal groups at 0.48 and more (docs/defaults.md).
STARVED = 0.4
RESTLESS = 0.1  # share of images that still changed their cluster in the last epoch
CROWDED = 0.5  # share of images in one cluster of a finer head
UNSURE = 3.0  # mean confidence under this many times a blind guess


def warnings_of(metrics: Sequence[Mapping[str, Any]], predictions: Predictions, config: Config) -> tuple[str, ...]:
    """Return what a person should know before using the clusters; nothing if all is well."""
    clusters = config.heads[0]
    found = _sizes(torch.bincount(predictions.cluster, minlength=clusters).tolist(), config)
    confidence = float(predictions.confidence.mean())
    if confidence < min(UNSURE / clusters, 0.6):
        found.append(
            f"the clusters are hardly told apart (mean confidence {confidence:.2f}): "
            "train longer (optim.epochs), or with a smaller batch (optim.batch_size)"
        )
    last = metrics[-1] if metrics else {"changed": 0.0}
    balance = _balance(config)
    if last.get("crowded", 0) > (CROWDED if balance is None else max(CROWDED, 1 - balance)):
        found.append(
            f"a finer clustering, which should help, has put {last['crowded']:.0%} of all images into one cluster: "
            "train longer (optim.epochs), raise balance, or ask for one alone (heads=[number of clusters])"
        )
    changed = last["changed"]
    if changed > RESTLESS:
        found.append(
            f"{changed:.0%} of the images still changed cluster in the last epoch: train longer (optim.epochs)"
        )
    return tuple(found)


def _balance(config: Config) -> float | None:
    """Return how equal clusters were asked to be; None where that cannot be asked for."""
    return config.constraint.lower if config.constraint.kind == "size" else None


def _sizes(sizes: list[int], config: Config) -> list[str]:
    """Return what is wrong with the sizes of clusters, seen from how equal they were asked to be."""
    found, clusters, share = [], len(sizes), sum(sizes) / len(sizes)
    balance = _balance(config)
    more_equal = "raise balance" if config.selflabel is None else "keep the run before"
    if empty := [str(number) for number, size in enumerate(sizes) if size == 0]:
        found.append(
            f"{len(empty)} of {clusters} clusters are empty ({', '.join(empty[:10])}): "
            f"ask for fewer clusters, or {more_equal}"
        )
    # Of all images, while the others have what they were promised.
    allowed = 0.0 if balance is None else 1 - balance * (clusters - 1) / clusters
    usual = OF_TWO if clusters == 2 else min(0.5, SWALLOWING / clusters)
    largest = max(sizes)
    if max(usual, allowed) * sum(sizes) < largest < sum(sizes):
        found.append(
            f"cluster {sizes.index(largest)} has swallowed {largest / sum(sizes):.0%} of all images: "
            f"{more_equal} if your groups should be more equal"
        )
    elif starved := [str(number) for number, size in enumerate(sizes) if 0 < size < STARVED * (balance or 0) * share]:
        found.append(
            f"{len(starved)} of {clusters} clusters are far smaller than balance asks for ({', '.join(starved[:10])}): "
            "lower balance if your groups are of very different size, or ask for fewer clusters"
        )
    return found
