"""Images for display, as tiles for pillow; each is decoded at most once, even if it is shown several times."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from secu.data import Images

Tile = NDArray[np.uint8]  # (height, width) or (height, width, 3)

LARGE = 192  # longest side in pixels on cards and on the sheet of exemplars
SMALL = 64  # longest side in pixels on the map


class Pictures:
    """Tiles of the images with these indices, shown large or small; those in both are only decoded large."""

    def __init__(self, images: Images, large: Iterable[int], small: Iterable[int] = ()) -> None:
        sides = dict.fromkeys(small, SMALL) | dict.fromkeys(large, LARGE)
        pictures = images.iter_pictures(sides)
        self._tiles = {index: shrink(to_tile(pixels_CHW), sides[index]) for index, pixels_CHW in pictures}

    def __getitem__(self, index: int) -> Tile:
        return self._tiles[index]

    def tiles(self, index: Sequence[int], side: int) -> list[Tile]:
        """Return the tiles of some images, scaled down to a longest side of at most ``side``."""
        return [shrink(self._tiles[i], side) for i in index]


def to_tile(pixels_CHW: NDArray[np.uint8]) -> Tile:
    """Return an image in pillow's layout: gray, or red, green and blue."""
    return pixels_CHW[0] if len(pixels_CHW) < 3 else np.ascontiguousarray(pixels_CHW[:3].transpose(1, 2, 0))


def shrink(tile: Tile, side: int) -> Tile:
    """Scale a tile down to a longest side of at most ``side``; smaller tiles are unchanged."""
    height, width = tile.shape[:2]
    if max(height, width) <= side:
        return tile
    scale = side / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(Image.fromarray(tile).resize(size, Image.Resampling.LANCZOS))
