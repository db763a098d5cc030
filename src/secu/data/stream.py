"""Decode a source to squares of uint8, one image or one batch at a time, ahead of their use and with bounded memory."""

import os
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import cache, partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from secu.base import processes
from secu.base.threads import finish
from secu.data.broken import Broken
from secu.data.decoding.cutting import Choose
from secu.data.decoding.decode import Raw, quiet
from secu.data.decoding.image_files import BadImage, as_bad_image
from secu.data.decoding.workers import Decoder, Outcome, Task
from secu.data.sources.base import Shape, Source

Batch = tuple[list[int], NDArray[np.uint8], list[tuple[int, BadImage]]]
AHEAD = 4  # images read ahead for each thread
AT_ONCE = 128  # images per decoded batch; small enough for smooth progress on large photos


def decoded(
    source: Source, shape: Shape | Mapping[int, Shape], values: str | None = None, *, workers: int | None = None
) -> Generator[tuple[int, Outcome]]:
    """Decode all images in threads or processes, in ``source.order``; or some, each to its own shape.

    Images are read sequentially in the calling thread, as archives require; memory use does not depend on their number.
    Close the iterator (``contextlib.closing``) when leaving it early.

    Yields:
        The index of an image, and its pixels (C, S, S) or a ``BadImage``.
    """
    workers = workers or cores()
    order = sorted(shape, key=source.position) if isinstance(shape, Mapping) else source.order
    decoder = Decoder(len(order), workers, values, source.max_pixels)

    def tasks() -> Generator[tuple[int, Task]]:
        for i in order:
            channels, size, _ = shape[i] if isinstance(shape, Mapping) else shape
            yield i, Task(read_raw(source, i, values), size, channels)

    waiting: deque[tuple[list[int], Future[list[Outcome]]]] = deque()
    most = max(2, AHEAD // decoder.at_once) * workers
    pool = ThreadPoolExecutor(workers)
    try:
        with quiet():
            for numbers, part in decoder.parts(tasks()):
                waiting.append((numbers, pool.submit(decoder, part)))
                if len(waiting) > most:
                    yield from _first(waiting)
            while waiting:
                yield from _first(waiting)
    finally:
        decoder.stop()
        finish(pool, [future for _, future in waiting])


def _first(waiting: deque[tuple[list[int], Future[list[Outcome]]]]) -> Iterable[tuple[int, Outcome]]:
    numbers, future = waiting[0]
    outcomes = future.result()
    waiting.popleft()
    return zip(numbers, outcomes, strict=True)


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
    wanted = shape if part is None else dict.fromkeys(source.order[part.start : part.stop], shape)
    with closing(decoded(source, wanted, values)) as images:
        while some := list(islice(images, min(batch, AT_ONCE))):
            good = [(i, image) for i, image in some if not isinstance(image, BadImage)]
            pixels = np.stack([image for _, image in good]) if good else np.empty((0, *shape), np.uint8)
            yield [i for i, _ in good], pixels, [(i, bad) for i, bad in some if isinstance(bad, BadImage)]


def decoded_ahead(
    broken: Broken, batches: Iterable[Sequence[int]], shape: Shape, values: str | None
) -> Generator[NDArray[np.uint8]]:
    """Decode batches of images in the given order, in threads that persist between calls and work ahead.

    Another image takes the place of one that cannot be read (broken.py).

    Yields:
        The pixels of each batch (B, C, S, S).
    """
    waiting: deque[tuple[NDArray[np.uint8], list[Future[None]]]] = deque()
    pool = _lasting_pool()
    reader = _Reader(broken, shape, values)

    def fill(pixels: NDArray[np.uint8], numbers: Sequence[int]) -> None:
        for row, image in zip(pixels, reader.read(numbers), strict=True):
            row[:] = image

    try:
        for numbers in batches:
            pixels = np.empty((len(numbers), *shape), np.uint8)
            parts = reader.parts(len(numbers))
            waiting.append((pixels, [pool.submit(fill, pixels[part], numbers[part]) for part in parts]))
            while sum(len(futures) for _, futures in waiting) > len(parts) + AHEAD * cores():
                yield _finished(waiting)
        while waiting:
            yield _finished(waiting)
    finally:
        for _, futures in waiting:
            for future in futures:
                future.cancel()
        reader.decoder.stop()


def _finished(waiting: deque[tuple[NDArray[np.uint8], list[Future[None]]]]) -> NDArray[np.uint8]:
    pixels, futures = waiting[0]
    for future in futures:
        future.result()
    waiting.popleft()
    return pixels


def crop_now(
    broken: Broken, numbers: Sequence[int], choose: Sequence[Choose], shape: Shape, values: str | None
) -> NDArray[np.uint8]:
    """Cut boxes out of some images, the same number of each, in the same threads: (boxes, B, C, S, S).

    Another image takes the place of one that cannot be read (broken.py).
    """
    reader = _Reader(broken, shape, values)
    parts = reader.parts(len(numbers))
    crops = _lasting_pool().map(reader.read, [numbers[part] for part in parts], [choose[part] for part in parts])
    try:
        return np.stack([image for some in crops for image in some], axis=1)
    finally:
        reader.decoder.stop()


class _Reader:
    """Reads and decodes images of a source in any order; another image takes the place of a broken one."""

    def __init__(self, broken: Broken, shape: Shape, values: str | None) -> None:
        self.broken = broken
        self.shape = shape
        self.values = values
        self.decoder = Decoder(len(broken.source), cores(), values, broken.source.max_pixels)

    def parts(self, count: int) -> list[slice]:
        """Divide a batch so that all threads have something to do."""
        step = max(1, min(self.decoder.at_once, count // cores()))
        return [slice(start, start + step) for start in range(0, count, step)]

    def read(self, numbers: Sequence[int], choose: Sequence[Choose] | None = None) -> list[NDArray[np.uint8]]:
        """Return the pixels of some images: their centers, or the boxes that are chosen for each."""
        chosen = [None] * len(numbers) if choose is None else choose
        outcomes = self.decoder([self._task(i, boxes) for i, boxes in zip(numbers, chosen, strict=True)])
        found = zip(numbers, outcomes, chosen, strict=True)
        return [self.broken.or_another(i, partial(self._attempt, i, outcome, boxes)) for i, outcome, boxes in found]

    def _task(self, i: int, choose: Choose | None) -> Task:
        channels, size, _ = self.shape
        return Task(read_raw(self.broken.source, i, self.values), size, channels, choose)

    def _attempt(self, first: int, outcome: Outcome, choose: Choose | None, i: int) -> NDArray[np.uint8]:
        """Return what has become of the first image, or decode another one."""
        if i != first:
            outcome = self.decoder([self._task(i, choose)])[0]
        if isinstance(outcome, BadImage):
            raise outcome
        return outcome


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


def cores() -> int:
    """Return this process's share of the CPU cores."""
    return max(1, all_cores() // processes.local_world())


def all_cores() -> int:
    """Return the number of CPU cores that this process may use while the others of the machine wait for it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
