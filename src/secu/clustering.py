"""Step 8 of the tour: all heads of a run, and the order of one training step.

A head is a clustering of the same images into its own number of clusters. All heads are computed as one, in
tensors padded to the largest. Shapes: S embeddings an image (its views), B images of a batch, N of the data set,
H heads, K clusters of the largest head, D dimensions.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from secu.centers import build_centers
from secu.config import Config
from secu.constraints import NO_LABEL, build_constraint
from secu.losses import PADDING, cross_entropy, log_probabilities, secu_loss, soft_label_loss


class Losses(NamedTuple):
    """The two parts of the objective, each a mean over batch, views and heads."""

    representation: Tensor
    centers: Tensor


class Clustering(nn.Module):
    """Centers, constraint and label memory of every head."""

    labels: Tensor
    epoch_centers: Tensor
    mask: Tensor

    def __init__(self, config: Config, images: int, dim: int) -> None:
        super().__init__()
        self.config = config.loss
        heads, widest = len(config.heads), max(config.heads)
        clusters_H = torch.tensor(config.heads)
        self.centers = build_centers(config.centers, heads, widest, dim)
        self.constraint = build_constraint(config.constraint, clusters_H, images)
        self.score_scale = 1.0 if config.constraint.score == "cosine" else 1 / config.loss.center_temperature
        self.register_buffer("labels", torch.full((images, heads), NO_LABEL))
        self.register_buffer("epoch_centers", self.centers.unit().detach().clone())
        surplus_HK = torch.arange(widest) >= clusters_H[:, None]
        self.register_buffer("mask", -PADDING * surplus_HK.float(), persistent=False)

    def start_epoch(self, done: float = 0.0) -> None:
        """Keep the centers as they stand: the encoder learns against them for a whole epoch.

        ``done`` is the share of the run that is over.
        """
        self.epoch_centers.copy_(self.centers.unit().detach())
        self.constraint.start_epoch(done)
        self.centers.start_epoch()

    def step(self, embeddings_SBD: Tensor, index_B: Tensor) -> Losses:
        """Assign a batch, remember it, and return the losses (Alg. 1)."""
        settings = self.config
        frozen_SBD = embeddings_SBD.detach()
        centers_HKD = self.centers.unit()
        # The plain cross-entropy is the one loss whose gradient needs every center; SeCu's needs the assigned one.
        against_HKD = centers_HKD if settings.name == "ce" else centers_HKD.detach()
        cosines_SBHK = torch.einsum("sbd,hkd->sbhk", frozen_SBD, against_HKD)

        previous_BH = self.labels[index_B]
        labels_BH = self.assign(cosines_SBHK.detach().mean(0), previous_BH)
        self.constraint.update(labels_BH, previous_BH)
        self.labels[index_B] = labels_BH

        log_p_SBHK = log_probabilities(cosines_SBHK, self.mask, settings.center_temperature)
        if settings.name == "ce":
            center_loss = cross_entropy(log_p_SBHK, labels_BH)
        else:
            center_loss = secu_loss(frozen_SBD, centers_HKD, log_p_SBHK, labels_BH, settings.center_temperature)
        self.centers.update(frozen_SBD, log_p_SBHK.detach(), labels_BH)

        # In the first epoch there is no previous label, and the one just assigned stands in for it.
        hard_BH = torch.where(previous_BH == NO_LABEL, labels_BH, previous_BH)
        old_cosines_SBHK = torch.einsum("sbd,hkd->sbhk", embeddings_SBD, self.epoch_centers)
        old_log_p_SBHK = log_probabilities(old_cosines_SBHK, self.mask, settings.temperature)
        return Losses(soft_label_loss(old_log_p_SBHK, hard_BH, settings.hard_label_weight), center_loss)

    def assign(self, cosines_BHK: Tensor, previous_BH: Tensor) -> Tensor:
        """Return labels for the mean cosines of a batch's views.

        log p differs from x·w/λ by a number that is the same for all clusters of an image, and so is its mean over
        the views: no argmax sees it. Scoring by log-probability is therefore scoring by the cosine over λ.
        """
        return self.constraint.assign(cosines_BHK * self.score_scale + self.mask, previous_BH)

    def record(self) -> dict[str, float]:
        """Return what this kind of training adds to an epoch's record.

        ``crowded`` is the share of images in the largest cluster of any finer head: near 1 when a head has collapsed,
        which the first one's sizes do not show.
        """
        finer = range(1, self.labels.shape[1])
        crowded = max((float(self.sizes(number).max()) for number in finer), default=0.0) / len(self.labels)
        return {"crowded": crowded} if finer else {}

    def head(self, number: int = 0) -> Tensor:
        """Return a head's centers on the sphere (its K, D)."""
        clusters = int(self.constraint.clusters[number])
        return self.centers.unit()[number, :clusters].detach()

    def sizes(self, number: int = 0) -> Tensor:
        """Return how many images the label memory holds for each cluster of a head."""
        labels_N = self.labels[:, number]
        return torch.bincount(labels_N[labels_N != NO_LABEL], minlength=int(self.constraint.clusters[number]))
