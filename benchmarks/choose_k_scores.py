"""Scores of a number of clusters that choose_k.py compares with that of the package."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import adjusted_rand_score, cohen_kappa_score
from sklearn.metrics.cluster import contingency_matrix
from torch import Tensor

from secu.cluster.offsets import find_offsets
from secu.config import LossConfig
from secu.methods.answer import disagreement, information
from secu.methods.number import EMPTY, Choice, principal, silhouette
from secu.views.neighbors import find_neighbors

NEIGHBORS = 20
SEEDS = "agreement of seeds"  # only if the case was trained with another seed
STRENGTH = "prediction strength"
STRONG = 0.8  # its usual limit


def other_scores(
    choice: Choice, labels: list[Tensor], embeddings: Tensor, points: Tensor, seed: int
) -> dict[str, list[float]]:
    """Return the other scores that were considered, for every size."""
    unit = F.normalize(principal(points.double()), dim=-1)
    found = F.normalize(principal(embeddings.double()), dim=-1)
    near = find_neighbors(embeddings, NEIGHBORS)
    scores: dict[str, list[float]] = {"cuts": list(choice.cuts)}
    for size, label in zip(choice.sizes, labels[:-1], strict=True):
        free = KMeans(size, n_init=2, random_state=seed).fit_predict(unit.numpy())
        row = {
            "heads, on embeddings": silhouette(found, label),
            "shifted": shifted_silhouette(unit, embeddings, label, size),
            "k-means": silhouette(unit, torch.from_numpy(free).long()),
            "information": information(label, near, size),
            "neighbors": 1 - disagreement(label, near),
            "probes": probe_across_halves(unit.numpy(), label.numpy(), seed),
            "agreement with k-means": adjusted_rand_score(label.numpy(), free),
            "coding length": -coding_length(unit, label),
            STRENGTH: strength_of(unit.numpy(), size, seed),
        }
        for name, value in row.items():
            scores.setdefault(name, []).append(value)
    strong = [size if value >= STRONG else value for size, value in zip(choice.sizes, scores[STRENGTH], strict=True)]
    return scores | {STRENGTH: strong}  # the largest number that is strong enough, if there is one


def shifted_silhouette(unit: Tensor, embeddings: Tensor, label: Tensor, size: int) -> float:
    """Return the silhouette after the borders of clusters are moved, so that these may differ in size.

    Offsets are found as for ``answer=shifted``, from the neighbors among the unit vectors, but centers are the means of
    the embeddings of the clusters.
    """
    sums = torch.zeros(size, embeddings.shape[1]).index_add_(0, label, embeddings)
    cosines = embeddings @ F.normalize(sums, dim=-1).T
    near = find_neighbors(unit.float(), NEIGHBORS).of(torch.arange(len(unit)))
    moved = (cosines + find_offsets(cosines, near, LossConfig().temperature)).argmax(-1)
    return silhouette(unit, moved) if len(moved.unique()) == size else EMPTY


def agreement_of_seeds(labels: NDArray[np.uint8], others: NDArray[np.uint8]) -> list[float]:
    """Return how well the heads of two runs of different seeds agree (ARI), for every size but the finest."""
    return [float(adjusted_rand_score(own, other)) for own, other in zip(labels[:-1], others[:-1], strict=True)]


def probe_across_halves(points: NDArray[np.float64], label: NDArray[np.int64], seed: int) -> float:
    """Return how well a linear classifier that learned the clusters on one half of the images finds them on the other.

    It is Cohen's kappa, 0 for labels by chance, averaged over both directions.
    """
    order = np.random.default_rng(seed).permutation(len(points))
    halves = (order[::2], order[1::2])
    found = []
    for learned, tested in (halves, halves[::-1]):
        if len(np.unique(label[learned])) < 2:
            return 0.0
        probe = LogisticRegression(C=10, max_iter=200).fit(points[learned], label[learned])
        found.append(cohen_kappa_score(label[tested], probe.predict(points[tested])))
    return float(np.mean(found))


def coding_length(points: Tensor, label: Tensor) -> float:
    """Return the bits, up to a factor, of points and clusters: round Gaussians of one width, by Schwarz's criterion."""
    _, label = label.unique(return_inverse=True)
    sizes = label.bincount().double()
    count, dim = points.shape
    centers = torch.zeros(len(sizes), dim, dtype=points.dtype).index_add_(0, label, points) / sizes[:, None]
    variance = float((points - centers[label]).square().sum()) / (dim * (count - len(sizes)))
    shares = float((sizes * (sizes / count).log()).sum())
    likelihood = -count * dim / 2 * math.log(2 * math.pi * variance) - dim * (count - len(sizes)) / 2 + shares
    return len(sizes) * (dim + 1) / 2 * math.log(count) - likelihood


def strength_of(points: NDArray[np.float64], size: int, seed: int) -> float:
    """Return the prediction strength of k-means: how many pairs in a cluster of one half the other half keeps together.

    It is that of the worst cluster, averaged over both directions.
    """
    order = np.random.default_rng(seed).permutation(len(points))
    halves = points[order[::2]], points[order[1::2]]
    models = [KMeans(size, n_init=2, random_state=seed).fit(half) for half in halves]
    worst = []
    for half, own, other in zip(halves, models, models[::-1], strict=True):
        counts = contingency_matrix(own.labels_, other.predict(half))
        members = counts.sum(1)
        kept = (counts * (counts - 1)).sum(1) / np.maximum(members * (members - 1), 1)
        worst.append(kept.min())
    return float(np.mean(worst))
