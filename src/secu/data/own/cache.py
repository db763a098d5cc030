"""The decoded images of a source in one file, found again by what they were made from.

A file holds the rows of all good images (N, C, S, S), then a list of the bad ones as JSON, then the length of that list
and a mark. It is mapped, not read, and written beside its place and renamed, so that it is there whole or not at all.
"""

import errno
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from secu.data.own.decode import BadImage
from secu.data.own.source import Source
from secu.data.own.stream import decoded
from secu.errors import UserError

VERSION = 1  # raise it whenever the same file would decode to other pixels
MARK = b"SeCu" + VERSION.to_bytes(4, "little")
FORGOTTEN = 24 * 3600  # seconds after which a temporary file belongs to nobody any more

Progress = Callable[[int, int], None]  # images so far, and of all


class Stored(NamedTuple):
    """What a cache file holds: pixels (n, C, S, S) of the good images, and the reasons of the others by number."""

    pixels: NDArray[np.uint8]
    bad: dict[int, str]


def cache_file(source: Source, size: int, channels: int, folder: Path) -> Path:
    """Return where the images of a source are kept."""
    return folder / f"{_key(source)}-{source.fingerprint[:32]}-{size}x{channels}.v{VERSION}.images"


def load(path: Path, count: int, size: int, channels: int) -> Stored | None:
    """Map a cache file; None if there is none, or it is not whole, or it must be made anew."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            if end < 16:
                return None
            file.seek(end - 16)
            length, mark = int.from_bytes(file.read(8), "little"), file.read(8)
            rows = end - 16 - length
            if mark != MARK or rows < 0:
                return None
            file.seek(rows)
            tail = json.loads(file.read(length))
        bad = {int(i): str(reason) for i, reason in tail["bad"]}
        shape = (count - len(bad), channels, size, size)
        if shape[0] < 1 or rows != np.prod(shape, dtype=np.int64) or not tail["lasting"]:
            return None
        # Copy on write: torch wants memory that it might write to, and the file is to stay as it is.
        return Stored(np.memmap(path, np.uint8, mode="c", shape=shape), bad)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def build(path: Path, source: Source, size: int, channels: int, progress: Progress | None = None) -> Stored:
    """Decode all images of a source into a cache file, and remove those of its former states.

    Raises:
        UserError: The file cannot be written, or there is no good image.
    """
    total = len(source) * channels * size * size
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # known before it is made, so never left behind
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path, source)
        with open(temporary, "x+b", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            _reserve(file, total)
            bad = _decode_into(file, source, size, channels, progress)
            if len(bad) == len(source):
                first = bad[min(bad)].reason
                raise UserError(f"source: none of the {len(bad)} images in {source.name} can be read; first: {first}")
            _finish(file, bad, len(source), channels * size * size)
        temporary.replace(path)
    except OSError as error:
        raise UserError(_cannot_write(path, error, total)) from None
    finally:
        with suppress(OSError):
            temporary.unlink()
    shape = (len(source) - len(bad), channels, size, size)
    return Stored(np.memmap(path, np.uint8, mode="c", shape=shape), {i: error.reason for i, error in bad.items()})


def _reserve(file: IO[bytes], size: int) -> None:
    """Let a disk that is too small say so now, not in an hour."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # not every disk can
                raise


def _decode_into(
    file: IO[bytes], source: Source, size: int, channels: int, progress: Progress | None
) -> dict[int, BadImage]:
    """Write each good image to its row; return the bad ones."""
    bad: dict[int, BadImage] = {}
    with closing(decoded(source, size, channels)) as outcomes:
        for done, (i, outcome) in enumerate(outcomes, 1):
            if isinstance(outcome, BadImage):
                bad[i] = outcome
            else:
                file.seek(i * outcome.nbytes)
                file.write(outcome.data)
            if progress:
                progress(done, len(source))
    return bad


def _finish(file: IO[bytes], bad: dict[int, BadImage], count: int, row: int) -> None:
    """Close the gaps that bad images left, and append the list of them."""
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
    tail = {
        "bad": [[i, bad[i].reason] for i in sorted(bad)],
        "lasting": all(error.lasting for error in bad.values()),
    }
    text = json.dumps(tail).encode()
    file.seek(kept * row)
    file.write(text + len(text).to_bytes(8, "little") + MARK)
    file.truncate()
    file.flush()
    os.fsync(file.fileno())  # a delayed write may still find the disk full


def _sweep(path: Path, source: Source) -> None:
    """Remove what was kept of former states of a source, and what a killed process left."""
    current = f"{_key(source)}-{source.fingerprint[:32]}-"
    for old in path.parent.glob(f"{_key(source)}-*.images"):
        if not (old.name.startswith(current) and old.name.endswith(f".v{VERSION}.images")):
            old.unlink(missing_ok=True)
    for left in path.parent.glob(f".{_key(source)}-*.images.*"):
        with suppress(FileNotFoundError):  # another process may be about to finish it
            if time.time() - left.stat().st_mtime > FORGOTTEN:
                left.unlink()


def _key(source: Source) -> str:
    return hashlib.sha256(source.place.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _cannot_write(path: Path, error: OSError, size: int) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"cache: no space in {path.parent} for {size / 1e6:,.0f} MB of images; free some or name another folder"
    return f"cache: cannot write to {path.parent}: {error.strerror or error}; SECU_DATA names another folder"
