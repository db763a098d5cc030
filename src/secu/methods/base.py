"""A method: how a model learns from images without labels.

A method owns everything that is learned or specific to it: the views, the encoder, the objective and its own state.
The rest of the package trains, saves and uses any method through this interface. To add a method, subclass ``Method``
and register it (``secu.registry.METHODS``); its name is then a valid ``config.method``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from secu.base.errors import UserError
from secu.cluster.clustering import Clustering
from secu.config import Config
from secu.data import Images, Shape, shape_of
from secu.methods.average import Average
from secu.methods.predictor import Predictor
from secu.nets.encoder import Encoder
from secu.nets.front import Front, needs_front
from secu.registry import METHODS
from secu.views.augment import Augmentation
from secu.views.features import FeatureViews
from secu.views.originals import OriginalCrops

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}  # values of optim.precision for which the encoder uses 16 bits


@dataclass(frozen=True)
class Conclusion:
    """What a method reports at the end of training."""

    summary: dict[str, Any] = field(default_factory=dict)  # written to outcome.json, with the warnings
    settings: dict[str, Any] = field(default_factory=dict)  # changes to the run's config that do not affect weights
    warnings: tuple[str, ...] = ()
    restored: bool = False  # whether the method went back to the model of the run in init_from


class Method(nn.Module):
    """Base class of all methods. A subclass builds views, encoder and clustering, and computes losses.

    Args:
        config: All settings of the run.
        images: Number of training images.
        shape: Channels, height and width of the inputs, or the length of feature vectors.

    Attributes:
        generator: Source of all random numbers in a step; set by the trainer before the first step.
        call: Calls a function of tensors; the trainer may replace it with one that compiles the function first.
    """

    # Name prefixes of the tensors in model.safetensors, besides trees and offsets.
    trained_tensors = ("views.", "encoder.", "clustering.centers.weight", "front_digest")
    needs_first_run = False  # whether a resumed run still needs the run in init_from

    views: Augmentation | FeatureViews
    encoder: Encoder
    clustering: Clustering
    front_digest: Tensor | None
    epoch_average: Average | None  # of encoder and centers at the ends of the last epochs
    crops: OriginalCrops | None = None  # set if the inputs of ``losses`` are random crops of the original pictures
    generator: torch.Generator
    call: Callable[..., Any]

    def __init__(self, config: Config, images: int, shape: Shape) -> None:
        super().__init__()
        self.config = config
        self.call = call_directly
        self.epoch_average = None  # see ``build_method``
        # Identifies the weights of a frozen backbone, which are not part of the model.
        digest = torch.zeros(32, dtype=torch.uint8) if needs_front(config) else None
        self.register_buffer("front_digest", digest)

    def losses(self, batch: Tensor, index_B: Tensor) -> dict[str, Tensor]:
        """Return the losses of a batch by name; their sum is minimized, and the mean of each is recorded.

        Args:
            batch: The inputs (B, …); in an epoch with partners, those of the images and of their partners (2, B, …);
                with ``crops``, those of both views (2, B, …).
            index_B: Indices of the images.
        """
        raise NotImplementedError

    def partners(self, order_N: Tensor, generator: torch.Generator) -> Tensor | None:
        """Return an epoch's partner of each image, in the order of the epoch; None if there are no partners.

        Called after ``start_epoch``, with a generator in host memory.
        """
        return None

    def start_epoch(self, epoch: int, done: float) -> None:
        """Prepare for an epoch; ``done`` is the fraction of the run that is complete."""
        self.clustering.start_epoch(done)

    def after_step(self) -> None:
        """Called after each optimizer step, for example to update a moving average."""

    def end_epoch(self, done: float) -> None:
        """Called after each epoch, in every process; at the end of the run, the average, if any, becomes the model."""
        if self.epoch_average is None:
            return
        self.epoch_average.add(self.encoder, self.clustering.centers, done)
        if done == 1:
            self.epoch_average.put_into(self.encoder, self.clustering.centers)

    def record(self) -> dict[str, float]:
        """Return values to add to the record of an epoch."""
        return self.clustering.record()

    def score(self, record: dict[str, Any]) -> float | None:
        """Return a label-free score that selects the final model; None if the last epoch's model is final."""
        return None

    def take_hints(self, images: Images) -> None:
        """Take the user's hints about the training images, if there are any, before a checkpoint is restored."""

    def prepare(self, images: Images, first: "Method | None", *, resumed: bool) -> None:
        """Prepare to train on these images, before the first epoch or after a checkpoint was restored.

        Args:
            images: The training images.
            first: The trained method of the run in ``config.init_from``, if it was loaded.
            resumed: Whether a checkpoint was restored, in which case nothing must be initialized again.
        """
        if first is not None and not resumed:
            self.start_from(first)

    def inputs(self) -> Tensor | None:
        """Return the inputs that ``losses`` gets, if they were computed from the images' own in ``prepare``."""
        return None

    def conclude(self, images: Images, scored: Images | None) -> Conclusion:
        """Finish after the last epoch; ``scored`` are the images with true labels, if they differ from ``images``."""
        return Conclusion()

    def predictor(self, level: int | None = None) -> Predictor:
        """Return the model for inference; with a ``level``, for that many groups of the finest head's clusters."""
        config = self.config
        centers_MD = self.clustering.answer_centers()
        groups = self.clustering.groups()
        offsets = self.clustering.answer_offsets()
        if level is not None:
            centers_MD, groups = self.clustering.cut(level)
            offsets = None
        return Predictor(
            self.views,
            self.encoder,
            centers_MD,
            config.loss.prediction_temperature,
            groups=groups,
            offsets=offsets,
            front=self.front(),
        )

    def front(self) -> Front | None:
        """Return the frozen part of the model; None if there is none.

        If ``prepare`` stored the digest of its weights, it must still have them.
        """
        if self.front_digest is None:
            return None
        return Front(self.config, shape_of(self.config.data)[0], self.front_digest)

    def trained_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters trained at the encoder's learning rate and those trained at the centers' rate."""
        trained = [weight for weight in self.encoder.parameters() if weight.requires_grad]
        return trained, list(self.clustering.centers.parameters())

    def start_from(self, first: "Method") -> None:
        """Copy encoder and centers from another run; heads are matched by their number of clusters.

        Labels are not copied, since the images may differ; the initial epoch assigns them.
        """
        name = self.config.init_from
        theirs = first.config.heads
        try:
            self.views.load_state_dict(first.views.state_dict())
            self.encoder.load_state_dict(first.encoder.state_dict())
        except RuntimeError:
            raise UserError(f"init_from: the encoder of {name} does not match these settings") from None
        for number, clusters in enumerate(self.config.heads):
            if clusters not in theirs:
                raise UserError(f"init_from: {name} has no head of {clusters} clusters; valid: {list(theirs)}")
            answers = number == self.config.head and clusters == first.config.clusters
            head = first.config.head if answers else theirs.index(clusters)  # several may be of the same size
            centers_KD = first.clustering.centers.weight.data[head, :clusters]
            self.clustering.centers.weight.data[number, :clusters].copy_(centers_KD)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.clustering.labels.device

    def autocast(self) -> torch.autocast:
        """Return the autocast context of the encoder: on CUDA, 16 bits if that is the precision of the config."""
        half = HALF.get(self.config.optim.precision)
        return torch.autocast(self.device.type, half, enabled=half is not None and self.device.type == "cuda")


def call_directly(function: Callable[..., Any], *inputs: Any) -> Any:
    """Call a function without compiling it."""
    return function(*inputs)


def build_method(config: Config, images: int, shape: Shape, device: torch.device) -> Method:
    """Build the untrained method of a config; the same seed gives the same weights on every device."""
    if images < config.clusters:
        raise UserError(f"heads: {config.clusters} clusters need at least {config.clusters} images, got {images}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)  # torch.manual_seed would also reseed the caller's GPUs
        method: Method = METHODS[config.method](config, images, shape)
    if config.optim.average_from is not None:
        method.epoch_average = Average(method.encoder, method.clustering.centers, config.optim.average_from)
    if device.type == "cuda":
        method.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return method.to(device)
