"""Files that are written whole or not at all."""

import json
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from secu.errors import UserError


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then move it there in one step."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # known before it is made, so never left behind
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(mode)  # some libraries would hide their files from colleagues
        temporary.replace(path)
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(temporary)):  # a name that nobody gave
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    finally:
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """Lend an empty folder beside a path: what is written there can be moved to its place once it is whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise UserError(f"out: cannot create {path}: {error.strerror}") from None
    with folder as name:
        yield Path(name)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda temporary: void(temporary.write_text(text, encoding="utf-8")))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def void(_: object) -> None:
    """Drop a value: for callbacks that must return nothing."""


def is_taken(path: Path) -> bool:
    """Say whether something is there already; an empty folder is nothing."""
    return path.exists() and (not path.is_dir() or any(path.iterdir()))
