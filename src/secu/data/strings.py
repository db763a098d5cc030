"""Millions of strings in little memory: one buffer of UTF-8 instead of one Python object per string."""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

_LONE = "surrogatepass"  # file names that are not UTF-8 contain lone surrogates


class Names(Sequence[str]):
    """An immutable sequence of strings; a string of length L takes L + 8 bytes, against 57 + L in a list.

    Args:
        data: All strings, one after the other.
        ends: The end of each string in ``data``, in bytes (N,).
    """

    def __init__(self, data: bytes, ends: NDArray[np.int64]) -> None:
        self.data = data
        self.ends = ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Names":
        """Pack strings, which are consumed one at a time."""
        data = bytearray()
        ends: list[int] = []
        for text in texts:
            data += text.encode("utf-8", _LONE)
            ends.append(len(data))
        return cls(bytes(data), np.array(ends, np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> "Names": ...
    def __getitem__(self, i: int | slice) -> "str | Names":
        if isinstance(i, slice):
            return Names.of(self[row] for row in range(*i.indices(len(self))))
        row = range(len(self))[i]  # raises IndexError, and counts from the end
        start = int(self.ends[row - 1]) if row else 0
        return self.data[start : int(self.ends[row])].decode("utf-8", _LONE)

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in self.ends:
            yield self.data[start:end].decode("utf-8", _LONE)
            start = end

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Names):
            return self.data == other.data and np.array_equal(self.ends, other.ends)
        return list(self) == list(other) if isinstance(other, tuple | list) else NotImplemented


class PathsBelow(Sequence[str]):
    """The path of each id below a folder, joined when it is needed: a million paths would take memory."""

    def __init__(self, top: str, ids: Sequence[str]) -> None:
        self.top = top
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> str:  # type: ignore[override]
        return os.path.join(self.top, *self.ids[i].split("/"))


def pick(column: Sequence[Any], rows: Sequence[int]) -> Sequence[Any]:
    """Return some rows of a column: the column itself if these are all of them, packed if it is packed."""
    if isinstance(rows, range) and rows == range(len(column)):
        return column
    if isinstance(column, Names):
        return Names.of(column[i] for i in rows)
    return [column[i] for i in rows]


def picked_ids(ids: Sequence[str], rows: Sequence[int]) -> Sequence[str]:
    """Return some ids, which are immutable: packed, or a tuple."""
    chosen = pick(ids, rows)
    return chosen if isinstance(chosen, Names) else tuple(chosen)
