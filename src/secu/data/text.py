"""Sorting and displaying arbitrary file names, and reporting files that cannot be read."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from secu.base.errors import UserError
from secu.base.names import printable

_DIGITS = re.compile(r"([0-9]+)")
LONGEST_REASON = 200  # characters


# natsort is not used: its order differs (case, accents, suffixes), which would change the image order of existing runs,
# and it fails on names with thousands of digits.
def natural(name: str) -> tuple[str, str]:
    r"""Return a key that sorts folder by folder, and ``img2`` before ``img10``.

    It consists of strings, since the keys of all names are in memory while a folder of a million images is sorted. Text
    ends with ``\0``, which no file name contains, a number starts with its length, and a part of the path ends with
    ``\1``.
    """
    return "".join(map(_part, name.split("/"))), name


def _part(part: str) -> str:
    chunks = _DIGITS.split(part)  # text, number, text, number, …, text
    for i in range(1, len(chunks), 2):
        number = chunks[i].lstrip("0")
        chunks[i] = chr(2 + len(number)) + number  # a longer number is a larger one
    chunks[::2] = [f"{text}\0" for text in chunks[::2]]
    return "".join(chunks) + "\1"


def one_line(error: BaseException | str) -> str:
    """Return an error as one short line."""
    text = error if isinstance(error, str) else _message(error)
    text = printable(" ".join(text.split()))
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"


def with_type(error: BaseException) -> str:
    """Return an error as one short line that starts with its type."""
    return f"{type(error).__name__}: {one_line(error)}"


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn any exception into a ``UserError`` that names the file: on a damaged one, libraries may raise anything."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"source: cannot read {name}: {one_line(error)}") from None


def _message(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "not enough memory"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without the path, which is shown anyway
    return str(error).strip() or type(error).__name__
