"""Images → sprite sheets: many thumbnails in one JPEG, none twice, all of them together within a budget of bytes.

A sheet saves the 600 bytes of header that every JPEG starts with. Cells lie on the grid of JPEG's own blocks and are
padded by their last row and column, so that no picture bleeds into its neighbour. Pictures are never enlarged here:
the browser does that.
"""

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from secu.data import ImageSource
from secu.data.own import pictures_of

Tile = NDArray[np.uint8]  # (height, width) or (height, width, 3)

SHEET = 1024  # longest side of a sheet in pixels: phones refuse to decode large images
CHUNK = 128  # images fetched at a time: photos are large


class Level(NamedTuple):
    """How much detail to keep: longest sides in pixels, and JPEG's quality and colour subsampling (0: full)."""

    card: int
    point: int
    quality: int
    subsampling: int


LEVELS = (
    Level(192, 64, 86, 0),
    Level(112, 48, 86, 0),
    Level(96, 40, 78, 2),
    Level(80, 32, 70, 2),
    Level(64, 32, 60, 2),
    Level(48, 24, 45, 2),
    Level(32, 16, 35, 2),
    Level(16, 8, 25, 2),
)


@dataclass(frozen=True)
class Sheets:
    """Thumbnails of equal size, in rows; thumbnail number n lies on sheet n // (columns × rows)."""

    width: int
    height: int
    pitch: tuple[int, int]
    columns: int
    rows: int
    jpegs: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """All bytes."""
        return sum(map(len, self.jpegs))

    def payload(self) -> dict[str, Any]:
        """Return what the browser needs to find a thumbnail."""
        return {
            "width": self.width,
            "height": self.height,
            "pitch": self.pitch,
            "columns": self.columns,
            "rows": self.rows,
            "jpegs": [base64.b64encode(jpeg).decode("ascii") for jpeg in self.jpegs],
        }


def make_sheets(
    images: ImageSource, cards: Sequence[int], points: Sequence[int], budget: int
) -> tuple[Sheets, Sheets, Level]:
    """Return sheets for the pictures on cards and, smaller, for the points of the map, in at most ``budget`` bytes.

    Detail is given up level by level until all fits; the last level is taken as it comes.
    """
    card_tiles = shrink(images, cards, LEVELS[0].card)
    point_tiles = shrink(images, points, LEVELS[0].point)
    for level in LEVELS:
        both = tuple(
            pack([resize(tile, side) for tile in tiles], level)
            for tiles, side in ((card_tiles, level.card), (point_tiles, level.point))
        )
        if both[0].size + both[1].size <= budget:
            break
    return both[0], both[1], level


def shrink(images: ImageSource, index: Sequence[int], side: int) -> list[Tile]:
    """Fetch images, a few at a time, and scale each to a longest side of at most ``side``."""
    return [
        resize(to_tile(pixels.numpy()), side)
        for chunk in torch.tensor(list(index), dtype=torch.int64).split(CHUNK)
        for pixels in (pictures_of(images, chunk, side) if len(chunk) else ())
    ]


def to_tile(pixels_CHW: NDArray[np.uint8]) -> Tile:
    """Return an image as pillow wants it: grey, or red, green and blue."""
    return pixels_CHW[0] if len(pixels_CHW) < 3 else np.ascontiguousarray(pixels_CHW[:3].transpose(1, 2, 0))


def resize(tile: Tile, side: int) -> Tile:
    """Scale an image down to a longest side of ``side``; a smaller one is left as it is."""
    height, width = tile.shape[:2]
    if max(height, width) <= side:
        return tile
    scale = side / max(height, width)
    wanted = max(1, round(width * scale)), max(1, round(height * scale))
    return np.asarray(Image.fromarray(tile).resize(wanted, Image.Resampling.LANCZOS))


def pack(tiles: Sequence[Tile], level: Level) -> Sheets:
    """Lay tiles of equal shape on as few sheets as they need."""
    if not tiles:
        return Sheets(1, 1, (1, 1), 1, 1, ())
    block = 16 if level.subsampling else 8
    height, width = tiles[0].shape[:2]
    across, down = (-(-length // block) * block for length in (width, height))
    columns, rows = max(1, SHEET // across), max(1, SHEET // down)
    margin = ((0, down - height), (0, across - width), (0, 0))[: tiles[0].ndim]
    padded = [np.pad(tile, margin, mode="edge") for tile in tiles]
    jpegs = tuple(encode(sheet, level) for sheet in fill(padded, columns, rows))
    return Sheets(width, height, (across, down), columns, rows, jpegs)


def fill(cells: Sequence[Tile], columns: int, rows: int) -> Iterator[Tile]:
    """Yield sheets of ``columns`` × ``rows`` cells; the last is only as large as it must be."""
    down, across = cells[0].shape[:2]
    for first in range(0, len(cells), columns * rows):
        part = cells[first : first + columns * rows]
        used = -(-len(part) // columns)
        sheet = np.zeros((used * down, min(columns, len(part)) * across, *cells[0].shape[2:]), np.uint8)
        for number, cell in enumerate(part):
            top, left = number // columns * down, number % columns * across
            sheet[top : top + down, left : left + across] = cell
        yield sheet


def encode(sheet: Tile, level: Level) -> bytes:
    """Return a sheet as JPEG; without ``optimize``: pillow's buffer is too small for it where pictures are noise."""
    buffer = io.BytesIO()
    image = Image.fromarray(sheet)
    options = {} if image.mode == "L" else {"subsampling": level.subsampling}
    image.save(buffer, "JPEG", quality=level.quality, **options)
    return buffer.getvalue()
