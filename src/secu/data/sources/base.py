"""The base class of all sources: ids, columns, labels, and the raw content of each image by index.

A ``Source`` lists images and holds no decoded pixels. It is immutable; how values are interpreted is passed to its
methods as ``values``. stream.py decodes a source to squares of uint8.
"""

import hashlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from statistics import median_low
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from secu.base.errors import UserError, nearest
from secu.base.names import printable
from secu.data.decoding.decode import DEEP, MAX_PIXELS, Raw, decode
from secu.data.decoding.image_files import as_bad_image
from secu.data.decoding.probe import Probe, Sample, take_sample
from secu.data.strings import Names
from secu.data.text import natural

Shape = tuple[int, ...]  # channels, height and width of images, or the length of feature vectors
Skipped = tuple[str, str]  # id and reason


class Source(ABC):
    """Base class of all sources: images by index.

    Attributes:
        name: Name used in messages.
        place: Name to reopen it by: a path, a pattern or ``KIND:rest``; empty for images in memory.
        ids: One per image: the path within the source with forward slashes, or the row number.
        columns: Additional columns, which are copied to the output.
        skipped: Id and reason of files that were skipped while listing; they are not in the lists above.
        repeated: Id and reason of duplicates that were left out.
        targets: True labels, int64 (N,), -1 where unknown; None if there are none.
        class_names: The name of each target.
        on_demand: Whether images are decoded on demand, for sources that do not fit in memory or in the cache.
        has_folders: Whether the ids are paths.
        max_pixels: Images with more pixels are not decoded (data.max_pixels).
        random_order: Whether images can be read in any order without delay.
    """

    has_folders = True
    max_pixels = MAX_PIXELS
    random_order = True

    def __init__(
        self,
        name: str,
        place: str,
        ids: Iterable[str],
        *,
        columns: Mapping[str, Sequence[Any]] | None = None,
        skipped: Iterable[Skipped] = (),
        repeated: Iterable[Skipped] = (),
        targets: NDArray[np.int64] | None = None,
        class_names: Iterable[str] = (),
        on_demand: bool = False,
        stamps: Iterable[str] = (),
    ) -> None:
        self.name = printable(name)
        self.place = place
        self.ids: Sequence[str] = ids if isinstance(ids, Names) else tuple(ids)
        self.columns: Mapping[str, Sequence[Any]] = columns or {}
        self.skipped = tuple(skipped)
        self.repeated = tuple(repeated)
        self.targets = targets
        self.class_names = tuple(class_names)
        self.on_demand = on_demand
        self._stamps = tuple(stamps)

    def __len__(self) -> int:
        return len(self.ids)

    @abstractmethod
    def read(self, i: int, values: str | None = None) -> Raw:
        """Return image ``i`` as stored: the path of its file, its bytes, or its pixels, interpreted by ``values``."""

    def ready(self, rows: slice, shape: Shape, values: str | None = None) -> NDArray[np.uint8] | None:
        """Return a batch of images that need no decoding; None if they do."""
        return None

    def stamps(self) -> Iterable[str]:
        """Return strings that change when an image changes, such as sizes and times; empty if unknown."""
        return self._stamps

    def is_read_from(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a file is one of those that contain the images, which must not be overwritten."""
        files = (self.place, *getattr(self, "files", ()))
        return os.path.realpath(path) in (os.path.realpath(file) for file in files if file)

    @property
    def cacheable(self) -> bool:
        """Whether decoded images may be cached: the source can be reopened, and changes can be detected."""
        return bool(self.place) and any(self.stamps())

    @property
    def order(self) -> Sequence[int]:
        """The indices of all images, in the fastest reading order."""
        return range(len(self))

    def position(self, i: int) -> int:
        """Return a sort key that is increasing along ``order``."""
        return i

    @cached_property
    def fingerprint(self) -> str:
        """A hash that changes when an image is added, removed, renamed or changed; computed on first access."""
        digest = hashlib.sha256()
        for lines in (self.ids, self.stamps()):
            for line in lines:
                text = line.encode("utf-8", "surrogatepass")
                digest.update(f"{len(text)}:".encode() + text)
        return digest.hexdigest()

    def decode(self, i: int, size: int, channels: int, values: str | None = None) -> NDArray[np.uint8]:
        """Return image ``i`` as (channels, size, size), with its shorter side scaled to ``size`` and center-cropped.

        Raises:
            BadImage: The image cannot be read.
        """
        with as_bad_image():
            return decode(self.read(i, values), size, channels, values, self.max_pixels)

    @cached_property
    def sample(self) -> Sample:
        """Headers of evenly spaced images; cached."""
        return take_sample(self)

    def probe(self) -> Probe:
        """Return size, channels and value range of the images, estimated from a sample.

        Raises:
            UserError: There are no images, or none of the sample can be read.
        """
        self.require_images()
        headers = self.sample.headers
        if not headers:
            bad = self.sample.bad
            raise UserError(f"source: none of {len(bad)} images tried in {self.name} can be read; {bad[0]}")
        side = median_low(min(header.width, header.height) for header in headers)
        channels = 1 if all(header.gray for header in headers) else 3
        return Probe(side, channels, self.values_of(None, new=True))

    def values_of(self, wanted: str | None, *, new: bool = False) -> str | None:
        """Return how the values of these images are interpreted, given the interpretation of a run (data.values).

        Args:
            wanted: The run's setting; None if its images were unambiguous.
            new: Whether the run has not seen these images. If so, a sample of 16-bit files is measured, since they may
                use more bits than the run's files, or be the first 16-bit files.

        Raises:
            UserError: The images cannot be interpreted in this way.
        """
        known = wanted if wanted in DEEP else None
        if not new:
            return known
        if known is None:
            return self.sample.values
        highest = max(self.sample.brightest, default=0)
        if highest > DEEP[known]:
            held = f"the 16-bit files in {self.name} hold values up to {highest:,}"
            raise UserError(f"source: {held}; the run was trained on {known}: scale them to the same range")
        return known

    def note(self, values: str | None) -> str:
        """Return one line on how values are interpreted; empty if that is unambiguous."""
        tried = self.sample.brightest
        if values != self.sample.values or not tried or DEEP[str(values)] == 65_535:
            return ""
        return f"16-bit files are taken as {values}: of {len(tried)} tried none holds more than {max(tried):,}"

    def require_images(self) -> None:
        """Raise ``UserError`` if there are no images."""
        if self.ids:
            return
        refused = ""
        if self.skipped:
            refused = f"; {len(self.skipped)} were refused, the first: {': '.join(map(printable, self.skipped[0]))}"
        raise UserError(f"source: no images in {self.name}{refused}")

    def label(self, labels: str) -> Self:
        """Return this source with targets for scoring: a column, or ``folder`` for the name of an image's folder.

        Values are converted to strings and sorted into classes; None, NaN and empty strings are unknown (-1).

        Raises:
            UserError: There are no images, or no such labels.
        """
        self.require_images()
        valid = [*self.columns, "folder"] if self.has_folders else list(self.columns)
        if labels not in valid:
            known = nearest(labels, valid) if valid else "it has no labels at all"
            raise UserError(f"labels: {self.name} has no {printable(labels)!r}; {known}")
        values = self.columns.get(labels)
        if values is None:
            values = [sys.intern(os.path.basename(os.path.dirname(name))) for name in self.ids]
        texts = ["" if value is None or value != value else _text(value) for value in values]
        names = sorted({text for text in texts if text}, key=natural)
        if not names:
            empty = "all of them are empty" if labels in self.columns else "no image is in a subfolder"
            raise UserError(f"labels: {self.name} has no labels in {printable(labels)!r}: {empty}")
        numbers = {"": -1} | {text: i for i, text in enumerate(names)}
        targets = np.array([numbers[text] for text in texts], np.int64)
        return self.replaced(targets=targets, class_names=tuple(names))

    def limited(self, max_pixels: int) -> Self:
        """Return this source with another limit on the size of an image."""
        return self if max_pixels == self.max_pixels else self.replaced(max_pixels=max_pixels)

    def replaced(self, **attributes: Any) -> Self:
        """Return a copy with some attributes replaced."""
        other = copy(self)
        vars(other).update(attributes)
        return other


class FileSource(Source):
    """One file per image; ``paths[i]`` is the file of image ``i``."""

    def __init__(self, name: str, place: str, ids: Iterable[str], paths: Sequence[str], **more: Any) -> None:
        super().__init__(name, place, ids, **more)
        self.paths = paths

    def read(self, i: int, values: str | None = None) -> Raw:
        """Return the path of image ``i``."""
        return self.paths[i]

    def stamps(self) -> Iterator[str]:
        """Return size, time and mode of each file; the mode, because a file may become readable."""
        for path in self.paths:
            try:
                status = os.stat(path)
                yield f"{status.st_size} {status.st_mtime_ns} {status.st_mode}"
            except (OSError, ValueError):
                yield "missing"


def file_stamp(path: str) -> str:
    """Return size and modification time of a file."""
    status = os.stat(path)
    return f"{status.st_size} {status.st_mtime_ns}"


def _text(value: object) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)
