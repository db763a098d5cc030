"""The exception for errors that the user can fix.

The command line prints the message as a single line and exits with code 2. Any other exception is a bug; ``--debug``
shows its traceback.
"""

import difflib
from collections.abc import Iterable

LONGEST = 1000  # characters of a message
LONGEST_VALUE = 200  # characters of a value in a message


class UserError(ValueError):
    """An invalid input; the message names the value and what would be valid."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return a list of valid names for an error message, with a suggestion if one is similar."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"{meant}valid: {', '.join(names)}"


def shortened(text: str, longest: int = LONGEST_VALUE) -> str:
    """Return a text without its middle part if it is too long for a message."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} … {text[-half:]}"


def quoted(value: object) -> str:
    """Return a value as Python writes it, shortened."""
    try:
        return shortened(repr(value))
    except ValueError:  # a whole number of thousands of digits
        return f"a value of type {type(value).__name__} that is too long to show"
