"""Images in an .npy or .npz array → uint8; nothing is ever unpickled.

Shapes are (N, H, W), (N, H, W, 1), (N, H, W, 3), (N, 1, H, W) or (N, 3, H, W); if the channel axis is ambiguous, the
last one is used. Values are interpreted by their range over the whole array, never per image:

- bool becomes 0 and 255;
- integers from 0 to 1, 16 or 255 are scaled to 0 to 255; of 10, 12, 14 or 16 bits, the upper 8 are kept;
- floats from 0 to 1, 16 or 255 are scaled to 0 to 255 and rounded.

The range 0 to 16 is that of scikit-learn's digits, and 12 bits are common in microscope cameras. New arrays are
interpreted like those that a run was trained on (``values_of``), so that a few dark images are not brightened.
"""

import os
import zipfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from secu.base.errors import UserError, shortened
from secu.base.names import printable
from secu.data.decoding.decode import Raw
from secu.data.rows import BLOCK, FileRows, Header, open_npy, read_npy_header, require_plain
from secu.data.sources.archives import require_ratio
from secu.data.sources.base import Shape, Source, file_stamp
from secu.data.text import reading

SLACK = 0.05  # tolerance for floats from 0 to 1, since resizing may overshoot
ROUNDING = 1e-4  # tolerance for other floats, relative to their range
HIGHEST = {"float": (1, 16, 255), "int": (1, 16, 255, 1023, 4095, 16383, 65535)}  # maxima of the known ranges
USUAL = ("float 0..1", "float 0..255", "int 0..255")  # common encodings of ordinary 8-bit images
SHAPES = "(N, H, W), (N, H, W, 1), (N, H, W, 3), (N, 1, H, W) or (N, 3, H, W)"
IMAGE_KEYS = ("images", "image", "x", "data", "pixels", "arr_0")  # preferred keys of an .npz with several image arrays

Rows = NDArray[Any] | FileRows


class ArraySource(Source):
    """Images in one array, in memory or in a file.

    Args:
        name: Name used in messages.
        array: The images, in one of the shapes and ranges above.
        place: Path to reopen the array from; empty for an array in memory.
        stamp: String that changes when the array changes; empty in memory, where nothing is cached.
        more: Other arguments of ``Source``: columns, targets, class names.

    Raises:
        UserError: The array does not contain images.
    """

    has_folders = False

    def __init__(self, name: str, array: Rows, *, place: str = "", stamp: str = "", **more: Any) -> None:
        self.array = _channels_last(printable(name), array)
        super().__init__(name, place, map(str, range(len(array))), stamps=[stamp], **more)
        self.range = (0.0, 0.0)
        self.own_values: str | None = None
        if len(array) and array.dtype.kind != "b":
            self.range = _range(self.name, array)
            self.own_values = _values(self.name, array.dtype, *self.range)

    def values_of(self, wanted: str | None, *, new: bool = False) -> str | None:
        """Return how values are interpreted, given the interpretation of a run; it overrides the array's own range.

        If the run used floats and this array has integers, or vice versa, each is interpreted by its own range,
        provided that both ranges are common ones.
        """
        own = self.own_values
        if not wanted or not own or wanted == own:
            return own
        kind, highest = _parts(wanted)
        own_kind, own_highest = _parts(own)
        if kind != own_kind and wanted in USUAL:
            return f"{own_kind} 0..255" if own_highest == 16 else own  # 16: just a few dark images
        # A smaller range may be due to dark images, but floats up to 1 were probably scaled differently.
        low, high = self.range
        dark = own_highest <= highest and (own_kind == "int" or high > 1 + SLACK or high <= 0)
        if not dark:
            found = f"{self.name} contains values from {low:g} to {high:g}, which are taken as {own}"
            raise UserError(f"source: {found}; the run was trained on {wanted}: scale them to the same range")
        return wanted

    def note(self, values: str | None) -> str:
        """Return one line on how values are interpreted; empty for ordinary 8-bit values."""
        if self.array.dtype.kind == "b":
            return "booleans are read as 255 (true) and 0 (false)"
        if not values or (self.array.dtype == np.uint8 and values == self.own_values == "int 0..255"):
            return ""
        return f"values from {self.range[0]:g} to {self.range[1]:g} are interpreted as {values}"

    def read(self, i: int, values: str | None = None) -> Raw:
        """Return the pixels of image ``i``: uint8 (H, W) or (H, W, 3)."""
        row = self._levels(np.asarray(self.array[i]), values)
        return np.ascontiguousarray(row[..., 0] if row.shape[-1] == 1 and row.ndim == 3 else row)

    def ready(self, rows: slice, shape: Shape, values: str | None = None) -> NDArray[np.uint8] | None:
        """Return a batch of images that already have this shape; None if they have another."""
        height, width, *depth = self.array.shape[1:]
        if ((*depth, 1)[0], height, width) != shape:
            return None
        levels = self._levels(np.asarray(self.array[rows]), values)
        first = np.moveaxis(levels, -1, 1) if depth else levels[:, None]
        return np.array(first, order="C")  # a copy: files are read-only

    def _levels(self, numbers: NDArray[Any], values: str | None) -> NDArray[np.uint8]:
        """Convert values to levels from 0 to 255."""
        factor = _factor(values or self.own_values)
        if numbers.dtype == np.uint8 and factor == 1:
            return numbers
        scaled = numbers.astype(np.float32) * np.float32(factor)
        rounded = np.floor(scaled) if factor < 1 else np.rint(scaled)
        levels: NDArray[np.uint8] = np.clip(rounded, 0, 255).astype(np.uint8)
        return levels


def open_array(path: str) -> ArraySource:
    """Open an .npy or .npz file; other arrays of an .npz with one value per image become columns."""
    with reading(printable(path)):
        array, columns = _load_npz(path) if path.lower().endswith(".npz") else (open_npy(path), {})
    return ArraySource(path, array, place=os.path.abspath(path), stamp=file_stamp(path), columns=columns)


def _load_npz(path: str) -> tuple[Rows, dict[str, Any]]:
    """Return the images in an .npz file, and other arrays with one value per image."""
    headers = {}
    with zipfile.ZipFile(path) as file:
        for name in file.namelist():
            if name.endswith(".npy"):
                with file.open(name) as member:
                    headers[name.removesuffix(".npy")] = read_npy_header(member)
        key = _image_key(path, headers)
        count = headers[key].shape[:1]
        alike = [name for name, header in headers.items() if header.shape == count and not header.dtype.hasobject]
        require_ratio(sum(headers[name].nbytes for name in (key, *alike)), os.path.getsize(path))
        images = _read_npz(file, key, headers[key])
        return images, {name: _read_npz(file, name, headers[name]).tolist() for name in alike}


def _image_key(path: str, headers: dict[str, Header]) -> str:
    """Return the key of the images in an .npz file."""
    images = [key for key, header in headers.items() if len(header.shape) in (3, 4)]
    if len(images) > 1:
        images = [key for name in IMAGE_KEYS for key in images if key.lower() == name][:1] or images
    if len(images) == 1:
        return images[0]
    what = f"several arrays of images ({', '.join(images)}): name one of them 'images'" if images else "no images"
    held = shortened(", ".join(f"{key} {header.shape}" for key, header in headers.items()))
    raise UserError(
        f"source: {printable(path)} contains {printable(shortened(what))}; it has {printable(held) or 'nothing'}"
    )


def _read_npz(file: zipfile.ZipFile, key: str, header: Header) -> NDArray[Any]:
    require_plain(header)
    if header.offset + header.nbytes > file.getinfo(f"{key}.npy").file_size:
        raise ValueError(f"the array {key} is truncated")
    with file.open(f"{key}.npy") as member:
        array: NDArray[Any] = np.lib.format.read_array(member)  # in pieces, so that it is in memory only once
    return array


def _channels_last(name: str, array: Rows) -> Rows:
    """Return a view (N, H, W) or (N, H, W, C)."""
    shape = array.shape
    if array.ndim == 3 and shape[-1] == 3 and shape[1] > 3:
        raise UserError(f"source: {name} has shape {shape}, which looks like one color image; valid: {SHAPES}")
    if 0 not in shape[1:]:
        if array.ndim == 3 or (array.ndim == 4 and shape[-1] in (1, 3)):
            return array
        if array.ndim == 4 and shape[1] in (1, 3):
            return array.transpose(0, 2, 3, 1)
    raise UserError(f"source: {name} has shape {shape}; valid: {SHAPES}")


def _values(name: str, dtype: np.dtype[Any], low: float, high: float) -> str:
    """Return how values in this range are interpreted."""
    kind = "float" if dtype.kind == "f" else "int"
    for highest in HIGHEST[kind]:
        slack = 0 if kind == "int" else SLACK if highest == 1 else ROUNDING * highest
        if low >= -slack and high <= highest + slack:
            return f"{kind} 0..{highest}"
    *ranges, last = (f"0 to {highest}" for highest in HIGHEST[kind])
    raise UserError(
        f"source: {name} contains {dtype} values from {low:g} to {high:g}; valid: {', '.join(ranges)} or {last}"
    )


def _parts(values: str) -> tuple[str, int]:
    """Return the kind of number and the maximum."""
    kind, _, highest = values.partition(" 0..")
    return kind, int(highest)


def _factor(values: str | None) -> float:
    """Return the factor that scales values to levels up to 255; None means booleans."""
    highest = _parts(values)[1] if values else 1
    return 255 / highest if highest <= 255 else 256 / (highest + 1)


def _range(name: str, array: Rows) -> tuple[float, float]:
    """Return the minimum and maximum of an array that may be larger than memory."""
    if array.dtype.kind not in "uif":
        raise UserError(f"source: {name} contains values of type {array.dtype}; valid: uint8, other integers, floats")
    low = np.inf
    high = -np.inf
    broken: list[int] = []
    step = max(1, BLOCK // (array.nbytes // len(array)))
    for start in range(0, len(array), step):
        block = np.asarray(array[start : start + step])
        ends = [float(block.min()), float(block.max())]
        low = min(low, ends[0])
        high = max(high, ends[1])
        if array.dtype == np.uint8 and high > 16:
            return 0.0, 255.0  # no need to read the rest, which may be many gigabytes
        if not np.isfinite(ends).all():
            broken += (start + np.flatnonzero(~np.isfinite(block).reshape(len(block), -1).all(1))).tolist()
    if broken:
        held = f"NaN or infinite values in {len(broken)} of {len(array)} images, first in {broken[0]}"
        raise UserError(f"source: {name} has {held}")
    return low, high
