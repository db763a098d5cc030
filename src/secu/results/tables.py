"""Tables of assignments: CSV, Parquet or JSON lines, written batch by batch.

A table is a dict of columns; no object is created per row, so that writing keeps up with a GPU. Names that cannot be
written are escaped (names.py). In CSV, cells that a spreadsheet would evaluate are disarmed (cells.py).
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from secu.base.errors import UserError
from secu.base.files import write_atomically
from secu.base.names import escape, escape_text
from secu.methods.predictor import Predictions
from secu.results.cells import disarm

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
DUPLICATE_OF = "duplicate_of"  # column with the id of the image that is the same picture and is kept; else empty
LABEL = "label"  # column with the name of the true class, if known
LEAF = "leaf"  # column with the cluster of the finest head, if that is not the run's own
TYPES = OURS | {LEAF: int}
FORMATS = ("csv", "jsonl", "parquet")
DIGITS = 6  # decimals of a number in a table


def make_table(
    ids: Sequence[str],
    predictions: Predictions,
    outlier: Tensor | None,
    columns: Mapping[str, Sequence[Any]],
    labels: Sequence[str] | None = None,
    kept: Sequence[int] | None = None,
    leaf: Tensor | None = None,
) -> Table:
    """Return one row per image: our own columns, those that are known of the optional ones, and the source's columns.

    ``kept`` is the image to keep for each image: itself or a near-duplicate. ``leaf`` is its cluster in the finest
    head, if that is not the run's own.
    """
    table: Table = {
        "id": [escape(name) for name in ids],
        "cluster": predictions.cluster.tolist(),
        "confidence": _rounded(predictions.confidence),
        "second": predictions.second.tolist(),
        "second_confidence": _rounded(predictions.second_confidence),
        "cosine": _rounded(predictions.cosine),
    }
    if outlier is not None:
        table["outlier"] = outlier.tolist()
    if kept is not None:
        table[DUPLICATE_OF] = ["" if k == i else escape(ids[k]) for i, k in enumerate(kept)]
    if labels is not None:
        table[LABEL] = [writable(label) for label in labels]
    if leaf is not None:
        table[LEAF] = leaf.tolist()
    for name, column in zip(_names(columns), columns.values(), strict=True):
        table[name] = [writable(value) for value in column]
    return table


def _rounded(values: Tensor) -> list[float]:
    rounded: list[float] = values.double().round(decimals=DIGITS).tolist()
    return rounded


def _names(columns: Iterable[str]) -> list[str]:
    """Return unique names for the source's columns that do not clash with our own, used here or not."""
    reserved = {*TYPES, DUPLICATE_OF, LABEL}
    names: list[str] = []
    for column in columns:
        name = str(writable(column))
        while name in reserved or name in names:
            name = f"source_{name}"
        names.append(name)
    return names


def writable(value: Any) -> Any:
    """Return a value in a form that can be written; bytes that are not UTF-8 are escaped."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    return escape_text(value) if isinstance(value, str) else value


class CsvWriter:
    """Comma-separated values with a header; formulas are disarmed, unless ``raw``."""

    def __init__(self, file: IO[str], *, raw: bool = False) -> None:
        self.writer = csv.writer(file)
        self.raw = raw
        self.has_header = False

    def write(self, table: Table) -> None:
        """Append rows."""
        if not self.has_header:
            self.writer.writerow(table if self.raw else map(disarm, table))
            self.has_header = True
        numbers = [name for name, kind in TYPES.items() if kind is not str]
        columns = [
            values if self.raw or name in numbers else map(disarm, values)  # most columns are numbers: fast
            for name, values in table.items()
        ]
        self.writer.writerows(zip(*columns, strict=True))


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

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.writer: Any = None

    def write(self, table: Table) -> None:
        """Append rows as one row group."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        kinds = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
        schema = pa.schema([(name, kinds[TYPES.get(name, str)]) for name in table])
        if self.writer is None:
            self.writer = pq.ParquetWriter(self.file, schema)
        typed = {
            name: values if name in TYPES else [None if value is None else str(value) for value in values]
            for name, values in table.items()
        }
        self.writer.write_table(pa.table(typed, schema=schema))

    def close(self) -> None:
        """Write the footer."""
        if self.writer is not None:
            self.writer.close()


Writer = CsvWriter | JsonWriter | ParquetWriter  # writes a table in parts, all with the same columns


def format_of(path: str) -> str:
    """Return the format implied by a file name; ``-`` (standard output) means CSV."""
    suffix = "csv" if path == "-" else path.rsplit(".", 1)[-1].lower()
    if suffix not in FORMATS:
        raise UserError(f"output: {path!r} must end in .csv, .jsonl or .parquet")
    return suffix


def write_table(path: Path, fill: Callable[[Writer], object], *, raw: bool = False) -> None:
    """Let ``fill`` write a table in the format of the file's name; the file appears when it is complete."""

    def write(temporary: Path) -> None:
        with table_writer(temporary, format_of(path.name), raw=raw) as writer:
            fill(writer)

    write_atomically(path, write)


@contextmanager
def table_writer(path: Path, kind: str, *, raw: bool = False) -> Iterator[Writer]:
    """Open a table file for writing; ``raw`` leaves formulas in CSV as they are."""
    if kind == "parquet":
        with path.open("wb") as binary:  # pyarrow cannot open a path that is not UTF-8
            writer = ParquetWriter(binary)
            try:
                yield writer
            finally:
                writer.close()
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        yield CsvWriter(file, raw=raw) if kind == "csv" else JsonWriter(file)
