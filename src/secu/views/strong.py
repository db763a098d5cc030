"""Weak and strong views for self-labeling: a batch of uint8 images → two float32 views, normalized, on any device.

The weak view is the input for evaluation, possibly flipped; it determines the label. The strong view is trained on that
label: it is possibly flipped, cropped, changed by several random RandAugment operations, and has a square cut out.

The style "scan" is that of SCAN (Van Gansbeke et al., 2020), whose setting the paper follows: the square has an even
side and the mean color of the data instead of black, and posterize keeps at most seven bits instead of eight.

As in augment.py, ``draw`` generates all random numbers of a batch in one call, ``choose`` converts them to the
parameters of strong_pixels.py, and ``render`` is a pure function of inputs and draws.
"""

import torch
from torch import Generator, Tensor

from secu.base.collectives import own_part, whole
from secu.config import AugmentConfig, Channels, SelfLabelConfig
from secu.views import strong_pixels as ops
from secu.views.augment import Augmentation
from secu.views.pixels import crop


class StrongAugmentation(Augmentation):
    """A weak and a strong random view of images of one size.

    ``strong`` are the settings of the strong view; ``config`` are those of the previous run, for the evaluation input
    and the probability of a flip.
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
        self.weak_flip = strong.weak_flip
        self.scan = strong.strong_style == "scan"
        ranges = ops.OPERATIONS | ({"posterize": (4, 8)} if self.scan else {})
        lowest, highest = zip(*ranges.values(), strict=True)
        self.register_buffer("lowest", torch.tensor(lowest, dtype=torch.float32), persistent=False)
        self.register_buffer("highest", torch.tensor(highest, dtype=torch.float32), persistent=False)

    def draw(self, batch_size: int, generator: Generator | None = None) -> dict[str, Tensor]:
        """Return all random numbers for both views of a batch: uniform in [0, 1), (B, n) each."""
        counts = {"flip": 2, "crop": 2, "operation": self.operations, "magnitude": self.operations, "cutout": 3}
        numbers = torch.rand(whole(batch_size), sum(counts.values()), device=self.mean.device, generator=generator)
        numbers = own_part(numbers, 0)
        return dict(zip(counts, numbers.split(list(counts.values()), dim=1), strict=True))

    def render(self, inputs: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """Return the two views given by ``draws``, the weak one first: float32 (2, B, C, height, width)."""
        chosen = self.choose(draws)
        if self._reframes:
            framed = crop(inputs.float(), self.center.expand(inputs.shape[0], 4), self.view_size)
            inputs = framed.round().clamp(0, 255).to(torch.uint8)
        flip_weak, flip_strong = chosen["flip"].unbind(1)
        weak = torch.where(flip_weak.view(-1, 1, 1, 1), inputs.flip(-1), inputs)
        strong = ops.mirror_and_shift(inputs, flip_strong, chosen["shift"])
        for operation, magnitude in zip(chosen["operation"].unbind(1), chosen["magnitude"].unbind(1), strict=True):
            strong = ops.operate(strong, operation, magnitude)
        if not self.scan:
            strong = ops.cutout(strong, chosen["box"])
        views = (torch.stack([weak, strong]).float() / 255 - self.mean) / self.std
        if not self.scan:
            return views
        return torch.stack([views[0], ops.cutout(views[1], chosen["box"])])

    def choose(self, draws: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert uniform numbers to the parameters of strong_pixels.py.

        They are ``flip`` (B, 2) of the weak and the strong view, and for the strong view ``shift`` (B, 2),
        ``operation`` and ``magnitude`` (B, n), in the order in which they are applied, and ``box`` (B, 4), which is
        cut out.
        """
        operation = (draws["operation"] * len(ops.OPERATIONS)).long()
        lowest = self.lowest[operation]
        highest = self.highest[operation]
        flip_weak, flip_strong = (draws["flip"] < self.config.flip_prob).unbind(1)
        if not self.weak_flip:
            flip_weak = torch.zeros_like(flip_weak)
        return {
            "flip": torch.stack([flip_weak, flip_strong], dim=1),
            "shift": self._shift(draws["crop"]),
            "operation": operation,
            "magnitude": lowest + (highest - lowest) * draws["magnitude"],
            "box": self._box(draws["cutout"]),
        }

    def _shift(self, crop: Tensor) -> Tensor:
        """Return the offset of the crop to the right and down, in pixels: (B, 2)."""
        pad_y, pad_x = self.padding
        return torch.stack(
            [(crop[:, 0] * (2 * pad_x + 1)).long() - pad_x, (crop[:, 1] * (2 * pad_y + 1)).long() - pad_y], dim=1
        )

    def _box(self, cutout: Tensor) -> Tensor:
        """Return left, top, right and bottom of the square, whose center may be anywhere in the image: (B, 4)."""
        height, width = self.view_size
        side, x, y = cutout.unbind(1)
        if self.scan:  # from 1 to the largest, rounded down to an even number, about a corner between four pixels
            side = (((side * self.largest_cutout).floor() + 1) / 2).floor() * 2
            left = (x * width).floor() - side / 2
            top = (y * height).floor() - side / 2
            return torch.stack([left, top, left + side, top + side], dim=1).long()
        side = (side * (self.largest_cutout + 1)).floor()
        left = (x * width - side / 2 + 0.5).floor()
        top = (y * height - side / 2 + 0.5).floor()
        return torch.stack([left, top, left + side, top + side], dim=1).long()
