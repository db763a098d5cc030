"""A second stage on trial: semi-supervised learning from the labels of the previous run that can be trusted most.

The labels of a few images, the trusted ones, are taken as given, and all images are the unlabeled part, as in FixMatch
(Sohn et al., 2020): the strong view of an image is trained on the label of its weak view, if that is confident. In each
cluster of the previous run, those images are trusted whose label agrees most with the probabilities of their nearest
neighbors in that run's embeddings. The final model is a moving average of the trained encoder.

It is registered as the methods ``semi``, ``semi-aligned`` (with distribution alignment), ``semi-soft`` (alignment, and
weights that grow with the confidence instead of a threshold, as in SoftMatch; Chen et al., 2023) and ``semi-renewed``
(the same, but whom to trust is chosen again twice, by the model so far). They use the settings of self-labeling:

- ``selflabel.kept`` is the share of each cluster that is trusted, and ``neighbors.count`` the number of neighbors; if
  that is 0, the most confident images are trusted.
- ``selflabel.confidence`` is the threshold. ``selflabel.uncertain=probabilities`` trains images below it on the
  probabilities of their weak view.
- ``selflabel.decay`` is the decay of the moving average; it does not label.
- ``centers.lr`` above 0 lets the centers learn; they are not averaged.

Shapes: L trusted images of a batch, B images of a batch, N of the data set, K clusters, D dimensions, k neighbors.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from secu.base import processes
from secu.base.errors import UserError
from secu.config import Config, SelfLabelConfig
from secu.data import Images, Shape
from secu.methods import Method
from secu.methods.confident import ConfidentLabels
from secu.methods.predictor import Predictor
from secu.methods.selflabel import SelfLabeling
from secu.nets.encoder import Encoder
from secu.registry import METHODS
from secu.views.neighbors import find_neighbors
from secu.views.strong import StrongAugmentation

UNLABELED = 7  # unlabeled images per trusted one
LARGEST_BATCH = 448  # 7 * 64
LEARNING_RATE = 0.03  # at the largest batch size; scaled in proportion to the batch size
USUAL_SHARES_RATE = 0.01  # of the moving averages of predicted shares and of confidence
DEVIATIONS = 2  # below the mean confidence, a weight falls as a normal density this many times narrower
SETTINGS: dict[str, Any] = {
    "optim": {"weight_decay": 5e-4, "warmup_epochs": 0},
    "neighbors": {"count": 100},
    "selflabel": {
        "warmup_epochs": 0,
        "confidence": 0.95,
        "decay": 0.999,
        "uncertain": "nothing",
        "kept": 0.2,
        "smallest": 0.0,
        "sharpen": False,
    },
}


class TrustedLabels(ConfidentLabels):
    """The main head as a classifier that is trained on trusted labels and on its own confident ones.

    With ``aligned``, probabilities are scaled so that the mean prediction approaches the first shares of the clusters
    (distribution alignment; Berthelot et al., 2020). With ``soft``, images below the mean confidence have a small
    weight instead of none.
    """

    usual_share: Tensor
    usual_confidence: Tensor

    def __init__(
        self, config: Config, settings: SelfLabelConfig, images: int, dim: int, *, aligned: bool, soft: bool = False
    ) -> None:
        super().__init__(config, settings, images, dim)
        self.aligned = aligned
        self.soft = soft
        self.register_buffer("usual_share", torch.full((config.clusters,), 1 / config.clusters))
        # Mean and variance; as wide as for random predictions at first, so that nearly all images count.
        self.register_buffer("usual_confidence", torch.tensor([1 / config.clusters, 1.0]))

    def learn(
        self, trusted_LD: Tensor, weak_BD: Tensor, strong_BD: Tensor, label_L: Tensor, index_B: Tensor
    ) -> dict[str, Tensor]:
        """Return the losses of the trusted images and of the strong views."""
        centers_KD = self.centers.unit()[0]
        temperature = self.config.temperature
        with torch.no_grad():
            p_BK = self._align(torch.softmax(weak_BD @ centers_KD.T / temperature, -1))
            confidence_B, weak_B = p_BK.max(-1)
            confident_B = confidence_B > self.settings.confidence
            others_BK = p_BK if self.settings.uncertain == "probabilities" else torch.zeros_like(p_BK)
            label_BK = F.one_hot(weak_B, p_BK.shape[1])
            targets_BK = torch.where(confident_B[:, None], label_BK, others_BK)
            if self.soft:
                weight_B = self._weigh(confidence_B)
                targets_BK = label_BK * weight_B[:, None]
            self.taught.add_((weight_B if self.soft else confident_B).sum())
        strong_BK = strong_BD @ centers_KD.T / temperature
        self._learn_labels(index_B, weak_B, confident_B, agree_B=strong_BK.detach().argmax(-1) == weak_B)
        return {
            "trusted_loss": F.cross_entropy(trusted_LD @ centers_KD.T / temperature, label_L),
            "loss": -(targets_BK * torch.log_softmax(strong_BK, -1)).sum(-1).mean(),
        }

    def _weigh(self, confidence_B: Tensor) -> Tensor:
        """Return the weight of each image: 1 from the mean confidence on, and less below it."""
        now = torch.stack([confidence_B.mean(), confidence_B.var()])
        self.usual_confidence.lerp_(now, USUAL_SHARES_RATE)
        mean, variance = self.usual_confidence.unbind()
        below_B = (confidence_B - mean).clamp(max=0)
        return torch.exp(-(below_B**2) * DEVIATIONS**2 / (2 * variance))

    def _align(self, p_BK: Tensor) -> Tensor:
        if not self.aligned:
            return p_BK
        self.usual_share.lerp_(p_BK.mean(0), USUAL_SHARES_RATE)
        p_BK = p_BK * (self.first_share / self.usual_share.clamp(min=1e-6))
        return p_BK / p_BK.sum(-1, keepdim=True)


@METHODS.register("semi")
class SemiSupervised(SelfLabeling):
    """Trains on trusted labels and, for all images, on the confident labels of weak views."""

    aligned = False
    soft = False
    renewals = 0  # how many times the trusted images are chosen again
    partner_of: Tensor

    def __init__(self, config: Config, images: int, shape: Shape) -> None:
        super().__init__(config, images, shape)
        if processes.world() > 1:
            raise UserError(f"method: {config.method} runs in one process, got {processes.world()}")
        channels, height, width = shape
        data = config.data
        gentle = self.settings.model_copy(update={"operations": 0, "cutout": 0.0})
        self.gentle_views = StrongAugmentation(config.augment, gentle, data.mean, data.std, channels, (height, width))
        self.clustering: TrustedLabels = TrustedLabels(
            config, self.settings, images, self.encoder.dim, aligned=self.aligned, soft=self.soft
        )
        self.encoder.expect_views(1)
        # The trusted image next to each image in this epoch.
        self.register_buffer("partner_of", torch.zeros(images, dtype=torch.int64), persistent=False)

    @property
    def learner(self) -> Encoder:
        """The encoder that is trained."""
        return self.encoder if self.student is None else self.student

    def prepare(self, images: Images, first: Method | None, *, resumed: bool) -> None:
        """Label the images with the previous run's model, and choose whom to trust."""
        super().prepare(images, first, resumed=resumed)
        if not resumed and self.config.neighbors.count:
            self._choose_trusted(self.lesson.first)

    def start_epoch(self, epoch: int, done: float) -> None:
        """Prepare for an epoch; in some, choose the trusted images again."""
        total = self.config.optim.total_epochs
        if epoch in [total * number // (self.renewals + 1) for number in range(1, self.renewals + 1)]:
            share_K = self.clustering.first_share.clone()
            self._choose_trusted(self.predictor())
            self.clustering.first_share.copy_(share_K)
        super().start_epoch(epoch, done)

    def _choose_trusted(self, model: Predictor) -> None:
        """Take the labels of a model, and trust those that agree most with the neighbors in its embeddings."""
        images = self.lesson.images
        embeddings_ND = model.embed_together(images)
        neighbors_Nk = find_neighbors(embeddings_ND, self.config.neighbors.count).of(torch.arange(len(images)))
        p_NK = torch.softmax(model.compare(embeddings_ND) / self.config.loss.temperature, -1)
        labels_N = p_NK.argmax(-1)
        self.clustering.begin(labels_N, support(p_NK, neighbors_Nk.to(self.device), labels_N))

    def partners(self, order_N: Tensor, generator: Generator) -> Tensor:
        """Return a random trusted image for each image; the first of a batch are used."""
        trusted = self.clustering.kept.nonzero()[:, 0].cpu()
        if not len(trusted):
            raise UserError(f"selflabel.kept: {self.settings.kept} leaves no image to trust; it must be above 0")
        drawn_N = trusted[torch.randint(len(trusted), (len(order_N),), generator=generator)]
        self.partner_of[order_N.to(self.device)] = drawn_N.to(self.device)
        return drawn_N

    def losses(self, batch: Tensor, index_B: Tensor) -> dict[str, Tensor]:
        """Return the losses of trusted and of unlabeled images, which share a batch and its statistics."""
        images, trusted = batch
        size = len(index_B)
        count = max(1, size // UNLABELED)
        weak, strong = self.call(self.views.render, images, self.views.draw(size, self.generator))
        draws = self.gentle_views.draw(count, self.generator)
        gentle = self.call(self.gentle_views.render, trusted[:count], draws)[1]
        with self.autocast():
            embeddings = self.call(self.learner.embed, torch.cat([gentle, weak, strong]))
        label_L = self.clustering.first_labels[self.partner_of[index_B[:count]]]
        losses: dict[str, Tensor] = self.call(
            self.clustering.learn, *embeddings.split([count, size, size]), label_L, index_B
        )
        return losses


@METHODS.register("semi-aligned")
class AlignedSemiSupervised(SemiSupervised):
    """The same with distribution alignment."""

    aligned = True


@METHODS.register("semi-soft")
class SoftSemiSupervised(AlignedSemiSupervised):
    """The same with weights by confidence instead of a threshold."""

    soft = True


@METHODS.register("semi-renewed")
class RenewedSemiSupervised(SoftSemiSupervised):
    """The same with trusted images that are chosen again."""

    renewals = 2


def support(p_NK: Tensor, neighbors_Nk: Tensor, labels_N: Tensor) -> Tensor:
    """Return the mean probability that the neighbors of each image assign to its label (N,)."""
    return p_NK[neighbors_Nk, labels_N[:, None]].mean(1)
