"""The tree of a report: the leaves, their merges, and the parts into which they split the run's own clusters.

The leaves are the clusters of the finest head. Each belongs to the own cluster that most of its images are in, and
splits it: the images of a cluster that are nearest to a leaf of another one join the nearest of the cluster's own
leaves. So the parts of a cluster add up to it, whether or not clusters consist of whole leaves.
Shapes: N images, K clusters, L leaves, P pairs of a cluster and a leaf that share images.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from secu.results.found import Results
from secu.results.leaves import Leaves
from secu.results.report.cards import first_by, main_classes, members_of
from secu.results.report.truth import class_names
from secu.results.report.values import Bools, Floats, Ints, floats, ints, mean_of
from secu.results.words import suggest_names

MOST_STRAYS = 50_000  # maximum number of pairs of a cluster and a leaf of another one for which clusters can be split
FEW_LEAVES = 120  # up to this many show their most typical images, more of them those that are shown anyway
EXEMPLARS = 4  # images of each leaf
OTHERS = 3  # likewise, of those that are shown anyway
DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"  # of the leaf of every image


class Split(NamedTuple):
    """How the leaves split the own clusters."""

    parent_L: Ints  # the own cluster of each leaf; -1 for a leaf without images
    home_N: Ints  # the part of each image, as a leaf of its own cluster; -1 in clusters that cannot be split
    strays: list[list[int]]  # own cluster, leaf and part of the images whose leaf belongs to another cluster


def tree_content(results: Results, shown: Sequence[int]) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the tree and the images it shows, besides those ``shown`` elsewhere; no tree if the results have none."""
    found = results.leaves
    if found is None:
        return None, []
    split = split_clusters(found, ints(results.predictions.cluster), len(results.centers))
    pool_N = np.zeros(len(results.images), bool)
    pool_N[list(shown)] = True
    cosine_N = floats(found.cosine)
    members = members_of(ints(found.leaf), len(found.centers))
    exemplars = choose_exemplars(members, cosine_N, pool_N)
    words = suggest_names(results.ids, results.texts, ints(found.leaf), len(found.centers))
    parts = part_columns(results, split, pool_N)
    tree = {
        "merges": ints(found.tree.linkage[:, :2]).tolist(),
        "numbers": found.tree.leaves.tolist(),
        "isOwn": found.column(results.predictions.cluster) is None,
        "leaves": leaf_columns(results, members, cosine_N) | {"words": words, "typical": exemplars},
        "parent": split.parent_L.tolist(),
        "parts": parts,
        "strays": split.strays,
    }
    return tree, [i for lists in (exemplars, parts["typical"]) for row in lists for i in row]


def split_clusters(found: Leaves, cluster_N: Ints, clusters: int) -> Split:
    """Return the own cluster of each leaf, and the part of each image."""
    leaves = len(found.centers)
    centers_LD = floats(found.centers)
    leaf_N = ints(found.leaf)
    pair_P, number_N, count_P = np.unique(cluster_N * leaves + leaf_N, return_inverse=True, return_counts=True)
    cluster_P, leaf_P = np.divmod(pair_P, leaves)
    parent_L = np.full(leaves, -1)
    order = np.argsort(count_P, kind="stable")  # the largest comes last and stays
    parent_L[leaf_P[order]] = cluster_P[order]
    children = members_of(parent_L[parent_L >= 0], clusters)
    known_L = np.flatnonzero(parent_L >= 0)
    home_P = np.full(len(pair_P), -1)
    strays: list[list[int]] = []
    if len(pair_P) - leaves > MOST_STRAYS:
        return Split(np.full(leaves, -1), home_P[number_N.reshape(-1)], strays)
    for place, (cluster, leaf) in enumerate(zip(cluster_P.tolist(), leaf_P.tolist(), strict=True)):
        own = known_L[children[cluster]]
        if len(own) < 2:
            continue
        home_P[place] = leaf
        if parent_L[leaf] != cluster:
            home_P[place] = own[np.argmax(centers_LD[own] @ centers_LD[leaf])]
            strays.append([cluster, leaf, int(home_P[place])])
    return Split(parent_L, home_P[number_N.reshape(-1)], strays)


def choose_exemplars(members: Sequence[Ints], cosine_N: Floats, pool_N: Bools) -> list[list[int]]:
    """Return the exemplars of each group: its most typical images or, if there are many groups, of those shown anyway.

    Each group that has images gets an exemplar; ``pool_N`` marks the images that are shown, and is extended.
    """
    chosen = []
    for index in members:
        best = first_by(-cosine_N, index, EXEMPLARS)
        if len(members) > FEW_LEAVES:
            best = first_by(-cosine_N, index[pool_N[index]], OTHERS) or best[:1]
        pool_N[best] = True
        chosen.append(best)
    return chosen


def leaf_columns(results: Results, members: Sequence[Ints], cosine_N: Floats) -> dict[str, list[Any]]:
    """Return the statistics of groups of images, as columns."""
    names = class_names(results)
    return {
        "size": [len(index) for index in members],
        "cohesion": [mean_of(cosine_N, index) for index in members],
        "classes": [main_classes(results, index, names) for index in members],
    }


def part_columns(results: Results, split: Split, pool_N: Bools) -> dict[str, list[Any]]:
    """Return the statistics of the parts of all own clusters, by leaf."""
    found = results.leaves
    assert found is not None
    cosine_N = floats(found.cosine).copy()
    moved = np.flatnonzero((split.home_N >= 0) & (split.home_N != ints(found.leaf)))
    homes = found.centers[split.home_N[moved]]
    cosine_N[moved] = floats((results.embeddings[moved] * homes).sum(-1))
    rows = np.flatnonzero(split.home_N >= 0)
    members = [rows[index] for index in members_of(split.home_N[rows], len(found.centers))]
    confidence_N = floats(results.predictions.confidence)
    outlier_N = ints(results.outlier)
    return leaf_columns(results, members, cosine_N) | {
        "confidence": [mean_of(confidence_N, index) for index in members],
        "outliers": [int(outlier_N[index].sum()) for index in members],
        "typical": choose_exemplars(members, cosine_N, pool_N),
    }


def encode_leaves(results: Results) -> str | None:
    """Return the leaf of each image as digits, as many per image as the number of leaves needs; None if not needed."""
    found = results.leaves
    if found is None or found.column(results.predictions.cluster) is None:
        return None
    width = digits_for(len(found.centers))
    codes = ["".join(DIGITS[leaf // 64**place % 64] for place in range(width)) for leaf in range(len(found.centers))]
    return "".join([codes[leaf] for leaf in found.leaf.tolist()])


def digits_for(leaves: int) -> int:
    """Return how many digits of ``DIGITS`` a leaf needs."""
    return 1 if leaves <= 64 else 2 if leaves <= 64**2 else 3
