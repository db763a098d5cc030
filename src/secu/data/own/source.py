"""What a user's own images are before they are decoded: ids, columns, labels, and each image's raw content by number.

A ``Source`` lists; it holds no pixels. stream.py turns it into squares of uint8.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
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
SAMPLE = 200  # images looked at to know what all are like
MEASURED = 20  # of those, if they are files of 16 bits
Skipped = tuple[str, str]  # id and reason


class Probe(NamedTuple):
    """What a sample of the images looks like: the median of their shorter sides, and whether every one is grey."""

    side: int
    grey: bool


class Source(ABC):
    """Images that the user named.

    Attributes:
        name: What the user calls it.
        place: Where it lies: the same for two runs on the same images, however they were named.
        ids: One an image, in natural order: the path within the source with forward slashes, or the number of the row.
        columns: What else is known of each image and is carried to the output.
        skipped: Id and reason of what was refused while listing, and is in none of the lists above.
        repeated: The same of what is left out because it is there already, which is no damage.
        targets: True labels, int64 (N,), -1 where unknown; None if none were asked for.
        class_names: The name of each target.
        note: How the pixels are understood, where that had to be decided; else empty.
        values: The same as a setting (data.values).
        has_folders: Whether the ids are paths.
    """

    note = ""
    values = ""
    has_folders = True
    repeated: Sequence[Skipped] = ()

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

    def read_new_as(self, values: str | None) -> None:
        """The same for images that the run has not seen: files of 16 bits may hold more, or be the first of their kind.

        Raises:
            UserError: They hold more than what was white for the run.
        """
        self.read_as(values)
        bright = self._measure(self._look(SAMPLE)[0])
        if not self.values:
            self._count_bits(bright)
        elif max(bright, default=0) > self.highest:
            held = f"the files of 16 bits in {self.name} hold values up to {max(bright):,}"
            raise UserError(f"source: {held}; the run was trained on {self.values}: scale them alike")

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

    def probe(self, sample: int = SAMPLE) -> Probe:
        """Read the headers of images evenly spread over the source.

        Raises:
            UserError: There is no image, or none of the sample can be read.
        """
        self.require_images()
        headers, bad = self._look(sample)
        if not headers:
            raise UserError(f"source: none of {len(bad)} images tried in {self.name} can be read; {bad[0]}")
        if not self.values:
            self._count_bits(self._measure(headers))
        found = headers.values()
        return Probe(median_low(min(h.width, h.height) for h in found), all(h.grey for h in found))

    def _look(self, sample: int) -> tuple[dict[int, Header], list[str]]:
        """Return the headers of images evenly spread over the source, by number, and what is wrong with the others."""
        headers: dict[int, Header] = {}
        bad: list[str] = []
        with quiet():
            for position in _spread(len(self), sample):
                i = self.order[position]
                try:
                    with as_bad_image():
                        headers[i] = header(self.read(i))
                except BadImage as error:
                    bad.append(f"{printable(self.ids[i])}: {error.reason}")
        return headers, bad

    def _measure(self, headers: Mapping[int, Header]) -> list[int]:
        """Return the highest values of some of the files of 16 bits."""
        deep, bright = [i for i, h in headers.items() if h.deep], list[int]()
        with quiet():
            for position in _spread(len(deep), MEASURED):
                with suppress(BadImage), as_bad_image():
                    raw = self.read(deep[position])
                    if not isinstance(raw, np.ndarray):
                        bright.append(brightest(raw))
        return bright

    def _count_bits(self, bright: list[int]) -> None:
        """Take files of 16 bits, if there are some, as what they seem to hold: cameras fill 10, 12 or 14 of them."""
        if not bright:
            return
        self.values = next(name for name, highest in DEEP.items() if max(bright) <= highest)
        if self.highest < 65_535:
            found = f"of {len(bright)} tried none holds more than {max(bright):,}"
            self.note = f"files of 16 bits are taken as {self.values}: {found}"

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


def _spread(count: int, sample: int) -> list[int]:
    """Return at most ``sample`` of ``count`` numbers, evenly spread."""
    chosen: list[int] = np.linspace(0, count - 1, min(sample, count)).astype(int).tolist()
    return chosen


def file_stamp(path: str) -> str:
    """Return size and time of the one file a source is."""
    status = os.stat(path)
    return f"{status.st_size} {status.st_mtime_ns}"


def _text(value: object) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)
