"""Where images are decoded: in the calling thread or, on many cores, in worker processes.

Between the calls into pillow, a thread holds Python's lock for a moment, so threads stop gaining at about five cores
(docs/lab/speed.md). With more cores, threads still read the files, but each of them lets a process decode.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ImageFile

from secu.base.errors import UserError
from secu.data.decoding.cutting import Choose
from secu.data.decoding.decode import Raw, decode, decode_crops
from secu.data.decoding.image_files import BadImage

if TYPE_CHECKING:  # it needs Unix
    from secu.data.decoding.process import Process

THREADS_SUFFICE = 4  # cores
ENOUGH = 500  # images for which processes are started
AT_ONCE = 4  # images that are sent to a process at once
LARGE = 2**20  # bytes of stored images that are enough for one time

Outcome = NDArray[np.uint8] | BadImage

_idle: list["Process"] = []
_lock = threading.Lock()  # for _idle, Decoder.used, and whether a process is stopped


class Task(NamedTuple):
    """An image as stored, or why it could not be read, and what to make of it: its center, or some boxes."""

    raw: Raw | BadImage
    size: int
    channels: int
    choose: Choose | None = None


class Decoder:
    """Decodes some images at a time; may be called by several threads at once.

    Args:
        images: Number of images that may be decoded.
        workers: Number of threads that call this, and of processes, if there are any.
        values: See ``decode``.
        max_pixels: See ``decode``.
    """

    def __init__(self, images: int, workers: int, values: str | None, max_pixels: int) -> None:
        self.values = values
        self.max_pixels = max_pixels
        self.elsewhere = workers > THREADS_SUFFICE and images >= ENOUGH and _may_start()
        self.at_once = AT_ONCE if self.elsewhere else 1
        self.used: set[Process] = set()
        self.stopped = False

    def __call__(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Return the pixels of each image, or why there are none."""
        if self.stopped:
            raise UserError("source: decoding was stopped")
        if not self.elsewhere or any(isinstance(task.raw, np.ndarray) for task in tasks):
            return decode_all(tasks, self.values, self.max_pixels)
        try:
            process = _take()
        except OSError:  # no memory or no process is left, or it ended at once
            return decode_all(tasks, self.values, self.max_pixels)
        return self._decoded_by(process, [task._replace(raw=_absolute(task.raw)) for task in tasks])

    def _decoded_by(self, process: "Process", tasks: Sequence[Task]) -> list[Outcome]:
        from secu.data.decoding.process import Ended

        with _lock:
            if self.stopped:
                _idle.append(process)
                raise UserError("source: decoding was stopped")
            self.used.add(process)
        outcomes: list[Outcome] | None = None
        ended = False
        try:
            outcomes = process.call(decode_all, tasks, self.values, self.max_pixels, ImageFile.LOAD_TRUNCATED_IMAGES)
        except Ended:
            ended = True
        finally:
            with _lock:
                self.used.discard(process)
                usable = outcomes is not None and not process.stopped
                if usable:
                    _idle.append(process)
            code = 0 if usable else process.end(gently=ended)
        if outcomes is not None:
            return outcomes
        if code == -signal.SIGALRM:  # it has ended for lack of work, just now
            return self(tasks)
        if code < 0:
            raise UserError("source: a process that decodes images was ended, probably for lack of memory")
        return decode_all(tasks, self.values, self.max_pixels)  # it could not even start

    def parts(self, tasks: Iterable[tuple[int, Task]]) -> Iterator[tuple[list[int], list[Task]]]:
        """Divide numbered tasks into parts that are worth a call, but take neither much memory nor much time."""
        part: list[tuple[int, Task]] = []
        for task in tasks:
            part.append(task)
            if len(part) >= self.at_once or sum(_bytes(task.raw) for _, task in part) > LARGE:
                yield [number for number, _ in part], [task for _, task in part]
                part = []
        if part:
            yield [number for number, _ in part], [task for _, task in part]

    def stop(self) -> None:
        """Let calls in other threads fail, so that nobody has to wait for them."""
        with _lock:
            self.stopped = True
            for process in self.used:
                process.stop()


def decode_all(
    tasks: Sequence[Task], values: str | None, max_pixels: int, truncated: bool | None = None
) -> list[Outcome]:
    """Decode images in this thread; with ``truncated``, set whether pillow reads incomplete files."""
    if truncated is not None:
        ImageFile.LOAD_TRUNCATED_IMAGES = truncated
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


def _absolute(raw: Raw | BadImage) -> Raw | BadImage:
    """Return a path that does not depend on the folder in which a process was started."""
    return os.path.abspath(raw) if isinstance(raw, str) else raw


def _bytes(raw: Raw | BadImage) -> int:
    return len(raw) if isinstance(raw, bytes) else 0


def _may_start() -> bool:
    """Return whether processes can be started, and this one is not itself one of several that share the work."""
    interpreter = bool(sys.executable) and not getattr(sys, "frozen", False)
    return hasattr(os, "fork") and interpreter and multiprocessing.parent_process() is None


def _take() -> "Process":
    """Return a process that has nothing to do, or start one."""
    from secu.data.decoding.process import Process

    with _lock:
        while _idle:
            process = _idle.pop()
            if process.runs:
                return process
            process.end()
    return Process()


@atexit.register
def end_idle() -> None:
    """End the processes that have nothing to do."""
    for process in _idle:
        process.stop()
    while _idle:
        _idle.pop().end()


def _after_fork() -> None:
    """Leave the processes to the program that this one was forked from."""
    global _lock
    _lock = threading.Lock()
    if process := sys.modules.get("secu.data.decoding.process"):
        process.forget_all()
    _idle.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
