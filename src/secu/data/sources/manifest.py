"""Images listed in the ``path`` column of a CSV or Parquet manifest; other columns are kept."""

import csv
import os
from collections import Counter
from itertools import zip_longest
from typing import Any, TextIO

from secu.base.errors import UserError, nearest, shortened
from secu.base.names import printable
from secu.data.sources.base import FileSource, Skipped
from secu.data.sources.parquet import PARQUET, read_parquet
from secu.data.text import reading

MAX_MISSING = 1_000_000  # values that may be left out at the ends of lines

Table = dict[str, list[Any]]


def open_manifest(name: str) -> FileSource:
    """Read a .csv, .tsv or .parquet manifest, keeping its order; relative paths are relative to its folder.

    Rows without a path and rows that repeat a file are skipped.
    """
    table = _read(name)
    place = os.path.abspath(name)
    found: dict[str, int] = {}  # path → row
    ids: list[str] = []
    skipped: list[Skipped] = []
    repeated: list[Skipped] = []
    for row, value in enumerate(table.pop("path")):
        path = os.path.normpath(os.path.join(os.path.dirname(place), value)) if value and isinstance(value, str) else ""
        if not path or "\0" in path:
            skipped.append((f"row {row + 1}", "no path"))
        elif path in found:
            repeated.append((value, f"row {row + 1} names the same file as row {found[path] + 1}"))
        else:
            found[path] = row
            ids.append(value.replace(os.sep, "/"))
    columns = {key: [values[row] for row in found.values()] for key, values in table.items()}
    return FileSource(name, place, ids, list(found), columns=columns, skipped=skipped, repeated=repeated)


def separator(file: TextIO) -> str:
    """Return the delimiter of a table: comma, semicolon or tab, whichever is most frequent in its first line."""
    first = file.readline()
    file.seek(0)
    return max(",;\t", key=first.count)


def _read(name: str) -> Table:
    """Return the columns of a manifest, including ``path``."""
    with reading(printable(name)):
        table = read_parquet(name).to_pydict() if name.lower().endswith(PARQUET) else _read_csv(name)
    if "path" not in table:
        known = nearest("path", map(printable, table)).replace("valid:", "it has") if table else "it is empty"
        missing = f"source: {printable(name)} has no column 'path', which names the file of each image"
        raise UserError(f"{missing}; {shortened(known)}")
    return table


def _read_csv(name: str) -> Table:
    """Read a table with a header line.

    Bytes that are not UTF-8 are decoded as in file names (surrogateescape), so that the paths can be opened.
    """
    with open(name, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        rows = csv.reader(file, delimiter=separator(file), strict=True)
        header = [column.strip() for column in next(rows, [])]
        table: Table = {column: [] for column in header}
        if len(table) < len(header):
            twice = next(column for column, count in Counter(header).items() if count > 1)
            raise UserError(f"source: {printable(name)} has two columns {printable(shortened(twice))!r}")
        missing = 0
        for row in rows:
            if not row:
                continue
            if len(row) > len(header):
                where = f"line {rows.line_num} of {printable(name)}"
                raise UserError(f"source: {where} has {len(row)} values for {len(header)} columns")
            missing += len(header) - len(row)
            if missing > MAX_MISSING:
                raise UserError(f"source: {printable(name)} has lines with fewer values than its {len(header)} columns")
            for column, value in zip_longest(header, row, fillvalue=""):
                table[column].append(value)
    return table
