"""Cells of CSV files: spreadsheets must not read them as formulas, and reading a file back restores them.

A spreadsheet evaluates a cell that starts with one of ``= + - @``, a tab or a carriage return, even if a stranger chose
the file name in it. An apostrophe in front keeps it as text. Numbers stay numbers. The report's download
does the same (report/download.js).
"""

import re
from typing import Any

_FORMULA = re.compile(r"'*[=+\-@\t\r]")
_DISARMED = re.compile(r"'+[=+\-@\t\r]")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def disarm(value: Any) -> Any:
    """Return a cell that no spreadsheet reads as a formula; only text is ever changed.

    Text that already starts with apostrophes before such a character gets one more, so that ``rearm`` is exact.
    """
    if isinstance(value, str) and _FORMULA.match(value) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value


def rearm(text: str) -> str:
    """Return the text that ``disarm`` was given."""
    return text[1:] if _DISARMED.match(text) else text
