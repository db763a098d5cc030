"""What the model says of each image, as a table: CSV, Parquet or JSON lines, written a batch at a time.

A table is kept by columns: no object is made for a row, so that writing keeps up with a GPU.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from torch import Tensor

from secu.data.own import printable
from secu.errors import UserError, nearest
from secu.evaluate import Predictions

Table = dict[str, list[Any]]  # columns of the same length
OURS: dict[str, type] = {
    "id": str,
    "cluster": int,
    "confidence": float,
    "second": int,
    "second_confidence": float,
    "cosine": float,
    "outlier": bool,
}
LABEL = "label"  # the true one, where given
FORMATS = ("csv", "jsonl", "parquet")


def make_table(
    ids: Sequence[str],
    predictions: Predictions,
    outlier: Tensor,
    columns: Mapping[str, Sequence[Any]],
    labels: Sequence[str] | None = None,
) -> Table:
    """Return a row an image: what we found, the true label, and the columns that the user's table carried."""
    found = (predictions.cluster, predictions.confidence, predictions.second, predictions.second_confidence)
    values = [
        (tensor.double().round(decimals=6) if tensor.is_floating_point() else tensor).tolist()
        for tensor in (*found, predictions.cosine, outlier)
    ]
    table: Table = dict(zip(OURS, ([printable(name) for name in ids], *values), strict=True))
    if labels is not None:
        table[LABEL] = [_writable(label) for label in labels]
    for name, column in zip(_names(columns), columns.values(), strict=True):
        table[name] = [_writable(value) for value in column]
    return table


def _names(columns: Iterable[str]) -> list[str]:
    """Return the names that carried columns get: no two alike, and none of them ours."""
    names: list[str] = []
    for column in columns:
        name = str(_writable(column))
        while name in (*OURS, LABEL, *names):
            name = f"source_{name}"
        names.append(name)
    return names


def _writable(value: Any) -> Any:
    r"""Return a value as it is, or text that can be written: a byte that was not UTF-8 becomes ``\udce4``."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


class Writer(Protocol):
    """Takes parts of a table, all of them with the same columns."""

    def write(self, table: Table) -> None:
        """Append rows."""


class CsvWriter:
    """Comma-separated values with a header."""

    def __init__(self, file: IO[str]) -> None:
        self.writer = csv.writer(file)
        self.begun = False

    def write(self, table: Table) -> None:
        """Append rows."""
        if not self.begun:
            self.writer.writerow(table)
            self.begun = True
        self.writer.writerows(zip(*table.values(), strict=True))


class JsonWriter:
    """A JSON object a line."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file

    def write(self, table: Table) -> None:
        """Append rows."""
        for row in zip(*table.values(), strict=True):
            known = (None if value != value else value for value in row)  # JSON has no NaN
            line = json.dumps(dict(zip(table, known, strict=True)), ensure_ascii=False, default=str)
            self.file.write(line + "\n")


class ParquetWriter:
    """Columns with types: ours as they are, carried ones as text."""

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
    """Return the format that a file name asks for; ``-`` (standard output) is CSV."""
    suffix = "csv" if path == "-" else path.rsplit(".", 1)[-1].lower()
    if suffix not in FORMATS:
        raise UserError(f"output: {path!r} must end in .csv, .jsonl or .parquet; {nearest(suffix, FORMATS)}")
    return suffix


@contextmanager
def table_writer(path: Path, kind: str) -> Iterator[Writer]:
    """Open a file for rows."""
    if kind == "parquet":
        writer = ParquetWriter(path)
        try:
            yield writer
        finally:
            writer.close()
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        yield CsvWriter(file) if kind == "csv" else JsonWriter(file)
