"""Constraints: scores → labels, without collapsing into a single cluster.

A constraint adds a bonus to every cluster's score before the best one is taken, and learns from the assigned labels.
To add one, subclass ``Constraint`` and register it in ``secu.registry.CONSTRAINTS``.
Shapes: B images, H heads, K clusters of the largest head. ``clusters_H`` holds the number of clusters of each head.
"""

import math
from typing import Self

import torch
from torch import Tensor, nn

from secu.cluster.losses import at_label
from secu.config import ConstraintConfig
from secu.registry import CONSTRAINTS

NO_LABEL = -1  # in the label memory: not assigned yet


class Constraint(nn.Module):
    """No constraint, and the base class of all others: every image is assigned to the most similar cluster."""

    clusters: Tensor

    def __init__(self, clusters_H: Tensor) -> None:
        super().__init__()
        self.register_buffer("clusters", clusters_H, persistent=False)

    @classmethod
    def build(cls, config: ConstraintConfig, clusters_H: Tensor, images: int) -> Self:
        """Return the constraint with the settings of a config, for a data set of ``images`` images."""
        return cls(clusters_H)

    def start_epoch(self, done: float) -> None:
        """Prepare for an epoch; ``done`` is the fraction of the run that is complete."""

    def assign(self, scores_BHK: Tensor, previous_BH: Tensor) -> Tensor:
        """Return the labels with the best sum of score and bonus; ``previous_BH`` are the last epoch's, or NO_LABEL."""
        return scores_BHK.argmax(-1)

    def update(self, labels_BH: Tensor, previous_BH: Tensor) -> None:
        """Update the constraint from the labels of a batch."""


class SizeConstraint(Constraint):
    """Eqn. 8 and appendix B: γN/K ≤ size ≤ γ'N/K, with one dual variable for each cluster and bound.

    y_i = argmax_j score_ij + ρ_j − ρ'_j, (Eqn. 9) and after each batch
    ρ_j ← ρ_j + η(γ/K − share_j), ρ'_j ← ρ'_j + η(share_j − γ'/K), both floored at 0. At γ = 1 the lower bound can
    only hold as an equality, and ρ may be negative. A falling η decays to zero, so assignments settle with the weights.

    Args:
        clusters_H: Number of clusters of each head.
        lower: γ.
        upper: γ', or None for no upper bound.
        dual_lr: η.
        schedule: "constant", or "falling" for an η that follows a half cosine to 0.
    """

    even_share: Tensor
    rate: Tensor
    lower_dual: Tensor
    upper_dual: Tensor

    def __init__(
        self, clusters_H: Tensor, lower: float, upper: float | None, dual_lr: float, schedule: str = "constant"
    ) -> None:
        super().__init__(clusters_H)
        self.lower = lower
        self.upper = upper
        self.dual_lr = dual_lr
        self.schedule = schedule
        real_HK = torch.arange(int(clusters_H.max())) < clusters_H[:, None]
        # An equal share of the batch; zero for padding, whose duals would otherwise grow without bound.
        self.register_buffer("even_share", real_HK / clusters_H[:, None], persistent=False)
        self.register_buffer("rate", torch.tensor(dual_lr), persistent=False)  # a captured step reads it every time
        self.register_buffer("lower_dual", torch.zeros(real_HK.shape))
        self.register_buffer("upper_dual", torch.zeros(real_HK.shape))

    @classmethod
    def build(cls, config: ConstraintConfig, clusters_H: Tensor, images: int) -> Self:
        """Return the constraint with the settings of a config."""
        return cls(clusters_H, config.lower, config.upper, config.dual_lr, config.dual_schedule)

    def start_epoch(self, done: float) -> None:
        """Set η for an epoch."""
        if self.schedule == "falling":
            self.rate.fill_(self.dual_lr * (1 + math.cos(math.pi * done)) / 2)

    def assign(self, scores_BHK: Tensor, previous_BH: Tensor) -> Tensor:
        """Return the labels with the best sum of score and duals."""
        return (scores_BHK + (self.lower_dual - self.upper_dual)).argmax(-1)

    def update(self, labels_BH: Tensor, previous_BH: Tensor) -> None:
        """Take one step of dual ascent with the shares of this batch."""
        ones_BH = torch.ones_like(labels_BH, dtype=self.lower_dual.dtype)
        share_HK = torch.zeros_like(self.lower_dual).scatter_add_(1, labels_BH.T, ones_BH.T) / len(labels_BH)
        self.lower_dual.add_(self.rate * (self.lower * self.even_share - share_HK))
        if self.lower < 1:
            self.lower_dual.clamp_(min=0)
        if self.upper is not None:
            self.upper_dual.add_(self.rate * (share_HK - self.upper * self.even_share)).clamp_(min=0)


class EntropyConstraint(Constraint):
    """Eqn. 10: the entropy H of the label counts over the whole data set, weighted by α.

    y_i = argmax_j score_ij + α·H(labels with y_i moved to j) (Eqn. 11). The cost of removing an image from its old
    cluster does not depend on j, so only the gain of adding it to cluster j is computed. With h(n) = −n/N·log(n/N),
    that gain is h(n + 1) − h(n), where n is n_j, or n_j − 1 for the old label. Counts change only between batches.

    The gain is proportional to α/N. In the published experiments N is the number of images seen so far plus one while
    there are fewer than all, that is in the first epoch, so that its labels spread from the start.

    Args:
        clusters_H: Number of clusters of each head.
        images: N.
        alpha: α.
        over: "all", or "seen" for α/(images seen so far + 1) in the first epoch.
    """

    counts: Tensor
    weight: Tensor
    gain: Tensor

    def __init__(self, clusters_H: Tensor, images: int, alpha: float, over: str = "all") -> None:
        super().__init__(clusters_H)
        self.images = images
        self.alpha = alpha
        self.over = over
        self.register_buffer("counts", torch.zeros(len(clusters_H), int(clusters_H.max())))
        self.register_buffer("weight", torch.tensor(alpha / images), persistent=False)
        # Stored as a buffer, so that the compiler does not recompute it for every image.
        self.register_buffer("gain", torch.zeros_like(self.counts), persistent=False)
        self._refresh()

    @classmethod
    def build(cls, config: ConstraintConfig, clusters_H: Tensor, images: int) -> Self:
        """Return the constraint with the settings of a config; by default α = 6N/50."""
        alpha = 6 * images / 50 if config.alpha is None else config.alpha
        return cls(clusters_H, images, alpha, config.alpha_over)

    def start_epoch(self, done: float) -> None:
        """Recompute the gains from the counts, which may come from a checkpoint."""
        self._refresh()

    def assign(self, scores_BHK: Tensor, previous_BH: Tensor) -> Tensor:
        """Return the labels with the best sum of score and change of entropy.

        An image's old cluster is handled separately: its gain is larger, because the image is already counted there.
        """
        labels_BH = (scores_BHK + self.gain).argmax(-1)
        heads_H = torch.arange(len(self.counts), device=labels_BH.device)
        old_BH = previous_BH.clamp(min=0)
        best_BH = at_label(scores_BHK, labels_BH) + self.gain[heads_H, labels_BH]
        staying_BH = at_label(scores_BHK, old_BH) + self._gain(self.counts[heads_H, old_BH] - 1)
        return torch.where((previous_BH != NO_LABEL) & (staying_BH >= best_BH), previous_BH, labels_BH)

    def update(self, labels_BH: Tensor, previous_BH: Tensor) -> None:
        """Move the images of a batch from their old to their new clusters."""
        known_BH = (previous_BH != NO_LABEL).to(self.counts.dtype)
        moves = torch.cat([torch.ones_like(known_BH), -known_BH])
        self.counts.scatter_add_(1, torch.cat([labels_BH, previous_BH.clamp(min=0)]).T, moves.T)
        self._refresh()

    def _refresh(self) -> None:
        """Compute weight and gains from the counts, whose sum, the same for every head, is the images seen so far."""
        if self.over == "seen":
            seen = self.counts[0].sum()
            self.weight.copy_(torch.where(seen < self.images, self.alpha / (seen + 1), self.alpha / self.images))
        self.gain.copy_(self._gain(self.counts))

    def _gain(self, counts_HK: Tensor) -> Tensor:
        """Return α·(h(n + 1) − h(n)), in a form without cancellation in float32; 0·log 0 = 0."""
        n = counts_HK.clamp(min=0)
        change = math.log(self.images) - torch.log1p(n) - n * torch.log1p(1 / n.clamp(min=1))
        return self.weight * change


def build_constraint(config: ConstraintConfig, clusters_H: Tensor, images: int) -> Constraint:
    """Return the constraint selected in the config, for a data set of ``images`` images."""
    constraint: Constraint = CONSTRAINTS[config.kind].build(config, clusters_H, images)
    return constraint
