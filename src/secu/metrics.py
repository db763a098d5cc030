"""How good a clustering is, given true labels: ACC, NMI and ARI.

The libraries are imported where they are needed, as a training shall not wait a second for them before its first step.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]


class Scores(NamedTuple):
    """Each between 0 and 1 (ARI may fall a little under 0), the higher the better."""

    acc: float
    nmi: float
    ari: float


def confusion(targets: Labels, clusters: Labels) -> NDArray[np.int64]:
    """Count the images of each true class (row) in each cluster (column)."""
    table = np.zeros((targets.max() + 1, clusters.max() + 1), np.int64)
    np.add.at(table, (targets, clusters), 1)
    return table


def matched(targets: Labels, clusters: Labels) -> NDArray[np.bool_]:
    """Say which images the best one-to-one matching of clusters to classes gets right.

    With more clusters than classes (or fewer), the ones left over are matched to nothing and count as wrong.
    """
    from scipy.optimize import linear_sum_assignment

    table = confusion(targets, clusters)
    rows, columns = linear_sum_assignment(table, maximize=True)
    class_of = np.full(table.shape[1], -1)
    class_of[columns] = rows
    right: NDArray[np.bool_] = class_of[clusters] == targets
    return right


def accuracy(targets: Labels, clusters: Labels) -> float:
    """Share of images that the best one-to-one matching of clusters to classes gets right."""
    return float(matched(targets, clusters).mean())


def calibration_error(confidence: NDArray[np.float32], right: NDArray[np.bool_], bins: int = 15) -> float:
    """Expected calibration error: how far confidence is from the share that is right, in the mean over all images.

    Images are put into equally wide bins of confidence, within which the two are compared.
    """
    bin_of = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    gaps = np.bincount(bin_of, weights=confidence - right, minlength=bins)
    return float(np.abs(gaps).sum() / len(confidence))


def score(targets: Labels, clusters: Labels) -> Scores:
    """Return all three metrics for the images whose true class is known (not negative)."""
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    known = targets >= 0
    targets, clusters = targets[known], clusters[known]
    return Scores(
        accuracy(targets, clusters),
        float(normalized_mutual_info_score(targets, clusters)),  # arithmetic mean, as in the paper
        float(adjusted_rand_score(targets, clusters)),
    )
