"""Self-labeling: the second stage, in which a trained model learns from its own confident labels.

The label-free score of an epoch is the mutual information between the labels of images and of random views of them.
Half of the views are drawn as in the previous run, half are strong views. The first kind alone would penalize every
change of labels; the second alone would reward any label that is stable under strong augmentation.

At the end, the run returns to the previous run's model if there are reasons to believe that its own is worse.
Otherwise, its mean confidence is calibrated to an estimate of its accuracy (``estimate``).
"""

import copy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secu.base.errors import UserError
from secu.cluster.metrics import find_temperature
from secu.config import Config
from secu.data import Images, Shape
from secu.methods.average import move_towards, values_of
from secu.methods.base import Conclusion, Method
from secu.methods.confident import ConfidentLabels
from secu.methods.outcome import Consistency, consistency, doubts, state_of
from secu.methods.predictor import Predictor, choose
from secu.nets.encoder import Encoder
from secu.views.augment import Augmentation
from secu.views.strong import StrongAugmentation

IMAGES_AT_END = 10_000  # maximum number of images for the score before and after the run
IMAGES_PER_EPOCH = 2_000  # maximum number of images for the score after every epoch
OTHER_LABELS = 0.01  # share of changed labels above which the previous run is considered replaced


@dataclass(frozen=True)
class Lesson:
    """What the model learns from: the previous run's model and its cosines for all images."""

    images: Images
    method: Method
    first: Predictor
    views: Augmentation  # the views that SeCu was trained with
    cosines_NK: Tensor


class SelfLabeling(Method):
    """Trains strong views on the confident labels of weak views.

    With ``selflabel.decay`` there are two encoders: ``student`` is trained, and ``encoder``, the final model, labels
    the weak views. The weights and batch-norm statistics of ``encoder`` are a moving average of the student's, so that
    labels change slowly. Without it, one encoder does both, and weak and strong views share batch statistics or, with
    ``selflabel.statistics``, have their own.
    """

    needs_first_run = True
    views: StrongAugmentation
    clustering: ConfidentLabels
    lesson: Lesson
    student: Encoder | None

    def __init__(self, config: Config, images: int, shape: Shape) -> None:
        super().__init__(config, images, shape)
        assert config.selflabel is not None
        channels, height, width = shape
        self.settings = config.selflabel
        self.views = StrongAugmentation(
            config.augment, self.settings, config.data.mean, config.data.std, channels, (height, width)
        )
        self.encoder = Encoder(config.encoder, channels)
        self.clustering = ConfidentLabels(config, self.settings, images, self.encoder.dim)
        self.encoder.expect_views(2 if self.settings.statistics == "separate" else 1)
        self.student = copy.deepcopy(self.encoder) if self.settings.decay else None
        if self.student is not None:
            self.encoder.requires_grad_(False)

    def prepare(self, images: Images, first: Method | None, *, resumed: bool) -> None:
        """Label the images with the previous run's model; when resuming, check that the labels are unchanged."""
        if first is None:
            raise UserError("selflabel: there are no labels to start from; run secu selflabel")
        config = first.config
        channels, height, width = images.shape
        # Not the first run's own views: if that run was itself self-labeled, those are strong views.
        views = Augmentation(config.augment, config.data.mean, config.data.std, channels, (height, width))
        predictor = first.predictor()
        cosines_NK = predictor.compare(predictor.embed_together(images))
        self.lesson = Lesson(images, first, predictor, views.to(self.device), cosines_NK)
        if resumed:
            self._check_first_labels(config.loss.temperature)
            return
        self.start_from(first)
        if self.student is not None:
            self.student.load_state_dict(self.encoder.state_dict())
        labels = choose(self.lesson.cosines_NK, self.config.loss.temperature)
        self.clustering.begin(labels.cluster, labels.confidence)

    def _check_first_labels(self, temperature: float) -> None:
        """Raise if the previous run was replaced and gives different labels.

        The same model on a different device may change the label of one image in thousands.
        """
        labels_N = choose(self.lesson.cosines_NK, temperature).cluster
        noted_N = self.clustering.first_labels.cpu()
        changed = float((labels_N != noted_N).float().mean())
        if changed > OTHER_LABELS:
            difference = f"{changed:.0%} of its labels are different"
            raise UserError(f"resume: the previous run changed since this one began: {difference}; start a new run")

    def start_epoch(self, epoch: int, done: float) -> None:
        """Prepare for an epoch; a teacher labels in evaluation mode, as at inference."""
        super().start_epoch(epoch, done)
        if self.student is not None:
            self.encoder.eval()

    def losses(self, batch: Tensor, index_B: Tensor) -> dict[str, Tensor]:
        """Label the weak views, and return the loss of the strong views."""
        draws = self.views.draw(len(index_B), self.generator)
        views = self.call(self.views.render, batch, draws)
        with self.autocast():
            embeddings_SBD = self._embed(views)
        losses: dict[str, Tensor] = self.call(self.clustering.step, embeddings_SBD, index_B)
        return losses

    def _embed(self, views: Tensor) -> Tensor:
        """Return the embeddings of weak and strong views (2, B, D)."""
        if self.student is None:
            embeddings_SBD: Tensor = self.call(self.encoder, views.flatten(0, 1))
            return embeddings_SBD
        weak, strong = views
        with torch.no_grad():
            weak_BD = self.call(self.encoder.embed, weak)
        return torch.stack([weak_BD, self.call(self.student.embed, strong)])

    def after_step(self) -> None:
        """Move the teacher towards the student."""
        if self.student is None:
            return
        move_towards(values_of(self.encoder), values_of(self.student), 1 - self.settings.decay)

    def trained_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters of the trained encoder, and the centers, whose learning rate is usually zero."""
        learner = self.encoder if self.student is None else self.student
        return list(learner.parameters()), list(self.clustering.centers.parameters())

    def record(self) -> dict[str, float]:
        """Return label statistics and the stability of labels under random augmentation."""
        return super().record() | self._look(self.predictor(), IMAGES_PER_EPOCH)._asdict()

    def score(self, record: dict[str, Any]) -> float | None:
        """Return the mutual information if ``selflabel.keep_best`` is set."""
        return float(record["information"]) if self.settings.keep_best else None

    def _look(self, predictor: Predictor, most: int) -> Consistency:
        """Compare the labels of evenly spaced images with those of random views of both kinds."""
        images = self.lesson.images
        index_N = torch.arange(0, len(images), -(-len(images) // most))
        usual = consistency(predictor, self.lesson.views, images, index_N)
        strong = consistency(predictor, self.views, images, index_N, numbers=(1,))
        agreement = max(usual.agreement, strong.agreement)
        return Consistency(agreement, (usual.information + strong.information) / 2)

    def conclude(self, images: Images, scored: Images | None) -> Conclusion:
        """Calibrate the confidence and summarize what changed, or return to the previous run's model."""
        first = self.lesson.first
        predictor = self.predictor()
        limit = self.settings.confidence
        seen_before = self._look(first, IMAGES_AT_END)
        before, labels_N = state_of(first, seen_before, images, self.lesson.cosines_NK, scored, limit)
        seen = self._look(predictor, IMAGES_AT_END)
        cosines_NK = predictor.cosines(images)
        predictor.temperature = round(find_temperature(cosines_NK, estimate(before.confidence, seen.agreement)), 4)
        after, new_labels_N = state_of(predictor, seen, images, cosines_NK, scored, limit)
        moved = float((new_labels_N != labels_N).float().mean())  # share of images whose label changed
        reasons = doubts(before, after)
        summary: dict[str, Any] = {"before": asdict(before), "after": asdict(after), "moved": moved}
        warnings = tuple(f"{reason}: keep the previous run, or lower optim.lr" for reason in reasons)
        restored = bool(reasons) and self.settings.keep_best
        if restored:
            self.start_from(self.lesson.method)
            predictor = first
            summary |= {"after": asdict(before), "moved": 0.0, "rejected": {**asdict(after), "moved": moved}}
            warnings = (f"{'; '.join(reasons)}: self-labeling did not help, and the previous run's model is kept",)
        return Conclusion(
            summary={**summary, "warnings": warnings},
            settings={"loss": {"confidence_temperature": predictor.temperature}},
            warnings=warnings,
            restored=restored,
        )


def estimate(confidence: float, agreement: float) -> float:
    """Estimate a model's accuracy from the mean confidence of the previous run and the agreement of its own views.

    The agreement alone is too high where clusters are not the classes: any model agrees with itself more often after
    training on its own labels. It counts for half if the previous run was confident (two thirds or more on average),
    for nothing if it was not (one third or less), and in proportion in between.
    """
    weight = min(max(1.5 * (confidence - 1 / 3), 0), 0.5)
    return confidence + weight * (agreement - confidence)
