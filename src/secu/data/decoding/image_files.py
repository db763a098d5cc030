"""Open an image file by its content; whatever is wrong with it is a ``BadImage``."""

import errno
import io
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from PIL import Image, ImageFile

from secu.base.errors import UserError
from secu.data.text import one_line

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM", "AVIF")  # no others: some run external programs (EPS)
MAX_BYTES = 2 << 30  # maximum file size: pillow reads some formats entirely into memory
# The fingerprint of a source detects a fix for these, so they may be cached; other OS errors may be temporary.
_LASTING = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}


class BadImage(UserError):
    """An image that cannot be read.

    Attributes:
        reason: The reason in one line, without the image's name.
        lasting: Whether the problem is permanent; False for disk errors or a lack of memory.
    """

    def __init__(self, reason: str, lasting: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lasting = lasting


@contextmanager
def as_bad_image() -> Iterator[None]:
    """Turn every exception into a ``BadImage``, since pillow may raise any exception on a damaged file."""
    try:
        yield
    except BadImage:
        raise
    except Exception as error:
        passing = isinstance(error, OSError) and error.errno is not None and error.errno not in _LASTING
        raise BadImage(one_line(error), lasting=not (passing or isinstance(error, MemoryError))) from None


@contextmanager
def opened(raw: str | bytes) -> Iterator[ImageFile.ImageFile]:
    """Open an image by its content; ``Image.open`` would reject large JPEGs before they can be drafted."""
    with _regular(raw) if isinstance(raw, str) else io.BytesIO(raw) as file:
        prefix = file.read(16)
        if not prefix:
            raise BadImage("empty file")
        with _identify(file, prefix) as image:
            yield image


def _regular(path: str) -> IO[bytes]:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would block forever
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
            accepted = accept is None or accept(prefix)  # a string explains why pillow cannot open it
            if accepted and not isinstance(accepted, str):
                file.seek(0)
                return factory(file, "")
        except (SyntaxError, IndexError, TypeError, KeyError, struct.error) as error:
            damage = f"damaged {name} header: {one_line(error)}"
    raise BadImage(damage)
