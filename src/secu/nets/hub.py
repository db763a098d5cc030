"""Backbones in the format of the Hugging Face hub, by name or folder: ``hf:facebook/dinov2-small``, ``hf:models/mine``.

The supported image encoders are listed in ``FAMILIES``; for CLIP and SigLIP, only the vision tower is loaded. All files
are read from one folder: the given one, or the snapshot of a named model, which is downloaded unless it is in the local
cache. Code included in a model is never run, and weights are read from safetensors if available.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from secu.base.errors import UserError
from secu.config import EncoderConfig
from secu.data.text import with_type
from secu.nets.backbones import Backbone
from secu.nets.pretrained import (
    HUB,
    PROCESSORS,
    Pretraining,
    commit_of,
    find_folder,
    license_of,
    read_json,
    require_extra,
    weight_files,
)


class Family(NamedTuple):
    """How the models of one type are used.

    Attributes:
        pooling: ``first``: the class token after the last norm, since a ViT's own pooler is often untrained;
            ``pooler``: the model's pooled output, which is CLIP's normalized class token, SigLIP's attention pooling
            and a convolutional network's mean over the last map.
        taught: The training data of such networks.
        tower: The class that loads the image encoder.
    """

    pooling: str
    taught: str
    tower: str = "AutoModel"


UNLABELED = "images without labels (self-distillation)"
CAPTIONS = "images with their captions"
CARD = "not stated in its files, mostly ImageNet with labels; see the model card"
FAMILIES = {
    "dinov2": Family("first", UNLABELED),
    "dinov2_with_registers": Family("first", UNLABELED),
    "dinov3_vit": Family("first", UNLABELED),
    "dinov3_convnext": Family("pooler", UNLABELED),
    "vit": Family("first", CARD),
    "clip": Family("pooler", CAPTIONS, "CLIPVisionModel"),
    "clip_vision_model": Family("pooler", CAPTIONS),
    "siglip": Family("pooler", CAPTIONS, "SiglipVisionModel"),
    "siglip_vision_model": Family("pooler", CAPTIONS),
    "resnet": Family("pooler", CARD),
    "convnext": Family("pooler", CARD),
    "convnextv2": Family("pooler", CARD),
}


class Hub(Backbone):
    """A model of the hub: (N, 1 or 3, H, W), normalized as ``describe`` says → (N, features)."""

    gray_scale: Tensor
    gray_shift: Tensor

    def __init__(self, model: Any, pooling: str, pretraining: Pretraining, channels: int) -> None:
        super().__init__()
        self.model = model
        self.pooling = pooling
        self.features = pretraining.features
        self.channels = channels
        self.can_interpolate = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
        # Gray images are normalized with the first channel's statistics; the other channels have different ones.
        mean = torch.tensor(pretraining.mean).view(1, 3, 1, 1)
        std = torch.tensor(pretraining.std).view(1, 3, 1, 1)
        self.register_buffer("gray_scale", std[:, :1] / std, persistent=False)
        self.register_buffer("gray_shift", (mean[:, :1] - mean) / std, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the pooled features; position embeddings are interpolated for image sizes other than the model's."""
        if self.channels == 1:
            x = x * self.gray_scale + self.gray_shift
        options = {"interpolate_pos_encoding": True} if self.can_interpolate else {}
        output = self.model(pixel_values=x, **options)
        pooled: Tensor = output.last_hidden_state[:, 0] if self.pooling == "first" else output.pooler_output
        return pooled.flatten(1)

    def stages(self) -> list[nn.Module]:
        """Return the parts of the network in order: its layers, or the stages of a convolutional network.

        Everything before the first layer is the first part; everything after the last layer belongs to the last part.
        """
        children = list(self.model.children())
        for position, child in enumerate(children):
            for layers in child.modules():
                if isinstance(layers, nn.ModuleList):
                    last = nn.Sequential(layers[-1], *children[position + 1 :])
                    return [nn.Sequential(*children[:position]), *layers[:-1], last]
        return [self.model]


def hub(config: EncoderConfig, channels: int) -> Hub:
    """Return the model selected by ``config.backbone``, with its weights, in evaluation mode."""
    backbone = config.backbone
    pretraining = describe(backbone)
    transformers = require_extra(backbone)
    folder = find_folder(backbone, weights=True)
    family = family_of(backbone, folder)
    tower = getattr(transformers, family.tower)
    safe = weight_files(folder)[0].suffix == ".safetensors"
    try:
        with quiet(transformers):
            model, report = tower.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=safe,
                weights_only=True,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below; the library's own error refers to its log
            )
    except Exception as error:  # a damaged file may raise any exception, from several libraries
        raise UserError(f"encoder.backbone: {backbone}: cannot be loaded: {with_type(error)}") from None
    unused = "pooler." if family.pooling == "first" else ()
    missing = sorted(name for name in report["missing_keys"] if not name.startswith(unused))
    if missing:  # the library would initialize them randomly
        raise UserError(f"encoder.backbone: {backbone}: its weights lack {len(missing)} tensors, such as {missing[0]}")
    if report["mismatched_keys"]:
        name, found, expected = min(report["mismatched_keys"])
        shapes = f"{name} has shape {tuple(found)}, but config.json says {tuple(expected)}"
        raise UserError(f"encoder.backbone: {backbone}: {shapes}")
    return Hub(model, family.pooling, pretraining, channels).eval()


def describe(backbone: str) -> Pretraining:
    """Return the description of a model from its own files, without loading its weights."""
    transformers = require_extra(backbone)
    folder = find_folder(backbone, weights=False)
    family = family_of(backbone, folder)
    try:
        with quiet(transformers):
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config = getattr(config, "vision_config", config)
        features = int(config.hidden_sizes[-1] if hasattr(config, "hidden_sizes") else config.hidden_size)
    except Exception as error:
        raise UserError(f"encoder.backbone: {backbone}: config.json cannot be used: {with_type(error)}") from None
    size, mean, std = read_preprocessing(backbone, folder)
    commit = commit_of(folder)
    kind = config.model_type
    name = backbone.removeprefix(HUB)
    weights = f"{kind} from {name} of the Hugging Face hub, commit {commit[:12]}" if commit else f"{kind} from {folder}"
    return Pretraining(size, mean, std, features, weights, license_of(folder), family.taught)


def family_of(backbone: str, folder: Path) -> Family:
    """Return the family of a model, by the type in its config.json."""
    kind = read_json(backbone, folder / "config.json").get("model_type")
    if kind not in FAMILIES:
        raise UserError(
            f"encoder.backbone: {backbone}: a model of type {kind!r} is not an image encoder known here; "
            f"valid: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[kind]


def read_preprocessing(backbone: str, folder: Path) -> tuple[int, tuple[float, ...], tuple[float, ...]]:
    """Return the side of the input, and mean and standard deviation for pixels of 0..1, from a model's own files.

    The whole central square is scaled to that size, without the additional center crop of some models (for example 224
    of 256 pixels).
    """
    contents = [read_json(backbone, folder / name) for name in PROCESSORS if (folder / name).is_file()]
    if not contents:
        reason = "no preprocessor_config.json, which states size and normalization; copy it from the original model"
        raise UserError(f"encoder.backbone: {backbone}: {reason}")
    settings = contents[-1].get("image_processor", contents[0])  # processor_config.json may contain all
    try:
        size = side_of(settings["crop_size"] if settings.get("do_center_crop") else settings["size"])
        # The model's own processor normalizes pixels of 0..1 times this.
        scale = 255 * (settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 1)
        normalizes = settings.get("do_normalize", True)
        mean = three(settings["image_mean"] if normalizes else 0, scale)
        std = three(settings["image_std"] if normalizes else 1, scale)
        if size < 1 or min(std) <= 0:
            raise ValueError(f"size {size}, std {std}")
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        reason = f"size, image_mean or image_std of its preprocessor is missing or not valid: {with_type(error)}"
        raise UserError(f"encoder.backbone: {backbone}: {reason}") from None
    return size, mean, std


def side_of(size: Any) -> int:
    """Return the side of a square from a number or from the dictionary of a processor."""
    if not isinstance(size, dict):
        return int(size)
    side = int(size["shortest_edge"] if "shortest_edge" in size else size["height"])
    if side != int(size.get("width", side)):
        raise ValueError(f"not a square: {size}")
    return side


def three(values: Any, scale: float) -> tuple[float, ...]:
    """Return one number for each color channel, divided by ``scale``."""
    numbers = values if isinstance(values, list) else [values] * 3
    if len(numbers) != 3:
        raise ValueError(f"{len(numbers)} channels instead of 3")
    return tuple(round(float(number) / scale, 8) for number in numbers)


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Silence the library's progress bars and reports, which would disrupt our own."""
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
