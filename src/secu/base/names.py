r"""One reversible escape for names: file names may contain anything, and tables, pages and consoles may not.

A name may contain newlines, control characters, changes of the writing direction, or bytes that are not UTF-8, which
Python represents as lone surrogates and refuses to encode. Wherever a name is written as text, such a character
becomes one of three escapes:

    \xff        a byte that is not UTF-8 (80 to ff), or an ASCII control character (00 to 1f, 7f)
    \u200d      any other character, by its number
    \U000e0001  likewise, beyond ffff

A backslash is unchanged unless it would be read as the start of an escape; then it becomes ``\x5c``. Hence different
names always differ when written, ``unescape`` restores them, and ordinary names are written as they are. JSON and
YAML have such escapes of their own, so config.yaml, images.json and run.json contain the names themselves. Messages use
the simpler ``printable``, which may be applied twice but cannot be undone.
"""

import codecs
import re

_ESCAPE = r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U(00(?:0[0-9a-f]|10)[0-9a-f]{4}))"
_ESCAPED = re.compile(_ESCAPE)
_LOOKS_ESCAPED = re.compile(rf"\\(?={_ESCAPE[2:]})")
_NOT_ENCODABLE = re.compile(r"[\ud800-\udfff]")
BYTES = 0xDC00  # added to a byte that is not UTF-8 (see os.fsdecode)
HANDLER = "secu.escape"  # of characters that a console cannot show: see codecs.register_error


def escape(name: str) -> str:
    """Return a name as it is written: on one line, encodable as UTF-8, and different for different names."""
    return printable(_without_escapes(name))


def printable(text: str) -> str:
    """Return text for a message: on one line, and encodable as UTF-8; backslashes are unchanged."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else _escape(character) for character in text)


def unescape(text: str) -> str:
    """Return the name or text that ``escape`` or ``escape_text`` has written."""
    return _ESCAPED.sub(_restore, text) if "\\" in text else text


def escape_text(text: str) -> str:
    """Return text that can be encoded as UTF-8; unlike in a name, line breaks and control characters are kept."""
    return _NOT_ENCODABLE.sub(lambda match: _escape(match[0]), _without_escapes(text))


def _without_escapes(name: str) -> str:
    return _LOOKS_ESCAPED.sub(r"\\x5c", name) if "\\" in name else name


def _escape(character: str) -> str:
    number = ord(character)
    if BYTES + 0x80 <= number <= BYTES + 0xFF:
        return f"\\x{number - BYTES:02x}"
    if number < 0x80:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number <= 0xFFFF else f"\\U{number:08x}"


def _restore(match: re.Match[str]) -> str:
    number = int(match[1] or match[2] or match[3], 16)
    is_byte = match[1] is not None and number >= 0x80
    return chr(BYTES + number if is_byte else number)


def _escape_unencodable(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_escape, error.object[error.start : error.end])), error.end


codecs.register_error(HANDLER, _escape_unencodable)
