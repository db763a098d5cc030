"""Self-labeling: how a clustered model teaches itself.

Every image is seen twice, weakly and strongly changed. The weak view says to which cluster the image belongs and how
sure that is; what is sure is taught to the strong view. Shapes: S embeddings an image (weak, then strong), B images of
a batch, N of the data set, K clusters, D dimensions.

Four things are known to go wrong. The first two are held back by dual ascent, as clusters are in SeCu itself
(constraints.py); the others matter where images are few (second_stage.py), and are settings:

- A cluster is swallowed by others. One whose share of the labels falls under a part of its share at the start gets a
  bonus on its cosines until it has that part again. While the bonus matters, all images of the cluster are taught a
  label, sure or not: the model must learn to do without it.
- Everything becomes sure, right or wrong; or less and less does, and what is not taught is forgotten. As many images
  shall be sure as have the same label in both views: the probabilities that say who is sure are blunted or sharpened.
- Labels drift, each change a little further. So a part of every cluster, the surest, may keep the label that it had
  at the start.
- What is never taught is forgotten. So images that are not sure may be taught how likely each cluster is, mixed with
  the label that they had at the start as SeCu mixes a label with a prediction (losses.py, Eqn. 7).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from secu.clustering import Clustering, Losses
from secu.config import Config
from secu.errors import UserError
from secu.losses import balanced_cross_entropy

LARGEST_BONUS = 10  # temperatures: wins every image that is not sure, and is soon gone when it is no longer needed
SHARPEST = math.log(20)  # how often a difference of cosines may be counted, at most, to say who is sure


class Teaching(Clustering):
    """The first head as a classifier, with what self-labeling has to remember."""

    first_labels: Tensor
    first_share: Tensor
    kept: Tensor
    bonus: Tensor
    log_sharpness: Tensor
    taught: Tensor
    sure: Tensor
    epoch: Tensor

    def __init__(self, config: Config, images: int, dim: int) -> None:
        super().__init__(config, images, dim)
        assert config.selflabel is not None
        self.settings, clusters = config.selflabel, config.heads[0]
        self.register_buffer("first_labels", torch.zeros(images, dtype=torch.int64))
        self.register_buffer("first_share", torch.zeros(clusters))
        self.register_buffer("kept", torch.zeros(images, dtype=torch.bool))  # images whose label stays
        self.register_buffer("bonus", torch.zeros(clusters))
        self.register_buffer("log_sharpness", torch.zeros(()))  # over 0: surer than the temperature says
        self.register_buffer("taught", torch.zeros(()))  # a label, so far in this epoch
        self.register_buffer("sure", torch.zeros(()))  # of them
        self.register_buffer("epoch", torch.zeros(()))

    def begin(self, labels_N: Tensor, sureness_N: Tensor) -> None:
        """Take the labels that the images have at the start, and how sure each of them is."""
        self.first_labels.copy_(labels_N)
        self.labels[:, 0] = self.first_labels
        self.first_share.copy_(self.sizes() / len(labels_N))
        self.kept.copy_(surest(labels_N, sureness_N, self.settings.kept))

    def start_epoch(self, done: float = 0.0) -> None:
        """Count an epoch, and what is taught in it anew."""
        if not self.first_share.any():
            raise UserError("selflabel: there are no labels to start from; use the command secu selflabel")
        super().start_epoch(done)
        self.taught.zero_()
        self.sure.zero_()
        self.epoch.add_(1)

    def step(self, embeddings_SBD: Tensor, index_B: Tensor) -> Losses:
        """Return the loss of the strong views; there is none for the centers."""
        centers_KD, temperature = self.centers.unit()[0], self.config.temperature
        with torch.no_grad():
            logits_BK = (embeddings_SBD[0] @ centers_KD.T + self.bonus) / temperature
            sureness_B, weak_B = torch.softmax(logits_BK * self.log_sharpness.exp(), -1).max(-1)
            sure_B = sureness_B > self.settings.confidence
            targets_BK = self._targets(logits_BK, weak_B, sure_B, index_B)
            self.labels[index_B] = weak_B.unsqueeze(-1)
            self.sure.add_(sure_B.sum())
        strong_BK = embeddings_SBD[1] @ centers_KD.T / temperature
        self._hold_back(weak_B, sure_B, agree_B=strong_BK.detach().argmax(-1) == weak_B)
        loss = balanced_cross_entropy(strong_BK, targets_BK)
        return Losses(loss, torch.zeros_like(loss))

    def _targets(self, logits_BK: Tensor, weak_B: Tensor, sure_B: Tensor, index_B: Tensor) -> Tensor:
        """Return what each image is taught: its first label, the one it is sure of, or else a mixture, or nothing."""
        settings, clusters = self.settings, logits_BK.shape[1]
        first_BK = F.one_hot(self.first_labels[index_B], clusters).to(logits_BK.dtype)
        keeps_B = self.kept[index_B] | (self.epoch <= settings.warmup_epochs)
        taught_B = keeps_B | sure_B | (self.bonus[weak_B] > self.config.temperature)
        self.taught.add_(taught_B.sum())
        label_BK = torch.where(keeps_B[:, None], first_BK, F.one_hot(weak_B, clusters))
        if settings.unsure == "nothing":
            return label_BK * taught_B[:, None]
        mixed_BK = torch.lerp(torch.softmax(logits_BK, -1), first_BK, self.config.hard_label_weight)
        return torch.where(taught_B[:, None], label_BK, mixed_BK)

    def _hold_back(self, weak_B: Tensor, sure_B: Tensor, agree_B: Tensor) -> None:
        """Answer to what the batch says of the size of clusters and of the share of sure images."""
        settings, size = self.settings, weak_B.shape[0]
        ones_B = torch.ones(size, device=weak_B.device)
        share_K = torch.zeros_like(self.bonus).scatter_add_(0, weak_B, ones_B) / size
        missing_K = settings.smallest * self.first_share - share_K
        self.bonus.add_(settings.dual_lr * missing_K).clamp_(0, LARGEST_BONUS * self.config.temperature)
        self.log_sharpness.add_(settings.dual_lr * (agree_B.sum() - sure_B.sum()) / size).clamp_(max=SHARPEST)

    def record(self) -> dict[str, float]:
        """Return what the epoch says of itself, without any true label."""
        return {
            "taught": float(self.taught / len(self.first_labels)),
            "sure": float(self.sure / len(self.first_labels)),
            "moved": float((self.labels[:, 0] != self.first_labels).float().mean()),
            "held_up": float((self.bonus > self.config.temperature).sum()),
            "sharpness": float(self.log_sharpness.exp()),
        }


def surest(labels_N: Tensor, sureness_N: Tensor, share: float) -> Tensor:
    """Say which images are among the surest of their cluster, this share of each, rounded up."""
    order_N = sureness_N.argsort(descending=True, stable=True)
    order_N = order_N[labels_N[order_N].argsort(stable=True)]  # cluster by cluster, each from the surest on
    sizes_K = labels_N.bincount()
    rank_N = torch.arange(len(labels_N), device=labels_N.device) - (sizes_K.cumsum(0) - sizes_K)[labels_N[order_N]]
    found_N = torch.zeros_like(labels_N, dtype=torch.bool)
    found_N[order_N] = rank_N < share * sizes_K[labels_N[order_N]]
    return found_N
