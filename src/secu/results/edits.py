"""The user's edits in the report: reads the downloaded table and derives a folder for every cluster (``secu sort``)."""

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from secu.base.errors import UserError
from secu.base.names import printable, unescape
from secu.data.sources.manifest import separator
from secu.results.cells import rearm
from secu.results.tables import LEAF

SAFE = re.compile(r"[^\w.\-]+")
LONGEST = 200  # maximum length of a file name in bytes; file systems allow 255
WRONG = "marked-as-wrong"
LABEL = re.compile(r"([0-9]{1,9})([ab]*)")  # of a cluster: 3, or 3a and 3b for its parts
SAME = 0.95  # minimum share of matching clusters; a different device may assign a few images differently


class Edits(NamedTuple):
    """The folder of each cluster, and the ids of images marked as wrong."""

    folders: list[str]
    wrong: set[str]
    by_id: Mapping[str, str] = {}  # the folder of each image, if clusters were split or the tree was cut

    def folder(self, name: str, cluster: int) -> str:
        """Return the folder of an image, by its id and its cluster."""
        return WRONG if name in self.wrong else self.group(name, cluster)

    def group(self, name: str, cluster: int) -> str:
        """Return the folder of an image if it is not marked as wrong."""
        if not self.by_id:
            return self.folders[cluster]
        if name not in self.by_id:
            raise UserError(f"names: there is no row for {printable(name)}; download the table again")
        return self.by_id[name]


class Row(NamedTuple):
    """One image in the table downloaded from the report."""

    id: str
    cluster: int
    name: str  # of the merged cluster; may be empty
    merged: str  # the cluster that the image is now in: its own one, another that it was merged into, a part or a group
    wrong: bool
    leaf: str | None = None  # its cluster in the finest head, if clusters were split


def read_edits(names: Path | None, clusters: int, cluster_of: Mapping[str, int]) -> Edits:
    """Read the table downloaded from the report; without one, folders are named after the cluster numbers.

    The table must match the cluster of each image in this run, by id, since another run numbers its clusters
    differently.
    """
    numbered = _numbered_folders(clusters)
    if names is None:
        return Edits(numbered, set())
    rows = read_rows(names, clusters)
    _require_same_run(names, rows, cluster_of)
    is_regrouped = rows[0].leaf is not None
    unnamed = _unnamed_folders(rows) if is_regrouped else {str(k): folder for k, folder in enumerate(numbered)}
    _require_distinct_folders(rows, unnamed)
    wrong = {row.id for row in rows if row.wrong}
    if is_regrouped:
        return Edits(numbered, wrong, {row.id: _folder(row.name, row.merged, unnamed) for row in rows})
    folders = list(numbered)
    for row in {row.cluster: row for row in rows}.values():
        folders[row.cluster] = _folder(row.name, row.merged, unnamed)
    return Edits(folders, wrong)


def ranked(rank: int, name: str) -> str:
    """Return a file name that starts with a rank and is safe for file systems and shells."""
    safe = SAFE.sub("_", name).encode()[-LONGEST:].decode(errors="ignore")  # may cut a multi-byte character
    return f"{rank:06d}-{safe}"


def _numbered_folders(clusters: int) -> list[str]:
    """Return zero-padded folder names, which sort by cluster number."""
    digits = len(str(clusters - 1))
    return [f"cluster-{cluster:0{digits}d}" for cluster in range(clusters)]


def _unnamed_folders(rows: Sequence[Row]) -> dict[str, str]:
    """Return the folder of each part or group without a name, as ``--level`` names those of a cut."""
    labels = {row.merged: row.merged.rstrip("ab") for row in rows}
    digits = max(map(len, labels.values()))
    return {label: f"cluster-{'0' * (digits - len(number))}{label}" for label, number in labels.items()}


def read_rows(names: Path, clusters: int) -> list[Row]:
    """Read the table downloaded from the report, without comparing it with a run."""
    numbers = {str(cluster): cluster for cluster in range(clusters)}
    try:
        with names.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file, delimiter=separator(file))  # a spreadsheet may have changed the delimiter
            rows = [_parse(row, numbers) for row in table]
    except OSError as error:
        raise UserError(f"names: cannot read {names}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, csv.Error):
        rows = []
    if not rows:
        raise UserError(f"names: {names} was not downloaded from the report of this run")
    return rows


def _parse(row: Mapping[str, str], numbers: Mapping[str, int]) -> Row:
    """Return a typed row; raise KeyError, TypeError or ValueError if a value is missing or invalid."""
    if row["name"] is None:  # the csv module fills short rows with None
        raise ValueError("a row without a name")
    leaf = row.get(LEAF)
    merged = row["merged_cluster"]
    if LEAF in row and (leaf is None or not LABEL.fullmatch(merged)):
        raise ValueError("a row without a leaf, or with an unknown cluster")
    return Row(
        id=unescape(rearm(row["id"])),
        cluster=numbers[row["cluster"]],
        name=rearm(row["name"]),
        merged=merged if leaf is not None else str(numbers[merged]),
        wrong=row["marked_wrong"] == "yes",
        leaf=leaf,
    )


def _require_same_run(names: Path, rows: Sequence[Row], cluster_of: Mapping[str, int]) -> None:
    known = [row for row in rows if row.id in cluster_of]
    agreed = [row for row in known if cluster_of[row.id] == row.cluster]
    if len(agreed) < SAME * max(1, len(known)):
        counts = f"it knows {len(known):,} of {len(cluster_of):,} images, and {len(agreed):,} of those"
        raise UserError(f"names: {names} belongs to another run: {counts} in the same cluster")


def _require_distinct_folders(rows: Sequence[Row], unnamed: Mapping[str, str]) -> None:
    """Raise if different names map to the same folder; equal names share a folder on purpose."""
    given: dict[str, dict[str, None]] = {}  # the names of each folder, in order
    if any(row.wrong for row in rows):
        given[WRONG] = {"images marked as wrong": None}
    for name, merged in dict.fromkeys((row.name, row.merged) for row in rows):
        shown = name if _safe(name) else f"cluster {merged}"
        given.setdefault(_folder(name, merged, unnamed), {})[shown] = None
    for folder, names in given.items():
        if len(names) > 1:
            shared = " and ".join(map(repr, names))
            raise UserError(f"names: {shared} would share the folder {folder}; rename one")


def _folder(name: str, merged: str, unnamed: Mapping[str, str]) -> str:
    """Return the folder of a cluster: its sanitized name, or that of the cluster it was merged into."""
    return _safe(name) or unnamed[merged]


def _safe(name: str) -> str:
    return SAFE.sub("_", name).strip("._").encode()[:LONGEST].decode(errors="ignore")
