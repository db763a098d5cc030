"""How many clusters a run reports, if that is left to it: heads of several sizes are compared without labels.

The score of a head is its mean silhouette: how much closer images are to their own cluster than to the next one. It is
measured on the feature vectors that a run was trained on, because training separates the clusters of every head in the
embeddings, whether they are real or not; a run on pixels has only its embeddings. Scores of neighboring sizes are
often almost equal, so the answer is a range with one recommended number.
Shapes: N images, D dimensions, K clusters.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SAMPLE = 10_000  # most images that are scored
PLAUSIBLE = 0.85  # sizes whose score is at least this share of the best are plausible
WEAK = 0.05  # a best score below this means that groups overlap


class Choice(NamedTuple):
    """The numbers of clusters that were compared, and the chosen one.

    Attributes:
        sizes: Numbers of clusters, increasing.
        scores: The score of each.
    """

    sizes: tuple[int, ...]
    scores: tuple[float, ...]

    @property
    def recommended(self) -> int:
        """The number of clusters with the best score."""
        return self.sizes[self.scores.index(max(self.scores))]

    @property
    def plausible(self) -> tuple[int, int]:
        """The smallest and the largest number whose score is nearly the best."""
        best = max(self.scores)
        near = [size for size, score in zip(self.sizes, self.scores, strict=True) if score >= PLAUSIBLE * best]
        return (near[0], near[-1]) if near else (self.sizes[0], self.sizes[-1])

    def reasons(self) -> tuple[str, ...]:
        """Return the choice and the reasons for it in plain words."""
        low, high = self.plausible
        best = max(self.scores)
        found = [
            f"{low} to {high} clusters are plausible, {self.recommended} are recommended"
            if low < high
            else f"{low} clusters are recommended; no other number from {self.sizes[0]} to {self.sizes[-1]} is close",
            f"of {len(self.sizes)} numbers from {self.sizes[0]} to {self.sizes[-1]}, {self.recommended} separates the "
            f"images best: silhouette {best:.3f}, where 1 is perfect and 0 is none",
        ]
        if low < high:
            found.append(f"the numbers from {low} to {high} reach at least {PLAUSIBLE:.0%} of that: look at several")
        if best < WEAK:
            found.append("the groups overlap strongly, so that no number stands out: choose by what you need")
        if self.recommended in (self.sizes[0], self.sizes[-1]):
            found.append(f"{self.recommended} is the end of the range: a wider range may have a better number")
        return tuple(found)

    def summary(self) -> dict[str, Any]:
        """Return the choice for outcome.json."""
        low, high = self.plausible
        return {
            "recommended": self.recommended,
            "low": low,
            "high": high,
            "scores": {str(size): round(score, 4) for size, score in zip(self.sizes, self.scores, strict=True)},
            "reasons": list(self.reasons()),
        }


def candidates(heads: Sequence[int]) -> list[int]:
    """Return the positions of the heads to choose from: all but the finest, whose clusters are for the tree."""
    return [n for n, size in enumerate(heads) if size < max(heads)]


def choose_number(sizes: Sequence[int], labels: Sequence[Tensor], points_ND: Tensor, seed: int = 0) -> Choice:
    """Compare clusterings of the same images.

    Args:
        sizes: The number of clusters of each.
        labels: The labels of each (N,).
        points_ND: What distances are measured between.
        seed: Seed of the sample, if there are many images.
    """
    order = torch.randperm(len(points_ND), generator=torch.Generator().manual_seed(seed))
    rows = order[:SAMPLE].sort().values
    unit_ND = F.normalize(points_ND[rows.to(points_ND.device)].double(), dim=-1).cpu()
    scores = [silhouette(unit_ND, labels_N[rows]) for labels_N in labels]
    ranked = sorted(zip(sizes, scores, strict=True))
    return Choice(tuple(size for size, _ in ranked), tuple(score for _, score in ranked))


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
