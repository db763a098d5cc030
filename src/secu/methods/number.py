"""How many clusters a run reports, if it chooses the number: heads of several sizes are compared without labels.

The score of a clustering is its mean silhouette: how much closer images are to their own cluster than to the next one.
It is measured on the feature vectors that a run was trained on, because training separates the clusters of every head
in the embeddings, whether they are real or not; a run on pixels has only its embeddings. Scores of neighboring sizes
are often almost equal, so the answer is a range with one recommended number.

Every head holds its clusters near an equal size, so it cannot leave surplus clusters empty, and where groups differ in
size it splits large ones and joins small ones. Cuts of the tree over the finest head have no such limits. They decide
less clearly, but show numbers that the heads miss, so they extend the range.
Shapes: N images, D dimensions, K clusters.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from secu.cluster.tree import Tree
from secu.methods.answer import relabeled

SAMPLE = 10_000  # maximum number of images that are scored
COMPONENTS = 64  # principal components that distances are measured in
# Sizes are plausible if the head, or the cut of the tree, has at least this share of the best score of its kind
# (docs/lab/how-many.md).
PLAUSIBLE = 0.85
PLAUSIBLE_CUT = 0.9
EMPTY = -1.0  # score of a head with empty clusters, which has fewer clusters than its size
WEAK = 0.05  # a best score below this means that groups overlap


class Choice(NamedTuple):
    """The numbers of clusters that were compared, and the chosen one."""

    sizes: tuple[int, ...]  # numbers of clusters, increasing
    scores: tuple[float, ...]  # the score of the head of each size
    cuts: tuple[float, ...]  # the score of the tree's cut of each size

    @property
    def recommended(self) -> int:
        """The number of clusters whose head has the best score."""
        return self.sizes[self.scores.index(max(self.scores))]

    @property
    def plausible(self) -> tuple[int, int]:
        """The smallest and the largest plausible number: up to halfway to the next one that was compared."""
        near = _near(self.scores, PLAUSIBLE)
        if max(self.cuts) > 0:
            near |= _near(self.cuts, PLAUSIBLE_CUT)
        first = min(near)
        last = max(near)
        low, high = self.sizes[first], self.sizes[last]
        if first > 0:
            low = min(low, math.ceil(math.sqrt(low * self.sizes[first - 1])))
        if last < len(self.sizes) - 1:
            high = max(high, math.floor(math.sqrt(high * self.sizes[last + 1])))
        return low, high

    def reasons(self) -> tuple[str, ...]:
        """Return the choice and the reasons for it in plain words."""
        low, high = self.plausible
        best = max(self.scores)
        between = f"from {self.sizes[0]} to {self.sizes[-1]}"
        if best == EMPTY:
            return (
                f"no number of clusters can be recommended; {self.recommended} is reported",
                f"of {len(self.sizes)} numbers tried {between}, every one left clusters without images",
            )
        reasons = [
            f"{low} to {high} clusters are plausible; {self.recommended} is recommended"
            if low < high
            else f"{self.recommended} clusters are recommended; no other number {between} comes close",
            f"of {len(self.sizes)} numbers tried {between}, {self.recommended} separates the images best "
            f"(silhouette {best:.3f}; 1: perfect separation, 0: none)",
        ]
        if low < high:
            reasons.append(f"{low} to {high} are almost as good: compare a few of them")
        if best < WEAK:
            reasons.append("the groups overlap, so no number stands out: choose the level of detail that you need")
        if self.recommended in (self.sizes[0], self.sizes[-1]):
            reasons.append(f"{self.recommended} is an end of the range: a wider range may contain a better number")
        return tuple(reasons)

    def summary(self) -> dict[str, Any]:
        """Return the choice for outcome.json."""
        low, high = self.plausible
        return {
            "recommended": self.recommended,
            "low": low,
            "high": high,
            "scores": {str(size): round(score, 4) for size, score in zip(self.sizes, self.scores, strict=True)},
            "cuts": {str(size): round(score, 4) for size, score in zip(self.sizes, self.cuts, strict=True)},
            "reasons": list(self.reasons()),
        }


def _near(scores: Sequence[float], share: float) -> set[int]:
    """Return the positions of the scores that are near the best one."""
    best = max(scores)
    return {n for n, score in enumerate(scores) if score >= best - (1 - share) * abs(best)}


def candidates(heads: Sequence[int]) -> list[int]:
    """Return the positions of the heads to choose from: all but the finest, whose clusters are for the tree."""
    return [n for n, size in enumerate(heads) if size < max(heads)]


def compare_sizes(
    heads: Sequence[int], labels: Sequence[Tensor], tree: Tree | None, points_ND: Tensor, seed: int = 0
) -> Choice:
    """Compare the heads of several sizes, and the cuts of the tree over the finest one at the same sizes.

    Distances are measured between the points. The tree is None if the finest head has fewer than two clusters with
    images.
    """
    finest = heads.index(max(heads))
    positions = sorted(candidates(heads), key=lambda n: heads[n])
    order = torch.randperm(len(points_ND), generator=torch.Generator().manual_seed(seed))
    rows = order[:SAMPLE].sort().values
    unit_ND = F.normalize(principal(points_ND.cpu()[rows].double()), dim=-1)
    scores = []
    cuts = []
    for n in positions:
        cut_N = labels[finest]  # if it has no more non-empty clusters than requested
        if tree is not None and len(tree.leaves) > heads[n]:
            cut_N = relabeled(labels[finest], tree, heads[n])
        whole = len(labels[n].unique()) == heads[n]
        scores.append(silhouette(unit_ND, labels[n][rows]) if whole else EMPTY)
        cuts.append(silhouette(unit_ND, cut_N[rows]))
    return Choice(tuple(heads[n] for n in positions), tuple(scores), tuple(cuts))


def principal(points_ND: Tensor) -> Tensor:
    """Return the centered points, reduced to the directions of largest variance: the others are mostly noise."""
    centered_ND = points_ND - points_ND.mean(0)
    if points_ND.shape[1] <= COMPONENTS:
        return centered_ND
    vectors = torch.linalg.eigh(centered_ND.T @ centered_ND).eigenvectors
    reduced_ND: Tensor = centered_ND @ vectors[:, -COMPONENTS:]
    return reduced_ND


def silhouette(unit_ND: Tensor, labels_N: Tensor) -> float:
    """Return the mean silhouette of unit vectors by cosine distance; an image alone in its cluster counts as 0.

    The mean cosine distance to the images of a cluster is one minus the product with the sum of their vectors, divided
    by their number, so that no distances between pairs of images are needed.
    """
    _, labels_N = labels_N.unique(return_inverse=True)
    sizes_K = labels_N.bincount().to(unit_ND.dtype)
    if len(sizes_K) < 2:
        return 0.0
    sums_KD = unit_ND.new_zeros(len(sizes_K), unit_ND.shape[1]).index_add_(0, labels_N, unit_ND)
    total_NK = sizes_K - unit_ND @ sums_KD.T
    own_N1 = labels_N[:, None]
    size_N = sizes_K[labels_N]
    within_N = total_NK.gather(1, own_N1)[:, 0] / (size_N - 1).clamp(min=1)
    between_N = (total_NK / sizes_K).scatter(1, own_N1, torch.inf).amin(1)
    values_N = (between_N - within_N) / torch.maximum(within_N, between_N).clamp(min=1e-9)
    return float(values_N.where(size_N > 1, 0.0).mean())
