"""Metrics of a clustering, with and without true labels, and calibration of its confidence.

scipy and scikit-learn are imported where they are used, since importing them takes about a second.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LOWEST_TEMPERATURE = 0.003
HIGHEST_TEMPERATURE = 1.0

Labels = NDArray[np.int64]


class Scores(NamedTuple):
    """ACC, NMI and ARI, each between 0 and 1 (ARI may be slightly negative); higher is better."""

    acc: float
    nmi: float
    ari: float


def confusion(targets: Labels, clusters: Labels) -> NDArray[np.int64]:
    """Return the number of images of each true class (row) in each cluster (column).

    Unlike scikit-learn's contingency_matrix, the table includes rows and columns for unused numbers.
    """
    table = np.zeros((targets.max() + 1, clusters.max() + 1), np.int64)
    np.add.at(table, (targets, clusters), 1)
    return table


def matched(targets: Labels, clusters: Labels) -> NDArray[np.bool_]:
    """Return which images are correct under the best one-to-one matching of clusters to classes.

    If the numbers of clusters and classes differ, the surplus ones remain unmatched and count as wrong.
    """
    from scipy.optimize import linear_sum_assignment

    table = confusion(targets, clusters)
    rows, columns = linear_sum_assignment(table, maximize=True)
    class_of = np.full(table.shape[1], -1)
    class_of[columns] = rows
    right: NDArray[np.bool_] = class_of[clusters] == targets
    return right


def accuracy(targets: Labels, clusters: Labels) -> float:
    """Return the share of images that are correct under the best one-to-one matching of clusters to classes."""
    return float(matched(targets, clusters).mean())


def score(targets: Labels, clusters: Labels) -> Scores:
    """Return all three metrics for the images whose true class is known (not negative)."""
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    known = targets >= 0
    targets = targets[known]
    clusters = clusters[known]
    return Scores(
        acc=accuracy(targets, clusters),
        nmi=float(normalized_mutual_info_score(targets, clusters)),  # arithmetic mean, as in the paper
        ari=float(adjusted_rand_score(targets, clusters)),
    )


def calibration_error(confidence: NDArray[np.float32], right: NDArray[np.bool_], bins: int = 15) -> float:
    """Return the expected calibration error: the mean gap between confidence and accuracy.

    Images are grouped by confidence into bins of equal width; confidence and accuracy are compared within each bin.
    """
    bin_of = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    gaps = np.bincount(bin_of, weights=confidence - right, minlength=bins)
    return float(np.abs(gaps).sum() / len(confidence))


def score_known(targets: Tensor | Labels | None, clusters: Tensor | Labels) -> Scores | None:
    """Return ACC, NMI and ARI for the images whose true class is known; None if there are none."""
    if targets is None or not (targets >= 0).any():
        return None
    return score(np.asarray(targets), np.asarray(clusters))


def calibration_known(
    targets: Tensor | Labels | None, clusters: Tensor | Labels, confidence: Tensor | NDArray[np.float32]
) -> float | None:
    """Return the calibration error for the images whose true class is known; None if there are none."""
    if targets is None or not (targets >= 0).any():
        return None
    known = np.asarray(targets) >= 0
    right = matched(np.asarray(targets)[known], np.asarray(clusters)[known])
    return calibration_error(np.asarray(confidence)[known], right)


def mutual_information(table_KK: Tensor) -> float:
    """Return the mutual information of two labelings, given their joint counts, as a share of log K."""
    from sklearn.metrics import mutual_info_score

    if not table_KK.any():
        return 0.0
    return float(mutual_info_score(None, None, contingency=table_KK.long().numpy())) / math.log(len(table_KK))


def find_temperature(cosines_NK: Tensor, wanted: float) -> float:
    """Return the temperature at which the mean confidence is ``wanted``, clamped to the range from 0.003 to 1."""
    from scipy.optimize import brentq

    def excess(log_temperature: float) -> float:
        confidence_N = torch.softmax(cosines_NK / math.exp(log_temperature), -1).amax(-1)
        return float(confidence_N.mean()) - wanted

    lowest = math.log(LOWEST_TEMPERATURE)
    highest = math.log(HIGHEST_TEMPERATURE)
    if excess(lowest) <= 0:
        return LOWEST_TEMPERATURE
    if excess(highest) >= 0:
        return HIGHEST_TEMPERATURE
    return math.exp(brentq(excess, lowest, highest))
