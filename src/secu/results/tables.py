"""Tables of assignments: CSV, Parquet or JSON lines, written batch by batch, and reading of CSV.

A table is a dict of columns; no object is created per row, so that writing keeps up with a GPU.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from torch import Tensor

from secu.data import printable
from secu.errors import UserError, nearest
from secu.methods.predictor import Predictions

Table = dict[str, list[Any]]  # columns of equal length
OURS: dict[str, type] = {
    "id": str,
    "cluster": int,
    "confidence": float,
    "second": int,
    "second_confidence": float,
    "cosine": float,
    "outlier": bool,
}
LABEL = "label"  # column with the name of the true class, if known
FORMATS = ("csv", "jsonl", "parquet")
DIGITS = 6  # decimals of a number in a table
BOOLEANS = {"True": True, "False": False}


def make_table(
    ids: Sequence[str],
    predictions: Predictions,
    outlier: Tensor,
    columns: Mapping[str, Sequence[Any]],
    labels: Sequence[str] | None = None,
) -> Table:
    """Return one row per image: our own columns, the true label, and the columns of the source."""
    table: Table = {
        "id": [printable(name) for name in ids],
        "cluster": predictions.cluster.tolist(),
        "confidence": _rounded(predictions.confidence),
        "second": predictions.second.tolist(),
        "second_confidence": _rounded(predictions.second_confidence),
        "cosine": _rounded(predictions.cosine),
        "outlier": outlier.tolist(),
    }
    if labels is not None:
        table[LABEL] = [writable(label) for label in labels]
    for name, column in zip(_names(columns), columns.values(), strict=True):
        table[name] = [writable(value) for value in column]
    return table


def _rounded(values: Tensor) -> list[float]:
    rounded: list[float] = values.double().round(decimals=DIGITS).tolist()
    return rounded


def _names(columns: Iterable[str]) -> list[str]:
    """Return unique names for the source's columns that do not clash with our own."""
    names: list[str] = []
    for column in columns:
        name = str(writable(column))
        while name in OURS or name == LABEL or name in names:
            name = f"source_{name}"
        names.append(name)
    return names


def writable(value: Any) -> Any:
    r"""Return a value in a form that can be written; bytes that are not UTF-8 are escaped, as in ``\udce4``."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def read_assignments(source: Path | bytes) -> Table:
    """Return the columns of an assignments.csv by name: our own with their types, all others as text.

    Args:
        source: The file, or its content.

    Raises:
        UserError: The file does not exist, or was not written by this package.
    """
    where = "assignments.csv" if isinstance(source, bytes) else str(source)
    try:
        content = source if isinstance(source, bytes) else source.read_bytes()
        return _typed(_columns(content.decode("utf-8")))
    except OSError as error:
        raise UserError(f"run: cannot read {where}: {error.strerror}; was the run stopped early?") from None
    except (ValueError, csv.Error) as error:
        raise UserError(f"run: {where} is not a table of assignments: {error}") from None


def _columns(text: str) -> dict[str, list[str]]:
    """Return the columns of a CSV table as text."""
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    header = next(rows, [])
    missing = [name for name in OURS if name not in header]
    if missing:
        raise ValueError(f"it has no column {missing[0]!r}")
    columns: dict[str, list[str]] = {name: [] for name in header}
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"line {rows.line_num} has {len(row)} values for {len(header)} columns")
        for name, value in zip(header, row, strict=True):
            columns[name].append(value)
    return columns


def _typed(columns: Mapping[str, list[str]]) -> Table:
    """Convert our columns to their types."""
    table: Table = dict(columns)
    for name, kind in OURS.items():
        convert: Callable[[str], Any] = _boolean if kind is bool else kind
        try:
            table[name] = [convert(value) for value in columns[name]]
        except ValueError as error:
            raise ValueError(f"column {name!r}: {error}") from None
    return table


def _boolean(text: str) -> bool:
    if text not in BOOLEANS:
        raise ValueError(f"{text!r} is neither True nor False")
    return BOOLEANS[text]


class Writer(Protocol):
    """Writes a table in parts, all with the same columns."""

    def write(self, table: Table) -> None:
        """Append rows."""


class CsvWriter:
    """Comma-separated values with a header."""

    def __init__(self, file: IO[str]) -> None:
        self.writer = csv.writer(file)
        self.has_header = False

    def write(self, table: Table) -> None:
        """Append rows."""
        if not self.has_header:
            self.writer.writerow(table)
            self.has_header = True
        self.writer.writerows(zip(*table.values(), strict=True))


class JsonWriter:
    """One JSON object per line."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file

    def write(self, table: Table) -> None:
        """Append rows."""
        for row in zip(*table.values(), strict=True):
            known = (None if value != value else value for value in row)  # JSON has no NaN
            line = json.dumps(dict(zip(table, known, strict=True)), ensure_ascii=False, default=str)
            self.file.write(line + "\n")


class ParquetWriter:
    """Parquet with typed columns: our own with their types, all others as text."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer: Any = None

    def write(self, table: Table) -> None:
        """Append rows as one row group."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        kinds = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
        schema = pa.schema([(name, kinds[OURS.get(name, str)]) for name in table])
        if self.writer is None:
            self.writer = pq.ParquetWriter(self.path, schema)
        typed = {
            name: values if name in OURS else [None if value is None else str(value) for value in values]
            for name, values in table.items()
        }
        self.writer.write_table(pa.table(typed, schema=schema))

    def close(self) -> None:
        """Write the footer."""
        if self.writer is not None:
            self.writer.close()


def format_of(path: str) -> str:
    """Return the format implied by a file name; ``-`` (standard output) means CSV."""
    suffix = "csv" if path == "-" else path.rsplit(".", 1)[-1].lower()
    if suffix not in FORMATS:
        raise UserError(f"output: {path!r} must end in .csv, .jsonl or .parquet; {nearest(suffix, FORMATS)}")
    return suffix


@contextmanager
def table_writer(path: Path, kind: str) -> Iterator[Writer]:
    """Open a table file for writing."""
    if kind == "parquet":
        writer = ParquetWriter(path)
        try:
            yield writer
        finally:
            writer.close()
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        yield CsvWriter(file) if kind == "csv" else JsonWriter(file)
