"""The place of a run: one process at a time writes there, and a new run appears only once it can be resumed.

    RUN/.secu.lock   held by the process that trains; the operating system frees it if that process dies
    RUN/.next/       a new run without a checkpoint, next to the old one that it is to replace, if any
    RUN/.ready/      a new run whose files are being moved into place

Renaming ``.next`` to ``.ready`` is the moment at which the new run replaces the old one. If the process is killed
after it, whoever opens the run next moves the remaining files.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from secu.base.errors import UserError
from secu.base.files import is_temporary, read_json, remove_leftovers, write_text

LOCK = ".secu.lock"  # stays in the folder: a lock that is removed can be held twice
NEXT = ".next"
READY = ".ready"
EVENTS = "tensorboard"  # a folder, written when the run is in its place
LIST = "files.json"  # in .ready: the files of the new run
PATIENCE = 10  # seconds to wait for another process that is moving files into place
POLL = 0.05  # seconds
MODEL = "model.safetensors"
BEST = "best.safetensors"
STATE = "state.safetensors"
OLD_STATE = "state.pt"  # of earlier versions
OUTCOMES = ("outcome.json", "selflabel.json")  # the second is the name used by version 0.1
FILES = (
    "config.yaml",
    "run.json",
    "images.json",
    "metrics.jsonl",
    MODEL,
    BEST,
    STATE,
    OLD_STATE,
    "assignments.csv",
    "assignments.parquet",
    "clusters.csv",
    "skipped.csv",
    "exemplars.png",
    "report.html",
    "summary.json",
    *OUTCOMES,
)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the lock of a run's folder, which is created if necessary.

    What a killed process left in the folder is removed. At the end, so is a new run that has no checkpoint.
    """
    created = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        lock.acquire(blocking=False)
    except Timeout:
        raise UserError(_in_use(path)) from None
    except OSError as error:
        raise UserError(f"out: cannot create {path}: {error.strerror}") from None
    try:
        _finish(path)
        remove_leftovers(path)
        yield
    finally:
        shutil.rmtree(path / NEXT, ignore_errors=True)
        with suppress(OSError):
            if os.listdir(path) == [LOCK]:  # no run after all
                (path / LOCK).unlink()
                if created:
                    path.rmdir()
        lock.release()


def require_unlocked(path: Path) -> None:
    """Raise ``UserError`` if a process is writing to a run's folder."""
    if not (path / LOCK).is_file():
        return
    try:
        with _lock(path).acquire(blocking=False):
            pass
    except Timeout:
        raise UserError(_in_use(path)) from None
    except OSError:  # a folder that cannot be written to is reported by whoever writes
        return


def _lock(path: Path) -> FileLock:
    return FileLock(path / LOCK)


def _in_use(path: Path) -> str:
    lock = path / LOCK
    return f"out: {path} is in use by another process ({lock} is locked); wait for it, or choose another folder"


def holds_files(path: Path) -> bool:
    """Return whether a folder contains anything but the lock and what a killed process left."""
    ours = {LOCK, NEXT}
    return path.is_dir() and any(name not in ours and not is_temporary(name) for name in os.listdir(path))


def new_folder(path: Path) -> Path:
    """Return the empty folder in which a new run is built until it has a checkpoint."""
    folder = path / NEXT
    try:
        path.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
    except OSError as error:
        raise UserError(f"out: cannot create {path}: {error.strerror}") from None
    return folder


def put_in_place(path: Path) -> None:
    """Replace the run in a folder by the new one; files that do not belong to a run are kept."""
    folder = path / NEXT
    write_text(folder / LIST, json.dumps([name for name in FILES if (folder / name).is_file()]))
    folder.rename(path / READY)
    _finish(path)


def finish_replacement(path: Path) -> None:
    """Move the remaining files of a new run into place if the process that did so was killed."""
    deadline = time.monotonic() + PATIENCE
    while (path / READY).is_dir():
        try:
            with _lock(path).acquire(blocking=False):
                _finish(path)
        except Timeout as error:  # the process that trains is doing it, and keeps the lock afterwards
            if time.monotonic() > deadline:
                raise UserError(f"run: {path} is being replaced by another process ({error})") from None
            time.sleep(POLL)
        except OSError as error:
            raise UserError(f"run: cannot move files of {path} into place: {error}") from None


def _finish(path: Path) -> None:
    """Carry out a replacement; doing so again after an interruption is harmless."""
    ready = path / READY
    if not ready.is_dir():
        return
    if (ready / LIST).is_file():  # removed once all is done
        names = read_json(ready / LIST, list)
        shutil.rmtree(path / EVENTS, ignore_errors=True)  # of the old run
        for name in FILES:
            if name not in names:
                (path / name).unlink(missing_ok=True)
            elif (ready / name).is_file():
                (ready / name).replace(path / name)
        (ready / LIST).unlink()
    shutil.rmtree(ready)
