"""Comparison of clusters with true classes, if these are known."""

from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from secu.cluster.metrics import confusion
from secu.results.found import Results
from secu.results.report.limits import LARGEST_TRUTH, class_length, shorten
from secu.results.report.values import Ints, ints

LARGEST_TABLE = 40  # maximum number of classes or clusters for a readable confusion matrix
MAIN_CLASSES = 3  # true classes per card
MIX_UPS = 8  # number of most frequent confusions listed


def has_truth(results: Results) -> bool:
    """Return whether the true class of any image is known, and there are not too many classes to compare."""
    targets = results.images.targets
    if targets is None or not bool((targets >= 0).any()):
        return False
    return _classes(results) * len(results.centers) <= LARGEST_TRUTH


def class_names(results: Results) -> list[str]:
    """Return the names of the true classes, shortened if they are very long."""
    classes = _classes(results)
    longest = class_length(classes, len(results.centers), MAIN_CLASSES)
    return [shorten(results.class_name(row), longest) for row in range(classes)]


def _classes(results: Results) -> int:
    targets = results.images.targets
    highest = -1 if targets is None else int(targets.max())
    return max(highest + 1, len(results.images.class_names))


def compare_to_classes(results: Results) -> dict[str, Any] | None:
    """Match clusters to true classes one to one, as for accuracy, and count matches and confusions."""
    if results.images.targets is None or not has_truth(results):
        return None
    table = _count(results, ints(results.images.targets), ints(results.predictions.cluster))
    rows, columns = linear_sum_assignment(table, maximize=True)
    match = {int(row): int(column) for row, column in zip(rows, columns, strict=True)}
    order = [match[row] for row in range(len(table)) if row in match]
    order += [column for column in range(table.shape[1]) if column not in set(order)]
    return {
        "match": [match.get(row) for row in range(len(table))],
        "totals": table.sum(1).tolist(),
        "found": [int(table[row, match[row]]) if row in match else 0 for row in range(len(table))],
        "order": order,
        "table": table[:, order].tolist() if max(table.shape) <= LARGEST_TABLE else None,
        "mixups": _mix_ups(table, match),
        "classes": class_names(results),
    }


def _count(results: Results, targets_N: Ints, cluster_N: Ints) -> Ints:
    """Return how many images of each true class are in each cluster, including empty classes and clusters."""
    known = targets_N >= 0
    found = confusion(targets_N[known], cluster_N[known])
    table = np.zeros((_classes(results), len(results.centers)), np.int64)
    table[: found.shape[0], : found.shape[1]] = found
    return table


def _mix_ups(table: Ints, match: dict[int, int]) -> list[list[int]]:
    """Return the most frequent unmatched pairs of class and cluster, each with its count."""
    others = table.copy()
    for row, column in match.items():
        others[row, column] = 0
    worst = np.argsort(-others, axis=None, kind="stable")[:MIX_UPS]
    pairs = (divmod(int(flat), table.shape[1]) for flat in worst)
    return [[row, column, int(others[row, column])] for row, column in pairs if others[row, column]]
