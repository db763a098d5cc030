"""The part of a cache file that is decoded already, so that an interrupted process continues there."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from secu.data.decoding.image_files import BadImage

EVERY = 5_000  # images between two records of progress


class Part:
    """A file that is being filled, and a record of how many images are done, and which of them are bad.

    Args:
        path: The file that is being filled.
        count: The number of images in all.
    """

    def __init__(self, path: Path, count: int) -> None:
        self.path = path
        self.note = path.with_name(f"{path.name}.json")
        self.count = count

    def load(self) -> tuple[int, dict[int, BadImage]]:
        """Return the number of images that are done, and the bad ones among them."""
        try:
            note = json.loads(self.note.read_text())
            done = int(note["done"])
            bad = {int(i): BadImage(str(reason), lasting=bool(lasting)) for i, reason, lasting in note["bad"]}
        except (OSError, ValueError, KeyError, TypeError):
            return 0, {}
        return (done, bad) if self.path.is_file() and 0 <= done <= self.count else (0, {})

    def save(self, file: IO[bytes], done: int, bad: Mapping[int, BadImage]) -> None:
        """Note how far the file is filled, after its content is on the disk."""
        file.flush()
        os.fsync(file.fileno())
        temporary = self.note.with_name(f"{self.note.name}.new")
        rows = [[i, error.reason, error.lasting] for i, error in bad.items()]
        temporary.write_text(json.dumps({"done": done, "bad": rows}))
        temporary.replace(self.note)

    def remove(self) -> None:
        """Remove both files."""
        for path in (self.path, self.note):
            with suppress(OSError):
                path.unlink()
