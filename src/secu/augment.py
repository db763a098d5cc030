"""Step 2 of the tour: a batch of uint8 images → two random float32 views, normalised, on any device.

Random numbers and arithmetic are kept apart. ``draw`` takes all random numbers of a batch in one call;
``choose`` turns them into boxes, factors and so on; ``apply`` is a pure function of pixels and draws. The same
draws give the same views, eager, compiled or replayed from a CUDA graph, and no two images or views share a number.

Order of operations: crop, affine, colour jitter, grey, blur, solarise, flip, normalise. The flip is done by the crop's
matrices: all that follows treats left and right alike, so the views have the same distribution.
"""

import math
from itertools import permutations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from secu import pixels as ops
from secu.config import AugmentConfig, Channels
from secu.errors import UserError

CROP_TRIES = 10  # as torchvision: the first of this many random boxes that fits into the image, else a central one
GAUSSIAN_REACH = 4  # in standard deviations
COLOURS_OF_GREY = ("brightness", "contrast")  # what means something with a single channel


class Augmentation(nn.Module):
    """Random views of images of one size; operations whose settings are zero cost nothing.

    Args:
        config: the settings.
        mean: of the data, one number or one a channel, for pixels from 0 to 1.
        std: likewise.
        channels: of the images, 1 or 3.
        image_size: height and width of the images. Views are squares of ``config.size``, else as large as the image.
    """

    mean: Tensor
    std: Tensor
    centre: Tensor
    affine_range: Tensor
    colour_range: Tensor
    colour_neutral: Tensor
    orders: Tensor
    blur_prob: Tensor
    solarize_prob: Tensor

    def __init__(
        self, config: AugmentConfig, mean: Channels, std: Channels, channels: int, image_size: tuple[int, int]
    ) -> None:
        super().__init__()
        if channels not in (1, 3):
            raise UserError(f"data: images must have 1 or 3 channels, got {channels}")
        for name, values in (("mean", mean), ("std", std)):
            if len(values) not in (1, channels):
                raise UserError(f"data.{name}: {len(values)} values, but the images have {channels} channels")
        self.config = config
        self.channels = channels
        self.image_size = image_size
        self.view_size = (config.size, config.size) if config.size else image_size
        self.colours = tuple(
            name
            for name in ops.COLOUR_OPERATIONS
            if config.jitter_prob and getattr(config, name) and (channels == 3 or name in COLOURS_OF_GREY)
        )
        self._store_constants(mean, std)
        self._number_count = 0
        self._numbers: dict[str, int | slice] = {}
        self._plan_draws()

    def forward(self, pixels: Tensor, generator: Generator | None = None) -> Tensor:
        """Return two random views of uint8 images (B, C, H, W): float32 (2, B, C, height, width)."""
        return self.apply(pixels, self.draw(pixels.shape[0], generator))

    def draw(self, batch_size: int, generator: Generator | None = None) -> dict[str, Tensor]:
        """Return all random numbers for two views of a batch: uniform in [0, 1), (2, B) or (2, B, n) each."""
        numbers = torch.rand(2, batch_size, self._number_count, device=self.mean.device, generator=generator)
        return {name: numbers[..., where] for name, where in self._numbers.items()}

    # Not nn.Module.apply, which would be of no use here: there are no submodules and no weights to initialise.
    def apply(self, pixels: Tensor, draws: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        """Return the two views that ``draws`` stand for: float32 (2, B, C, height, width)."""
        chosen = {name: value.flatten(0, 1) for name, value in self.choose(draws).items()}
        images = (pixels.float() / 255).expand(2, *pixels.shape).flatten(0, 1)
        if "box" in chosen:
            images = ops.crop(images, chosen["box"], self.view_size)
        if "affine" in chosen:
            images = ops.affine(images, chosen["affine"])
        if "order" in chosen:
            images = ops.colour_jitter(images, self.colours, chosen["colours"], chosen["order"])
        if "grey" in chosen:
            images = ops.grey(images, chosen["grey"])
        if "sigma" in chosen:
            images = ops.blur(images, chosen["sigma"], math.ceil(GAUSSIAN_REACH * self.config.blur_radius[1]))
        if "solarize" in chosen:
            images = ops.solarize(images, chosen["solarize"])
        return ((images - self.mean) / self.std).contiguous().view(2, *pixels.shape[:2], *self.view_size)

    def normalize(self, pixels: Tensor) -> Tensor:
        """Return the un-augmented images for evaluation, normalised: whole, or the centre in the size of a view."""
        images = pixels.float() / 255
        if self._reframes and self.config.plain == "centre":
            images = ops.crop(images, self.centre.expand(images.shape[0], 4), self.view_size).contiguous()
        return (images - self.mean) / self.std

    def choose(self, draws: dict[str, Tensor]) -> dict[str, Tensor]:
        """Turn uniform numbers into what is done to each image, (2, B, …): the parameters of pixels.py.

        ``box`` (4), ``affine`` (2, 3), ``colours`` (n) in the order of ``self.colours``, ``order`` (n), ``grey``,
        ``sigma`` (0: no blur) and ``solarize``; what the settings rule out is left out.
        """
        config = self.config
        chosen: dict[str, Tensor] = {}
        if "flip" in draws:
            chosen["box"] = self._boxes(draws)
        if "affine" in draws:
            chosen["affine"] = ops.affine_matrix(self.affine_range * (2 * draws["affine"] - 1), self.view_size)
        if "order" in draws:
            jittered = (draws["jitter"] < config.jitter_prob).unsqueeze(-1)
            chosen["colours"] = self.colour_neutral + self.colour_range * (2 * draws["colours"] - 1) * jittered
            chosen["order"] = self.orders[(draws["order"] * len(self.orders)).long()]
        if "grey" in draws:
            chosen["grey"] = draws["grey"] < config.grey_prob
        if "blur" in draws:
            low, high = config.blur_radius
            chosen["sigma"] = (low + (high - low) * draws["sigma"]) * (draws["blur"] < self.blur_prob)
        if "solarize" in draws:
            chosen["solarize"] = draws["solarize"] < self.solarize_prob
        return chosen

    def _boxes(self, draws: dict[str, Tensor]) -> Tensor:
        """Return left, top, right, bottom of each view's crop, left and right exchanged for a flip: (2, B, 4)."""
        flip = draws["flip"] < self.config.flip_prob
        if "area" in draws:
            left, top, right, bottom = self._random_crop(draws)
        else:
            left, top, right, bottom = self.centre.expand(*flip.shape, 4).unbind(-1)
        return torch.stack([torch.where(flip, right, left), top, torch.where(flip, left, right), bottom], dim=-1)

    def _random_crop(self, draws: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the edges of torchvision's random resized crop: whole pixels, the first of the tries that fits."""
        (image_height, image_width), config = self.image_size, self.config
        area = (config.crop_min + (1 - config.crop_min) * draws["area"]) * (image_height * image_width)
        aspect = torch.exp(math.log(config.crop_aspect) * (2 * draws["aspect"] - 1))
        last_height, last_width = self._fallback_crop()  # stands behind the random tries and always fits
        width = F.pad((area * aspect).sqrt().round(), (0, 1), value=last_width)
        height = F.pad((area / aspect).sqrt().round(), (0, 1), value=last_height)
        fits = (width > 0) & (width <= image_width) & (height > 0) & (height <= image_height)
        first = fits.int().argmax(-1, keepdim=True)
        width, height = width.gather(-1, first).squeeze(-1), height.gather(-1, first).squeeze(-1)
        random = first.squeeze(-1) < CROP_TRIES
        left = torch.where(random, draws["left"] * (image_width - width + 1), (image_width - width) / 2).floor()
        top = torch.where(random, draws["top"] * (image_height - height + 1), (image_height - height) / 2).floor()
        return left, top, left + width, top + height

    def _fallback_crop(self) -> tuple[int, int]:
        """Return height and width of the largest crop of a valid aspect ratio."""
        (height, width), aspect = self.image_size, self.config.crop_aspect
        if width * aspect < height:
            return round(width * aspect), width
        return height, min(width, round(height * aspect))

    def _store_constants(self, mean: Channels, std: Channels) -> None:
        """Keep as buffers what the operations read, since a CUDA graph must not copy from the host."""
        config = self.config
        height, width = self.image_size
        box_height, box_width = (min(config.size, height, width),) * 2 if config.size else self.image_size
        left, top = (width - box_width) // 2, (height - box_height) // 2
        a = config.affine
        constants = {
            "mean": [[[value]] for value in mean],
            "std": [[[value]] for value in std],
            "centre": [left, top, left + box_width, top + box_height],
            "affine_range": [a.scale, a.aspect, a.rotation, a.shear, a.shift, a.shift] if a else [],
            "colour_range": [getattr(config, name) for name in self.colours],
            "colour_neutral": [0 if name == "hue" else 1 for name in self.colours],
            "blur_prob": [[p] for p in config.blur_prob],
            "solarize_prob": [[p] for p in config.solarize_prob],
        }
        for name, values in constants.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32), persistent=False)
        orders = list(permutations(range(len(self.colours))))
        self.register_buffer("orders", torch.tensor(orders, dtype=torch.long), persistent=False)

    def _plan_draws(self) -> None:
        """Give each random number an image needs its place in the one draw; what has no place is never done."""
        config = self.config
        if config.crop_min < 1:
            self._add_draws(area=CROP_TRIES, aspect=CROP_TRIES, left=None, top=None)
        if config.crop_min < 1 or config.flip_prob or self._reframes:
            self._add_draws(flip=None)
        if config.affine:
            self._add_draws(affine=6)
        if self.colours:
            self._add_draws(jitter=None, colours=len(self.colours), order=None)
        if config.grey_prob and self.channels == 3:
            self._add_draws(grey=None)
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
        """Whether the view of an un-cropped image differs from the image."""
        return self.view_size != self.image_size
