"""Let two names of a disk change places in one step, which Python's own functions cannot."""

import ctypes
import os
import sys
from pathlib import Path

FROM_HERE = -100  # AT_FDCWD: relative paths start at the current folder
EXCHANGE = 2  # RENAME_EXCHANGE


def exchange(first: Path, second: Path) -> bool:
    """Let two existing files or folders change places in one step; return whether the system and the disk can."""
    if sys.platform != "linux":
        return False
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError):  # an old C library, or a system that does not let programs load it
        return False
    done: int = rename(FROM_HERE, os.fsencode(first), FROM_HERE, os.fsencode(second), EXCHANGE)
    return done == 0
