"""Embeddings → points on a map: a sample, laid out so that alike images lie close together.

t-SNE shows groups far better than two principal components do; those are for samples too small for it, or without
any spread. Both are deterministic.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

Array = NDArray[np.float64]

MOST_POINTS = 2000
LEAST_POINTS = 20  # below this t-SNE has too few neighbours to work with
COMPONENTS = 50  # kept for t-SNE: the rest is noise, and slow


class Layout(NamedTuple):
    """Positions (S, 2) from 0 to 1, and how they came about: ``t-SNE`` or ``PCA``."""

    points: Array
    method: str


def sample(count: int, most: int = MOST_POINTS) -> NDArray[np.int64]:
    """Return the index of all images, or of a random sample that is the same every time."""
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).choice(count, most, replace=False))


def lay_out(embeddings_SD: Array) -> Layout:
    """Place each embedding on a map."""
    components = principal_components(embeddings_SD)
    spread = float(components[:, 0].std()) if len(components) else 0.0
    if len(components) < LEAST_POINTS or spread < 1e-6:
        return Layout(to_unit_square(components[:, :2]), "PCA")
    return Layout(to_unit_square(tsne(components)), "t-SNE")


def principal_components(embeddings_SD: Array) -> Array:
    """Return the coordinates along the leading directions, at least two columns wide."""
    clean = np.nan_to_num(embeddings_SD, posinf=0, neginf=0)
    centered = clean - clean.mean(0, keepdims=True) if len(clean) else clean
    _, _, directions = np.linalg.svd(centered.T @ centered, hermitian=True)
    components: Array = centered @ directions[:COMPONENTS].T
    return np.pad(components, ((0, 0), (0, max(0, 2 - components.shape[1]))))


def tsne(components: Array) -> Array:
    """Run t-SNE on one thread: more would add numbers in another order, and end elsewhere."""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(components) - 1) / 3)
    with threadpool_limits(limits=1):
        model = TSNE(perplexity=perplexity, init="pca", random_state=0, max_iter=600)
        return np.asarray(model.fit_transform(components.astype(np.float32)), np.float64)


def to_unit_square(points_S2: Array) -> Array:
    """Scale both axes alike until all points lie from 0 to 1, in the middle of the square."""
    if not len(points_S2):
        return points_S2
    low, high = points_S2.min(0), points_S2.max(0)
    side = float((high - low).max())
    unit: Array = (points_S2 - (low + high) / 2) / (side if side > 0 else 1.0) + 0.5
    return unit
