"""The cards of a report: one per cluster, with its statistics, its pictures and similar clusters."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from secu.methods.predictor import Predictions
from secu.results.found import Results
from secu.results.report.limits import MOST_COMPARED
from secu.results.report.truth import MAIN_CLASSES, class_names
from secu.results.report.values import Bools, Floats, Ints, floats, ints, mean_of, number

SIMILAR = 3  # similar clusters per card
MOST_PICTURES = 9000  # maximum number of pictures on all cards
KINDS = ("typical", "uncertain", "outlying")  # kinds of pictures on a card, in display order


def cluster_cards(results: Results) -> list[dict[str, Any]]:
    """Return the content of all cards."""
    predictions = results.predictions
    cosine = floats(predictions.cosine)
    confidence = floats(predictions.confidence)
    outlier = ints(results.outlier)
    members = members_of(ints(predictions.cluster), len(results.centers))
    pictures = choose_pictures(predictions, outlier > 0, members)
    similar = similar_clusters(floats(results.centers), ints(predictions.cluster), ints(predictions.second))
    names = class_names(results)
    return [
        {
            "size": len(index),
            "cohesion": mean_of(cosine, index),
            "confidence": mean_of(confidence, index),
            "outliers": int(outlier[index].sum()),
            "words": results.suggestions[cluster],
            "classes": main_classes(results, index, names),
            "similar": similar[cluster],
            **pictures[cluster],
        }
        for cluster, index in enumerate(members)
    ]


def members_of(cluster_N: Ints, clusters: int) -> list[Ints]:
    """Return the indices of each cluster's images."""
    order = np.argsort(cluster_N, kind="stable")
    ends = np.cumsum(np.bincount(cluster_N, minlength=clusters))
    return np.split(order, ends[:-1])


def pictures_per_card(clusters: int) -> tuple[int, int, int]:
    """Return how many typical, uncertain and outlying pictures a card shows; fewer if there are many cards."""
    if clusters <= 40:
        return 12, 6, 6
    if clusters <= 200:
        return 6, 3, 3
    if clusters <= 1000:
        return 6, 2, 1
    return max(1, MOST_PICTURES // clusters), 0, 0


def choose_pictures(predictions: Predictions, outlier_N: Bools, members: Sequence[Ints]) -> list[dict[str, list[int]]]:
    """Choose each card's pictures: those closest to the center, the least confident of the others, and outliers."""
    cosine = floats(predictions.cosine)
    confidence = floats(predictions.confidence)
    most_typical, most_uncertain, most_outlying = pictures_per_card(len(members))
    cards = []
    for index in members:
        typical = first_by(-cosine, index, most_typical)
        others = index[~np.isin(index, typical)]
        uncertain = first_by(confidence, others, most_uncertain)
        outlying = first_by(cosine, index[outlier_N[index]], most_outlying)
        cards.append({"typical": typical, "uncertain": uncertain, "outlying": outlying})
    return cards


def first_by(values: Floats, index: Ints, count: int) -> list[int]:
    """Return the ``count`` images with the smallest values; ties keep their order."""
    order = np.argsort(values[index], kind="stable")[:count]
    return [int(i) for i in index[order]]


def similar_clusters(centers_KD: Floats, cluster_N: Ints, second_N: Ints) -> list[list[dict[str, Any]]]:
    """Return each cluster's nearest clusters, with the cosine of the centers and the number of second choices.

    With very many clusters, none are compared.
    """
    clusters = len(centers_KD)
    if clusters > MOST_COMPARED:
        return [[] for _ in range(clusters)]
    norms = np.linalg.norm(centers_KD, axis=1, keepdims=True)
    unit_KD = np.nan_to_num(centers_KD / np.where(norms > 0, norms, 1))
    cosines_KK = unit_KD @ unit_KD.T
    np.fill_diagonal(cosines_KK, -np.inf)
    second_KK = np.zeros((clusters, clusters), np.int64)
    np.add.at(second_KK, (cluster_N, second_N), 1)
    empty_K = np.bincount(cluster_N, minlength=clusters) == 0
    cosines_KK[:, empty_K] = -np.inf
    nearest_KA = np.argsort(-cosines_KK, axis=1, kind="stable")[:, :SIMILAR]
    return [
        [
            {"cluster": int(b), "cosine": number(cosines_KK[a, b]), "second": int(second_KK[a, b])}
            for b in nearest
            if np.isfinite(cosines_KK[a, b])
        ]
        for a, nearest in enumerate(nearest_KA)
    ]


def main_classes(results: Results, index: Ints, names: Sequence[str]) -> list[list[Any]]:
    """Return the most frequent true classes of some images, each with its count."""
    if results.images.targets is None:
        return []
    targets = ints(results.images.targets)[index]
    counts = np.bincount(targets[targets >= 0])
    best = np.argsort(-counts, kind="stable")[:MAIN_CLASSES]
    return [[names[int(target)], int(counts[target])] for target in best if counts[target]]
