"""Decode an image of any kind to a square of uint8; no file content may crash a run.

The rules, in order:

- Formats are JPEG, PNG, WebP, BMP, TIFF, GIF, PPM, and AVIF if pillow supports it. They are recognized by content, not
  by file name. If there are several frames or pages, the first one is used.
- An image with more than ``data.max_pixels`` is rejected before it is decoded. A JPEG that is not progressive may have
  eight times as many, because it is decoded at a half, a quarter or an eighth of its size if that is sufficient.
- 16 bits per channel are reduced to 8 by dropping the lower 8, so that images of one set stay comparable. If ``values``
  states that files use only 10, 12 or 14 bits, the lower 2, 4 or 6 are dropped.
- 32-bit integers and floats are interpreted by their range: 0 to 1 (floats), 0 to 255 or 0 to 65,535; anything else is
  stretched from the minimum to the maximum.
- Palettes and CMYK are converted to RGB (color profiles are not applied), and transparent parts become white.
- The central square, or each requested part of the whole image, is scaled to the requested size (bilinear,
  antialiased), then rotated according to EXIF.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import ceil, floor
from typing import cast

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile

from secu.data.decoding.cutting import Choose, center, enough, squares
from secu.data.decoding.image_files import BadImage, as_bad_image, opened

MAX_PIXELS = 100_000_000  # default of data.max_pixels; decoding takes up to 16 bytes per pixel (WebP), so 1.6 GB
JPEG_FACTOR = 8  # a JPEG may have this many times as many pixels
LARGE = 25_000_000  # pixels; larger images are decoded one at a time, regardless of the number of threads
# Ranges of 16-bit files, by their name in data.values → the value that becomes white.
DEEP = {f"int 0..{highest}": highest for highest in (1023, 4095, 16383, 65_535)}

Raw = str | bytes | NDArray[np.uint8]  # an image as read from a source: its path, its bytes or its pixels

_one_large: AbstractContextManager[object] = threading.Lock()
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def share_turns(lock: AbstractContextManager[object]) -> None:
    """Let this process take turns with others at decoding large images."""
    global _one_large
    _one_large = lock


@contextmanager
def quiet() -> Iterator[None]:
    """Silence pillow's warnings about odd metadata, which would disrupt a progress bar."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


def decode(
    raw: Raw, size: int, channels: int, values: str | None = None, max_pixels: int = MAX_PIXELS
) -> NDArray[np.uint8]:
    """Return an image as (channels, size, size), with its shorter side scaled to ``size`` and center-cropped.

    Args:
        raw: A path, the bytes of a file, or pixels (H, W) or (H, W, 3).
        size: Side of the square.
        channels: 1 for gray, 3 for color.
        values: Range of 16-bit files, a key of ``DEEP``; any other value means all 16 bits.
        max_pixels: Number of pixels above which a file is rejected.

    Raises:
        BadImage: The image cannot be read.
    """
    return _decode(raw, None, size, channels, values, max_pixels)[0]


def decode_crops(
    raw: Raw, choose: Choose, size: int, channels: int, values: str | None = None, max_pixels: int = MAX_PIXELS
) -> NDArray[np.uint8]:
    """Return parts of the whole image, each scaled to a square, as (parts, channels, size, size).

    They are what ``Image.crop(box).resize(size)`` returns. A JPEG that is much larger than necessary is decoded at a
    half, a quarter or an eighth of its size. ``choose`` is called with width and height of the stored image, before it
    is rotated, and returns the boxes; the other arguments are those of ``decode``.
    """
    return np.stack(_decode(raw, choose, size, channels, values, max_pixels))


def _decode(
    raw: Raw, choose: Choose | None, size: int, channels: int, values: str | None, max_pixels: int
) -> list[NDArray[np.uint8]]:
    """Return the central square of an image, or the chosen parts of it."""
    if isinstance(raw, np.ndarray):
        image = Image.fromarray(raw)
        boxes = choose(*image.size) if choose else None
        return [_as_array(square, channels) for square in squares(image, boxes, image.size, size)]
    with as_bad_image(), opened(raw) as file:
        stored = file.size
        boxes = choose(*stored) if choose else None
        _draft(file, enough(boxes, stored, size), channels, max_pixels)
        with _one_large if file.width * file.height > LARGE else nullcontext():
            file.load()
            parts = squares(_plain(file, whole=boxes is not None), boxes, stored, size)
            if parts[0].mode in ("I", "F"):
                parts = [_to_8_bits(part, file, values) for part in parts]
        return [_as_array(_upright(part, file), channels) for part in parts]


def is_16_bit(image: Image.Image) -> bool:
    """Return whether an image has a single 16-bit channel."""
    return image.mode.startswith("I;16")


def _draft(image: ImageFile.ImageFile, least: tuple[int, int], channels: int, max_pixels: int) -> None:
    """Prepare a JPEG to be decoded at a half, a quarter or an eighth, never below ``least``; reject what is too large.

    Color is left out if it is not needed. All coefficients of a progressive JPEG are in memory at once, so its own size
    counts.
    """
    require_size(image, max_pixels)
    if image.format in ("JPEG", "MPO"):
        image.draft("L" if channels == 1 else None, least)
        require_size(image, max_pixels, drafted=True)


def require_size(image: Image.Image, max_pixels: int, *, drafted: bool = False) -> None:
    """Raise ``BadImage`` if an image has too many pixels to be decoded: as stored, or as drafted."""
    reducible = image.format in ("JPEG", "MPO") and not image.info.get("progressive") and not drafted
    factor = JPEG_FACTOR if reducible else 1
    pixels = image.width * image.height
    limit = factor * max_pixels
    if pixels > limit:
        setting = "data.max_pixels" if factor == 1 else f"{factor} times data.max_pixels"
        raise BadImage(f"{image.width} x {image.height} are {pixels:,} pixels; the limit is {limit:,} ({setting})")


def _plain(image: Image.Image, *, whole: bool = False) -> Image.Image:
    """Return an image, or its central part, in a mode that can be scaled: L, RGB, RGBA, I or F."""
    side = min(image.size)
    if max(image.size) > 3 * side and not whole:  # crop before converting; the margin is for the resampling filter
        left, top, right, bottom = center(image)
        across, down = (side, 0) if image.width > side else (0, side)
        image = image.crop((floor(left) - across, floor(top) - down, ceil(right) + across, ceil(bottom) + down))
    if image.mode in ("I", "F"):
        return image
    if is_16_bit(image):
        return image.convert("I")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        mode = "RGBA"
    else:
        mode = "L" if image.mode in ("1", "L") else "RGB"
    return image if image.mode == mode else image.convert(mode)  # no second copy of a large image


def _to_8_bits(square: Image.Image, image: Image.Image, values: str | None) -> Image.Image:
    """Scale the values of the resized square by the range of the original image."""
    numbers = np.asarray(square)
    if is_16_bit(image):
        factor = 256 / (DEEP.get(values or "", 65_535) + 1)
        return Image.fromarray(np.clip(np.floor(numbers * factor), 0, 255).astype(np.uint8))
    low, high = cast("tuple[float, float]", image.getextrema())
    if not np.isfinite([low, high, numbers.min(), numbers.max()]).all():
        raise BadImage("NaN or infinite values")
    if low < 0 or high > 65_535:
        scaled = (numbers.astype(float) - low) * (255 / (high - low) if high > low else 0)
    elif high > 255:
        scaled = np.floor(numbers / 256)
    elif high <= 1 and numbers.dtype.kind == "f":
        scaled = numbers * 255
    else:
        scaled = numbers
    return Image.fromarray(np.clip(np.rint(scaled), 0, 255).astype(np.uint8))


def _upright(square: Image.Image, image: Image.Image) -> Image.Image:
    """Rotate the resized square according to EXIF, which is cheaper than rotating the original image."""
    try:
        turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # ignore a damaged EXIF block: the pixels may be fine
        turn = None
    return square if turn is None else square.transpose(turn)


def _as_array(image: Image.Image, channels: int) -> NDArray[np.uint8]:
    pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    return np.ascontiguousarray(pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1))
