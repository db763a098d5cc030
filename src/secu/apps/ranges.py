"""How many clusters the user asked for: one number, a range such as 5..40, or auto."""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from secu.apps.feature_plan import Change, Facts
from secu.base.errors import UserError
from secu.config import MOST_CLUSTERS

AUTO = "auto"
LOWEST = 3  # the range of auto
HIGHEST = 40
IMAGES_PER_CLUSTER = 10  # minimum number of images per cluster in that range
STEP = 1.25  # ratio of the sizes of successive heads
FINER = 2  # the finest head, for the tree, as a multiple of the upper end
FINEST_IMAGES = 5  # minimum number of images per cluster of that head


class Range(NamedTuple):
    """The numbers of clusters that a run chooses from."""

    low: int
    high: int

    def sizes(self) -> list[int]:
        """Return numbers from ``low`` to ``high``, both included, in nearly geometric steps."""
        steps = max(1, round(math.log(self.high / self.low) / math.log(STEP)))
        exact = (self.low * (self.high / self.low) ** (step / steps) for step in range(steps + 1))
        return sorted({round(size) for size in exact})

    def middle(self) -> int:
        """Return the position of the size nearest to the geometric mean."""
        sizes = self.sizes()
        return min(range(len(sizes)), key=lambda n: abs(sizes[n] ** 2 - self.low * self.high))

    def heads(self, images: int) -> list[int]:
        """Return the sizes of the heads: those to choose from, and a finer one, whose clusters the tree merges."""
        return [*self.sizes(), max(self.high + 1, min(FINER * self.high, images // FINEST_IMAGES))]

    def rule(self, facts: Facts, clusters: int, settings: dict[str, Any]) -> Change:
        """Return the heads, in place of those for one number of clusters."""
        heads = self.heads(facts.images)
        why = f"the number of clusters is chosen at the end, from {self.low} to {self.high}; the last is for the tree"
        return {"heads": heads, "head": self.middle(), "answer": "number"}, f"heads={heads}: {why}"

    def require_free(self, balance: float | None, overrides: Mapping[str, Any]) -> None:
        """Refuse what only has a meaning for one number of clusters."""
        for name in ("heads", "head", "answer"):
            if name in overrides:
                raise UserError(f"{name}: {overrides[name]} needs one number of clusters, got {self.low}..{self.high}")
        if overrides.get("hints", {}).get("checksum") is not None:
            raise UserError(f"hints: need one number of clusters, got {self.low}..{self.high}")
        if balance is not None:
            why = "groups that are held at equal sizes do not show how many there are"
            raise UserError(f"balance: {balance} needs one number of clusters, got {self.low}..{self.high}: {why}")


def parse_clusters(asked: str | int | None) -> int | Range | None:
    """Return the number of clusters or the range that was asked for; None for auto."""
    text = AUTO if asked is None else str(asked).strip()
    if text == AUTO:
        return None
    if re.fullmatch(r"[+-]?[0-9]{1,9}", text, re.ASCII):
        return int(text)
    ends = re.fullmatch(r"([0-9]{1,9})\.\.([0-9]{1,9})", text, re.ASCII)
    if ends is None:
        valid = "a number such as 8, a range such as 5..40, or auto"
        raise UserError(f"clusters: {text[:40]!r} must be {valid}")
    low, high = map(int, ends.groups())
    if not 2 <= low < high <= MOST_CLUSTERS:
        raise UserError(f"clusters: {text} must be a range of at least 2, with the smaller number first, such as 5..40")
    return Range(low, high)


def range_for(images: int) -> Range:
    """Return the range of auto for this many images."""
    high = min(HIGHEST, images // IMAGES_PER_CLUSTER)
    if high <= LOWEST:
        least = (LOWEST + 1) * IMAGES_PER_CLUSTER
        raise UserError(f"clusters: auto needs at least {least} images, got {images}; give a number, such as 3")
    return Range(LOWEST, high)
