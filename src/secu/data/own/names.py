"""Names of files as they come, and how to sort and to show them."""

import re

_DIGITS = re.compile(r"([0-9]+)")
LONGEST_REASON = 200  # characters


def natural(name: str) -> tuple[list[list[tuple[int, str]]], str]:
    """Return a key that sorts folder by folder, and ``img2`` before ``img10``."""
    return [[_chunk(text) for text in _DIGITS.split(part)] for part in name.split("/")], name


def _chunk(text: str) -> tuple[int, str]:
    if not text[:1].isdecimal() or not text.isascii():
        return (0, text)
    number = text.lstrip("0")
    return (1 + len(number), number)  # a longer number is a larger one: no int(), which refuses 5,000 digits


def printable(name: str) -> str:
    r"""Return a name that fits on one line and can be written as UTF-8: what cannot is shown as ``\n`` or ``\x80``.

    A file's name may hold a newline, a control character, one that turns the direction of writing, or bytes that are
    not UTF-8 (which Python keeps as lone surrogates, and which cannot be written to a file). Everything else, HTML
    included, stays as it is.
    """
    if name.isprintable():
        return name
    return "".join(character if character.isprintable() else _escape(character) for character in name)


def _escape(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # a byte that was not UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


def one_line(error: BaseException | str) -> str:
    """Return why something failed as one short line."""
    text = error if isinstance(error, str) else _message(error)
    text = printable(" ".join(text.split()))
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"


def _message(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "not enough memory"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without the path, which the reader is shown anyway
    return str(error).strip() or type(error).__name__
