"""Scores of a number of clusters that choose_k.py compares with that of the package."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from sklearn.metrics.cluster import contingency_matrix
from torch import Tensor

from secu.methods.answer import information
from secu.methods.number import Choice, principal, silhouette
from secu.views.neighbors import find_neighbors

NEIGHBORS = 20
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
            "k-means": silhouette(unit, torch.from_numpy(free).long()),
            "information": information(label, near, size),
            "agreement with k-means": adjusted_rand_score(label.numpy(), free),
            "coding length": -coding_length(unit, label),
            STRENGTH: strength_of(unit.numpy(), size, seed),
        }
        for name, value in row.items():
            scores.setdefault(name, []).append(value)
    strong = [size if value >= STRONG else value for size, value in zip(choice.sizes, scores[STRENGTH], strict=True)]
    return scores | {STRENGTH: strong}  # the largest number that is strong enough, if there is one


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
