"""The objective of self-labeling: confident labels of weak views are the targets of strong views.

The weak view of an image determines its label and the confidence of that label; confident labels are used as targets
for the strong view. Shapes: S embeddings per image (weak, then strong), B images of a batch, N of the data set, K
clusters, D dimensions.

There are four known failure modes. The first two are countered by dual ascent, like the cluster sizes in SeCu itself
(cluster/constraints.py); the other two matter for small data sets (apps/selflabel.py) and are countered by settings:

- A cluster is absorbed by others. A cluster whose share of the labels falls below a fraction of its initial share is
  boosted: its cosines get a bonus until the share is restored. While the bonus is significant, all images of the
  cluster are trained on their label, confident or not, so that the model learns to do without the bonus.
- All images become confident, right or wrong; or fewer and fewer do, and the model forgets images that it is not
  trained on. The share of confident images should equal the share whose two views have the same label, so the
  probabilities that the confidence threshold applies to are sharpened or flattened accordingly.
- Labels drift gradually. The most confident images of every cluster may keep their initial label.
- Images that are never trained on are forgotten. Unconfident images may be trained on their predicted probabilities,
  mixed with their first label as SeCu mixes a label with a prediction (cluster/losses.py, Eqn. 7).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from secu.base import collectives
from secu.base.errors import UserError
from secu.cluster.clustering import Clustering
from secu.cluster.losses import balanced_cross_entropy
from secu.config import Config, SelfLabelConfig

LARGEST_BONUS = 10  # in units of the temperature: wins every unconfident image, yet decays quickly
SHARPEST = math.log(20)  # upper limit of log_sharpness


class ConfidentLabels(Clustering):
    """The main head used as a classifier, with the state of self-labeling."""

    first_labels: Tensor
    first_share: Tensor
    kept: Tensor
    bonus: Tensor
    log_sharpness: Tensor
    taught: Tensor
    confident: Tensor
    epoch: Tensor

    def __init__(self, config: Config, settings: SelfLabelConfig, images: int, dim: int) -> None:
        super().__init__(config, images, dim)
        self.settings = settings
        clusters = config.clusters
        self.register_buffer("first_labels", torch.zeros(images, dtype=torch.int64))
        self.register_buffer("first_share", torch.zeros(clusters))
        self.register_buffer("kept", torch.zeros(images, dtype=torch.bool))  # images whose label is fixed
        self.register_buffer("bonus", torch.zeros(clusters))
        self.register_buffer("log_sharpness", torch.zeros(()))  # above 0: sharper than the temperature implies
        self.register_buffer("taught", torch.zeros(()))  # images trained on a label so far in this epoch
        self.register_buffer("confident", torch.zeros(()))  # confident images so far in this epoch
        self.register_buffer("epoch", torch.zeros(()))

    def begin(self, labels_N: Tensor, confidence_N: Tensor) -> None:
        """Store the initial labels; those of the most confident images of each cluster may be fixed."""
        self.first_labels.copy_(labels_N)
        self.labels[:, 0] = self.first_labels
        self.first_share.copy_(self.sizes() / len(labels_N))
        self.kept.copy_(most_confident(labels_N, confidence_N, self.settings.kept))

    def start_epoch(self, done: float = 0.0) -> None:
        """Increment the epoch and reset its counters."""
        if not self.first_share.any():
            raise UserError("selflabel: there are no labels to start from; run secu selflabel")
        super().start_epoch(done)
        self.taught.zero_()
        self.confident.zero_()
        self.epoch.add_(1)

    def step(self, embeddings_SBD: Tensor, index_B: Tensor) -> dict[str, Tensor]:
        """Return the loss of the strong views, whose gradient reaches embeddings and centers."""
        centers_KD = self.centers.unit()[0]
        temperature = self.config.temperature
        with torch.no_grad():
            logits_BK = (embeddings_SBD[0] @ centers_KD.T + self.bonus) / temperature
            confidence_B, weak_B = torch.softmax(logits_BK * self.log_sharpness.exp(), -1).max(-1)
            confident_B = confidence_B > self.settings.confidence
            targets_BK = self._targets(logits_BK, weak_B, confident_B, index_B)
        strong_BK = embeddings_SBD[1] @ centers_KD.T / temperature
        self._learn_labels(index_B, weak_B, confident_B, agree_B=strong_BK.detach().argmax(-1) == weak_B)
        return {"loss": balanced_cross_entropy(strong_BK, targets_BK)}

    def _targets(self, logits_BK: Tensor, weak_B: Tensor, confident_B: Tensor, index_B: Tensor) -> Tensor:
        """Return each image's target: its first label, its confident label, a mixture, or nothing (zeros)."""
        settings = self.settings
        clusters = logits_BK.shape[1]
        first_BK = F.one_hot(self.first_labels[index_B], clusters).to(logits_BK.dtype)
        fixed_B = self.kept[index_B] | (self.epoch <= settings.warmup_epochs)
        taught_B = fixed_B | confident_B | (self.bonus[weak_B] > self.config.temperature)
        self.taught.add_(collectives.add_up(taught_B.sum()))
        label_BK = torch.where(fixed_B[:, None], first_BK, F.one_hot(weak_B, clusters))
        if settings.uncertain == "nothing":
            return label_BK * taught_B[:, None]
        mixed_BK = torch.lerp(torch.softmax(logits_BK, -1), first_BK, self.config.hard_label_weight)
        return torch.where(taught_B[:, None], label_BK, mixed_BK)

    @torch.no_grad()
    def _learn_labels(self, index_B: Tensor, weak_B: Tensor, confident_B: Tensor, agree_B: Tensor) -> None:
        """Store the labels of the whole batch and update the duals, the same way in every process."""
        index_G, weak_G, confident_G, agree_G = collectives.gather(index_B, weak_B, confident_B, agree_B)
        self.labels[index_G] = weak_G.unsqueeze(-1)
        self.confident.add_(confident_G.sum())
        self._update_duals(weak_G, confident_G, agree_G)

    def _update_duals(self, weak_B: Tensor, confident_B: Tensor, agree_B: Tensor) -> None:
        """Update the bonus of small clusters and the sharpness from the labels of a batch."""
        settings = self.settings
        size = weak_B.shape[0]
        ones_B = torch.ones(size, device=weak_B.device)
        share_K = torch.zeros_like(self.bonus).scatter_add_(0, weak_B, ones_B) / size
        missing_K = settings.smallest * self.first_share - share_K
        self.bonus.add_(settings.dual_lr * missing_K).clamp_(0, LARGEST_BONUS * self.config.temperature)
        if not settings.sharpen:
            return
        surplus = (agree_B.sum() - confident_B.sum()) / size
        self.log_sharpness.add_(settings.dual_lr * surplus).clamp_(max=SHARPEST)

    def record(self) -> dict[str, float]:
        """Return an epoch's label-free statistics."""
        return super().record() | {
            "taught": float(self.taught / len(self.first_labels)),
            "confident": float(self.confident / len(self.first_labels)),
            "moved": float((self.labels[:, 0] != self.first_labels).float().mean()),
            "boosted": float((self.bonus > self.config.temperature).sum()),
            "sharpness": float(self.log_sharpness.exp()),
        }


def most_confident(labels_N: Tensor, confidence_N: Tensor, share: float) -> Tensor:
    """Return a mask of the most confident images: the given share of each cluster, rounded up."""
    order_N = confidence_N.argsort(descending=True, stable=True)
    order_N = order_N[labels_N[order_N].argsort(stable=True)]  # by cluster, then by descending confidence
    sizes_K = labels_N.bincount()
    rank_N = torch.arange(len(labels_N), device=labels_N.device) - (sizes_K.cumsum(0) - sizes_K)[labels_N[order_N]]
    chosen_N = torch.zeros_like(labels_N, dtype=torch.bool)
    chosen_N[order_N] = rank_N < share * sizes_K[labels_N[order_N]]
    return chosen_N
