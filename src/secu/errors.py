"""The one exception that means: the user can fix this.

The command line prints its message as a single line and exits with code 2; everything else is a bug
of ours and keeps its traceback behind ``--debug``.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A wrong value from outside: the message names it and says what would be valid."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return ``valid`` as text for a message, led by the name that was probably meant."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"{meant}valid: {', '.join(names)}"
