"""Sprite sheets: many thumbnails per JPEG, without duplicates, within a byte budget.

A sheet saves the 600-byte header of each JPEG. Cells are aligned with JPEG's blocks and padded with their last row and
column, so that no picture bleeds into its neighbor. Pictures are never upscaled here; the browser does that.
"""

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from secu.results.pictures import LARGE, SMALL, Pictures, Tile, shrink

SHEET = 1024  # maximum side of a sheet in pixels, since phones refuse to decode large images


class Level(NamedTuple):
    """A level of detail: longest sides in pixels, JPEG quality, and chroma subsampling (0: none)."""

    card: int
    point: int
    quality: int
    subsampling: int


LEVELS = (
    Level(LARGE, SMALL, 86, 0),
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
    """Thumbnails of equal size, in rows; thumbnail n is on sheet n // (columns × rows)."""

    width: int
    height: int
    pitch: tuple[int, int]
    columns: int
    rows: int
    jpegs: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Total number of bytes."""
        return sum(map(len, self.jpegs))

    def payload(self) -> dict[str, Any]:
        """Return the data that the browser needs to locate a thumbnail."""
        return {**vars(self), "jpegs": [base64.b64encode(jpeg).decode("ascii") for jpeg in self.jpegs]}


def make_sheets(
    pictures: Pictures, cards: Sequence[int], points: Sequence[int], budget: int
) -> tuple[Sheets, Sheets, Level]:
    """Return sheets for the pictures on cards and, smaller, for the points of the map, in at most ``budget`` bytes.

    Detail is reduced level by level until everything fits; the last level is used regardless of its size.
    """
    card_tiles = pictures.tiles(cards, LARGE)
    point_tiles = pictures.tiles(points, SMALL)
    for level in LEVELS:
        on_cards = pack([shrink(tile, level.card) for tile in card_tiles], level)
        on_map = pack([shrink(tile, level.point) for tile in point_tiles], level)
        if on_cards.size + on_map.size <= budget:
            break
    return on_cards, on_map, level


def pack(tiles: Sequence[Tile], level: Level) -> Sheets:
    """Arrange tiles of equal shape on as few sheets as possible."""
    if not tiles:
        return Sheets(1, 1, (1, 1), 1, 1, ())
    block = 16 if level.subsampling else 8
    height, width = tiles[0].shape[:2]
    across = -(-width // block) * block
    down = -(-height // block) * block
    columns = max(1, SHEET // across)
    rows = max(1, SHEET // down)
    margin = ((0, down - height), (0, across - width), (0, 0))[: tiles[0].ndim]
    padded = [np.pad(tile, margin, mode="edge") for tile in tiles]
    jpegs = tuple(encode(sheet, level) for sheet in fill(padded, columns, rows))
    return Sheets(width, height, (across, down), columns, rows, jpegs)


def fill(cells: Sequence[Tile], columns: int, rows: int) -> Iterator[Tile]:
    """Yield sheets of ``columns`` × ``rows`` cells; the last one may be smaller."""
    down, across = cells[0].shape[:2]
    for first in range(0, len(cells), columns * rows):
        part = cells[first : first + columns * rows]
        used = -(-len(part) // columns)
        sheet = np.zeros((used * down, min(columns, len(part)) * across, *cells[0].shape[2:]), np.uint8)
        for number, cell in enumerate(part):
            top = number // columns * down
            left = number % columns * across
            sheet[top : top + down, left : left + across] = cell
        yield sheet


def encode(sheet: Tile, level: Level) -> bytes:
    """Encode a sheet as JPEG, without ``optimize``, which fails for noisy pictures (pillow's buffer is too small)."""
    buffer = io.BytesIO()
    image = Image.fromarray(sheet)
    options = {} if image.mode == "L" else {"subsampling": level.subsampling}
    image.save(buffer, "JPEG", quality=level.quality, **options)
    return buffer.getvalue()
