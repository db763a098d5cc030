"""Sorting and displaying arbitrary file names."""

import re

_DIGITS = re.compile(r"([0-9]+)")
LONGEST_REASON = 200  # characters


# natsort is not used: its order differs (case, accents, suffixes), which would change the image order of existing runs,
# and it fails on names with thousands of digits.
def natural(name: str) -> tuple[list[list[tuple[int, str]]], str]:
    """Return a key that sorts folder by folder, and ``img2`` before ``img10``."""
    return [[_chunk(text) for text in _DIGITS.split(part)] for part in name.split("/")], name


def _chunk(text: str) -> tuple[int, str]:
    if not text[:1].isdecimal() or not text.isascii():
        return (0, text)
    number = text.lstrip("0")
    return (1 + len(number), number)  # a longer number is a larger one


def printable(name: str) -> str:
    r"""Return a name that fits on one line and can be encoded as UTF-8; other characters become ``\n`` or ``\x80``.

    A file name may contain newlines, control characters, changes of the writing direction, or bytes that are not UTF-8
    (which Python represents as lone surrogates and cannot encode). Everything else, including HTML, is unchanged.
    """
    if name.isprintable():
        return name
    return "".join(character if character.isprintable() else _escape(character) for character in name)


def _escape(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # a byte that was not UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


def one_line(error: BaseException | str) -> str:
    """Return an error as one short line."""
    text = error if isinstance(error, str) else _message(error)
    text = printable(" ".join(text.split()))
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"


def _message(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "not enough memory"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without the path, which is shown anyway
    return str(error).strip() or type(error).__name__
