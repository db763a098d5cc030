"""A batch of uint8 images → two random float32 views, normalized, on any device.

Random numbers and arithmetic are separate. ``draw`` generates all random numbers of a batch in one call, ``choose``
converts them to boxes, factors and so on, and ``render`` is a pure function of inputs and draws. The same draws give
the same views, whether eager, compiled or replayed from a CUDA graph. No two images or views share a random number.

Order of operations: crop, affine, color jitter, gray, blur, solarize, flip, normalize. The flip is folded into the
crop's matrices; this does not change the distribution of views, because the other operations are symmetric.
"""

import math
from itertools import permutations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from secu.base.collectives import own_part, whole
from secu.base.errors import UserError
from secu.config import AugmentConfig, Channels
from secu.views import pixels as ops
from secu.views.originals import CROP_TRIES, largest_crop

GAUSSIAN_REACH = 4  # in standard deviations
SINGLE_CHANNEL_COLORS = ("brightness", "contrast")  # the color operations that also apply to gray images


class Augmentation(nn.Module):
    """Random views of images of one size; operations that are disabled by the settings cost nothing.

    Args:
        config: The settings.
        mean: Mean of the data for pixels from 0 to 1: one number, or one per channel.
        std: Standard deviation, in the same form.
        channels: Number of channels of the images, 1 or 3.
        image_size: Height and width of the images. Views are squares of ``config.size``, or as large as the image.
        cropped: Whether the inputs of ``render`` are pairs of random crops and flips already (see originals.py).
    """

    mean: Tensor
    std: Tensor
    center: Tensor
    affine_range: Tensor
    color_range: Tensor
    color_neutral: Tensor
    orders: Tensor
    blur_prob: Tensor
    solarize_prob: Tensor

    def __init__(
        self,
        config: AugmentConfig,
        mean: Channels,
        std: Channels,
        channels: int,
        image_size: tuple[int, int],
        *,
        cropped: bool = False,
    ) -> None:
        super().__init__()
        if channels not in (1, 3):
            raise UserError(f"data: images must have 1 or 3 channels, got {channels}")
        for name, values in (("mean", mean), ("std", std)):
            if len(values) not in (1, channels):
                raise UserError(
                    f"data.{name}: {len(values)} values, but the images have {channels} channels; "
                    "give one value, or one per channel"
                )
        self.config = config
        self.channels = channels
        self.cropped = cropped
        self.image_size = image_size
        self.view_size = (config.size, config.size) if config.size else image_size
        self.colors = tuple(
            name
            for name in ops.COLOR_OPERATIONS
            if config.jitter_prob and getattr(config, name) and (channels == 3 or name in SINGLE_CHANNEL_COLORS)
        )
        self._store_constants(mean, std)
        self._number_count = 0
        self._numbers: dict[str, int | slice] = {}
        self._plan_draws()

    def forward(self, inputs: Tensor, generator: Generator | None = None) -> Tensor:
        """Return two random views of uint8 images (B, C, H, W): float32 (2, B, C, height, width)."""
        return self.render(inputs, self.draw(inputs.shape[0], generator))

    def draw(self, batch_size: int, generator: Generator | None = None) -> dict[str, Tensor]:
        """Return all random numbers for two views of a batch: uniform in [0, 1), (2, B) or (2, B, n) each.

        If processes share a batch, each draws the numbers of all its images and returns those of its own.
        """
        numbers = torch.rand(2, whole(batch_size), self._number_count, device=self.mean.device, generator=generator)
        numbers = own_part(numbers, 1)
        return {name: numbers[..., where] for name, where in self._numbers.items()}

    def render(self, inputs: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """Return the two views given by ``draws``: float32 (2, B, C, height, width).

        ``inputs`` are images (B, C, H, W), or pairs of images (2, B, C, H, W), one for each view.
        """
        chosen = {name: value.flatten(0, 1) for name, value in self.choose(draws).items()}
        pairs = inputs if inputs.ndim == 5 else inputs.expand(2, *inputs.shape)
        images = pairs.flatten(0, 1).float() / 255
        if "box" in chosen:
            images = ops.crop(images, chosen["box"], self.view_size)
        if "affine" in chosen:
            images = ops.affine(images, chosen["affine"])
        if "order" in chosen:
            images = ops.color_jitter(images, self.colors, chosen["colors"], chosen["order"])
        if "gray" in chosen:
            images = ops.gray(images, chosen["gray"])
        if "sigma" in chosen:
            images = ops.blur(images, chosen["sigma"], math.ceil(GAUSSIAN_REACH * self.config.blur_radius[1]))
        if "solarize" in chosen:
            images = ops.solarize(images, chosen["solarize"])
        return ((images - self.mean) / self.std).contiguous().view(*pairs.shape[:3], *self.view_size)

    def plain(self, inputs: Tensor) -> Tensor:
        """Return the inputs for evaluation: normalized images without augmentation.

        If ``config.plain`` is "center", they are center-cropped to the size of a view.
        """
        images = inputs.float() / 255
        if self._reframes and self.config.plain == "center":
            images = ops.crop(images, self.center.expand(images.shape[0], 4), self.view_size).contiguous()
        return (images - self.mean) / self.std

    def choose(self, draws: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert uniform numbers to the parameters of pixels.py, (2, B, …) each.

        They are ``box`` (4), ``affine`` (2, 3), ``colors`` (n) in the order of ``self.colors``, ``order`` (n),
        ``gray``, ``sigma`` (0: no blur) and ``solarize``. Disabled operations are absent.
        """
        config = self.config
        chosen: dict[str, Tensor] = {}
        if "flip" in draws:
            chosen["box"] = self._boxes(draws)
        if "affine" in draws:
            chosen["affine"] = ops.affine_matrix(self.affine_range * (2 * draws["affine"] - 1), self.view_size)
        if "order" in draws:
            jittered = (draws["jitter"] < config.jitter_prob).unsqueeze(-1)
            chosen["colors"] = self.color_neutral + self.color_range * (2 * draws["colors"] - 1) * jittered
            chosen["order"] = self.orders[(draws["order"] * len(self.orders)).long()]
        if "gray" in draws:
            chosen["gray"] = draws["gray"] < config.gray_prob
        if "blur" in draws:
            low, high = config.blur_radius
            chosen["sigma"] = (low + (high - low) * draws["sigma"]) * (draws["blur"] < self.blur_prob)
        if "solarize" in draws:
            chosen["solarize"] = draws["solarize"] < self.solarize_prob
        return chosen

    def _boxes(self, draws: dict[str, Tensor]) -> Tensor:
        """Return left, top, right and bottom of each view's crop, with left and right swapped for a flip: (2, B, 4)."""
        flip = draws["flip"] < self.config.flip_prob
        if "area" in draws:
            left, top, right, bottom = self._random_crop(draws)
        else:
            left, top, right, bottom = self.center.expand(*flip.shape, 4).unbind(-1)
        return torch.stack([torch.where(flip, right, left), top, torch.where(flip, left, right), bottom], dim=-1)

    def _random_crop(self, draws: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the edges of torchvision's random resized crop, in whole pixels: the first candidate that fits."""
        config = self.config
        image_height, image_width = self.image_size
        area = (config.crop_min + (1 - config.crop_min) * draws["area"]) * (image_height * image_width)
        aspect = torch.exp(math.log(config.crop_aspect) * (2 * draws["aspect"] - 1))
        last_height, last_width = largest_crop(image_height, image_width, config.crop_aspect)  # always fits
        width = F.pad((area * aspect).sqrt().round(), (0, 1), value=last_width)
        height = F.pad((area / aspect).sqrt().round(), (0, 1), value=last_height)
        fits = (width > 0) & (width <= image_width) & (height > 0) & (height <= image_height)
        first = fits.int().argmax(-1, keepdim=True)
        width = width.gather(-1, first).squeeze(-1)
        height = height.gather(-1, first).squeeze(-1)
        random = first.squeeze(-1) < CROP_TRIES
        left = torch.where(random, draws["left"] * (image_width - width + 1), (image_width - width) / 2).floor()
        top = torch.where(random, draws["top"] * (image_height - height + 1), (image_height - height) / 2).floor()
        return left, top, left + width, top + height

    def _store_constants(self, mean: Channels, std: Channels) -> None:
        """Register constants as buffers, since a CUDA graph must not copy from the host."""
        config = self.config
        affine_range: list[float] = []
        if affine := config.affine:
            affine_range = [affine.scale, affine.aspect, affine.rotation, affine.shear, affine.shift, affine.shift]
        constants = {
            "mean": [[[value]] for value in mean],
            "std": [[[value]] for value in std],
            "center": self._center_box(),
            "affine_range": affine_range,
            "color_range": [getattr(config, name) for name in self.colors],
            "color_neutral": [0 if name == "hue" else 1 for name in self.colors],
            "blur_prob": [[p] for p in config.blur_prob],
            "solarize_prob": [[p] for p in config.solarize_prob],
        }
        for name, values in constants.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32), persistent=False)
        orders = list(permutations(range(len(self.colors))))
        self.register_buffer("orders", torch.tensor(orders, dtype=torch.long), persistent=False)

    def _center_box(self) -> list[int]:
        """Return left, top, right and bottom of the central crop."""
        height, width = self.image_size
        box_height = min(self.config.size, height, width) if self.config.size else height
        box_width = min(self.config.size, height, width) if self.config.size else width
        left = (width - box_width) // 2
        top = (height - box_height) // 2
        return [left, top, left + box_width, top + box_height]

    def _plan_draws(self) -> None:
        """Assign each random number a position in the draw; disabled operations get none."""
        config = self.config
        if config.crop_min < 1 and not self.cropped:
            self._add_draws(area=CROP_TRIES, aspect=CROP_TRIES, left=None, top=None)
        if (config.crop_min < 1 or config.flip_prob or self._reframes) and not self.cropped:
            self._add_draws(flip=None)
        if config.affine:
            self._add_draws(affine=6)
        if self.colors:
            self._add_draws(jitter=None, colors=len(self.colors), order=None)
        if config.gray_prob and self.channels == 3:
            self._add_draws(gray=None)
        if any(config.blur_prob):
            self._add_draws(blur=None, sigma=None)
        if any(config.solarize_prob):
            self._add_draws(solarize=None)

    def _add_draws(self, **counts: int | None) -> None:
        for name, count in counts.items():
            start = self._number_count
            self._number_count += count or 1
            self._numbers[name] = slice(start, self._number_count) if count else start

    @property
    def _reframes(self) -> bool:
        """Whether the view of an uncropped image differs from the image."""
        return self.view_size != self.image_size
