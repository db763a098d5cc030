"""The exception for errors that the user can fix.

The command line prints the message as a single line and exits with code 2. Any other exception is a bug; ``--debug``
shows its traceback.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """An invalid input; the message names the value and what would be valid."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return a list of valid names for an error message, with a suggestion if one is similar."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"{meant}valid: {', '.join(names)}"
