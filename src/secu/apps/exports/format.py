"""What a format is."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from secu.apps.exports.content import Content

MARK = "secu-export.json"  # a file in the folder of an export; in a Parquet file, a key of its metadata


class Format(NamedTuple):
    """How clusters are written for a tool.

    Attributes:
        write: Writes everything into an empty folder or, if there is a suffix, to a file.
        opening: How to open the result; ``{path}`` is where it is, and ``{quoted}`` the same for a shell.
        suffix: The ending of the file; empty for a folder.
        needs_pictures: Whether it cannot represent vectors without pictures.
    """

    write: Callable[[Content, Path], None]
    opening: str
    suffix: str = ""
    needs_pictures: bool = False
