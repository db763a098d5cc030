"""Is the result to be trusted? What went wrong, in plain words, with what to do."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from secu.evaluate import Predictions

SWALLOWING = 4.0  # a cluster this many times larger than an equal share, or with more than half of all images
RESTLESS = 0.1  # share of images that still changed their cluster in the last epoch
UNSURE = 3.0  # mean confidence under this many times a blind guess


def warnings_of(metrics: Sequence[Mapping[str, Any]], predictions: Predictions, clusters: int) -> tuple[str, ...]:
    """Return what a person should know before using the clusters; nothing if all is well."""
    images = len(predictions.cluster)
    sizes = torch.bincount(predictions.cluster, minlength=clusters)
    found = []
    if empty := [str(number) for number in range(clusters) if sizes[number] == 0]:
        found.append(
            f"{len(empty)} of {clusters} clusters are empty ({', '.join(empty[:10])}): "
            "ask for fewer clusters, or raise --balance"
        )
    largest = int(sizes.max())
    if clusters > 2 and largest > min(0.5, SWALLOWING / clusters) * images:
        found.append(
            f"cluster {int(sizes.argmax())} has swallowed {largest / images:.0%} of all images: "
            "raise --balance if your groups should be more equal"
        )
    confidence = float(predictions.confidence.mean())
    if confidence < min(UNSURE / clusters, 0.6):
        found.append(
            f"the clusters are hardly told apart (mean confidence {confidence:.2f}): "
            "train longer (optim.epochs), or with a smaller batch (optim.batch_size)"
        )
    changed = metrics[-1]["changed"] if metrics else 0.0
    if changed > RESTLESS:
        found.append(
            f"{changed:.0%} of the images still changed cluster in the last epoch: train longer (optim.epochs)"
        )
    return tuple(found)
