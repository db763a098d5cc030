"""What Python code has in memory, or names, as a source: arrays, tensors, PIL images, lists of paths."""

import io
import math
import os
from collections.abc import Sequence
from typing import Any

import sklearn
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from sklearn.utils import check_array

from secu.data.own import ArraySource, FileSource, Source, open_source
from secu.data.own.decode import Raw
from secu.data.own.names import one_line
from secu.errors import UserError

SHAPES = "(N, H, W), (N, H, W, 3), (N, 3, H, W), or (N, H·H) of grey squares"


def open_images(images: Any) -> Source:
    """Return what Python code has or names as a source: an array, a tensor, a list of paths or of PIL images, a path.

    Raises:
        UserError: That is none of these, or not of a valid shape or range.
    """
    if isinstance(images, str | os.PathLike):
        return open_source(os.fspath(images))
    if isinstance(images, torch.Tensor):
        images = (images.float() if images.is_floating_point() else images).detach().cpu().numpy()
    names = getattr(getattr(images, "dtype", None), "kind", "") in ("O", "U", "T")
    items = list(images) if names or isinstance(images, list | tuple) else []
    if items and all(isinstance(item, str | os.PathLike) for item in items):
        paths = [os.fspath(item) for item in items]
        return FileSource("X", "", paths, [os.path.expanduser(path) for path in paths])
    if items and all(isinstance(item, Image.Image) for item in items):
        return PictureSource(items)
    return ArraySource("X", _as_images(images))


def _as_images(values: Any) -> NDArray[Any]:
    """Return an array of three or four dimensions; rows of numbers are taken as grey squares."""
    try:
        with sklearn.config_context(assume_finite=True):  # the source checks that, and says where
            array: NDArray[Any] = check_array(values, allow_nd=True, ensure_2d=False, input_name="X")
    except ValueError as error:
        raise UserError(f"X: {one_line(str(error).splitlines()[0]).rstrip('.')}; valid: {SHAPES}") from None
    if array.ndim < 2:
        raise UserError(f"X: no images in shape {array.shape}. Reshape your data to {SHAPES}")
    side = math.isqrt(array.shape[1])
    if array.ndim == 2 and side**2 != array.shape[1]:
        raise UserError(f"X: {array.shape[1]} features are not a square of grey pixels; valid: {SHAPES}")
    return array.reshape(-1, side, side) if array.ndim == 2 else array


class PictureSource(Source):
    """PIL images in memory."""

    has_folders = False

    def __init__(self, pictures: Sequence[Image.Image]) -> None:
        super().__init__("X", "", [str(i) for i in range(len(pictures))])
        self.pictures = pictures

    def read(self, i: int) -> Raw:
        """Return image ``i`` as a file that loses nothing, so that it is decoded by the same rules as any other."""
        picture = ImageOps.exif_transpose(self.pictures[i])
        if picture.mode in ("P", "PA", "RGBa") or "transparency" in picture.info:
            picture = picture.convert("RGBA")
        elif picture.mode in ("HSV", "YCbCr"):
            picture = picture.convert("RGB")
        file = io.BytesIO()
        picture.save(file, "TIFF")
        return file.getvalue()

    def stamps(self) -> Sequence[str]:
        """Return nothing: what is in memory is never cached."""
        return ()
