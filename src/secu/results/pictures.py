"""Images for display, as tiles for pillow; each is decoded at most once, even if it is shown several times."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from secu.data import Images

Tile = NDArray[np.uint8]  # (height, width) or (height, width, 3)

LARGE = 192  # longest side in pixels on cards and on the sheet of exemplars
SMALL = 64  # longest side in pixels on the map
CHUNK = 128  # images fetched at a time, to limit memory for large photos


class Pictures:
    """Tiles of chosen images.

    Args:
        images: Where the pixels come from.
        large: Indices of images that are shown large; duplicates are decoded once.
        small: Indices of images that are shown small; those in ``large`` are not decoded again.
    """

    def __init__(self, images: Images, large: Iterable[int], small: Iterable[int] = ()) -> None:
        wanted = set(large)
        self._tiles = dict(_decode(images, wanted, LARGE))
        self._tiles.update(_decode(images, set(small) - wanted, SMALL))

    def __getitem__(self, index: int) -> Tile:
        return self._tiles[index]

    def tiles(self, index: Sequence[int], side: int) -> list[Tile]:
        """Return the tiles of some images, scaled down to a longest side of at most ``side``."""
        return [shrink(self._tiles[i], side) for i in index]


def _decode(images: Images, wanted: set[int], side: int) -> Iterator[tuple[int, Tile]]:
    """Yield the tile of each requested image, in the fastest reading order of the source."""
    order = sorted(wanted, key=images.position)
    for first in range(0, len(order), CHUNK):
        chunk = order[first : first + CHUNK]
        pixels_BCHW = images.pictures(torch.tensor(chunk), side)
        for index, pixels_CHW in zip(chunk, pixels_BCHW, strict=True):
            yield index, shrink(to_tile(pixels_CHW), side)


def to_tile(pixels_CHW: Tensor) -> Tile:
    """Return an image in pillow's layout: gray, or red, green and blue."""
    pixels = pixels_CHW.numpy()
    return pixels[0] if len(pixels) < 3 else np.ascontiguousarray(pixels[:3].transpose(1, 2, 0))


def shrink(tile: Tile, side: int) -> Tile:
    """Scale a tile down to a longest side of at most ``side``; smaller tiles are unchanged."""
    height, width = tile.shape[:2]
    if max(height, width) <= side:
        return tile
    scale = side / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(Image.fromarray(tile).resize(size, Image.Resampling.LANCZOS))
