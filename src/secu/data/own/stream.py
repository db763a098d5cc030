"""From a source to squares of uint8: image by image in threads, or a batch at a time, holding only a few at once."""

import os
from collections import deque
from collections.abc import Collection, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from secu.data.own.decode import BadImage, Raw, as_bad_image, decode, quiet
from secu.data.own.source import Source

Outcome = NDArray[np.uint8] | BadImage
AHEAD = 4  # images read ahead for each thread
AT_ONCE = 128  # images decoded for a batch: small enough for a progress bar that moves while photos are read


def decoded(
    source: Source, size: int, channels: int, *, only: Collection[int] | None = None, workers: int | None = None
) -> Generator[tuple[int, Outcome]]:
    """Decode all images, or ``only`` some, in threads (pillow frees the lock of Python), in ``source.order``.

    Reading is done here, one image after the other, as archives want it; memory does not grow with their number. Close
    the iterator (``contextlib.closing``) when leaving it early.

    Yields:
        The number of an image, and its pixels (channels, size, size) or why it is bad.
    """
    workers = workers or _cores()
    waiting: deque[tuple[int, Future[Outcome]]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        with quiet():
            for i in source.order if only is None else sorted(set(only), key=source.position):
                if len(waiting) >= AHEAD * workers:
                    first, future = waiting.popleft()
                    yield first, future.result()
                waiting.append((i, pool.submit(_outcome, _raw(source, i), size, channels, source.highest)))
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def needs_decoding(source: Source, size: int, channels: int) -> bool:
    """Return whether the images are anything but an array of this very size and number of channels."""
    return source.ready(slice(0, 0), size, channels) is None


def decoded_in_batches(
    source: Source, size: int, channels: int, batch: int
) -> Generator[tuple[list[int], NDArray[np.uint8], list[tuple[int, BadImage]]]]:
    """Decode all images, at most ``batch`` at a time; an array that needs no decoding is cut into slices.

    Yields:
        The numbers of images, their pixels (n, channels, size, size), and number and reason of those that are bad.
    """
    if not needs_decoding(source, size, channels):
        for start in range(0, len(source), batch):
            numbers = range(start, min(start + batch, len(source)))
            pixels = source.ready(slice(numbers.start, numbers.stop), size, channels)
            assert pixels is not None
            yield list(numbers), pixels, []
        return
    with closing(decoded(source, size, channels)) as images:
        while some := list(islice(images, min(batch, AT_ONCE))):
            good = [(i, image) for i, image in some if not isinstance(image, BadImage)]
            pixels = np.stack([image for _, image in good]) if good else np.empty((0, channels, size, size), np.uint8)
            yield [i for i, _ in good], pixels, [(i, bad) for i, bad in some if isinstance(bad, BadImage)]


def _raw(source: Source, i: int) -> Raw | BadImage:
    try:
        with as_bad_image():
            return source.read(i)
    except BadImage as bad:
        return bad


def _outcome(raw: Raw | BadImage, size: int, channels: int, highest: int) -> Outcome:
    try:
        return raw if isinstance(raw, BadImage) else decode(raw, size, channels, highest)
    except BadImage as bad:
        return bad


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
