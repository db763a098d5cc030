"""Random resized crops of the original pictures, taken while they are decoded.

The crops of augment.py are taken on the device, from squares of one size. In the published experiments on ImageNet they
are taken from whole pictures, whose size and shape only the decoder knows. The rule is the same.
"""

import math
from collections.abc import Sequence

import numpy as np

from secu.config import AugmentConfig
from secu.data.decoding.cutting import Box

CROP_TRIES = 10  # as in torchvision: use the first of this many random boxes that fits, else a center crop
VIEWS = 2
NUMBERS = 2 * CROP_TRIES + 3  # random numbers per view: area and aspect ratio of every try, left, top, flip


class OriginalCrops:
    """Chooses the boxes of both views of an image.

    They depend only on the seed of the epoch, the index of the image and the size of the picture, so that a resumed run
    equals an uninterrupted one, however its batches are read.
    """

    def __init__(self, config: AugmentConfig, size: int) -> None:
        self.config = config
        self.size = size  # side of a view, in pixels

    def boxes(self, seed: int, index: int, width: int, height: int) -> list[Box]:
        """Return the boxes of both views of image ``index``, whose picture has the given size."""
        key = np.array([seed, index], np.uint64)
        numbers = np.random.Generator(np.random.Philox(key=key)).random((VIEWS, NUMBERS)).tolist()
        return [random_box(self.config, width, height, view) for view in numbers]


def random_box(config: AugmentConfig, width: int, height: int, numbers: Sequence[float]) -> Box:
    """Return torchvision's random resized crop for ``NUMBERS`` uniform numbers: left, top, right, bottom, in pixels.

    Left and right are swapped for a flip.
    """
    *tries, x, y, flip = numbers
    box_height, box_width = largest_crop(height, width, config.crop_aspect)
    left = (width - box_width) // 2
    top = (height - box_height) // 2
    for area_number, aspect_number in zip(tries[:CROP_TRIES], tries[CROP_TRIES:], strict=True):
        area = (config.crop_min + (1 - config.crop_min) * area_number) * (width * height)
        aspect = math.exp(math.log(config.crop_aspect) * (2 * aspect_number - 1))
        try_width = round(math.sqrt(area * aspect))
        try_height = round(math.sqrt(area / aspect))
        if 0 < try_width <= width and 0 < try_height <= height:
            box_width = try_width
            box_height = try_height
            left = int(x * (width - box_width + 1))
            top = int(y * (height - box_height + 1))
            break
    right = left + box_width
    bottom = top + box_height
    return (right, top, left, bottom) if flip < config.flip_prob else (left, top, right, bottom)


def largest_crop(height: int, width: int, aspect: float) -> tuple[int, int]:
    """Return height and width of the largest crop whose aspect ratio is between 1/aspect and aspect."""
    if width * aspect < height:
        return round(width * aspect), width
    return height, min(width, round(height * aspect))
