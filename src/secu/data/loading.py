"""From a source to Images: decoded into the cache, into memory, or on demand."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from secu.base import processes
from secu.base.errors import UserError
from secu.base.names import printable
from secu.data.broken import MAX_BAD, Broken, unreadable
from secu.data.cache import Progress, Stored, cached
from secu.data.images import Images
from secu.data.opening import open_data, shape_of
from secu.data.rows import FileRows
from secu.data.sources.base import Shape, Source
from secu.data.sources.downloads import data_root
from secu.data.sources.vectors import VectorSource
from secu.data.stream import decoded_in_batches, needs_decoding
from secu.data.strings import pick, picked_ids

if TYPE_CHECKING:
    from secu.config import DataConfig

LARGEST = 4096  # maximum side of a decoded image, in pixels
BATCH = 1024  # images copied at a time, so that a large file (STL-10: 2.7 GB) is in memory only once


def load(
    data: DataConfig,
    split: str | None = None,
    root: Path | None = None,
    *,
    cache: Path | None = None,
    progress: Progress | None = None,
    allow_bad: bool = False,
) -> Images:
    """Load the images specified by a run's settings; see ``open_data`` and ``load_images``.

    Raises:
        UserError: The source does not exist, or its images cannot be read with these settings.
    """
    images = load_images(
        open_data(data, split, root),
        shape_of(data),
        values=data.values,
        cache=cache,
        allow_bad=allow_bad,
        on_demand=data.on_demand,
        progress=progress,
    )
    return require_all(images) if data.strict else images


def load_images(
    source: Source,
    shape: Shape,
    *,
    values: str | None = None,
    cache: Path | None = None,
    allow_bad: bool = False,
    strict: bool = False,
    on_demand: bool | None = None,
    progress: Progress | None = None,
) -> Images:
    """Load the images of a source as squares.

    They are decoded on demand if that is asked for or the source is ``on_demand``, into memory if it cannot be cached,
    and otherwise into the cache, unless the cache is up to date.

    Args:
        source: A source returned by ``open_source`` or ``open_images``.
        shape: Channels (1 for gray, 3 for color), and height and width, which are equal.
        values: How the run interprets values (data.values); if None, the source decides, and 16-bit files are reduced
            to their upper 8 bits.
        cache: Folder for decoded images, created if needed; by default ``default_cache()``. Cache files of earlier
            states of the source are removed when the images are decoded again.
        allow_bad: Continue when more than 5% of the images cannot be read.
        strict: Decode into memory, and raise if an image cannot be read; always the case for images in memory.
        on_demand: Decode images whenever they are needed, instead of once; None: as the source prefers.
        progress: Called with the number of images decoded so far and in total; not called if nothing is decoded.

    Raises:
        UserError: Too many images cannot be read, or the cache cannot be written.
    """
    source.require_images()
    if isinstance(source, VectorSource):
        source.ready(slice(0, 0), shape)  # raises if the run was trained on other inputs
        return combine(source, Stored(source.in_memory(), {}), None, shape)
    if len(shape) == 1:
        raise UserError(f"source: {source.name} has images, but the run was trained on given feature vectors")
    _check(shape)
    values = source.values_of(values)
    if source.on_demand if on_demand is None else on_demand:
        most = 0.0 if strict else 1.0 if allow_bad else MAX_BAD
        return combine(source, None, values, shape, most)
    strict = strict or not source.place
    if strict or not source.cacheable:
        stored = _in_memory(source, shape, values, strict, progress)
    else:
        with processes.one_first():
            stored = cached(source, shape, values, Path(cache or default_cache()), progress)
    images = combine(source, stored, values, shape)
    if not allow_bad:
        require_few_bad(source, images)
    return images


def default_cache() -> Path:
    """Return the default cache folder for decoded images."""
    return data_root() / "images"


def _check(shape: Shape) -> None:
    channels, height, width = shape
    if height != width or not 1 <= height <= LARGEST:
        raise UserError(f"image_size: {height} x {width} must be a square with a side from 1 to {LARGEST}")
    if channels not in (1, 3):
        raise UserError(f"channels: {channels} must be 1 (gray) or 3 (color)")


def _in_memory(source: Source, shape: Shape, values: str | None, strict: bool, progress: Progress | None) -> Stored:
    pixels = np.empty((len(source), *shape), np.uint8)
    bad: dict[int, str] = {}
    done = 0
    shown = progress if needs_decoding(source, shape, values) else None
    with closing(decoded_in_batches(source, shape, values, BATCH)) as batches:
        for numbers, images, failed in batches:
            for number, error in failed:
                if strict:
                    raise unreadable(source, number, error)
                bad[number] = error.reason
            pixels[numbers] = images
            done += len(numbers) + len(failed)
            if shown:
                shown(done, len(source))
    return Stored(np.delete(pixels, list(bad), 0) if bad else pixels, bad)


def combine(
    source: Source, stored: Stored | None, values: str | None, shape: Shape, most_bad: float = MAX_BAD
) -> Images:
    """Combine inputs and metadata, leaving out bad images; without inputs, images are decoded on demand."""
    import torch

    bad = stored.bad if stored else {}
    inputs = stored.inputs if stored else None
    everything = range(len(source))
    rows = [i for i in everything if i not in bad] if bad else everything
    return Images(
        torch.from_numpy(inputs) if isinstance(inputs, np.ndarray) else None,
        None if source.targets is None else torch.from_numpy(source.targets[rows] if bad else source.targets),
        source.class_names,
        ids=picked_ids(source.ids, rows),
        columns={name: pick(column, rows) for name, column in source.columns.items()},
        skipped=(*source.skipped, *((source.ids[i], reason) for i, reason in bad.items())),
        repeated=source.repeated,
        source=source,
        numbers=rows,
        values=values,
        shape=shape,
        rows=inputs if isinstance(inputs, FileRows) else None,
        checksums=stored.checksums if stored else None,
        broken=Broken(source, most_bad),
    )


def require_all(images: Images) -> Images:
    """Return the images, of which none may be unreadable: neither now nor while they are decoded on demand."""
    if images.skipped:
        name, reason = images.skipped[0]
        raise UserError(f"source: {printable(name)} cannot be read: {reason} (data.strict)")
    if images.broken is not None:
        images.broken.most = 0.0
    return images


def require_few_bad(source: Source, images: Images) -> None:
    """Raise if too many images cannot be read."""
    bad = len(images.skipped)
    total = len(images) + bad
    if bad > MAX_BAD * total:
        share = f"{bad} of {total} images in {source.name} cannot be read, more than {MAX_BAD:.0%}"
        first = ": ".join(map(printable, images.skipped[0]))
        raise UserError(
            f"source: {share}; the first: {first}; to continue without them, use --allow-bad (in Python allow_bad=True)"
        )
