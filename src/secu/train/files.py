"""Atomic writing of files and folders."""

import json
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from secu.errors import UserError


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file next to ``path``, then rename it."""
    # The name is chosen before the file is created, so that it is removed even if creating it is interrupted.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(mode)  # some libraries create files that only the owner can read
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise UserError(f"out: cannot create {path}: {error.strerror}") from None
    with folder as name:
        yield Path(name)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def is_taken(path: Path) -> bool:
    """Return whether something exists at a path; an empty folder does not count."""
    return path.exists() and (not path.is_dir() or any(path.iterdir()))
