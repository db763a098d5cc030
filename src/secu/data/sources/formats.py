"""Readers for the official file formats of CIFAR and STL-10: one file → pixels and targets.

The pixels of STL-10, which are 2.7 GB, stay in their file until they are loaded.
"""

import codecs
import pickle
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from secu.base.errors import UserError
from secu.data.rows import FileRows

CIFAR_SHAPE = (3, 32, 32)


class Part(NamedTuple):
    """Content of one file: pixels uint8 (N, C, H, W) and targets int64 (N,)."""

    pixels: NDArray[np.uint8] | FileRows
    targets: NDArray[np.int64] | None


def cifar_binary(path: Path, label_bytes: int, column: int, classes: int) -> Part:
    """Read a file of records: ``label_bytes`` labels (the one at ``column`` is used), then red, green and blue."""
    records = _records(path, (label_bytes + 3072,)).in_memory()
    targets = _checked(path, records[:, column], 0, classes)
    return Part(records[:, label_bytes:].reshape(-1, *CIFAR_SHAPE), targets)


def cifar_pickle(path: Path, key: str, classes: int) -> Part:
    """Read a file of the "python version": a pickled mapping with ``data`` and one list of labels per ``key``."""
    content = _unpickle(path)
    data = content.get("data")
    labels = content.get(key)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise UserError(f"{path}: data must be an array of bytes of shape (n, 3072), got {_kind(data)}")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise UserError(f"{path}: {key} must be a list of whole numbers, got {_kind(labels)}")
    if len(labels) != len(data) or not labels:
        raise UserError(f"{path}: must hold one or more images and as many labels, got {len(data)} and {len(labels)}")
    return Part(data.reshape(-1, *CIFAR_SHAPE), _checked(path, np.array(labels), 0, classes))


def stl10_binary(pixels: Path, labels: Path | None, classes: int) -> Part:
    """Read ``*_X.bin``, whose images are stored column by column, and its ``*_y.bin`` of labels from 1."""
    images = _records(pixels, (3, 96, 96)).transpose(0, 1, 3, 2)
    if labels is None:
        return Part(images, None)
    targets = _checked(labels, _records(labels, (1,)).in_memory()[:, 0], 1, classes)
    if len(targets) != len(images):
        raise UserError(
            f"{labels}: must hold {len(images)} labels, as many as {pixels.name} has images, got {len(targets)}"
        )
    return Part(images, targets)


def _records(path: Path, shape: tuple[int, ...]) -> FileRows:
    """Open a file of records of bytes in this shape."""
    size = prod(shape)
    try:
        length = path.stat().st_size
        if length and length % size == 0:
            return FileRows(path, np.uint8, (length // size, *shape), what="data")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    raise UserError(f"{path}: {length} bytes are not one or more whole records of {size} bytes; is the file damaged?")


def _checked(path: Path, labels: NDArray[Any], first: int, classes: int) -> NDArray[np.int64]:
    """Convert labels ``first`` to ``first + classes - 1`` to targets from 0; raise if a label is out of range."""
    wrong = (labels < first) | (labels >= first + classes)
    if wrong.any():
        image = int(wrong.argmax())
        raise UserError(f"{path}: image {image} has label {labels[image]}, valid: {first} to {first + classes - 1}")
    return labels.astype(np.int64) - first


def _kind(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return "nothing" if value is None else type(value).__name__


_RECONSTRUCT = np.empty(0).__reduce__()[0]  # its module differs between versions of numpy; the function is the same
_ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,  # how Python 3 writes bytes in old protocols
}


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler restricted to arrays and plain values, so that a malicious file cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the allowed constructors; raise for everything else."""
        if (module, name) not in _ADMITTED:
            raise UserError(f"refused: its pickle requires {module}.{name}, which is not allowed")
        return _ADMITTED[module, name]


def _unpickle(path: Path) -> dict[str, Any]:
    """Read a mapping pickled by Python 2, with keys decoded as text."""
    try:
        with path.open("rb") as file:
            content = _ArrayUnpickler(file, encoding="bytes").load()
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except Exception as error:  # a damaged pickle may raise any exception
        raise UserError(f"{path}: is not a valid pickle: {type(error).__name__}: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a mapping, got {_kind(content)}")
    return {key.decode(errors="replace") if isinstance(key, bytes) else str(key): content[key] for key in content}
