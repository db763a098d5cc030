"""Waits for what programs in other processes do."""

import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

from secu.train.place import NEXT

LONGEST = 200  # seconds, on a busy machine


def wait_for(happened: Callable[[], object], *running: Popen) -> None:
    """Wait until something happened, before any of the programs ends; otherwise, end them and fail."""
    deadline = time.monotonic() + LONGEST
    while not happened():
        ended = [process for process in running if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            for process in running:
                process.kill()
            raise AssertionError(f"nothing happened; ended: {[process.communicate() for process in ended]}")
        time.sleep(0.02)


def epochs_of(run: Path) -> int:
    """Return how many epochs a run in progress has recorded; a new one is not in its place yet."""
    for folder in (run / NEXT, run):
        try:
            return (folder / "metrics.jsonl").read_text().count("\n")
        except FileNotFoundError:  # it may just have been put into place
            pass
    return 0
