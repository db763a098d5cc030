"""An .npy or .npz array of images → rows of uint8; nothing is ever unpickled.

Shapes are (N, H, W), (N, H, W, 1), (N, H, W, 3), (N, 1, H, W) or (N, 3, H, W); where both ends could be the channels,
the last is. Values are understood by their range over the whole array, never image by image:

- bool as 0 and 255;
- integers: 0 to 1, 0 to 16 and 0 to 255 spread over 0 to 255; of 10, 12, 14 or 16 bits the upper 8;
- floats: 0 to 1, 0 to 16 and 0 to 255 likewise, rounded.

0 to 16 are scikit-learn's digits, 12 bits what cameras of microscopes give.

New arrays are understood as those that a run was trained on (``read_as``), so that a few dark images are no other ones.
"""

import os
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from secu.data.own.decode import Raw
from secu.data.own.names import one_line, printable
from secu.data.own.source import Source, file_stamp
from secu.errors import UserError

IMAGE_KEYS = ("images", "image", "x", "data", "pixels", "arr_0")  # of an .npz that holds several such arrays
SLACK = 0.05  # by which floats from 0 to 1 may pass the ends, as they do where an image was scaled
BLOCK = 64 << 20  # bytes looked at in one go
ROUNDING = 1e-4  # of their range: the same for other floats
HIGHEST = {"float": (1, 16, 255), "int": (1, 16, 255, 1023, 4095, 16383, 65535)}  # of the ranges that are understood
USUAL = ("float 0..1", "float 0..255", "int 0..255")  # the same images may be any of these
SHAPES = "(N, H, W), (N, H, W, 1), (N, H, W, 3), (N, 1, H, W) or (N, 3, H, W)"


class ArraySource(Source):
    """Images in one array; it may be mapped from a file.

    Args:
        name: What messages call it.
        array: The images, in one of the shapes and ranges above.
        place: Where it lies; empty for an array in memory.
        stamp: What changes when the array changes; none is needed in memory, where nothing is cached.
        columns: What else is known of each image.

    Raises:
        UserError: The array does not hold images.
    """

    has_folders = False

    def __init__(
        self, name: str, array: NDArray[Any], *, place: str = "", stamp: str = "", columns: dict[str, Any] | None = None
    ) -> None:
        name = printable(name)
        self.array = _channels_last(name, array)
        self.stamp, self.factor, self.low, self.high = stamp, 1.0, 0.0, 0.0
        super().__init__(name, place, [str(i) for i in range(len(array))], columns=columns)
        if array.dtype.kind == "b":
            self.factor, self.note = 255.0, "true and false are taken as 255 and 0"
        elif len(array):
            self.low, self.high = _range(name, array)
            self._understand(_values(name, array.dtype, self.low, self.high))
            if array.dtype == np.uint8 and self.factor == 1:
                self.note = ""  # what everybody expects

    def read_as(self, values: str | None) -> None:
        """Understand values as a run understood those it was trained on, whatever their own range suggests.

        Where a run had floats and these are integers, or the other way round, each is read by its own range, if both
        ranges are usual ones.

        Raises:
            UserError: They cannot be on that scale.
        """
        if not values or not self.values or values == self.values:
            return
        (kind, highest), (own_kind, own_highest) = _parts(values), _parts(self.values)
        if kind != own_kind and values in USUAL:
            if own_highest == 16:  # a few dark images
                self._understand(f"{own_kind} 0..255")
            return
        # A few dark images have a smaller range; but floats up to 1 were rather scaled in another way.
        dark = own_highest <= highest and (own_kind == "int" or self.high > 1 + SLACK or self.high <= 0)
        if not dark:
            found = f"{self.name} holds values from {self.low:g} to {self.high:g}, which are taken as {self.values}"
            raise UserError(f"source: {found}; the run was trained on {values}: scale them alike")
        self._understand(values)

    def read_new_as(self, values: str | None) -> None:
        """The same, as the range of all values is known."""
        self.read_as(values)

    def _understand(self, values: str) -> None:
        highest = _parts(values)[1]
        self.values, self.factor = values, 255 / highest if highest <= 255 else 256 / (highest + 1)
        self.note = f"values from {self.low:g} to {self.high:g} are taken as {values}"

    def read(self, i: int) -> Raw:
        """Return the pixels of image ``i``: uint8 (H, W) or (H, W, 3)."""
        row = self._levels(np.asarray(self.array[i]))
        return np.ascontiguousarray(row[..., 0] if row.shape[-1] == 1 and row.ndim == 3 else row)

    def ready(self, rows: slice, size: int, channels: int) -> NDArray[np.uint8] | None:
        """Return images of this very size and number of channels all at once; None if they are of another."""
        height, width, *depth = self.array.shape[1:]
        if (height, width, depth or [1]) != (size, size, [channels]):
            return None
        levels = self._levels(np.asarray(self.array[rows]))
        return np.array(
            np.moveaxis(levels, -1, 1) if depth else levels[:, None], order="C"
        )  # a copy: files are read-only

    def _levels(self, values: NDArray[Any]) -> NDArray[np.uint8]:
        """Return values as levels from 0 to 255."""
        if values.dtype == np.uint8 and self.factor == 1:
            return values
        scaled = values.astype(np.float32) * np.float32(self.factor)
        levels: NDArray[np.uint8] = np.clip(np.floor(scaled) if self.factor < 1 else np.rint(scaled), 0, 255).astype(
            np.uint8
        )
        return levels

    def stamps(self) -> Iterator[str]:
        """Return size and time of the array's file."""
        yield self.stamp


def open_array(path: str) -> ArraySource:
    """Open an .npy or .npz file; other arrays of an .npz with one value an image become columns.

    Raises:
        UserError: It cannot be read, holds Python objects, or no images.
    """
    columns: dict[str, Any] = {}
    try:
        if path.lower().endswith(".npz"):
            array, columns = _load_npz(path)
        else:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"source: cannot read {printable(path)}: {_why(error)}") from None
    return ArraySource(path, array, place=os.path.abspath(path), stamp=file_stamp(path), columns=columns)


def _why(error: Exception) -> str:
    text = one_line(error)
    objects = "pickle" in text.lower() or "objects" in text  # as numpy puts it
    return "it holds pickled Python objects, which are never loaded" if objects else text


def _load_npz(path: str) -> tuple[NDArray[Any], dict[str, Any]]:
    shapes = _npz_shapes(path)
    images = [key for key, (shape, _) in shapes.items() if len(shape) in (3, 4)]
    if len(images) > 1:
        images = [key for name in IMAGE_KEYS for key in images if key.lower() == name][:1] or images
    if len(images) != 1:
        what = f"several arrays of images ({', '.join(images)}): name one of them 'images'" if images else "no images"
        held = ", ".join(f"{key} {shape}" for key, (shape, _) in shapes.items())
        raise UserError(f"source: {printable(path)} holds {printable(what)}; it has {printable(held) or 'nothing'}")
    with np.load(path, allow_pickle=False) as file:
        array = file[images[0]]
        alike = [key for key, (shape, kind) in shapes.items() if shape == array.shape[:1] and not kind.hasobject]
        return array, {key: file[key].tolist() for key in alike}


def _npz_shapes(path: str) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return shape and type of every array of an .npz, from their headers."""
    shapes = {}
    with zipfile.ZipFile(path) as file:
        for name in file.namelist():
            if not name.endswith(".npy"):
                continue
            with file.open(name) as member:
                version = np.lib.format.read_magic(member)
                read = np.lib.format.read_array_header_1_0
                shape, _, kind = (read if version == (1, 0) else np.lib.format.read_array_header_2_0)(member)
                shapes[name.removesuffix(".npy")] = (shape, kind)
    return shapes


def _channels_last(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Return a view (N, H, W) or (N, H, W, C)."""
    shape = array.shape
    wrong = UserError(f"source: {name} has shape {shape}; valid: {SHAPES}")
    if array.ndim not in (3, 4) or 0 in shape[1:]:
        raise wrong
    if array.ndim == 3:
        if shape[-1] == 3 and shape[1] > 3:
            raise UserError(f"source: {name} has shape {shape}, which looks like one colour image; valid: {SHAPES}")
        return array
    if shape[-1] in (1, 3):
        return array
    if shape[1] in (1, 3):
        return np.moveaxis(array, 1, -1)
    raise wrong


def _values(name: str, dtype: np.dtype[Any], low: float, high: float) -> str:
    """Return how values of this range are understood."""
    kind = "float" if dtype.kind == "f" else "int"
    for highest in HIGHEST[kind]:
        slack = 0 if kind == "int" else SLACK if highest == 1 else ROUNDING * highest
        if low >= -slack and high <= highest + slack:
            return f"{kind} 0..{highest}"
    *ranges, last = (f"0 to {highest}" for highest in HIGHEST[kind])
    raise UserError(
        f"source: {name} holds {dtype} values from {low:g} to {high:g}; valid: {', '.join(ranges)} or {last}"
    )


def _parts(values: str) -> tuple[str, int]:
    """Return the kind of number and the highest one."""
    kind, _, highest = values.partition(" 0..")
    return kind, int(highest)


def _blocks(array: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Return pieces of an array that may be larger than memory, each with the number of its first image."""
    step = max(1, BLOCK // max(1, array[0].nbytes)) if len(array) else 1
    for start in range(0, len(array), step):
        yield start, np.asarray(array[start : start + step])


def _range(name: str, array: NDArray[Any]) -> tuple[float, float]:
    """Return the lowest and highest value."""
    if array.dtype.kind not in "uif":
        raise UserError(f"source: {name} holds values of type {array.dtype}; valid: uint8, other integers, floats")
    low, high, broken, first = np.inf, -np.inf, 0, -1
    for start, block in _blocks(array):
        lowest, highest = float(block.min()), float(block.max())
        low, high = min(low, lowest), max(high, highest)
        if array.dtype == np.uint8 and high > 16:
            return 0.0, 255.0  # no need to look at more, which may be many gigabytes
        if not np.isfinite([lowest, highest]).all():
            rows = np.flatnonzero(~np.isfinite(block).reshape(len(block), -1).all(1))
            first = start + int(rows[0]) if first < 0 else first
            broken += len(rows)
    if broken:
        raise UserError(
            f"source: {name} has NaN or infinite values in {broken} of {len(array)} images, first in {first}"
        )
    return low, high
