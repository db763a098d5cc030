"""A model in memory, built new, taken up from a checkpoint, or started from another run."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from secu.augment import Augmentation
from secu.clustering import Clustering
from secu.config import Config
from secu.errors import UserError
from secu.model import Encoder
from secu.run import Run
from secu.steps import Step
from secu.strong import StrongAugmentation
from secu.teaching import Teaching


@dataclass
class Trained:
    """Everything a run learns, and how far it got."""

    config: Config
    augmentation: Augmentation
    encoder: Encoder
    clustering: Clustering
    epochs_done: int = 0
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether the whole schedule was run."""
        return self.epochs_done == self.config.optim.total_epochs


def build(config: Config, images: int, shape: tuple[int, int, int], device: torch.device) -> Trained:
    """Return an untrained model for so many images; the same seed gives the same weights on every device."""
    channels, height, width = shape
    if images < config.heads[0]:
        raise UserError(f"heads: {config.heads[0]} clusters need at least {config.heads[0]} images, got {images}")
    look = (config.data.mean, config.data.std, channels, (height, width))
    second = config.selflabel
    augmentation = StrongAugmentation(config.augment, second, *look) if second else Augmentation(config.augment, *look)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)  # torch.manual_seed would reseed the caller's GPUs, too
        encoder = Encoder(config.encoder, channels)
        clustering = (Teaching if second else Clustering)(config, images, encoder.dim)
    if second:
        encoder.expect_views(1)
    if device.type == "cuda":
        encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    encoder.to(device)
    return Trained(config, augmentation.to(device), encoder, clustering.to(device))


class Snapshot(NamedTuple):
    """All that training needs to go on exactly as if it had not stopped: what ``Run.save`` writes."""

    modules: dict[str, nn.Module]
    state: dict[str, Any]


def snapshot(model: Trained, step: Step) -> Snapshot:
    """Return how things stand between two epochs; what is in it changes as training goes on."""
    state = {"epochs_done": model.epochs_done, "seconds": model.seconds, "momentum": step.state_dict()}
    return Snapshot({"encoder": model.encoder, "clustering": model.clustering}, state)


def restore(run: Run, model: Trained, step: Step) -> None:
    """Take up a run's own checkpoint."""
    state = run.load_state()
    _load(model.encoder, _part(state["tensors"], "encoder"), run)
    _load(model.clustering, _part(state["tensors"], "clustering"), run)
    step.load_state_dict(state["momentum"])
    model.epochs_done, model.seconds = state["epochs_done"], state["seconds"]


def start_from(run: Run, model: Trained) -> None:
    """Take encoder and centers from another run; a head is found again by its number of clusters.

    Labels are not taken: the data may be another. The initial epoch assigns them anew.
    """
    tensors, theirs = run.load_model(), run.config().heads
    _load(model.encoder, _part(tensors, "encoder"), run)
    centers_HKD = model.clustering.centers.weight.data
    for number, clusters in enumerate(model.config.heads):
        if clusters not in theirs:
            raise UserError(f"init_from: {run.path} has no head of {clusters} clusters; valid: {list(theirs)}")
        source_KD = tensors["clustering.centers.weight"][theirs.index(clusters), :clusters]
        centers_HKD[number, :clusters].copy_(source_KD)


def load_trained(run: Run, shape: tuple[int, int, int], device: torch.device) -> Trained:
    """Return the trained model of a run, ready to embed images of the given shape."""
    config = run.config()
    model = build(config, config.heads[0], shape, device)
    load_weights(run, "model.safetensors", model)
    return model


def load_weights(run: Run, name: str, model: Trained) -> None:
    """Put the encoder and the centers of a model file into a model."""
    tensors = run.load_model(name)
    _load(model.encoder, _part(tensors, "encoder"), run)
    model.clustering.centers.weight.data.copy_(tensors["clustering.centers.weight"])


def _part(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    prefix = f"{name}."
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def _load(module: nn.Module, tensors: dict[str, Tensor], run: Run) -> None:
    try:
        module.load_state_dict(tensors)
    except RuntimeError:
        kind = type(module).__name__.lower()
        raise UserError(f"run: {run.path} holds another {kind} than its data and config ask for") from None
