"""Which images a run was trained on, and what became of them since."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from secu.data.own.names import printable
from secu.data.own.source import Source

if TYPE_CHECKING:
    from secu.data.own import OwnImages

Known = dict[str, int | None]  # id of every image in order → checksum of its decoded pixels; None: it was not readable


def remember(source: Source, images: OwnImages) -> Known:
    """Return what tells the images of a source apart from others that lie in the same place later.

    A checksum of the pixels stays when files are copied, which gives them another time, and an array or an archive has
    but one time for all of its images.
    """
    sums = {name: zlib.crc32(pixels) for name, pixels in zip(images.ids, images.pixels.numpy(), strict=True)}
    return {name: sums.get(name) for name in source.ids}


def changes(before: Mapping[str, int | None], now: Mapping[str, int | None]) -> str:
    """Say how many images are gone, new or changed, with the first of each; nothing if all are as they were."""
    kinds = {
        "gone": [name for name in before if name not in now],
        "new": [name for name in now if name not in before],
        "changed": [name for name, pixels in before.items() if name in now and now[name] != pixels],
    }
    return ", ".join(f"{len(names):,} {kind} (first {printable(names[0])})" for kind, names in kinds.items() if names)
