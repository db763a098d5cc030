"""One image, whatever its kind → a square of uint8; nothing that a file holds may stop the run.

The rules, in order:

- JPEG, PNG, WebP, BMP, TIFF, GIF, PPM (and AVIF where pillow reads it), told apart by content, not by name; of several
  frames or pages the first.
- Over ``MAX_PIXELS`` an image is refused before it is decoded, except that a JPEG is decoded at a half, a quarter or an
  eighth of its size where that suffices.
- 16 bits a channel become 8 by dropping the lower 8, so that pictures of one set stay comparable; where a source knows
  that its files use only 10, 12 or 14 of them (``highest``), the lower 2, 4 or 6.
- 32-bit integers and floats go by their range: 0 to 1 (floats), 0 to 255 or 0 to 65,535; anything else is stretched
  from lowest to highest.
- Palettes and CMYK become RGB (colour profiles are not applied), transparent parts white.
- The central square is scaled to the wanted size (bilinear, antialiased), then turned as EXIF says.
"""

import errno
import io
import os
import stat
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import ceil, floor
from typing import IO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile

from secu.data.own.names import one_line
from secu.errors import UserError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM", "AVIF")  # no others: some start programs (EPS)
MAX_PIXELS = 178_956_970  # where pillow itself refuses; 0.7 GB as RGB
MAX_BYTES = 2 << 30  # of a file: pillow reads some kinds whole
LARGE = 25_000_000  # pixels: such images are decoded one at a time, whatever the number of threads

Raw = str | bytes | NDArray[np.uint8]  # what a source reads of an image: its path, its bytes or its pixels

_one_large = threading.Lock()
# The fingerprint of a source knows of these, so they may be remembered; other errors of the system may pass.
_LASTING = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class BadImage(UserError):
    """An image that cannot be read.

    Attributes:
        reason: Why, in one line, without the image's name.
        lasting: Whether it will be as bad next time; False for a disk that failed or memory that was short.
    """

    def __init__(self, reason: str, lasting: bool = True) -> None:
        super().__init__(reason)
        self.reason, self.lasting = reason, lasting


class Header(NamedTuple):
    """What the head of an image says; width and height are as stored, before EXIF turns it."""

    width: int
    height: int
    grey: bool
    deep: bool = False  # 16 bits


@contextmanager
def as_bad_image() -> Iterator[None]:
    """Turn every exception into a ``BadImage``: pillow raises whatever a damaged file makes it stumble on."""
    try:
        yield
    except BadImage:
        raise
    except Exception as error:
        passing = isinstance(error, OSError) and error.errno is not None and error.errno not in _LASTING
        raise BadImage(one_line(error), lasting=not (passing or isinstance(error, MemoryError))) from None


def header(raw: Raw) -> Header:
    """Return an image's size and whether it is grey, without decoding it.

    Raises:
        BadImage: It cannot be read.
    """
    if isinstance(raw, np.ndarray):
        return Header(raw.shape[1], raw.shape[0], raw.ndim == 2)
    with as_bad_image(), _opened(raw) as image:
        deep = _is_16_bit(image)
        return Header(image.width, image.height, deep or image.mode in ("1", "L", "LA", "La", "I", "F"), deep)


def brightest(raw: str | bytes) -> int:
    """Return the highest value of an image of 16 bits.

    Raises:
        BadImage: It cannot be read.
    """
    with as_bad_image(), _opened(raw) as image:
        if image.width * image.height > LARGE:
            return 65_535  # too much to look at: it may hold anything
        return int(cast("tuple[int, int]", image.getextrema())[1])


def decode(raw: Raw, size: int, channels: int, highest: int = 65_535) -> NDArray[np.uint8]:
    """Return an image as (channels, size, size): its shorter side scaled to ``size``, the centre cut out.

    ``highest`` is the one of 16-bit files that becomes white.

    Raises:
        BadImage: It cannot be read.
    """
    if isinstance(raw, np.ndarray):
        return _as_array(_square(Image.fromarray(raw), size), channels)
    with as_bad_image(), _opened(raw) as image:
        if image.format in ("JPEG", "MPO"):
            _draft(image, size, channels)
        pixels = image.width * image.height
        if pixels > MAX_PIXELS:
            raise BadImage(_too_large(image))
        with _one_large if pixels > LARGE else nullcontext():
            image.load()
            square = _square(_plain(image), size)
            if square.mode in ("I", "F"):
                square = _to_8_bits(square, image, highest)
        return _as_array(_upright(square, image), channels)


@contextmanager
def _opened(raw: str | bytes) -> Iterator[ImageFile.ImageFile]:
    """Open an image by its content; ``Image.open`` would warn of or refuse large JPEGs before they can be drafted."""
    with _regular(raw) if isinstance(raw, str) else io.BytesIO(raw) as file:
        prefix = file.read(16)
        if not prefix:
            raise BadImage("empty file")
        with _identify(file, prefix) as image:
            yield image


def _regular(path: str) -> IO[bytes]:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
        raise BadImage("not a file")
    if status.st_size > MAX_BYTES:
        raise BadImage(f"file of {status.st_size / 1e9:.1f} GB; the limit is {MAX_BYTES / 1e9:.1f} GB")
    return open(path, "rb")


def _identify(file: IO[bytes], prefix: bytes) -> ImageFile.ImageFile:
    damage = "not an image of a kind that can be read (JPEG, PNG, WebP, BMP, TIFF, GIF)"
    for name in FORMATS:
        if name not in Image.OPEN:
            Image.init()
        if name not in Image.OPEN:
            continue
        factory, accept = Image.OPEN[name]
        try:
            accepted = accept is None or accept(prefix)  # text: why this pillow cannot
            if accepted and not isinstance(accepted, str):
                file.seek(0)
                return factory(file, "")
        except (SyntaxError, IndexError, TypeError, KeyError, struct.error) as error:
            damage = f"damaged {name} header: {one_line(error)}"
    raise BadImage(damage)


def _draft(image: ImageFile.ImageFile, size: int, channels: int) -> None:
    """Let JPEG decode at a half, a quarter or an eighth, never below ``size``, and without colour if none is wanted."""
    if image.info.get("progressive") and image.width * image.height > MAX_PIXELS:
        raise BadImage(_too_large(image))  # all of its coefficients would have to be held at once
    image.draft("L" if channels == 1 else None, (size, size))


def _too_large(image: Image.Image) -> str:
    millions = image.width * image.height / 1e6
    return f"{image.width} x {image.height} are {millions:,.0f} million pixels; the limit is {MAX_PIXELS / 1e6:.0f}"


def _plain(image: Image.Image) -> Image.Image:
    """Return the central part of an image in a mode that can be scaled: L, RGB, RGBA, I or F."""
    side = min(image.size)
    if max(image.size) > 3 * side:  # not to convert what is cut off anyway; scaling looks a little beyond the square
        left, top, right, bottom = _centre(image)
        across, down = (side, 0) if image.width > side else (0, side)
        image = image.crop((floor(left) - across, floor(top) - down, ceil(right) + across, ceil(bottom) + down))
    if image.mode in ("I", "F"):
        return image
    if _is_16_bit(image):
        return image.convert("I")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        return image.convert("RGBA")
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def _is_16_bit(image: Image.Image) -> bool:
    return image.mode.startswith("I;16")


def _to_8_bits(square: Image.Image, image: Image.Image, highest: int) -> Image.Image:
    """Scale the values of a small square by the range of the image that it comes from."""
    values = np.asarray(square)
    if _is_16_bit(image):
        return Image.fromarray(np.clip(np.floor(values * (256 / (highest + 1))), 0, 255).astype(np.uint8))
    low, high = cast("tuple[float, float]", image.getextrema())
    if not np.isfinite([low, high, values.min(), values.max()]).all():
        raise BadImage("NaN or infinite values")
    if low < 0 or high > 65_535:
        scaled = (values.astype(float) - low) * (255 / (high - low) if high > low else 0)
    elif high > 255:
        scaled = np.floor(values / 256)
    elif high <= 1 and values.dtype.kind == "f":
        scaled = values * 255
    else:
        scaled = values
    return Image.fromarray(np.clip(np.rint(scaled), 0, 255).astype(np.uint8))


def _square(image: Image.Image, size: int) -> Image.Image:
    """Scale the central square alone, which is the same as scaling all and cutting; alpha is laid on white after it."""
    square = image
    if image.size != (size, size):
        square = image.resize((size, size), Image.Resampling.BILINEAR, box=_centre(image))
    if square.mode != "RGBA":
        return square
    return Image.alpha_composite(Image.new("RGBA", square.size, "white"), square).convert("RGB")


def _centre(image: Image.Image) -> tuple[float, float, float, float]:
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    return left, top, left + side, top + side


def _upright(square: Image.Image, image: Image.Image) -> Image.Image:
    """Turn the small square as the file says: cheaper than turning the image, and a centre stays the centre."""
    try:
        turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # a damaged EXIF block says nothing about the pixels
        turn = None
    return square if turn is None else square.transpose(turn)


def _as_array(image: Image.Image, channels: int) -> NDArray[np.uint8]:
    pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    return np.ascontiguousarray(pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1))


@contextmanager
def quiet() -> Iterator[None]:
    """Silence pillow's remarks about odd metadata, which would tear a progress bar apart."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield
