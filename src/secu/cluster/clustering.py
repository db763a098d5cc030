"""All heads of a run, and the training step of the clustering.

A head is a clustering of the same images into its own number of clusters. All heads are computed at once, in tensors
padded to the largest. Shapes: S embeddings per image (its views), B images of a batch, N of the data set, H heads,
K clusters of the largest head, D dimensions.
"""

import torch
from torch import Tensor, nn

from secu.base import collectives
from secu.base.errors import UserError
from secu.cluster.centers import build_centers
from secu.cluster.constraints import NO_LABEL, build_constraint
from secu.cluster.guide import Guide
from secu.cluster.losses import PADDING, cross_entropy, log_probabilities, secu_loss, soft_label_loss
from secu.cluster.tree import Tree, grow_tree
from secu.config import Config


class Clustering(nn.Module):
    """Centers, constraint and label memory of every head.

    Args:
        config: All settings of the run.
        images: Number of training images, N.
        dim: Length of an embedding, D.
    """

    labels: Tensor
    labels_before: Tensor
    epoch_centers: Tensor
    mask: Tensor

    def __init__(self, config: Config, images: int, dim: int) -> None:
        super().__init__()
        self.config = config.loss
        self.heads = config.heads
        self.main = config.head
        self.answer = config.answer
        heads = len(config.heads)
        widest = max(config.heads)
        clusters_H = torch.tensor(config.heads)
        self.centers = build_centers(config.centers, heads, widest, dim)
        self.constraint = build_constraint(config.constraint, clusters_H, images)
        self.score_scale = 1.0 if config.constraint.score == "cosine" else 1 / config.loss.center_temperature
        self.register_buffer("labels", torch.full((images, heads), NO_LABEL))
        self.register_buffer("labels_before", torch.full((images,), NO_LABEL), persistent=False)
        self.register_buffer("epoch_centers", self.centers.unit().detach().clone())
        surplus_HK = torch.arange(widest) >= clusters_H[:, None]
        self.register_buffer("mask", -PADDING * surplus_HK.float(), persistent=False)
        self.guide: Guide | None = None  # the user's hints, if there are any
        self.tree: Tree | None = None  # of the clusters of a finer head; grown at the end of a run, if at all
        self.finest: Tree | None = None  # of those of the finest head, if that is known to be another
        self.offsets: Tensor | None = None  # of the clusters of the main head; found at the end of a run, if at all

    def start_epoch(self, done: float = 0.0) -> None:
        """Fix the encoder's target centers for the whole epoch, and store the labels of the previous epoch.

        Args:
            done: Fraction of the run that is complete.
        """
        self.epoch_centers.copy_(self.centers.unit().detach())
        self.labels_before.copy_(self.labels[:, self.main])
        self.constraint.start_epoch(done)
        self.centers.start_epoch()

    def step(self, embeddings_SBD: Tensor, index_B: Tensor) -> dict[str, Tensor]:
        """Assign labels to a batch, store them, and return the losses (Alg. 1).

        Returns:
            The losses of the representation (``loss``), of the centers (``center_loss``) and, if there are any, of the
            user's hints (``hint_loss``), each a mean over batch, views and heads.
        """
        settings = self.config
        frozen_SBD = embeddings_SBD.detach()
        centers_HKD = self.centers.unit()
        # Only the plain cross-entropy has a gradient for every center; SeCu's loss has one for the assigned center.
        against_HKD = centers_HKD if settings.name == "ce" else centers_HKD.detach()
        cosines_SBHK = torch.einsum("sbd,hkd->sbhk", frozen_SBD, against_HKD)

        previous_BH = self.labels[index_B]
        labels_BH = self.assign(cosines_SBHK.detach().mean(0), previous_BH)
        if self.guide is not None:
            labels_BH = self.guide.labels(index_B, labels_BH)
        self._learn(index_B, labels_BH, previous_BH)

        log_p_SBHK = log_probabilities(cosines_SBHK, self.mask, settings.center_temperature)
        if settings.name == "ce":
            center_loss = cross_entropy(log_p_SBHK, labels_BH)
        else:
            center_loss = secu_loss(frozen_SBD, centers_HKD, log_p_SBHK, labels_BH, settings.center_temperature)
        self.centers.update(frozen_SBD, log_p_SBHK.detach(), labels_BH)

        # In the first epoch there is no previous label, so the new one is used instead.
        hard_BH = torch.where(previous_BH == NO_LABEL, labels_BH, previous_BH)
        old_cosines_SBHK = torch.einsum("sbd,hkd->sbhk", embeddings_SBD, self.epoch_centers)
        old_log_p_SBHK = log_probabilities(old_cosines_SBHK, self.mask, settings.temperature)
        losses = {
            "loss": soft_label_loss(old_log_p_SBHK, hard_BH, settings.hard_label_weight),
            "center_loss": center_loss,
        }
        if self.guide is not None:
            losses["hint_loss"] = self.guide.loss(index_B, old_log_p_SBHK)
        return losses

    def _learn(self, index_B: Tensor, labels_BH: Tensor, previous_BH: Tensor) -> None:
        """Update constraint and label memory with the labels of the whole batch, the same way in every process."""
        index_G, labels_GH, previous_GH = collectives.gather(index_B, labels_BH, previous_BH)
        self.constraint.update(labels_GH, previous_GH)
        self.labels[index_G] = labels_GH

    def assign(self, cosines_BHK: Tensor, previous_BH: Tensor) -> Tensor:
        """Return labels for cosines averaged over the views of a batch.

        log p and x·w/λ differ by a constant that is the same for all clusters of an image, and so do their means over
        the views, so the argmax is the same. Scoring by log-probability is therefore scoring by cosine divided by λ.
        """
        return self.constraint.assign(cosines_BHK * self.score_scale + self.mask, previous_BH)

    def record(self) -> dict[str, float]:
        """Return values to add to the record of an epoch.

        Returns:
            For the main head, the sizes of the ``largest`` and ``smallest`` cluster and the share of labels that
            ``changed`` in the epoch. If there are other heads that are at least as fine, also ``crowded``: the share of
            images in the largest cluster of any of them. It is near 1 when such a head has collapsed.
        """
        sizes = self.sizes()
        changed_N = self.labels[:, self.main] != self.labels_before
        record: dict[str, float] = {
            "largest": int(sizes.max()),
            "smallest": int(sizes.min()),
            "changed": float(changed_N.float().mean()),
        }
        if finer := self._finer_heads():
            record["crowded"] = max(float(self.sizes(number).max()) for number in finer) / len(self.labels)
        return record

    def head(self, number: int | None = None) -> Tensor:
        """Return a head's centers on the unit sphere (its K, D); by default, those of the main head."""
        number = self.main if number is None else number
        return self.centers.unit()[number, : self.heads[number]].detach()

    def answer_centers(self) -> Tensor:
        """Return the centers of the main head or, if the tree answers, those of its leaves (M, D)."""
        if self.tree is None or self.answer != "tree":
            return self.head()
        return self.leaf_centers(self.tree)

    def leaf_centers(self, tree: Tree) -> Tensor:
        """Return the centers of the leaves of a tree (L, D)."""
        return self.head(int(tree.head))[tree.leaves.to(self.labels.device)]

    def groups(self) -> Tensor | None:
        """Return the cluster of each of these centers (M,), if the tree answers; None if each is a cluster."""
        if self.tree is None or self.answer != "tree":
            return None
        return self.tree.cut(self.heads[self.main])

    def answer_offsets(self) -> Tensor | None:
        """Return the offset of each cluster (K,), if the answer has them."""
        return self.offsets if self.answer == "shifted" else None

    def finest_tree(self) -> Tree:
        """Return the tree of the finest clusters: one that was grown on images or, if there is none, one of centers.

        The centers of clusters without images would distort a tree, so that of a coarser head is better.
        """
        if tree := self.finest or self.tree:
            return tree
        finest = self.heads.index(max(self.heads))
        centers_KD = self.head(finest).cpu()
        return grow_tree(centers_KD, torch.arange(len(centers_KD)), finest)

    def cut(self, level: int) -> tuple[Tensor, Tensor]:
        """Return the centers of the finest tree's leaves (M, D), and the group of each after cutting it (M,)."""
        tree = self.finest_tree()
        most = len(tree.leaves)
        if not 2 <= level <= most:
            raise UserError(f"level: {level} must be a number of groups from 2 to {most}, the clusters of the tree")
        return self.leaf_centers(tree), tree.cut(level)

    def sizes(self, number: int | None = None) -> Tensor:
        """Return the number of images with each label of a head; by default, the main head."""
        number = self.main if number is None else number
        labels_N = self.labels[:, number]
        return torch.bincount(labels_N[labels_N != NO_LABEL], minlength=self.heads[number])

    def _finer_heads(self) -> list[int]:
        """Return the positions of the other heads with at least as many clusters as the main head."""
        least = self.heads[self.main]
        return [n for n, clusters in enumerate(self.heads) if n != self.main and clusters >= least]
