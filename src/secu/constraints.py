"""Step 6 of the tour: scores → labels, kept from collapsing into a single cluster.

A constraint adds a bonus to every cluster's score before the best one is taken, and learns from the labels given.
Shapes: B images, H heads, K clusters of the largest head. ``clusters_H`` are the heads' true cluster numbers.
"""

import math

import torch
from torch import Tensor, nn

from secu.config import ConstraintConfig
from secu.losses import at_label

NO_LABEL = -1  # in the label memory: not assigned yet


class Constraint(nn.Module):
    """No constraint, and the base of the others: every image goes to the cluster it is most similar to."""

    def __init__(self, clusters_H: Tensor) -> None:
        super().__init__()
        self.register_buffer("clusters", clusters_H, persistent=False)
        self.clusters: Tensor

    def start_epoch(self, done: float) -> None:
        """Hear that an epoch begins, with this share of the run behind it."""

    def assign(self, scores_BHK: Tensor, previous_BH: Tensor) -> Tensor:
        """Return the label with the best score and bonus; ``previous`` is the last epoch's, or NO_LABEL."""
        return scores_BHK.argmax(-1)

    def update(self, labels_BH: Tensor, previous_BH: Tensor) -> None:
        """Learn from a batch's labels, once a batch and after all its images were assigned."""


class SizeConstraint(Constraint):
    """Eqn. 8 and appendix B: γN/K ≤ size ≤ γ'N/K, through one dual variable a cluster and bound.

    y_i = argmax_j score_ij + ρ_j − ρ'_j, (Eqn. 9) and after each batch
    ρ_j ← ρ_j + η(γ/K − share_j), ρ'_j ← ρ'_j + η(share_j − γ'/K), both floored at 0. At γ = 1 the lower bound can
    only hold as an equality, and ρ may go negative. A falling η lets the labels come to rest with the weights.
    """

    def __init__(
        self, clusters_H: Tensor, lower: float, upper: float | None, dual_lr: float, schedule: str = "constant"
    ) -> None:
        super().__init__(clusters_H)
        self.lower, self.upper, self.dual_lr, self.schedule = lower, upper, dual_lr, schedule
        real_HK = torch.arange(int(clusters_H.max())) < clusters_H[:, None]
        # An equal share of the batch; nothing for padding, whose duals would grow for ever.
        self.register_buffer("even_share", real_HK / clusters_H[:, None], persistent=False)
        self.register_buffer("rate", torch.tensor(dual_lr), persistent=False)  # a captured step reads it anew
        self.register_buffer("lower_dual", torch.zeros(real_HK.shape))
        self.register_buffer("upper_dual", torch.zeros(real_HK.shape))
        self.even_share: Tensor
        self.rate: Tensor
        self.lower_dual: Tensor
        self.upper_dual: Tensor

    def start_epoch(self, done: float) -> None:
        """Set η for an epoch; a falling one follows a half cosine."""
        if self.schedule == "falling":
            self.rate.fill_(self.dual_lr * (1 + math.cos(math.pi * done)) / 2)

    def assign(self, scores_BHK: Tensor, previous_BH: Tensor) -> Tensor:
        """Return the label with the best score and duals."""
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

    y_i = argmax_j score_ij + α·H(labels with y_i moved to j) (Eqn. 11). Taking the image out of its old cluster costs
    the same whatever j is, so what counts is the gain of adding it to j afterwards: with h(n) = −n/N·log(n/N),
    gain(n) = h(n + 1) − h(n), at n_j, or at n_j − 1 for the old label itself. A batch's images see the same counts.
    """

    def __init__(self, clusters_H: Tensor, images: int, alpha: float) -> None:
        super().__init__(clusters_H)
        self.images, self.alpha = images, alpha
        self.register_buffer("counts", torch.zeros(len(clusters_H), int(clusters_H.max())))
        self.counts: Tensor
        # Kept beside the counts, so that no compiler works it out anew for every image.
        self.register_buffer("gain", self._gain(self.counts), persistent=False)
        self.gain: Tensor

    def start_epoch(self, done: float) -> None:
        """Make the gains those of the counts, which may come from a checkpoint."""
        self.gain.copy_(self._gain(self.counts))

    def assign(self, scores_BHK: Tensor, previous_BH: Tensor) -> Tensor:
        """Return the label with the best score and change of entropy.

        An image gains more where it came from than another one would: it stays if that makes its old label the best.
        """
        labels_BH = (scores_BHK + self.gain).argmax(-1)
        heads_H, old_BH = torch.arange(len(self.counts), device=labels_BH.device), previous_BH.clamp(min=0)
        best_BH = at_label(scores_BHK, labels_BH) + self.gain[heads_H, labels_BH]
        staying_BH = at_label(scores_BHK, old_BH) + self._gain(self.counts[heads_H, old_BH] - 1)
        return torch.where((previous_BH != NO_LABEL) & (staying_BH >= best_BH), previous_BH, labels_BH)

    def update(self, labels_BH: Tensor, previous_BH: Tensor) -> None:
        """Move the batch's images from their old to their new clusters."""
        known_BH = (previous_BH != NO_LABEL).to(self.counts.dtype)
        moves = torch.cat([torch.ones_like(known_BH), -known_BH])
        self.counts.scatter_add_(1, torch.cat([labels_BH, previous_BH.clamp(min=0)]).T, moves.T)
        self.gain.copy_(self._gain(self.counts))

    def _gain(self, counts_HK: Tensor) -> Tensor:
        """α·(h(n + 1) − h(n)), written so that float32 loses nothing between two large numbers; 0·log 0 = 0."""
        n = counts_HK.clamp(min=0)
        change = math.log(self.images) - torch.log1p(n) - n * torch.log1p(1 / n.clamp(min=1))
        return self.alpha / self.images * change


def build_constraint(config: ConstraintConfig, clusters_H: Tensor, images: int) -> Constraint:
    """Return the constraint that the config names, for a data set of so many images."""
    match config.kind:
        case "none":
            return Constraint(clusters_H)
        case "size":
            return SizeConstraint(clusters_H, config.lower, config.upper, config.dual_lr, config.dual_schedule)
        case "entropy":
            return EntropyConstraint(clusters_H, images, 6 * images / 50 if config.alpha is None else config.alpha)
