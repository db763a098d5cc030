"""Atomic writing of files and folders.

A file or folder is written under a temporary name, ``.NAME.HEX.tmp``, and renamed once it is complete. The process
holds a lock on what it is writing. The lock ends with the process, so whatever a killed process left behind is
recognized, and removed by the next one that writes under the same name. If it was about to replace a folder, the old
one is put back first.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from secu.base.errors import UserError
from secu.base.exchange import exchange

try:
    import fcntl
except ImportError:  # Windows: leftovers stay
    fcntl = None  # type: ignore[assignment]

Content = TypeVar("Content", list[Any], dict[str, Any])

REPLACED = ".replaced"  # in a temporary folder: holds the folder that is being replaced, under its own name
LONGEST = 200  # bytes of a name that are repeated in a temporary name; file systems allow 255 in all
_TEMPORARY = re.compile(r"\.(?P<name>.*)\.[0-9a-f]{8}\.tmp", re.DOTALL)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file next to ``path``, then rename it."""
    remove_leftovers(path.parent, path.name)
    try:
        with _owned(path, Path.touch) as temporary:
            mode = temporary.stat().st_mode
            write(temporary)
            temporary.chmod(mode)  # some libraries create files that only the owner can read
            _flush(temporary)
            temporary.replace(path)
    except OSError as error:
        ours = error.filename is None or is_temporary(os.path.basename(os.fsdecode(error.filename)))
        if error.errno is not None and ours:  # report the name the user knows
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def _flush(path: Path) -> None:
    """Wait until a file is on the disk: a delayed write may still fail if the disk is full."""
    with path.open("rb") as file:  # the library that wrote it may have replaced the file
        os.fsync(file.fileno())


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """Yield an empty temporary folder next to a path, whose content can be moved into place once complete."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent, path.name)
        folder = ExitStack()
        temporary = folder.enter_context(_owned(path, Path.mkdir))
    except OSError as error:
        raise UserError(f"out: cannot create {path}: {error.strerror}") from None
    with folder:
        yield temporary


def replace_folder(new: Path, path: Path) -> None:
    """Let a complete folder take the place of what is at ``path``, if anything; it is in the folder of ``aside(path)``.

    Where two names cannot be exchanged, nothing is at ``path`` for a moment. If the process is interrupted then, the
    old folder is put back, at the latest by ``remove_leftovers``.
    """
    if path.exists():
        if exchange(new, path):
            return
        old = new.parent / REPLACED
        old.mkdir()
        path.rename(old / path.name)
    new.rename(path)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove temporary files of dead processes from a folder: all of them, or only those written for ``name``."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _TEMPORARY.fullmatch(entry.name)
            if match and (name is None or match["name"] == _shortened(name)):
                _remove_if_abandoned(Path(entry.path))


def is_temporary(name: str) -> bool:
    """Return whether a name is one that unfinished files and folders have."""
    return _TEMPORARY.fullmatch(name) is not None


def _shortened(name: str) -> str:
    return os.fsdecode(os.fsencode(name)[:LONGEST])


@contextmanager
def _owned(path: Path, create: Callable[[Path], object]) -> Iterator[Path]:
    """Create a temporary file or folder next to ``path``, hold a lock on it, and remove it at the end."""
    while True:
        # Named before it is created, so that an interruption removes it in any case.
        temporary = path.with_name(f".{_shortened(path.name)}.{secrets.token_hex(4)}.tmp")
        handle = None
        try:
            create(temporary)
            with suppress(FileNotFoundError):
                handle = _locked(temporary)
            # Another process may have taken it for a leftover before it was locked.
            if handle is not None and os.fstat(handle).st_nlink:
                yield temporary
                return
        finally:
            if handle is not None:
                os.close(handle)
            _remove(temporary)


def _locked(path: Path, *, blocking: bool = True) -> int:
    """Return a handle of a file or folder with a lock, which ends when it is closed.

    Raises:
        OSError: It does not exist, or another process has the lock.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
    except OSError:
        if not blocking:
            os.close(handle)
            raise
        # Some network disks have no such locks: leftovers stay.
    return handle


def _remove_if_abandoned(path: Path) -> None:
    """Remove a temporary file or folder, unless a living process holds its lock."""
    if fcntl is None:
        return
    with suppress(OSError):
        handle = _locked(path, blocking=False)
        try:
            _remove(path)
        finally:
            os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        if _put_back(path):
            shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _put_back(folder: Path) -> bool:
    """Put back what was to be replaced, unless something took its place; return whether nothing of value is left."""
    match = _TEMPORARY.fullmatch(folder.name)
    for old in (folder / REPLACED).glob("*"):
        if match and match["name"] == _shortened(old.name) and not os.path.lexists(folder.with_name(old.name)):
            try:
                old.rename(folder.with_name(old.name))
            except OSError:
                return False
    return True


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def read_json(path: Path, kind: type[Content]) -> Content:
    """Read a JSON file that this package wrote, which must hold a ``kind``."""
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
