"""Properties of a source's images, from the headers of a sample; only 16-bit files are decoded."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from secu.base.names import printable
from secu.data.decoding.decode import DEEP, LARGE, MAX_PIXELS, Raw, is_16_bit, quiet, require_size
from secu.data.decoding.image_files import BadImage, as_bad_image, opened

if TYPE_CHECKING:
    from secu.data.sources.base import Source

SAMPLE = 200  # number of images whose headers are read
MEASURED = 20  # number of 16-bit files in the sample that are decoded


class Probe(NamedTuple):
    """Properties of a sample of the images."""

    side: int  # the median of the shorter sides, in pixels
    channels: int  # 1 if every image is gray, else 3
    values: str | None  # how an array or 16-bit files are interpreted (data.values); None if unambiguous


class Header(NamedTuple):
    """Content of an image's header; width and height are as stored, before any EXIF rotation."""

    width: int
    height: int
    gray: bool
    deep: bool = False  # 16 bits


class Sample(NamedTuple):
    """The headers of some images, errors of unreadable ones, and the maximum values of some 16-bit files."""

    headers: tuple[Header, ...]
    bad: tuple[str, ...]
    brightest: tuple[int, ...]

    @property
    def values(self) -> str | None:
        """The estimated range of 16-bit files, since cameras may use only 10, 12 or 14 bits; None if there are none."""
        if not self.brightest:
            return None
        return next(name for name, highest in DEEP.items() if max(self.brightest) <= highest)


def take_sample(source: Source) -> Sample:
    """Read the headers of evenly spaced images of a source."""
    headers: dict[int, Header] = {}
    bad: list[str] = []
    brightest: list[int] = []
    with quiet():
        for position in _spread(len(source), SAMPLE):
            i = source.order[position]
            try:
                with as_bad_image():
                    headers[i] = read_header(source.read(i), source.max_pixels)
            except BadImage as error:
                bad.append(f"{printable(source.ids[i])}: {error.reason}")
        deep = [i for i, header in headers.items() if header.deep]
        for position in _spread(len(deep), MEASURED):
            with suppress(BadImage), as_bad_image():
                brightest.append(_brightest(cast("str | bytes", source.read(deep[position]))))
    return Sample(tuple(headers.values()), tuple(bad), tuple(brightest))


def read_header(raw: Raw, max_pixels: int = MAX_PIXELS) -> Header:
    """Return an image's size and whether it is gray, without decoding it."""
    if isinstance(raw, np.ndarray):
        return Header(raw.shape[1], raw.shape[0], raw.ndim == 2)
    with as_bad_image(), opened(raw) as image:
        require_size(image, max_pixels)
        deep = is_16_bit(image)
        gray = deep or image.mode in ("1", "L", "LA", "La", "I", "F")
        return Header(image.width, image.height, gray, deep)


def _brightest(raw: str | bytes) -> int:
    """Return the maximum value of a 16-bit file."""
    with opened(raw) as image:
        if image.width * image.height > LARGE:
            return 65_535  # too large to decode here, so assume the full range
        return int(cast("tuple[int, int]", image.getextrema())[1])


def _spread(count: int, sample: int) -> list[int]:
    """Return at most ``sample`` evenly spaced indices below ``count``."""
    chosen: list[int] = np.linspace(0, count - 1, min(sample, count)).astype(int).tolist()
    return chosen
