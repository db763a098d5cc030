"""Add a kind of source: photos stored as blobs in an SQLite database.

    python examples/source.py PHOTOS.db [CLUSTERS] [EPOCHS] [RUN]

The database has a table ``photos`` with the columns name, image (the bytes of a file) and camera. A source lists images
and reads one at a time; decoding, caching, training and the report are the same for all sources.
"""

import os
import sqlite3
import sys
from collections.abc import Iterable
from contextlib import closing
from typing import Any

from secu import SeCu
from secu.data import Source
from secu.registry import SOURCES


@SOURCES.register("sqlite")
class Database(Source):
    """The photos of a database, opened by the name ``sqlite:PHOTOS.db``; it has no splits."""

    def __init__(self, path: str, split: str | None = None) -> None:
        self.path = path
        found = self.query("SELECT rowid, name, camera FROM photos ORDER BY rowid")
        self.rows = [row for row, _, _ in found]
        cameras = [camera for _, _, camera in found]  # copied to assignments.csv
        super().__init__(path, path, [name for _, name, _ in found], columns={"camera": cameras})

    def query(self, text: str, *values: int) -> list[Any]:
        """Return the rows of a query; each query opens a connection, since photos are read in several threads."""
        with closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)) as database:
            return database.execute(text, values).fetchall()

    def read(self, i: int, values: str | None = None) -> bytes:
        """Return the bytes of photo ``i``."""
        image: bytes = self.query("SELECT image FROM photos WHERE rowid = ?", self.rows[i])[0][0]
        return image

    def stamps(self) -> Iterable[str]:
        """Return strings that change when a photo changes, so that decoded photos can be cached."""
        yield f"{os.path.getsize(self.path)} {os.stat(self.path).st_mtime_ns}"


def main(path: str, clusters: str = "10", epochs: str = "", out: str = "runs/database") -> None:
    """Cluster the photos, and print where the first of them are."""
    model = SeCu(int(clusters), epochs=int(epochs) if epochs else None, out=out, verbose=1).fit(f"sqlite:{path}")
    for name, cluster in list(zip(model.ids_, model.labels_, strict=True))[:10]:
        print(f"{name}: cluster {cluster}")
    print(f"open {out}/report.html")


if __name__ == "__main__":
    main(*sys.argv[1:])
