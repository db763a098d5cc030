"""Where images are decoded: in the calling thread or, on many cores, in worker processes.

Between the calls into pillow, a thread holds Python's lock for a moment, so threads stop gaining at about five cores
(docs/lab/speed.md). With more cores, threads still read the files, but processes decode them. They are those of loky,
which joblib contains, because they do not import the user's script again.
"""

import os
import signal
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, Executor
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from secu.base.errors import UserError
from secu.data.decoding.cutting import Choose
from secu.data.decoding.decode import Raw, decode, decode_crops, share_turns
from secu.data.decoding.image_files import BadImage

THREADS_SUFFICE = 4  # cores
ENOUGH = 500  # images for which processes are started
AT_ONCE = 8  # images that are sent to a process at once
IDLE = 30  # seconds without work after which a process ends
WATCH = 1.0  # seconds between looks at whether the main process still runs

Outcome = NDArray[np.uint8] | BadImage

_starting = threading.Lock()  # of several threads that call at once, one starts the processes


class Task(NamedTuple):
    """An image as stored, or why it could not be read, and what to make of it: its center, or some boxes."""

    raw: Raw | BadImage
    size: int
    channels: int
    choose: Choose | None = None


@dataclass(frozen=True)
class Decoder:
    """Decodes some images of a source at a time; may be called by several threads at once.

    Args:
        images: Number of images that may be decoded.
        workers: Number of threads that call this, and of processes, if there are any.
        values: See ``decode``.
        max_pixels: See ``decode``.
    """

    images: int
    workers: int
    values: str | None
    max_pixels: int

    @property
    def elsewhere(self) -> bool:
        """Whether other processes decode."""
        return self.workers > THREADS_SUFFICE and self.images >= ENOUGH

    @property
    def at_once(self) -> int:
        """Number of images in a call that is worth its effort, and small enough for even progress."""
        return AT_ONCE if self.elsewhere else 1

    def __call__(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Return the pixels of each image, or why there are none."""
        if not self.elsewhere or any(isinstance(task.raw, np.ndarray) for task in tasks):
            return decode_all(tasks, self.values, self.max_pixels)
        try:
            with _starting:
                executor = _processes(self.workers).executor
            return executor.submit(decode_all, tasks, self.values, self.max_pixels).result()
        except BrokenExecutor:
            _processes.cache_clear()
            raise UserError("source: a process that decodes images was ended, probably for lack of memory") from None


def decode_all(tasks: Sequence[Task], values: str | None, max_pixels: int) -> list[Outcome]:
    """Decode images in this thread."""
    return [_outcome(task, values, max_pixels) for task in tasks]


def _outcome(task: Task, values: str | None, max_pixels: int) -> Outcome:
    raw, size, channels, choose = task
    if isinstance(raw, BadImage):
        return raw
    try:
        if choose is None:
            return decode(raw, size, channels, values, max_pixels)
        return decode_crops(raw, choose, size, channels, values, max_pixels)
    except BadImage as bad:
        return bad


class _Processes(NamedTuple):
    executor: Executor
    turns: threading.Lock  # at decoding large images; kept here, because it must not be deleted before it is shared


@cache
def _processes(workers: int) -> _Processes:
    from joblib.externals.loky import ProcessPoolExecutor
    from joblib.externals.loky.backend import get_context

    turns = get_context("loky").Lock()
    arguments = (os.getpid(), turns)
    return _Processes(ProcessPoolExecutor(workers, timeout=IDLE, initializer=_begin, initargs=arguments), turns)


def _begin(parent: int, turns: threading.Lock) -> None:
    """Prepare a process: the main process alone reacts to signals, and this one ends with it."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    warnings.filterwarnings("ignore", module=r"PIL\.")  # see ``quiet``
    share_turns(turns)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH)
    os._exit(1)
