"""Reading of the tables in a run folder; whatever is wrong with one is reported in one line."""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from secu.base.errors import UserError
from secu.base.names import unescape
from secu.results.cells import rearm
from secu.results.tables import OURS, Table

BOOLEANS = {"True": True, "False": False}
SHOWN = 50  # characters of an invalid value that are repeated in a message
MOST_DIGITS = 9


def read_assignments(source: Path | bytes, clusters: int | None = None) -> Table:
    """Return the columns of an assignments.csv by name: our own with their types, all others as text.

    The source is the file or its content. If the number of clusters is known, larger cluster numbers are refused.
    """
    where = "assignments.csv" if isinstance(source, bytes) else str(source)
    try:
        content = source if isinstance(source, bytes) else source.read_bytes()
        return _typed(_columns(content, tuple(OURS)), clusters)
    except OSError as error:
        raise UserError(f"run: cannot read {where}: {error.strerror}; was the run stopped early?") from None
    except (ValueError, csv.Error) as error:
        raise UserError(f"run: {where} is not a table of assignments: {error}") from None


def read_limits(path: Path, clusters: int) -> list[float]:
    """Return each cluster's outlier threshold, a cosine, from a clusters.csv in any order, which must exist."""
    try:
        columns = _columns(path.read_bytes(), ("cluster", "outlier_below"))
        numbers = [_whole(text) for text in columns["cluster"]]
        limits = [_finite(text) for text in columns["outlier_below"]]
        if sorted(numbers) != list(range(clusters)):
            raise ValueError(f"expected the clusters 0 to {clusters - 1}, got {len(numbers)} rows")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"run: cannot read {path}: {error.strerror}") from None
    except (ValueError, csv.Error) as error:
        raise UserError(f"run: {path} does not contain outlier_below for {clusters} clusters: {error}") from None
    return [limit for _, limit in sorted(zip(numbers, limits, strict=True))]


def _columns(content: bytes, needed: Sequence[str]) -> dict[str, list[str]]:
    """Return the columns of a CSV table as text, as it was before it was written."""
    rows = csv.reader(io.StringIO(content.decode("utf-8"), newline=""), strict=True)
    header = [unescape(rearm(name)) for name in next(rows, [])]
    missing = [name for name in needed if name not in header]
    if missing:
        raise ValueError(f"it has no column {missing[0]!r}")
    if len(set(header)) < len(header):
        raise ValueError("it has two columns with the same name")
    columns: dict[str, list[str]] = {name: [] for name in header}
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"line {rows.line_num} has {len(row)} values for {len(header)} columns")
        for name, value in zip(header, row, strict=True):
            columns[name].append(unescape(rearm(value)))
    return columns


def _typed(columns: Mapping[str, list[str]], clusters: int | None) -> Table:
    table: Table = dict(columns)
    converters: dict[type, Callable[[str], Any]] = {str: str, int: _whole, float: _finite, bool: _boolean}
    for name, kind in OURS.items():
        try:
            table[name] = [converters[kind](value) for value in columns[name]]
        except ValueError as error:
            raise ValueError(f"column {name!r}: {error}") from None
    for name in ("cluster", "second"):
        if clusters is not None and max(table[name], default=0) >= clusters:
            raise ValueError(f"column {name!r}: {max(table[name])} is not one of {clusters} clusters")
    return table


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
        raise ValueError(f"{text[:SHOWN]!r} is not a cluster number")
    return int(text)


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text[:SHOWN]!r} is not a number")
    return value


def _boolean(text: str) -> bool:
    if text not in BOOLEANS:
        raise ValueError(f"{text[:SHOWN]!r} is neither True nor False")
    return BOOLEANS[text]
