"""Read the user's hints: a table of names or links, the table downloaded from the report, or names in Python."""

import csv
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from secu.base.errors import UserError, shortened
from secu.base.names import printable, unescape
from secu.data import Source
from secu.data.hints import NO_GROUP, Hints, Pair, join_hints
from secu.data.images import Images
from secu.data.sources.manifest import separator
from secu.data.text import one_line
from secu.results.cells import rearm

LARGEST = 2**27  # bytes of a table
LINKS = {"must": True, "cannot": False}
TEXTS = ("label", "link", "name")  # columns that are stripped of surrounding spaces
EDITED = ("cluster", "name", "merged_cluster", "marked_wrong")  # columns of the table downloaded from the report
MISSING = {"None", "nan", "<NA>", "NaT", "-1", "-1.0"}  # values in Python that are no name
PER_CLUSTER = 100  # images that represent a cluster that was named or merged in the report
VALID = "columns id and label, or id, other and link, or the table downloaded from a report"

Rows = list[tuple[str, dict[str, str]]]  # where each row is, for messages, and its values


class Wanted(NamedTuple):
    """Names and links of images, by index."""

    names: dict[int, str]
    must: list[Pair]
    cannot: list[Pair]


def read_hints(given: Any, source: Source) -> Hints:
    """Return hints about the images of a source.

    They are given as the path of a table, a mapping of ids to names, or one name per image; None, NaN, -1 and "" mean
    unknown.
    """
    index = {name: number for number, name in enumerate(source.ids)}

    def find(name: str, where: str) -> int:
        if name in index:
            return index[name]
        for left_out, reason in (*source.skipped, *source.repeated):
            if left_out == name:
                raise UserError(f"hints: {where}{_shown(name)} is left out: {reason}")
        example = _shown(source.ids[0]) if index else "a.jpg"
        raise UserError(f"hints: {where}there is no image {_shown(name)}; valid: an id such as {example}")

    if isinstance(given, str | os.PathLike):
        path = Path(given)
        wanted = _from_rows(_read(path), find)
        if not any(wanted):
            raise UserError(f"hints: {printable(str(path))} has no hints; valid: {VALID}")
    else:
        wanted = Wanted(_from_names(given, source, find), [], [])
        if not wanted.names:
            raise UserError("hints: expected at least one name, got none")
    return join_hints(source.ids, *wanted)


def hints_of(hints: Hints, images: Images, source: Source) -> Hints:
    """Return the hints about readable images; raise if there is a hint about any other image."""
    missing = np.setdiff1d(np.flatnonzero(hints.group != NO_GROUP), np.asarray(images.numbers, np.int64))
    if len(missing):
        name = source.ids[int(missing[0])]
        reason = dict([*images.skipped, *images.repeated]).get(name, "it cannot be read")
        raise UserError(f"hints: {_shown(name)} is left out: {reason}")
    return hints.select(images.numbers)


def _from_names(given: Any, source: Source, find: Callable[[str, str], int]) -> dict[int, str]:
    """Return the names in a mapping by id, or in a sequence with one entry per image."""
    if isinstance(given, Mapping):
        pairs = {find(str(key), ""): value for key, value in given.items()}
    else:
        values = np.asarray(given, dtype=object)
        if values.shape != (len(source.ids),):
            needed = f"a file, a mapping of ids to names, or one name per image ({len(source.ids)},)"
            raise UserError(f"hints: expected {needed}, got shape {values.shape}")
        pairs = dict(enumerate(values.tolist()))
    return {number: str(value) for number, value in pairs.items() if not _is_missing(value)}


def _is_missing(value: Any) -> bool:
    """Return whether a value means unknown; pandas has several such values, which cannot be compared."""
    return not value if isinstance(value, str) else str(value) in MISSING


def _read(path: Path) -> Rows:
    """Return the rows of a table with a header line, without empty ones."""
    name = printable(str(path))
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(f"hints: {name} is larger than {LARGEST // 2**20} MB")
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file, delimiter=separator(file), strict=True)
            header = [column.strip() for column in next(rows, [])]
            _require_columns(name, header)
            return [(f"line {rows.line_num} of {name}: ", row) for row in _records(name, header, rows)]
    except OSError as error:
        raise UserError(f"hints: cannot read {name}: {error.strerror}") from None
    except (ValueError, csv.Error) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"hints: {name} is not a CSV table: {one_line(error)}") from None


def _records(name: str, header: list[str], rows: Any) -> Iterator[dict[str, str]]:
    for row in rows:
        if len(row) > len(header):
            raise UserError(f"hints: line {rows.line_num} of {name} has {len(row)} values for {len(header)} columns")
        values = [rearm(value) for value in row] + [""] * (len(header) - len(row))
        if any(values):
            found = dict(zip(header, values, strict=True))
            yield found | {column: found[column].strip() for column in TEXTS if column in found}


def _require_columns(name: str, header: list[str]) -> None:
    if len(set(header)) < len(header):
        raise UserError(f"hints: {name} has two columns with the same name")
    known = set(header)
    if "id" not in known or not ({"label"} <= known or {"other", "link"} <= known or {*EDITED} <= known):
        found = ", ".join(map(printable, header)) or "nothing"
        raise UserError(f"hints: {name} needs {VALID}; it has {shortened(found)}")


def _from_rows(rows: Rows, find: Callable[[str, str], int]) -> Wanted:
    if rows and "label" not in rows[0][1] and {*EDITED} <= rows[0][1].keys():
        return _from_edits(rows, find)
    wanted = Wanted({}, [], [])
    for where, row in rows:
        name, other, link = row.get("label", ""), row.get("other", ""), row.get("link", "")
        if not (name or other or link):
            continue  # an image that the user did not name
        image = find(unescape(row["id"]), where)
        if name and wanted.names.setdefault(image, name) != name:
            both = f"{_shown(wanted.names[image])} and {_shown(name)}"
            raise UserError(f"hints: {where}{_shown(row['id'])} is named {both}; it can have one name")
        if not (other or link):
            continue
        if link not in LINKS:
            raise UserError(f"hints: {where}link: {_shown(link)} must be must or cannot")
        pair = (image, find(unescape(other), where))
        (wanted.must if LINKS[link] else wanted.cannot).append(pair)
    return wanted


def _from_edits(rows: Rows, find: Callable[[str, str], int]) -> Wanted:
    """Return the hints in the table downloaded from the report.

    A cluster that was named, merged or has images that were marked as wrong is represented by a sample of its other
    images, which get its name; those marked as wrong must be in another cluster. Other clusters are no hints.
    """
    whole = {where: row["name"] or f"cluster {row['merged_cluster']}" for where, row in rows}
    touched = {
        whole[where]
        for where, row in rows
        if row["name"] or row["merged_cluster"] != row["cluster"] or row["marked_wrong"] == "yes"
    }
    members: dict[str, list[int]] = {}
    wrong: dict[str, list[int]] = {}
    for where, row in rows:
        if whole[where] in touched:
            place = wrong if row["marked_wrong"] == "yes" else members
            place.setdefault(whole[where], []).append(find(unescape(row["id"]), where))
    wanted = Wanted({}, [], [])
    for name, images in members.items():
        sample = np.random.default_rng(0).permutation(len(images))[:PER_CLUSTER]
        wanted.names.update({images[place]: name for place in np.sort(sample).tolist()})
        first = images[int(sample.min())]
        wanted.cannot.extend((image, first) for image in wrong.get(name, ()))
    return wanted


def _shown(name: str) -> str:
    return repr(printable(shortened(name)))
