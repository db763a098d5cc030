"""Sources for Python objects: arrays, tensors, PIL images, lists of paths."""

import io
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from secu.base.errors import UserError
from secu.data.decoding.decode import Raw
from secu.data.opening import open_source
from secu.data.sources.arrays import ArraySource
from secu.data.sources.base import FileSource, Source
from secu.data.sources.vectors import VectorSource
from secu.data.text import one_line

SHAPES = "(N, H, W), (N, H, W, 3), (N, 3, H, W), (N, D) of features, or (N, H·H) of uint8, which are gray squares"


def open_images(images: Any) -> Source:
    """Return a source for an array, a tensor, a list of paths or of PIL images, or a path.

    A matrix holds feature vectors, one per row, as everywhere in scikit-learn; one of uint8 holds gray squares.
    """
    if isinstance(images, str | os.PathLike):
        return open_source(os.fspath(images))
    if hasattr(images, "is_floating_point"):  # a tensor, without importing torch
        images = (images.float() if images.is_floating_point() else images).detach().cpu().numpy()
    names = getattr(getattr(images, "dtype", None), "kind", "") in ("O", "U", "T") and images.ndim > 0
    items = list(images) if names or isinstance(images, list | tuple) else []
    if items and all(isinstance(item, str | os.PathLike) for item in items):
        paths = [os.fspath(item) for item in items]
        return FileSource("X", "", paths, [os.path.expanduser(path) for path in paths])
    if items and all(isinstance(item, Image.Image) for item in items):
        return PictureSource(items)
    array = _as_array(images)
    if array.ndim > 2:
        return ArraySource("X", array)
    if array.dtype != np.uint8:
        return VectorSource("X", array if array.dtype.kind == "f" else array.astype(np.float32))
    side = math.isqrt(array.shape[1])
    if side**2 != array.shape[1]:
        raise UserError(f"X: rows of {array.shape[1]} bytes are not squares of gray pixels; valid: {SHAPES}")
    return ArraySource("X", array.reshape(-1, side, side))


def _as_array(values: Any) -> NDArray[Any]:
    """Return an array of at least two dimensions."""
    import sklearn  # slow to import
    from sklearn.utils import check_array

    try:
        with sklearn.config_context(assume_finite=True):  # the source checks this and reports the position
            array: NDArray[Any] = check_array(values, allow_nd=True, ensure_2d=False, input_name="X")
    except ValueError as error:
        raise UserError(f"X: {one_line(str(error).splitlines()[0]).rstrip('.')}; valid: {SHAPES}") from None
    except TypeError as error:  # as scikit-learn raises it
        raise TypeError(f"X: {one_line(error).rstrip('.')}; valid: {SHAPES}") from None
    if array.ndim < 2:
        raise UserError(f"X: no images in shape {array.shape}. Reshape your data to {SHAPES}")
    return array


class PictureSource(Source):
    """PIL images in memory."""

    has_folders = False

    def __init__(self, pictures: Sequence[Image.Image]) -> None:
        super().__init__("X", "", map(str, range(len(pictures))))
        self.pictures = pictures

    def read(self, i: int, values: str | None = None) -> Raw:
        """Return image ``i`` as the bytes of a lossless file, so that it is decoded like any other image."""
        picture = ImageOps.exif_transpose(self.pictures[i])
        if picture.mode in ("P", "PA", "RGBa") or "transparency" in picture.info:
            picture = picture.convert("RGBA")
        elif picture.mode in ("HSV", "YCbCr"):
            picture = picture.convert("RGB")
        file = io.BytesIO()
        picture.save(file, "TIFF")
        return file.getvalue()
