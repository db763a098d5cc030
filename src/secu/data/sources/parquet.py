"""Images in Parquet files, as the Hugging Face hub stores them: a column of bytes, with labels and others beside it.

Only the bytes of a few row groups are in memory. In training, images come in random order, so that every image may cost
a row group; decoding into the cache reads each row group once.
"""

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from secu.base.errors import UserError
from secu.base.names import printable
from secu.data.decoding.decode import Raw
from secu.data.decoding.image_files import BadImage
from secu.data.sources.archives import require_ratio
from secu.data.sources.base import Source, file_stamp
from secu.data.sources.patterns import distinct
from secu.data.strings import Names
from secu.data.text import reading

USUAL = ("image", "img", "picture", "photo")  # preferred names of the column, if there are several
LABELS = ("label", "labels", "fine_label")  # preferred names of the column with true labels
KEPT_BYTES = 512 << 20  # row groups in memory, in bytes
BATCH = 64  # images unpacked at a time, so that a bomb is noticed early
ROWS = 4096  # rows of a table without images that are read at a time
CELL = 64  # bytes of a small Python object
PARQUET = (".parquet", ".pq")


class Table(NamedTuple):
    """What is known of one file without reading its images."""

    rows: list[int]  # of each row group
    paths: list[str | None]
    columns: dict[str, list[Any]]


class ParquetImages(Source):
    """Images in a column of one or several Parquet files; ids are the stored paths, or ``FILE/row``."""

    def __init__(self, name: str, place: str, files: Sequence[str], column: str, tables: Sequence[Table]) -> None:
        super().__init__(name, place, _ids(files, tables), columns=_join(tables), stamps=map(file_stamp, files))
        self.files = tuple(files)
        self.column = column
        self.groups = [(file, group) for file, table in enumerate(tables) for group in range(len(table.rows))]
        self.starts = np.cumsum([0, *(rows for table in tables for rows in table.rows)])
        self.kept: OrderedDict[int, Any] = OrderedDict()
        self.lock = threading.Lock()

    def read(self, i: int, values: str | None = None) -> Raw:
        """Return the bytes of image ``i``."""
        group = int(np.searchsorted(self.starts, i, "right")) - 1
        data: bytes | None = self._load(group)[i - int(self.starts[group])].as_py()
        if data is None:
            raise BadImage("this row has no image data")
        return data

    def _load(self, group: int) -> Any:
        """Return the bytes of all images of a row group, keeping the most recently used ones."""
        with self.lock:
            if group not in self.kept:
                file, number = self.groups[group]
                self.kept[group] = _read_group(self.files[file], number, self.column)
            self.kept.move_to_end(group)
            while len(self.kept) > 1 and sum(kept.nbytes for kept in self.kept.values()) > KEPT_BYTES:
                self.kept.popitem(last=False)
            return self.kept[group]


def read_schema(path: str) -> Any:
    """Return the columns of a Parquet file and their types."""
    import pyarrow.parquet as parquet

    with open(path, "rb") as content:  # pyarrow needs paths to be UTF-8
        return parquet.read_schema(content)


def read_parquet(name: str) -> Any:
    """Return the table in a Parquet file, read in batches: a few bytes may stand for millions of equal values."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    size = os.path.getsize(name)
    with open(name, "rb") as content, parquet.ParquetFile(content) as file:  # pyarrow needs paths to be UTF-8
        batches = []
        unpacked = 0
        for batch in file.iter_batches(ROWS):
            unpacked += batch.nbytes + CELL * batch.num_rows * batch.num_columns
            require_ratio(unpacked, size)
            batches.append(batch)
        return pa.Table.from_batches(batches, file.schema_arrow)


def _read_group(path: str, group: int, column: str) -> Any:
    """Return the bytes of the images in a row group, as an array of pyarrow."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    with open(path, "rb") as content, parquet.ParquetFile(content) as file:  # pyarrow needs paths to be UTF-8
        is_nested = pa.types.is_struct(file.schema_arrow.field(column).type)
        wanted = f"{column}.bytes" if is_nested else column
        batches = []
        for batch in file.iter_batches(BATCH, row_groups=[group], columns=[wanted]):
            batches.append(batch)
            require_ratio(sum(part.nbytes for part in batches), os.path.getsize(path))
    images = pa.Table.from_batches(batches).column(column).combine_chunks()
    return images.field("bytes") if is_nested else images


def open_parquet_images(name: str, files: Sequence[str]) -> Source:
    """Open Parquet files with images; a column of labels, if there is one, becomes the true labels."""
    first = _schema(files[0])
    column = image_column(first)
    if column is None:
        raise UserError(f"source: {printable(files[0])} has no column of images; it has {_described(first)}")
    names = _class_names(first)
    label = next((key for key in (*LABELS, *names) if key in first.names), None)
    tables = []
    for path in files:
        schema = _schema(path)
        if image_column(schema) != column or set(schema.names) != set(first.names):
            found = f"{_described(schema)}, unlike {os.path.basename(files[0])} with {_described(first)}"
            raise UserError(f"source: {printable(path)} has the columns {found}")
        tables.append(_read(path, schema, column, names))
    return labeled(ParquetImages(name, os.path.abspath(name), files, column, tables), label, names.get(label or ""))


def image_column(schema: Any) -> str | None:
    """Return the name of the column that holds images: bytes, or a struct with ``bytes``; None if there is none."""
    found = [field.name for field in schema if _holds_bytes(field)]
    return next((name for name in USUAL if name in found), found[0] if found else None)


def holds_images(path: str) -> bool:
    """Return whether a Parquet file has a column of images."""
    return image_column(read_schema(path)) is not None


def _holds_bytes(field: Any) -> bool:
    import pyarrow as pa

    binary = (pa.binary(), pa.large_binary())
    if pa.types.is_struct(field.type):
        return any(part.name == "bytes" and part.type in binary for part in field.type)
    return field.name in USUAL and field.type in binary


def _schema(path: str) -> Any:
    with reading(printable(path)):
        return read_schema(path)


def _described(schema: Any) -> str:
    return printable(", ".join(f"{field.name} ({field.type})" for field in schema)) or "no columns"


def _class_names(schema: Any) -> dict[str, list[str]]:
    """Return the names of the classes of each column of labels, as ``datasets`` stores them in the schema."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {key: list(map(str, kind["names"])) for key, kind in features.items() if "names" in kind}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _read(path: str, schema: Any, column: str, names: dict[str, list[str]]) -> Table:
    """Read everything but the images."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    types = pa.types
    simple = (types.is_integer, types.is_floating, types.is_string, types.is_large_string, types.is_boolean)
    keys = [field.name for field in schema if any(test(field.type) for test in simple) and field.name != column]
    kind = schema.field(column).type
    has_paths = types.is_struct(kind) and "path" in [part.name for part in kind]
    with reading(printable(path)), open(path, "rb") as content, parquet.ParquetFile(content) as file:
        rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        table = file.read(columns=[*keys, *([f"{column}.path"] if has_paths else [])])
        columns = {key: named(table.column(key).to_pylist(), names.get(key)) for key in keys}
        stored = table.column(column).to_pylist() if has_paths else []
    paths = [None if image is None else image["path"] for image in stored] or [None] * sum(rows)
    return Table(rows, paths, columns)


def named(values: list[Any], names: list[str] | None) -> list[Any]:
    """Return labels as the names of their classes; None where they are unknown."""
    if names is None:
        return values
    return [names[value] if isinstance(value, int) and 0 <= value < len(names) else None for value in values]


def labeled(source: Source, label: str | None, names: Sequence[str] | None) -> Source:
    """Return a source with the values of a column as its true labels, if there are any.

    If the file names its classes, they keep its numbers.
    """
    if label is None or not any(value not in (None, "") for value in source.columns.get(label, ())):
        return source
    source = source.label(label)
    if not names or source.targets is None:
        return source
    number = np.array([*(list(names).index(name) for name in source.class_names), -1], np.int64)
    return source.replaced(targets=number[source.targets], class_names=tuple(names))


def _ids(files: Sequence[str], tables: Sequence[Table]) -> Names:
    paths = [path for table in tables for path in table.paths]
    if all(paths):
        stored = [str(path).replace(os.sep, "/").lstrip("/") for path in paths]
        if len(set(stored)) == len(stored):
            return Names.of(stored)
    rows = [(file, row) for file, table in zip(distinct(files), tables, strict=True) for row in range(sum(table.rows))]
    return Names.of(f"{file}/{row}" for file, row in rows)


def _join(tables: Sequence[Table]) -> dict[str, Sequence[Any]]:
    """Return the columns of all files, packed where they are text."""
    joined: dict[str, Sequence[Any]] = {}
    for key in tables[0].columns:
        values = [value for table in tables for value in table.columns[key]]
        joined[key] = Names.of(values) if all(isinstance(value, str) for value in values) else values
    return joined
