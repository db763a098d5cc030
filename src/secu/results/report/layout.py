"""The layout of the map: a sample of embeddings in two dimensions, with similar images close together.

t-SNE separates groups far better than the first two principal components, which are the fallback for samples that are
too small for it or have no variance. Both are deterministic.
"""

from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from secu.results.report.values import Floats, Ints

MOST_POINTS = 2000
LEAST_POINTS = 20  # minimum for t-SNE
COMPONENTS = 50  # principal components passed to t-SNE; more only add noise and time


class Layout(NamedTuple):
    """Positions (S, 2) from 0 to 1, and how they were computed: ``t-SNE`` or ``PCA``."""

    points: Floats
    method: str


def sample(count: int, most: int = MOST_POINTS) -> Ints:
    """Return the indices of all images, or of a random sample with a fixed seed."""
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).choice(count, most, replace=False))


def lay_out(embeddings_SD: Floats) -> Layout:
    """Compute the position of each embedding on the map."""
    components = principal_components(embeddings_SD)
    spread = float(components[:, 0].std()) if len(components) else 0.0
    if len(components) < LEAST_POINTS or spread < 1e-6:
        return Layout(to_unit_square(components[:, :2]), "PCA")
    return Layout(to_unit_square(tsne(components)), "t-SNE")


def principal_components(embeddings_SD: Floats) -> Floats:
    """Return the leading principal components, at least two columns."""
    clean = np.nan_to_num(embeddings_SD, posinf=0, neginf=0)
    centered = clean - clean.mean(0, keepdims=True) if len(clean) else clean
    _, _, directions = np.linalg.svd(centered.T @ centered, hermitian=True)
    components: Floats = centered @ directions[:COMPONENTS].T
    return np.pad(components, ((0, 0), (0, max(0, 2 - components.shape[1]))))


def tsne(components: Floats) -> Floats:
    """Run t-SNE on a single thread, since the result would otherwise depend on the number of threads."""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(components) - 1) / 3)
    with threadpool_limits(limits=1):
        model = TSNE(perplexity=perplexity, init="pca", random_state=0, max_iter=600)
        return np.asarray(model.fit_transform(components.astype(np.float32)), np.float64)


def to_unit_square(points_S2: Floats) -> Floats:
    """Scale both axes equally so that all points are between 0 and 1, centered in the unit square."""
    if not len(points_S2):
        return points_S2
    low = points_S2.min(0)
    high = points_S2.max(0)
    side = float((high - low).max())
    unit: Floats = (points_S2 - (low + high) / 2) / (side if side > 0 else 1.0) + 0.5
    return unit
