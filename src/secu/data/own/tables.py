"""A CSV or Parquet manifest → the images that its ``path`` column names; other columns are carried along."""

import csv
import os
from typing import Any, TextIO

from secu.data.own.names import one_line, printable
from secu.data.own.source import FileSource, Skipped
from secu.errors import UserError, nearest

Table = dict[str, list[Any]]


def open_manifest(name: str) -> FileSource:
    """Read a manifest: .csv, .tsv or .parquet. Relative paths are relative to it; its order is kept.

    Rows without a path, and rows after the first that name the same file, are skipped.

    Raises:
        UserError: It cannot be read, or has no ``path`` column.
    """
    shown = printable(name)
    try:
        table = _read_parquet(name) if name.lower().endswith((".parquet", ".pq")) else _read_csv(name)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"source: cannot read {shown}: {one_line(error)}") from None
    if "path" not in table:
        known = nearest("path", map(printable, table)).replace("valid:", "it has") if table else "it is empty"
        raise UserError(f"source: {shown} has no column 'path', which names the file of each image; {known}")
    ids: list[str] = []
    paths: list[str] = []
    rows: list[int] = []
    skipped: list[Skipped] = []
    repeated: list[Skipped] = []
    seen: dict[str, int] = {}
    folder = os.path.dirname(os.path.abspath(name))
    for row, value in enumerate(table.pop("path")):
        path = os.path.normpath(os.path.join(folder, value)) if isinstance(value, str) else ""
        if not value or not path or "\0" in path:
            skipped.append((f"row {row + 1}", "no path"))
        elif path in seen:
            repeated.append((value, f"row {row + 1} names the same file as row {seen[path] + 1}"))
        else:
            seen[path] = row
            ids.append(value.replace(os.sep, "/"))
            paths.append(path)
            rows.append(row)
    columns = {key: [values[row] for row in rows] for key, values in table.items()}
    source = FileSource(name, os.path.abspath(name), ids, paths, columns=columns, skipped=skipped)
    source.repeated = repeated
    return source


def separator(file: TextIO) -> str:
    """Return what separates the values of a table: comma, semicolon or tab, whichever its first line has most."""
    first = file.readline()
    file.seek(0)
    return max(",;\t", key=first.count)


def _read_csv(name: str) -> Table:
    """Read a table whose first line has the names.

    Bytes that are not UTF-8 are kept as file names keep them, so that the paths are found.
    """
    with open(name, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        rows = csv.reader(file, delimiter=separator(file), strict=True)
        header = [column.strip() for column in next(rows, [])]
        twice = next((column for column in header if header.count(column) > 1), None)
        if twice is not None:
            raise UserError(f"source: {printable(name)} has two columns {printable(twice)!r}")
        table: Table = {column: [] for column in header}
        for row in rows:
            if not row:
                continue
            if len(row) > len(header):
                where = f"line {rows.line_num} of {printable(name)}"
                raise UserError(f"source: {where} has {len(row)} values for {len(header)} columns")
            for column, value in zip(header, row + [""] * (len(header) - len(row)), strict=True):
                table[column].append(value)
    return table


def _read_parquet(name: str) -> Table:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError("source: a Parquet manifest needs pyarrow; run: pip install pyarrow") from None
    with parquet.ParquetFile(name) as file:
        columns: Table = file.read().to_pydict()
    return columns
