"""Rows as Parquet: one row group at a time, so that memory use does not depend on the number of images."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

from secu.apps.exports.content import COLUMNS, Content, Row, has_pictures

TYPES = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
GROUP_ROWS = 1_000  # maximum number of rows in a row group
GROUP_BYTES = 64 << 20  # size of the pictures at which a row group ends
FILE_BYTES = 500 << 20  # size of the pictures at which a file ends


def schema_of(content: Content, more: Mapping[str, pa.DataType], metadata: Mapping[str, str]) -> pa.Schema:
    """Return the columns of the rows, their embeddings, pictures if there are any, and more columns."""
    fields = {"image": IMAGE} if has_pictures(content.images) else {}
    fields |= {name: TYPES[COLUMNS[name]] for name in content.table}
    fields["embedding"] = pa.list_(pa.float32(), content.embeddings.shape[1])
    return pa.schema(list({**fields, **more}.items()), metadata=dict(metadata))


def groups_of(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield the rows of one row group after the other."""
    group: list[Row] = []
    size = 0
    for row in rows:
        group.append(row)
        size += size_of(row)
        if len(group) == GROUP_ROWS or size >= GROUP_BYTES:
            yield group
            group = []
            size = 0
    if group:
        yield group


def size_of(row: Row) -> int:
    """Return the size of a row's picture in bytes."""
    return len(row["image"]["bytes"]) if "image" in row else 0


def write_file(path: Path, schema: pa.Schema, rows: Iterable[Row]) -> None:
    """Write all rows into one file."""
    with path.open("wb") as file, parquet.ParquetWriter(file, schema) as writer:  # a path may not be UTF-8
        for group in groups_of(rows):
            writer.write_table(pa.Table.from_pylist(group, schema))


def write_files(folder: Path, schema: pa.Schema, rows: Iterable[Row]) -> None:
    """Write the rows into as many files as needed, named as the Hugging Face Hub does."""
    folder.mkdir()
    count = 0
    with ExitStack() as opened:
        size = FILE_BYTES
        for group in groups_of(rows):
            if size >= FILE_BYTES:
                opened.close()
                file = opened.enter_context((folder / f"{count}.parquet").open("wb"))
                writer = opened.enter_context(parquet.ParquetWriter(file, schema))
                count += 1
                size = 0
            writer.write_table(pa.Table.from_pylist(group, schema))
            size += sum(map(size_of, group))
    for number in range(count):
        (folder / f"{number}.parquet").rename(folder / f"train-{number:05d}-of-{count:05d}.parquet")
