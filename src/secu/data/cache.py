"""A cache file with the decoded images of a source, keyed by the source's fingerprint.

The file contains the readable images (N, C, S, S), then a JSON list of the bad ones, then the length of that list and a
magic number. It is copied to memory, or read row by row if it is too large for that. It grows under a temporary name,
and is renamed once it is complete; a lock keeps two processes from writing the same file.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from secu.base.errors import UserError
from secu.data.decoding.decode import MAX_PIXELS
from secu.data.decoding.image_files import BadImage
from secu.data.rows import FileRows, fits_in_memory
from secu.data.sources.base import Shape, Source
from secu.data.stream import all_cores, decoded

VERSION = 1  # increment it whenever the same file would decode to different pixels
ENDING = f".v{VERSION}.images"
MARK = b"SeCu" + VERSION.to_bytes(4, "little")
EVERY = 5_000  # images between two records of progress

Progress = Callable[[int, int], None]  # called with images done and total


class Stored(NamedTuple):
    """Inputs of a model, and what is wrong with the images that cannot be read."""

    inputs: NDArray[Any] | FileRows  # pixels (n, C, S, S) or features (n, D) of the readable images
    bad: dict[int, str]  # errors of the others by index
    checksums: NDArray[np.uint32] | None = None  # of the pixels (n,), if the inputs are not pixels


def cached(source: Source, shape: Shape, values: str | None, folder: Path, progress: Progress | None = None) -> Stored:
    """Return the decoded images of a source, decoding them unless the cache is up to date."""
    kind = f"-{values.replace(' 0..', '')}" if values else ""
    path = folder / f"{state_of(source)}-{shape[1]}x{shape[0]}{kind}{ENDING}"
    return _load(path, len(source), shape) or _build(path, source, shape, values, progress)


def free_space(source: Source, folder: Path) -> int:
    """Return the disk space in bytes for the decoded images of a source, including its current cache files."""
    place = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    files = (*folder.glob(f"{_key(source)}-*.images"), *folder.glob(f".{_key(source)}-*.images.part"))
    held = sum(file.stat().st_size for file in files)
    return shutil.disk_usage(place).free + held


def state_of(source: Source) -> str:
    """Return the cache key of a source's current state; its first part is common to all states of the source."""
    limit = "" if source.max_pixels == MAX_PIXELS else f"-{source.max_pixels}px"  # other images may be left out
    return f"{_key(source)}-{source.fingerprint[:32]}{limit}"


def _key(source: Source) -> str:
    return hashlib.sha256(source.place.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _load(path: Path, count: int, shape: Shape) -> Stored | None:
    """Read a cache file; None if it is missing, incomplete or outdated."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(end - 16)
            length = int.from_bytes(file.read(8), "little")
            rows = end - 16 - length
            if file.read(8) != MARK:
                return None
            file.seek(rows)
            tail = json.loads(file.read(length))
        bad = {int(i): str(reason) for i, reason in tail["bad"]}
        good = (count - len(bad), *shape)
        if rows != prod(good) or not tail["lasting"] or not bad.keys() <= set(range(count)):
            return None
    except Exception:  # a damaged file: negative offsets, invalid or very deep JSON, infinite numbers
        return None
    return _stored(path, good, bad)


def _stored(path: Path, shape: tuple[int, ...], bad: dict[int, str]) -> Stored:
    rows = FileRows(path, np.uint8, shape, what="cache")
    return Stored(rows.in_memory() if fits_in_memory(rows.nbytes) else rows, bad)


def _build(path: Path, source: Source, shape: Shape, values: str | None, progress: Progress | None) -> Stored:
    """Decode all images of a source into a cache file, and remove files of its earlier states.

    If it is interrupted or killed, the next call continues. Of several processes, one decodes and the others wait.
    """
    size = len(source) * prod(shape)
    part = _Part(path, len(source))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):
            if (ready := _load(path, len(source), shape)) is not None:
                return ready  # another process has just made it
            forget_earlier_states(path.parent, source, ENDING)
            try:
                bad = _fill(part, source, shape, values, progress)
                part.path.replace(path)
            except Exception:  # anything but an interruption
                part.remove()
                raise
    except OSError as error:
        raise UserError(cannot_write(path, error, size)) from None
    return _stored(path, (len(source) - len(bad), *shape), {i: error.reason for i, error in bad.items()})


class _Part:
    """A file that is being filled, and a record of how many images are done, and which of them are bad."""

    def __init__(self, path: Path, count: int) -> None:
        self.path = path.with_name(f".{path.name}.part")
        self.note = path.with_name(f".{path.name}.part.json")
        self.count = count

    def load(self) -> tuple[int, dict[int, BadImage]]:
        """Return the number of images that are done, and the bad ones among them."""
        try:
            note = json.loads(self.note.read_text())
            done = int(note["done"])
            bad = {int(i): BadImage(str(reason), lasting=bool(lasting)) for i, reason, lasting in note["bad"]}
        except (OSError, ValueError, KeyError, TypeError):
            return 0, {}
        return (done, bad) if self.path.is_file() and 0 <= done <= self.count else (0, {})

    def save(self, file: IO[bytes], done: int, bad: dict[int, BadImage]) -> None:
        """Record how far the file is filled, after its content is on the disk."""
        file.flush()
        os.fsync(file.fileno())
        temporary = self.note.with_name(f"{self.note.name}.new")
        rows = [[i, error.reason, error.lasting] for i, error in bad.items()]
        temporary.write_text(json.dumps({"done": done, "bad": rows}))
        temporary.replace(self.note)

    def remove(self) -> None:
        """Remove both files."""
        for path in (self.path, self.note):
            with suppress(OSError):
                path.unlink()


def _fill(
    part: _Part, source: Source, shape: Shape, values: str | None, progress: Progress | None
) -> dict[int, BadImage]:
    """Decode the images that are missing in a file, and finish it; return the bad ones."""
    row = prod(shape)
    done, bad = part.load()
    rest = dict.fromkeys(source.order[done:], shape) if done else shape
    flags = os.O_RDWR | os.O_CREAT | (0 if done else os.O_TRUNC)
    with open(os.open(part.path, flags, 0o600), "r+b") as file:
        _reserve(file, len(source) * row)
        with closing(decoded(source, rest, values, workers=all_cores())) as outcomes:
            for now, (i, outcome) in enumerate(outcomes, done + 1):
                if isinstance(outcome, BadImage):
                    bad[i] = outcome
                else:
                    file.seek(i * row)
                    file.write(outcome.data)
                if now % EVERY == 0:
                    part.save(file, now, bad)
                if progress:
                    progress(now, len(source))
        if len(bad) == len(source):
            first = bad[min(bad)].reason
            raise UserError(f"source: none of the {len(bad)} images in {source.name} can be read; first: {first}")
        part.note.unlink(missing_ok=True)  # rows will move
        _finish(file, bad, len(source), row)
    return bad


def _reserve(file: IO[bytes], size: int) -> None:
    """Reserve disk space, so that a full disk is reported now rather than in an hour."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # not supported by every file system
                raise


def _finish(file: IO[bytes], bad: dict[int, BadImage], count: int, row: int) -> None:
    """Remove the gaps left by bad images, and append the list of them."""
    kept = 0
    for i in range(count):
        if i in bad:
            continue
        if kept != i:
            file.seek(i * row)
            pixels = file.read(row)
            file.seek(kept * row)
            file.write(pixels)
        kept += 1
    lasting = all(error.lasting for error in bad.values())
    text = json.dumps({"bad": [[i, bad[i].reason] for i in sorted(bad)], "lasting": lasting}).encode()
    file.seek(kept * row)
    file.write(text + len(text).to_bytes(8, "little") + MARK)
    file.truncate()
    file.flush()
    os.fsync(file.fileno())  # a delayed write may still fail on a full disk


def forget_earlier_states(folder: Path, source: Source, ending: str) -> None:
    """Remove cache files of earlier states of a source, and of earlier versions of this package.

    Names of current files have the given ending: version and kind.
    """
    kind = ending.rpartition(".")[2]
    for old in (*folder.glob(f"{_key(source)}-*.{kind}"), *folder.glob(f".{_key(source)}-*.{kind}.part*")):
        current = old.name.removeprefix(".").startswith(f"{state_of(source)}-") and ending in old.name
        if not current and not (old.name.startswith(".") and _is_being_written(old, kind)):
            old.unlink(missing_ok=True)


def _is_being_written(part: Path, kind: str) -> bool:
    """Return whether a process holds the lock of an unfinished file."""
    whole = part.name.partition(f".{kind}.part")[0]
    try:
        with FileLock(part.with_name(f"{whole}.{kind}.lock")).acquire(blocking=False):
            return False
    except Timeout:
        return True


def cannot_write(path: Path, error: OSError, size: int, what: str = "images") -> str:
    """Return the message for a cache file that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        space = f"not enough space in {path.parent} for {size / 1e6:,.0f} MB of {what}"
        return f"cache: {space}; free some space, or set SECU_DATA to another folder"
    return f"cache: cannot write to {path.parent}: {error.strerror or error}; set SECU_DATA to another folder"
