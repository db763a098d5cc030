"""Feature vectors that someone has computed: a float matrix (N, D) in an .npy file, or a list column in a Parquet file.

Other columns of a Parquet file are kept. If there is a ``path`` column, it names the picture of each vector, which is
shown in reports and sorted into folders; training uses the vectors alone.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from secu.base.errors import UserError
from secu.base.names import printable, unescape
from secu.data.decoding.decode import Raw
from secu.data.decoding.image_files import BadImage
from secu.data.decoding.probe import Probe
from secu.data.rows import FileRows, fits_in_memory, open_npy, read_npy_header
from secu.data.sources.base import Shape, Source, file_stamp
from secu.data.sources.parquet import read_parquet, read_schema
from secu.data.text import reading

COLUMNS = ("features", "embedding", "embeddings", "vector")  # preferred names of a list column, if there are several
MARK = b"secu"  # key in the metadata of a Parquet file whose texts are escaped (names.py): written by ``secu embed``
BLOCK = 2**24  # values that are checked at a time
SAMPLE = 500  # rows that are compared with their neighbors
SMALLEST_PICTURE = 16  # pixels
ROUGHEST_PICTURE = 0.3  # variance between neighboring pixels, as a share of that of the whole; 97% of photos have less
ROUGHEST_OTHERWISE = 0.1  # the same, if values or proportions are unlike those of a picture
LONGEST_SIDE = 4  # of a picture, as a multiple of the shorter one


class VectorSource(Source):
    """Feature vectors by index, optionally with the picture that each belongs to.

    Args:
        name: Name used in messages.
        vectors: The vectors, floats (N, D), in memory or in a file.
        place: Path to reopen the vectors from; empty for vectors in memory.
        stamp: String that changes when the vectors change; empty in memory.
        paths: The file of each picture; None if there are no pictures.
        more: Other arguments of ``Source``.
    """

    def __init__(
        self,
        name: str,
        vectors: NDArray[Any] | FileRows,
        *,
        place: str = "",
        stamp: str = "",
        paths: Sequence[str] | None = None,
        **more: Any,
    ) -> None:
        _require_usable(printable(name), vectors)
        self.vectors = vectors
        ids: Iterable[str] = map(str, range(len(vectors)))
        self.paths: list[str] | None = None
        if paths is not None:
            ids = _unique_ids(paths)
            self.paths = [os.path.normpath(os.path.join(os.path.dirname(place), path)) for path in paths]
        super().__init__(name, place, ids, stamps=[stamp], **more)
        self.has_folders = paths is not None

    def read(self, i: int, values: str | None = None) -> Raw:
        """Return the path of picture ``i``."""
        if self.paths is None:
            raise BadImage("there are only feature vectors, no pictures")
        return self.paths[i]

    def ready(self, rows: slice, shape: Shape, values: str | None = None) -> NDArray[Any] | None:
        """Return a batch of vectors."""
        if shape != self.vectors.shape[1:]:
            wanted = f"vectors of {shape[0]}" if len(shape) == 1 else f"images of {shape[-1]} pixels"
            given = f"{self.name} has vectors of {self.vectors.shape[1]} features"
            raise UserError(f"source: {given}, but the run was trained on {wanted}")
        return np.array(self.vectors[rows], np.float32)

    def in_memory(self) -> NDArray[Any]:
        """Return all vectors as writable memory of a type that torch has; training needs them all at once."""
        vectors = self.vectors
        plain = vectors.dtype if vectors.dtype.itemsize <= 4 and vectors.dtype.isnative else np.dtype(np.float32)
        if not isinstance(vectors, FileRows):
            return vectors if vectors.flags.writeable and vectors.dtype == plain else np.array(vectors, plain)
        size = len(vectors) * vectors.shape[1] * plain.itemsize
        if not fits_in_memory(size):
            raise UserError(
                f"source: {self.name} has {size / 1e9:,.1f} GB of vectors, too many for this machine's memory"
            )
        return vectors.in_memory(plain)

    def probe(self) -> Probe:
        """Return size and channels of the pictures; both are 0 if there are none."""
        try:
            return super().probe() if self.paths is not None else Probe(0, 0, None)
        except UserError:  # the pictures are gone, which matters only for display
            return Probe(0, 0, None)


def open_vectors(path: str) -> VectorSource:
    """Open an .npy file with a float matrix, or a Parquet file with a list column."""
    place = os.path.abspath(path)
    if path.lower().endswith(".npy"):
        return VectorSource(path, open_npy(path), place=place, stamp=file_stamp(path))
    vectors, columns = _read_parquet(path)
    paths = columns.pop("path", None)
    if paths is not None and not all(isinstance(value, str) and value for value in paths):
        raise UserError(f"source: {printable(path)} has rows without a path; name a picture in every row, or in none")
    return VectorSource(path, vectors, place=place, stamp=file_stamp(path), paths=paths, columns=columns)


def has_vectors(path: str) -> bool:
    """Return whether a readable .npy or Parquet file holds feature vectors rather than images or paths of images."""
    if path.lower().endswith(".npy"):
        with open(path, "rb") as file:
            header = read_npy_header(file)
        return len(header.shape) == 2 and header.dtype.kind == "f"
    return vector_column(read_schema(path)) is not None


def vector_column(schema: Any) -> str | None:
    """Return the name of the column of a Parquet file that holds lists of floats; None if there is none."""
    import pyarrow as pa

    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    columns = [field for field in schema if any(test(field.type) for test in lists)]
    found = [field.name for field in columns if pa.types.is_floating(field.type.value_type)]
    usual = [name for name in COLUMNS if name in found]
    if "path" in schema.names and not usual:
        return None  # a manifest of images; the lists may be boxes or colors
    if len(found) > 1 and not usual:
        raise UserError(f"source: several columns hold vectors ({printable(', '.join(found))}); name one 'features'")
    return (usual or found or [None])[0]


def _read_parquet(path: str) -> tuple[NDArray[Any], dict[str, list[Any]]]:
    """Return the vectors in a Parquet file, and its other columns."""
    with reading(printable(path)):  # there may be damaged pages behind a readable header, or columns of the same name
        table = read_parquet(path)
        name = vector_column(table.schema)
        assert name is not None
        column = table.column(name).combine_chunks()
        return _matrix(path, name, column), _texts(table.drop_columns([name]))


def _texts(table: Any) -> dict[str, list[Any]]:
    """Return the columns by name; what ``secu embed`` has escaped is restored."""
    columns: dict[str, list[Any]] = table.to_pydict()
    if MARK not in (table.schema.metadata or {}):
        return columns
    return {
        unescape(name): [unescape(value) if isinstance(value, str) else value for value in values]
        for name, values in columns.items()
    }


def _matrix(path: str, name: str, column: Any) -> NDArray[Any]:
    """Return a list column as a matrix."""
    if column.null_count:
        raise UserError(f"source: {printable(path)} has no vector in {column.null_count} of {len(column)} rows")
    lengths = set(column.value_lengths().unique().to_pylist()) if len(column) else {0}
    if len(lengths) != 1:
        found = f"{min(lengths)} to {max(lengths)}"
        raise UserError(f"source: {printable(path)}: vectors in {name!r} have different lengths, from {found}")
    values = column.flatten().to_numpy(zero_copy_only=False)
    return np.asarray(values).reshape(len(column), lengths.pop())


def _require_usable(name: str, vectors: NDArray[Any] | FileRows) -> None:
    """Raise if vectors cannot be clustered."""
    if vectors.ndim != 2 or vectors.dtype.kind != "f":
        raise UserError(f"source: {name} must be floats of shape (N, D), got {vectors.dtype} of shape {vectors.shape}")
    count, features = vectors.shape
    if features < 2:
        raise UserError(f"source: {name} has vectors of {features} feature(s); at least 2 are needed")
    step = max(1, BLOCK // features)
    for start in range(0, count, step):
        with np.errstate(over="ignore"):  # too large a number becomes infinite, which is reported below
            block = np.asarray(vectors[start : start + step], np.float32)
        if not (finite := np.isfinite(block).all(1)).all():
            first = start + int(finite.argmin())
            raise UserError(f"source: {name} has NaN, infinite or too large values, first in row {first}")
        if not (nonzero := block.any(1)).all():
            first = start + int(nonzero.argmin())
            raise UserError(f"source: {name} has vectors of zeros, which have no direction, first in row {first}")
    if looks_like_picture(np.asarray(vectors[:SAMPLE], np.float32), count):
        raise UserError(f"source: {name} of shape {vectors.shape} looks like one picture; vectors have shape (N, D)")


def looks_like_picture(rows_ND: NDArray[np.float32], count: int) -> bool:
    """Return whether neighboring rows and neighboring columns are nearly the same, as in a single gray image.

    ``rows_ND`` are the first of ``count`` rows. Spectra in order are smooth, too, but often have other proportions.
    """
    if min(rows_ND.shape) < SMALLEST_PICTURE:
        return False
    sides = sorted((count, rows_ND.shape[1]))
    like_pixels = sides[1] <= LONGEST_SIDE * sides[0] and rows_ND.min() >= 0 and rows_ND.max() <= 255
    centered = rows_ND - rows_ND.mean(0)  # features may have any mean, for example where two kinds are put together
    power = float(np.square(centered).mean())
    jumps = [float(np.square(np.diff(centered, axis=axis)).mean()) / 2 for axis in (0, 1)]
    return power > 0 and max(jumps) < (ROUGHEST_PICTURE if like_pixels else ROUGHEST_OTHERWISE) * power


def _unique_ids(paths: Sequence[str]) -> list[str]:
    """Return the paths with forward slashes; a repeated one gets the number of its row."""
    seen: set[str] = set()
    ids = []
    for row, path in enumerate(paths):
        name = path.replace(os.sep, "/")
        while name in seen:
            name = f"{name}#{row}"
        ids.append(name)
        seen.add(name)
    return ids
