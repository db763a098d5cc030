"""What a user's own images are before they are decoded: ids, columns, labels, and each image's raw content by number.

A ``Source`` lists; it holds no pixels. stream.py turns it into squares of uint8.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from secu.data.own.decode import BadImage, Header, Raw, as_bad_image, brightest, decode, header, quiet
from secu.data.own.names import natural, printable
from secu.errors import UserError, nearest

# What files of 16 bits may hold, by its name as a setting (data.values).
DEEP = {f"int 0..{highest}": highest for highest in (1023, 4095, 16383, 65_535)}
MEASURED = 20  # of them, in a sample
Skipped = tuple[str, str]  # id and reason


class Probe(NamedTuple):
    """What a sample of the images looks like: median sides, as stored, and whether every one of them is grey."""

    width: int
    height: int
    grey: bool


class Source(ABC):
    """Images that the user named.

    Attributes:
        name: What the user calls it.
        place: Where it lies: the same for two runs on the same images, however they were named.
        ids: One an image, in natural order: the path within the source with forward slashes, or the number of the row.
        columns: What else is known of each image and is carried to the output.
        skipped: Id and reason of what was refused while listing, and is in none of the lists above.
        targets: True labels, int64 (N,), -1 where unknown; None if none were asked for.
        class_names: The name of each target.
        note: How the pixels are understood, where that had to be decided; else empty.
        values: The same as a setting (data.values).
        has_folders: Whether the ids are paths.
    """

    note = ""
    values = ""
    has_folders = True

    def __init__(
        self,
        name: str,
        place: str,
        ids: list[str],
        *,
        columns: dict[str, list[Any]] | None = None,
        skipped: Sequence[Skipped] = (),
    ) -> None:
        self.name, self.place, self.ids = printable(name), place, ids
        self.columns: dict[str, list[Any]] = columns or {}
        self.skipped = list(skipped)
        self.targets: NDArray[np.int64] | None = None
        self.class_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    @abstractmethod
    def read(self, i: int) -> Raw:
        """Return image ``i`` as it lies there: the path of its file, its bytes, or its pixels."""

    def ready(self, rows: slice, size: int, channels: int) -> NDArray[np.uint8] | None:
        """Return images that need no decoding all at once; None if they do."""
        return None

    @abstractmethod
    def stamps(self) -> Iterable[str]:
        """Return what changes when an image changes: sizes and times."""

    def read_as(self, values: str | None) -> None:
        """Understand values as a run did (data.values): those of an array, or of files of 16 bits."""
        if values in DEEP:
            self.values = values

    @property
    def highest(self) -> int:
        """The value of files of 16 bits that becomes white."""
        return DEEP.get(self.values, 65_535)

    def close(self) -> None:  # noqa: B027
        """Let go of open files; an image cannot be read after that."""

    @property
    def order(self) -> Sequence[int]:
        """The images in the order in which they are fast to read."""
        return range(len(self))

    def position(self, i: int) -> int:
        """Return a number that grows along ``order``."""
        return i

    @cached_property
    def fingerprint(self) -> str:
        """A hash that changes when an image is added, removed, renamed, changed or understood in another way.

        As of the first time it is read.
        """
        digest = hashlib.sha256()
        for lines in (self.ids, self.stamps(), [self.values] if self.values else []):
            for line in lines:
                text = line.encode("utf-8", "surrogatepass")
                digest.update(f"{len(text)}:".encode() + text)
        return digest.hexdigest()

    def decode(self, i: int, size: int, channels: int) -> NDArray[np.uint8]:
        """Return image ``i`` as (channels, size, size): shorter side scaled to ``size``, the centre cut out.

        Raises:
            BadImage: It cannot be read.
        """
        with as_bad_image():
            raw = self.read(i)
        return decode(raw, size, channels, self.highest)

    def probe(self, sample: int = 200) -> Probe:
        """Read the headers of images evenly spread over the source.

        Raises:
            UserError: There is no image, or none of the sample can be read.
        """
        self.require_images()
        chosen = np.linspace(0, len(self) - 1, min(sample, len(self))).astype(int).tolist()
        headers: list[Header] = []
        bad: list[str] = []
        bright: list[int] = []
        with quiet():
            for i in [self.order[position] for position in chosen]:
                try:
                    with as_bad_image():
                        raw = self.read(i)
                        headers.append(header(raw))
                        if headers[-1].deep and len(bright) < MEASURED and not isinstance(raw, np.ndarray):
                            bright.append(brightest(raw))
                except BadImage as error:
                    bad.append(f"{printable(self.ids[i])}: {error.reason}")
        if not headers:
            raise UserError(f"source: none of {len(chosen)} images tried in {self.name} can be read; {bad[0]}")
        if bright and not self.values:
            self._count_bits(bright)
        width, height = median_low(h.width for h in headers), median_low(h.height for h in headers)
        return Probe(width, height, all(h.grey for h in headers))

    def _count_bits(self, bright: list[int]) -> None:
        """Take files of 16 bits as what they seem to hold: cameras of microscopes fill 10, 12 or 14 of them."""
        values = next(name for name, highest in DEEP.items() if max(bright) <= highest)
        if DEEP[values] < 65_535:
            self.values = values
            found = f"of {len(bright)} tried none holds more than {max(bright):,}"
            self.note = f"files of 16 bits are taken as {values}: {found}"

    def require_images(self) -> None:
        """Raise ``UserError`` if nothing was found."""
        if self.ids:
            return
        refused = ""
        if self.skipped:
            refused = f"; {len(self.skipped)} were refused, the first: {': '.join(map(printable, self.skipped[0]))}"
        raise UserError(f"source: no images in {self.name}{refused}")

    def label(self, labels: str) -> None:
        """Set the targets, for scoring: a column, or ``folder`` for the name of the folder an image lies in.

        Values are sorted into classes as text; None, NaN and the empty text are unknown (-1).
        """
        if labels in self.columns:
            values = self.columns[labels]
        elif labels == "folder" and self.has_folders:
            values = [os.path.basename(os.path.dirname(name)) for name in self.ids]
        else:
            valid = [*self.columns, *(["folder"] if self.has_folders else [])]
            known = nearest(labels, valid) if valid else "it has no labels at all"
            raise UserError(f"labels: {self.name} has no {printable(labels)!r}; {known}")
        texts = ["" if value is None or value != value else _text(value) for value in values]
        self.class_names = tuple(sorted({text for text in texts if text}, key=natural))
        if not self.class_names:
            empty = "no image lies in a folder within it" if labels not in self.columns else "all of them are empty"
            raise UserError(f"labels: {self.name} has no labels in {printable(labels)!r}: {empty}")
        number = {"": -1} | {text: i for i, text in enumerate(self.class_names)}
        self.targets = np.array([number[text] for text in texts], np.int64)


class FileSource(Source):
    """Images in files of their own; ``paths[i]`` is where image ``i`` lies."""

    def __init__(self, name: str, place: str, ids: list[str], paths: list[str], **more: Any) -> None:
        super().__init__(name, place, ids, **more)
        self.paths = paths

    def read(self, i: int) -> Raw:
        """Return the path of image ``i``."""
        return self.paths[i]

    def stamps(self) -> Iterator[str]:
        """Return the size, time and mode of each file: a file that may be read at last is not the same as before."""
        for path in self.paths:
            try:
                status = os.stat(path)
                yield f"{status.st_size} {status.st_mtime_ns} {status.st_mode}"
            except (OSError, ValueError):
                yield "missing"


def file_stamp(path: str) -> str:
    """Return size and time of the one file a source is."""
    status = os.stat(path)
    return f"{status.st_size} {status.st_mtime_ns}"


def _text(value: object) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)
