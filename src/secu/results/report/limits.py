"""Bounds on the text in a report, so that the file stays below its limit, however long names are."""

import json
from collections.abc import Sequence

NAMES_SHOWN = 1_500_000  # bytes for the names of all pictures that are shown
LENGTHS = (4096, 1024, 512, 256, 128, 64, 32)  # of a shortened name, in characters
CLASS_NAMES = 500_000  # characters of the names of all true classes, wherever they are shown
LONGEST_CLASS = 200
SHORTEST_CLASS = 24
LONGEST_TEXT = 2_000  # characters of a title, a fact or a warning
MOST_WARNINGS = 50
LONGEST_CONFIG = 100_000
MOST_EPOCHS = 2_000  # on a curve
MOST_COMPARED = 5_000  # maximum number of clusters for which similar ones are listed
LARGEST_TRUTH = 10_000_000  # maximum number of pairs of a true class and a cluster that are counted


def shorten(text: str, longest: int) -> str:
    """Return text of at most ``longest`` characters, without its middle if it is longer; see download.js."""
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2 - 1]}…{text[-(longest // 2) :]}"


def fit_names(names: Sequence[str]) -> tuple[list[str], int | None]:
    """Return names that take at most NAMES_SHOWN bytes, and the length they were shortened to; None if they fit."""
    if sum(map(len, names)) <= NAMES_SHOWN and _size(names) <= NAMES_SHOWN:  # encoding very long names takes long
        return list(names), None
    for length in LENGTHS:
        shortened = [shorten(name, length) for name in names]
        if _size(shortened) <= NAMES_SHOWN:
            break
    return shortened, length


def class_length(classes: int, clusters: int, per_cluster: int) -> int:
    """Return how long the name of a true class may be: it is shown in a list of all, and on the cards of clusters."""
    shown = max(1, classes + clusters * per_cluster)
    return min(LONGEST_CLASS, max(SHORTEST_CLASS, CLASS_NAMES // shown))


def thin(count: int, most: int = MOST_EPOCHS) -> list[int]:
    """Return at most ``most`` evenly spaced indices, including the last."""
    step = -(-count // most) if count else 1
    return list(range((count - 1) % step, count, step))


def _size(names: Sequence[str]) -> int:
    return sum(len(json.dumps(name, ensure_ascii=False).encode("utf-8", "surrogatepass")) for name in names)
