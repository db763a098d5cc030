"""Arrays in files, whose rows are copied when they are needed.

Files are not mapped into memory: if another program truncates a mapped file, the next access ends the process with a
signal. Here, a read that ends early is an error in one line.
"""

import io
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from secu.base.errors import UserError
from secu.base.names import printable
from secu.data.decoding.image_files import BadImage

BLOCK = 64 << 20  # bytes read at a time
LONGEST_HEADER = 16_384  # bytes of an .npy header, of which numpy accepts 10,000
MEMORY_SHARE = 0.5  # of all memory; a larger array stays in its file
UNKNOWN_MEMORY = 8 << 30  # bytes assumed if the system does not report it


class Header(NamedTuple):
    """What precedes the values of an array in the .npy format."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    offset: int  # of the first value, in bytes

    @property
    def nbytes(self) -> int:
        """Size of all values, in bytes."""
        return prod(self.shape) * self.dtype.itemsize


class FileRows:
    """An array in a file, which may be larger than memory; ``rows[…]`` returns copies of some of its rows.

    If the file is too short, now or when rows are read, that is a ``BadImage``.

    Args:
        path: The file.
        dtype: Type of the values.
        shape: Shape of the array.
        offset: Position of the first value in the file, in bytes.
        what: What the file is, for messages.
    """

    def __init__(
        self, path: str | Path, dtype: DTypeLike, shape: Sequence[int], offset: int = 0, what: str = "source"
    ) -> None:
        self.name = f"{what}: cannot read {printable(str(path))}"
        self.dtype = np.dtype(dtype)
        self.shape = tuple(shape)
        self.offset = offset
        self.stored = self.shape[1:]  # shape of a row in the file
        self.axes = tuple(range(len(self.shape)))
        self.chosen: NDArray[np.int64] | None = None  # numbers of the rows in the file; None: all of them
        self.file = _OpenFile(path)  # open as long as the array is used: a file that is replaced stays readable
        self.lock = threading.Lock()
        if offset + self.nbytes > os.fstat(self.file.fileno()).st_size:
            raise self._truncated()

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of all values, in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def transpose(self, *axes: int) -> Self:
        """Return the same array with its axes in another order; the first one must stay the first."""
        other = copy(self)
        other.shape = tuple(self.shape[axis] for axis in axes)
        other.axes = tuple(self.axes[axis] for axis in axes)
        return other

    def select(self, numbers: Sequence[int]) -> Self:
        """Return the rows of these numbers as an array; nothing is read yet."""
        other = copy(self)
        other.chosen = self._numbers()[list(numbers)]
        other.shape = (len(other.chosen), *self.shape[1:])
        return other

    def _numbers(self) -> NDArray[np.int64]:
        return np.arange(len(self)) if self.chosen is None else self.chosen

    def __getitem__(self, rows: int | slice | NDArray[np.int64]) -> NDArray[Any]:
        if isinstance(rows, int | np.integer):
            return cast("NDArray[Any]", self[np.array([rows])][0])
        if isinstance(rows, slice) and self.chosen is None:
            start, stop, _ = rows.indices(len(self))
            return self._read(start, max(0, stop - start)).transpose(self.axes)
        numbers = self._numbers()[rows]
        block = np.empty((len(numbers), *self.stored), self.dtype)
        for place, number in enumerate(numbers.tolist()):
            block[place] = self._read(number, 1)[0]
        return block.transpose(self.axes)

    def in_memory(self, dtype: DTypeLike | None = None) -> NDArray[Any]:
        """Return a copy of all rows, converted block by block."""
        copied = np.empty(self.shape, dtype or self.dtype)
        step = max(1, BLOCK // max(1, self.nbytes // max(1, len(self))))
        for start in range(0, len(self), step):
            copied[start : start + step] = self[start : start + step]
        return copied

    def _read(self, first: int, count: int) -> NDArray[Any]:
        """Return successive rows of the file."""
        block = np.empty((count, *self.stored), self.dtype)
        rest = block.reshape(-1).view(np.uint8).data
        with self.lock:
            self.file.seek(self.offset + first * prod(self.stored) * self.dtype.itemsize)
            while rest:
                got = self.file.readinto(rest)
                if not got:
                    raise self._truncated()
                rest = rest[got:]
        return block

    def _truncated(self) -> BadImage:
        return BadImage(f"{self.name}: it is truncated", lasting=False)


class _OpenFile(io.FileIO):
    """A file that is closed without a warning when nothing refers to it anymore."""

    def __del__(self) -> None:
        self.close()


def open_npy(path: str) -> FileRows | NDArray[Any]:
    """Open the array in an .npy file; one in Fortran order, whose rows are scattered, is copied to memory."""
    with open(path, "rb") as file:
        header = read_npy_header(file)
    require_plain(header)
    if not header.fortran:
        return FileRows(path, header.dtype, header.shape, header.offset)
    columns = FileRows(path, header.dtype, header.shape[::-1], header.offset)
    if not fits_in_memory(columns.nbytes):
        size = f"{printable(path)} is in Fortran order, and its {columns.nbytes / 1e9:,.1f} GB do not fit into memory"
        raise UserError(f"source: {size}; save np.ascontiguousarray(array) instead")
    return columns.in_memory().T


def read_npy_header(file: IO[bytes]) -> Header:
    """Return the header of an array in the .npy format; raise ``ValueError`` if it is damaged."""
    start = io.BytesIO(file.read(LONGEST_HEADER))  # numpy would read as much as the file claims
    version = np.lib.format.read_magic(start)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(start)
    if not dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"its header claims values of {dtype.itemsize} bytes in shape {shape}")
    return Header(shape, fortran, dtype, start.tell())


def require_plain(header: Header) -> None:
    """Raise ``ValueError`` if an array consists of Python objects."""
    if header.dtype.hasobject:
        raise ValueError("it contains pickled Python objects, which are never loaded")


def fits_in_memory(size: int) -> bool:
    """Return whether an array of this many bytes may be kept in memory, by each process on this machine."""
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")  # set by torchrun
    return size * int(processes) <= MEMORY_SHARE * _memory()


def _memory() -> int:
    """Return the memory of this machine, or of this container, in bytes."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return UNKNOWN_MEMORY
    with suppress(OSError, ValueError):  # without a limit, the file says "max"
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total
