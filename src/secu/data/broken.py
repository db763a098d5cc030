"""Images that cannot be read while a run decodes them on demand: one broken file does not end an epoch.

The next image of the source that can be read takes the place of a broken one, so that batches keep their size and the
result depends neither on the batch nor on the process. That image counts twice. Results leave broken images out.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

from secu.base import processes
from secu.base.errors import UserError
from secu.base.names import printable
from secu.data.decoding.image_files import BadImage
from secu.data.sources.base import Skipped, Source

IN_A_ROW = 100  # broken images in a row after which the whole source is considered unreadable
MAX_BAD = 0.05  # maximum share of unreadable images, unless allow_bad is set

Result = TypeVar("Result")


class Broken:
    """The images of a source that could not be read when they were last tried.

    Args:
        source: The images.
        most: The share of them that may be broken; 0: none.
    """

    def __init__(self, source: Source, most: float = MAX_BAD) -> None:
        self.source = source
        self.most = most
        self.reasons: dict[int, str] = {}  # index in the source → reason
        self.reported: set[int] = set()
        self.recovered: set[int] = set()  # since the last ``share``
        self.lock = threading.Lock()

    def or_another(self, i: int, attempt: Callable[[int], Result]) -> Result:
        """Return ``attempt(i)`` or, if image ``i`` is broken, that of the next one that is not.

        Raises:
            UserError: More images are broken than allowed.
        """
        tried = min(IN_A_ROW, len(self.source))
        for number in range(i, i + tried):
            number %= len(self.source)
            try:
                result = attempt(number)
            except BadImage as bad:
                self._add(number, bad)
            else:
                with self.lock:
                    if self.reasons.pop(number, None) is not None:  # it was unreadable only for a while
                        self.recovered.add(number)
                return result
        raise UserError(f"source: {tried} images in a row cannot be read, the first: {self._described(i)}")

    def _add(self, i: int, bad: BadImage) -> None:
        with self.lock:
            self.reasons[i] = bad.reason
            count = len(self.reasons)
        if not self.most:
            raise unreadable(self.source, i, bad)
        if count > self.most * len(self.source):
            share = f"{count:,} of {len(self.source):,} images in {self.source.name} cannot be read"
            advice = "to continue without them, use --allow-bad (in Python allow_bad=True)"
            raise UserError(f"source: {share}, more than {self.most:.0%}; the last: {self._described(i)}; {advice}")

    def _described(self, i: int) -> str:
        return f"{printable(self.source.ids[i])}: {self.reasons[i]}"

    def share(self) -> None:
        """Learn which images the other processes could not read; all processes must call this."""
        found = processes.collect((self.reasons, self.recovered))
        recovered = set().union(*(numbers for _, numbers in found))
        for reasons, _ in found:
            self.reasons |= {i: reason for i, reason in reasons.items() if i not in recovered}
        self.recovered = set()

    def __len__(self) -> int:
        return len(self.reasons)

    @property
    def share_of_all(self) -> float:
        """Share of the images that could not be read."""
        return len(self) / len(self.source)

    def report(self) -> str:
        """Return one line that names the images not reported before; empty if there are none."""
        new = self.new()
        if not new:
            return ""
        name, reason = new[0]
        others = f", and {len(new) - 1:,} more" if len(new) > 1 else ""
        return f"skipped, cannot be read: {printable(name)}: {reason}{others}"

    def warning(self) -> str:
        """Return a warning at the end of a run; empty if all images could be read."""
        if not self.reasons:
            return ""
        count = f"{len(self):,} of {len(self.source):,} images ({self.share_of_all:.2%})"
        return f"{count} could not be read and are left out: see skipped.csv"

    def new(self) -> list[Skipped]:
        """Return id and reason of the broken images that this method has not returned before."""
        with self.lock:
            numbers = sorted(self.reasons.keys() - self.reported)
            self.reported.update(numbers)
            return [(self.source.ids[i], self.reasons[i]) for i in numbers]


def unreadable(source: Source, i: int, bad: BadImage) -> UserError:
    """Return the error for an image that must be readable."""
    return UserError(f"source: {printable(source.ids[i])} cannot be read: {bad.reason}")
