"""Weak and strong views for self-labeling: a batch of uint8 images → two float32 views, normalised, on any device.

The weak view is what evaluation sees, mirrored or not: the model's own label is read from it. The strong view teaches
that label: mirrored or not, cropped, changed by operations of RandAugment, each drawn from all of them, and with a
square cut out.
Random numbers and arithmetic are kept apart as in augment.py: ``draw`` takes all random numbers of a batch in one call,
``choose`` turns them into the parameters of strong_pixels.py, ``apply`` is a pure function of pixels and draws.
"""

import torch
from torch import Generator, Tensor

from secu import strong_pixels as ops
from secu.augment import Augmentation
from secu.config import AugmentConfig, Channels, SelfLabelConfig
from secu.pixels import crop


class StrongAugmentation(Augmentation):
    """A weak and a strong random view of images of one size.

    Args:
        config: the settings of the run before: what evaluation sees, and whether images may be mirrored.
        strong: the settings of the strong view.
        mean: of the data, one number or one a channel, for pixels from 0 to 1.
        std: likewise.
        channels: of the images, 1 or 3.
        image_size: height and width of the images.
    """

    lowest: Tensor
    highest: Tensor

    def __init__(
        self,
        config: AugmentConfig,
        strong: SelfLabelConfig,
        mean: Channels,
        std: Channels,
        channels: int,
        image_size: tuple[int, int],
    ) -> None:
        if config.plain == "whole":
            config = config.model_copy(update={"size": None})
        super().__init__(config, mean, std, channels, image_size)
        height, width = self.view_size
        self.operations = strong.operations
        self.padding = (int(strong.crop_padding * height), int(strong.crop_padding * width))
        self.largest_cutout = int(strong.cutout * min(height, width))
        lowest, highest = zip(*ops.OPERATIONS.values(), strict=True)
        self.register_buffer("lowest", torch.tensor(lowest, dtype=torch.float32), persistent=False)
        self.register_buffer("highest", torch.tensor(highest, dtype=torch.float32), persistent=False)

    def draw(self, batch_size: int, generator: Generator | None = None) -> dict[str, Tensor]:
        """Return all random numbers for both views of a batch: uniform in [0, 1), (B, n) each."""
        counts = {"flip": 2, "crop": 2, "operation": self.operations, "magnitude": self.operations, "cutout": 3}
        numbers = torch.rand(batch_size, sum(counts.values()), device=self.mean.device, generator=generator)
        return dict(zip(counts, numbers.split(list(counts.values()), dim=1), strict=True))

    def apply(self, pixels: Tensor, draws: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        """Return the two views that ``draws`` stand for, the weak one first: float32 (2, B, C, height, width)."""
        chosen = self.choose(draws)
        if self._reframes:
            framed = crop(pixels.float(), self.centre.expand(pixels.shape[0], 4), self.view_size)
            pixels = framed.round().clamp(0, 255).to(torch.uint8)
        flip_weak, flip_strong = chosen["flip"].unbind(1)
        weak = torch.where(flip_weak.view(-1, 1, 1, 1), pixels.flip(-1), pixels)
        strong = ops.mirror_and_shift(pixels, flip_strong, chosen["shift"])
        for operation, magnitude in zip(chosen["operation"].unbind(1), chosen["magnitude"].unbind(1), strict=True):
            strong = ops.operate(strong, operation, magnitude)
        strong = ops.cutout(strong, chosen["box"])
        return (torch.stack([weak, strong]).float() / 255 - self.mean) / self.std

    def choose(self, draws: dict[str, Tensor]) -> dict[str, Tensor]:
        """Turn uniform numbers into what is done to each image: the parameters of strong_pixels.py.

        ``flip`` (B, 2) of the weak and the strong view, and of the strong view ``shift`` (B, 2), ``operation`` and
        ``magnitude`` (B, n), in their order, and ``box`` (B, 4), which is cut out.
        """
        operation = (draws["operation"] * len(ops.OPERATIONS)).long()
        lowest, highest = self.lowest[operation], self.highest[operation]
        return {
            "flip": draws["flip"] < self.config.flip_prob,
            "shift": self._shift(draws["crop"]),
            "operation": operation,
            "magnitude": lowest + (highest - lowest) * draws["magnitude"],
            "box": self._box(draws["cutout"]),
        }

    def _shift(self, crop: Tensor) -> Tensor:
        """Return how far right and down the crop lies, in pixels: (B, 2)."""
        pad_y, pad_x = self.padding
        return torch.stack(
            [(crop[:, 0] * (2 * pad_x + 1)).long() - pad_x, (crop[:, 1] * (2 * pad_y + 1)).long() - pad_y], dim=1
        )

    def _box(self, cutout: Tensor) -> Tensor:
        """Return left, top, right, bottom of the square, whose centre lies anywhere in the image: (B, 4)."""
        (height, width), (side, x, y) = self.view_size, cutout.unbind(1)
        side = (side * (self.largest_cutout + 1)).floor()
        left, top = (x * width - side / 2 + 0.5).floor(), (y * height - side / 2 + 0.5).floor()
        return torch.stack([left, top, left + side, top + side], dim=1).long()
