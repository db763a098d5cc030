"""Atomic writing of files and folders.

A file or folder is written under a temporary name, ``.NAME.HEX.tmp``, and renamed once it is complete. The process
holds a lock on what it is writing. The lock ends with the process, so whatever a killed process left behind is
recognized, and removed by the next one that writes under the same name.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from secu.base.errors import UserError

try:
    import fcntl
except ImportError:  # Windows: leftovers stay
    fcntl = None  # type: ignore[assignment]

Content = TypeVar("Content", list[Any], dict[str, Any])

LONGEST = 200  # bytes of a name that are repeated in a temporary name; file systems allow 255 in all
_TEMPORARY = re.compile(r"\.(?P<name>.*)\.[0-9a-f]{8}\.tmp", re.DOTALL)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file next to ``path``, then rename it."""
    remove_leftovers(path.parent, path.name)
    temporary = _temporary(path)  # named before it is created, so that it is removed even if creating it is interrupted
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        with _owned(temporary) as handle:
            write(temporary)
            temporary.chmod(mode)  # some libraries create files that only the owner can read
            os.fsync(handle)  # a delayed write may still fail on a full disk
            temporary.replace(path)
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(temporary)):  # report the name the user knows
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    finally:
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """Yield an empty temporary folder next to a path, whose content can be moved into place once complete."""
    folder = _temporary(path)
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(path.parent, path.name)
            folder.mkdir()
        except OSError as error:
            raise UserError(f"out: cannot create {path}: {error.strerror}") from None
        with _owned(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove temporary files of dead processes from a folder: all of them, or only those written for ``name``."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _TEMPORARY.fullmatch(entry.name)
            if match and (name is None or match["name"] == _shortened(name)) and _is_abandoned(entry.path):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    Path(entry.path).unlink(missing_ok=True)


def is_temporary(name: str) -> bool:
    """Return whether a name is one that unfinished files and folders have."""
    return _TEMPORARY.fullmatch(name) is not None


def _temporary(path: Path) -> Path:
    return path.with_name(f".{_shortened(path.name)}.{secrets.token_hex(4)}.tmp")


def _shortened(name: str) -> str:
    return os.fsdecode(os.fsencode(name)[:LONGEST])


@contextmanager
def _owned(path: Path) -> Iterator[int]:
    """Hold a lock on a temporary file or folder; yield a handle of it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        if fcntl is not None:
            with suppress(OSError):  # some network disks have no such locks: leftovers stay
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield handle
    finally:
        os.close(handle)


def _is_abandoned(path: str) -> bool:
    """Return whether no living process holds the lock on a temporary file or folder."""
    if fcntl is None:
        return False
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def read_json(path: Path, kind: type[Content]) -> Content:
    """Read a JSON file that this package wrote.

    Raises:
        UserError: The file is not JSON, or does not hold a ``kind``.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, kind):
        raise UserError(f"run: {path} is damaged: it is not a JSON {'list' if kind is list else 'object'}")
    return content


def is_taken(path: Path) -> bool:
    """Return whether something exists at a path; an empty folder does not count."""
    return path.exists() and (not path.is_dir() or any(path.iterdir()))
