"""Decode a source to squares of uint8 in threads, one image or one batch at a time, with bounded memory."""

import os
from collections import deque
from collections.abc import Collection, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from secu.data.decode import BadImage, Raw, as_bad_image, decode, quiet
from secu.data.source import Shape, Source
from secu.data.text import printable
from secu.errors import UserError

Outcome = NDArray[np.uint8] | BadImage
Batch = tuple[list[int], NDArray[np.uint8], list[tuple[int, BadImage]]]
AHEAD = 4  # images read ahead for each thread
AT_ONCE = 128  # images per decoded batch; small enough for smooth progress on large photos


def decoded(
    source: Source,
    shape: Shape,
    values: str | None = None,
    *,
    only: Collection[int] | None = None,
    workers: int | None = None,
) -> Generator[tuple[int, Outcome]]:
    """Decode all images, or ``only`` some, in threads (pillow releases the GIL), in ``source.order``.

    Images are read sequentially in the calling thread, as archives require; memory use does not depend on their number.
    Close the iterator (``contextlib.closing``) when leaving it early.

    Yields:
        The index of an image, and its pixels (C, S, S) or a ``BadImage``.
    """
    workers = workers or cores()
    waiting: deque[tuple[int, Future[Outcome]]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        with quiet():
            for i in source.order if only is None else sorted(set(only), key=source.position):
                if len(waiting) >= AHEAD * workers:
                    first, future = waiting.popleft()
                    yield first, future.result()
                waiting.append((i, pool.submit(_outcome, read_raw(source, i, values), shape, values)))
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def needs_decoding(source: Source, shape: Shape, values: str | None = None) -> bool:
    """Return whether the images must be decoded; False for an array that already has this shape."""
    return source.ready(slice(0, 0), shape, values) is None


def decoded_in_batches(
    source: Source, shape: Shape, values: str | None, batch: int, part: range | None = None
) -> Generator[Batch]:
    """Decode all images, at most ``batch`` at a time, or a part of ``source.order``; an array may only be sliced.

    Yields:
        The indices of images, their pixels (B, C, S, S), and index and reason of bad images.
    """
    if not needs_decoding(source, shape, values):
        part = range(len(source)) if part is None else part
        for start in range(part.start, part.stop, batch):
            stop = min(start + batch, part.stop)
            pixels = source.ready(slice(start, stop), shape, values)
            assert pixels is not None
            yield list(range(start, stop)), pixels, []
        return
    only = None if part is None else source.order[part.start : part.stop]
    with closing(decoded(source, shape, values, only=only)) as images:
        while some := list(islice(images, min(batch, AT_ONCE))):
            good = [(i, image) for i, image in some if not isinstance(image, BadImage)]
            pixels = np.stack([image for _, image in good]) if good else np.empty((0, *shape), np.uint8)
            yield [i for i, _ in good], pixels, [(i, bad) for i, bad in some if isinstance(bad, BadImage)]


def decode_now(source: Source, numbers: Sequence[int], shape: Shape, values: str | None) -> NDArray[np.uint8]:
    """Decode some images in the given order (B, C, S, S), in threads that persist between calls.

    Raises:
        UserError: An image cannot be read.
    """
    pixels = np.empty((len(numbers), *shape), np.uint8)

    def fill(row: int) -> None:
        try:
            pixels[row] = source.decode(numbers[row], shape[1], shape[0], values)
        except BadImage as bad:
            raise unreadable(source, numbers[row], bad) from None

    for _ in _lasting_pool().map(fill, range(len(numbers))):
        pass
    return pixels


def unreadable(source: Source, i: int, bad: BadImage) -> UserError:
    """Return the error for an image that must be readable."""
    return UserError(f"source: {printable(source.ids[i])} cannot be read: {bad.reason}")


@cache
def _lasting_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cores(), "secu-decode")


def read_raw(source: Source, i: int, values: str | None) -> Raw | BadImage:
    """Return image ``i`` as stored, or the error if it cannot be read."""
    try:
        with as_bad_image():
            return source.read(i, values)
    except BadImage as bad:
        return bad


def _outcome(raw: Raw | BadImage, shape: Shape, values: str | None) -> Outcome:
    channels, size, _ = shape
    try:
        return raw if isinstance(raw, BadImage) else decode(raw, size, channels, values)
    except BadImage as bad:
        return bad


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
