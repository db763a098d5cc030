"""Record of the images that a run was trained on, to detect later changes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from secu.base.names import printable

if TYPE_CHECKING:
    from secu.data.images import Images

Known = dict[str, int | None]  # id of each image → checksum of its decoded pixels; None if it could not be read


def remember(images: Images) -> Known:
    """Return a checksum of each image, to detect later changes of the source.

    Checksums are of the pixels rather than of modification times, because copying a file changes its time, and an array
    or an archive has a single time for all of its images. The result is empty for named data sets, images in memory and
    images that are decoded on demand.
    """
    inputs = images.rows if images.tensor is None else images.tensor.numpy()
    if inputs is None or images.source is None or not images.source.cacheable:
        return {}
    sums = images.checksums
    if sums is None:
        sums = np.array([zlib.crc32(inputs[i].data) for i in range(len(inputs))], np.uint32)
    known = dict(zip(images.ids, sums.tolist(), strict=True))
    return {name: known.get(name) for name in images.source.ids}


def changes(before: Mapping[str, int | None], now: Mapping[str, int | None]) -> str:
    """Describe how many images are missing, new or changed, with the first of each; empty if nothing changed."""
    kinds = {
        "gone": [name for name in before if name not in now],
        "new": [name for name in now if name not in before],
        "changed": [name for name, pixels in before.items() if name in now and now[name] != pixels],
    }
    return ", ".join(f"{len(names):,} {kind} (first {printable(names[0])})" for kind, names in kinds.items() if names)
