"""Listings of large sources, kept in files: the images of a folder, and the members of a shard.

A listing is a few arrays in an .npz file with checksums. It is only a shortcut: a file that is missing, damaged or
cannot be written is no error.
"""

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from secu.base.files import write_atomically
from secu.data.sources.downloads import data_root
from secu.data.strings import Names

VERSION = 1  # increment it whenever the same folder or shard would be listed differently
LEAST = 20_000  # images; smaller folders are listed in a moment
ENDS = "_ends"  # suffix of the array with the ends of names
SETTLED = 2.0  # seconds; a folder that changed later than this before it was listed may change again unnoticed

Content = dict[str, Any]  # arrays and Names


class Listing(NamedTuple):
    """The images below a folder."""

    ids: Names  # relative paths
    skipped: list[tuple[str, str]]  # id and reason
    others: int  # number of other files
    folders: Names  # real paths of the visited folders
    times: NDArray[np.int64]  # when each of them changed, in nanoseconds (F,)
    has_links: bool  # whether an image is a link to a file, which may change without any of these folders


def listed(top: str, what: str, walk: Callable[[], Listing]) -> Listing:
    """Return the images of a folder, from a file if none of its folders has changed since.

    The time of a folder changes when an entry is added, removed or renamed, and one time per folder is read instead of
    every entry. A file whose content changes keeps its place in the listing. ``what`` is listed of the folder, such as
    the matches of a pattern.
    """
    path = _place(f"{os.path.realpath(top)}\0{what}")
    known = _load_listing(path)
    if known is not None:
        return known
    began = time.time_ns()
    listing = walk()
    changed = int(listing.times.max(initial=0))
    if len(listing.ids) >= LEAST and not listing.skipped and not listing.has_links and began - changed > SETTLED * 1e9:
        others = np.array([listing.others], np.int64)
        _save(path, {"ids": listing.ids, "folders": listing.folders, "times": listing.times, "others": others})
    return listing


def _load_listing(path: Path) -> Listing | None:
    known = _load(path)
    try:
        folders = known["folders"]
        times = known["times"]
        if not all(os.stat(folder).st_mtime_ns == then for folder, then in zip(folders, times, strict=True)):
            return None
        return Listing(known["ids"], [], int(known["others"][0]), folders, times, False)
    except (OSError, ValueError, KeyError):  # not kept, a folder is gone, or the file was made by something else
        return None


def indexed(path: str, stamp: str, index: Callable[[], Content]) -> Content:
    """Return the index of a file, from the cache if its stamp is the same."""
    place = _place(os.path.realpath(path))
    mark = np.frombuffer(stamp.encode(), np.uint8)
    known = _load(place)
    if np.array_equal(known.get("stamp", mark[:0]), mark):
        return known
    content = index()
    _save(place, {**content, "stamp": mark})
    return content


def _place(key: str) -> Path:
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return data_root() / "listings" / f"{digest}.v{VERSION}.npz"


def _load(path: Path) -> Content:
    """Return the content of a file; empty if it is missing, or damaged in any way."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception:
        return {}
    names = [name for name in arrays if f"{name}{ENDS}" in arrays]
    return arrays | {name: Names(arrays[name].tobytes(), arrays[f"{name}{ENDS}"]) for name in names}


def _save(path: Path, content: Content) -> None:
    arrays: dict[str, NDArray[Any]] = {}
    for name, value in content.items():
        if isinstance(value, Names):
            arrays |= {name: np.frombuffer(value.data, np.uint8), f"{name}{ENDS}": value.ends}
        else:
            arrays[name] = value

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, write)
