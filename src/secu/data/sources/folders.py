"""List the images in folders and glob patterns; each file is listed once, even if there are links to it."""

import os
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from secu.base.errors import UserError
from secu.base.names import printable
from secu.data.sources.base import FileSource, Skipped
from secu.data.sources.listing import Listing, listed
from secu.data.sources.patterns import is_pattern
from secu.data.strings import Names, PathsBelow
from secu.data.text import natural, one_line

# HEIC is included although pillow cannot read it, so that photos from a phone are reported instead of ignored.
_SUFFIXES = """
    .jpeg .jpg .jpe .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .avif .heic .heif
"""
SUFFIXES = tuple(_SUFFIXES.split())
Entry = os.DirEntry[str]


class NoImages(UserError):
    """A folder or pattern without images."""


class Visit(NamedTuple):
    """A visited folder: its relative path, and when it last changed."""

    name: str
    time: int


def is_image(name: str) -> bool:
    """Return whether a file name (without folders) has an image extension and is not hidden."""
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def open_folder(name: str) -> FileSource:
    """List the images in a folder and its subfolders, ignoring hidden and other files."""
    return _files(name, os.path.abspath(name), name, listed(name, "all", lambda: walk(name)))


def open_glob(pattern: str) -> FileSource:
    """List the images that match a pattern: ``*``, ``?`` and ``[ab]`` within a name, ``**`` for any folders.

    Ids are relative to the last folder before the first wildcard. ``glob.glob`` is not used because it would follow
    cyclic links.
    """
    top, wanted = split_pattern(pattern)
    if not os.path.isdir(top):
        raise UserError(f"source: {printable(top)} in the pattern {printable(pattern)} is not a folder")
    listing = listed(top, f"pattern {'/'.join(wanted)}", lambda: walk(top, wanted))
    return _files(pattern, os.path.abspath(pattern), top, listing)


def open_classes(name: str, top: str) -> FileSource:
    """List ``top/<class>/<image>``, with each image's class as its target; images are decoded on demand.

    Classes and files are in plain string order, as in torchvision. A class without images keeps its number, so that
    targets are consistent across splits.
    """
    listing = listed(top, "classes", lambda: walk(top, ["*", "*"], key=lambda name: name.split("/")))
    if not listing.ids:
        raise UserError(f"{name}: no images found in {top}; put them into one folder per class: {top}/<class>/<image>")
    folders = [folder for folder in os.listdir(top) if os.path.isdir(os.path.join(top, folder))]
    class_names = sorted(folder for folder in folders if not folder.startswith("."))
    numbers = {folder: number for number, folder in enumerate(class_names)}
    targets = np.array([numbers[image.partition("/")[0]] for image in listing.ids], np.int64)
    return _files(name, name, top, listing, targets=targets, class_names=class_names, on_demand=True)


def split_pattern(pattern: str) -> tuple[str, list[str]]:
    """Return the folder before a pattern's first wildcard or brace, and the parts from there on."""
    parts = os.path.normpath(pattern).split(os.sep)
    fixed = next(i for i, part in enumerate(parts) if is_pattern(part))
    return os.sep.join(parts[:fixed]) or (os.sep if os.path.isabs(pattern) else "."), parts[fixed:]


def spelled_out(name: str) -> str:
    """Return the location of a source's images: its name or, for a pattern, the folder before the first wildcard."""
    return split_pattern(name)[0] if is_pattern(name) and not os.path.lexists(name) else name


def _files(name: str, place: str, top: str, listing: Listing, **more: Any) -> FileSource:
    if not listing.ids and not listing.skipped:
        others = f"; {listing.others} files there are of other kinds" if listing.others else ""
        raise NoImages(f"source: no images in {printable(name)} (looked for {' '.join(SUFFIXES)}){others}")
    paths = PathsBelow(top, listing.ids)
    return FileSource(name, place, listing.ids, paths, skipped=listing.skipped, **more)


def walk(top: str, wanted: Sequence[str] = ("**",), key: Callable[[str], Any] = natural) -> Listing:
    """List the images below ``top`` that match a pattern, given in parts, sorted by a key of their relative path.

    Each folder is visited once and each file is listed once, by its real path rather than by a link to it. Broken links
    are listed, so that they are reported. Hard links count as separate files.
    """
    files: list[str] = []
    links: list[str] = []
    skipped: list[Skipped] = []
    visited: dict[str, Visit] = {}
    others = 0
    for name, entry in _below(top, wanted, skipped, visited):
        if not (is_image(entry.name) and _matches(name.split("/"), wanted)):
            others += 1
        elif entry.is_symlink():
            links.append(name)
        elif entry.is_file():
            files.append(name)
        else:
            skipped.append((name, "not a file"))
    files += _new_targets(top, sorted(links, key=natural), visited, wanted)
    files.sort(key=key)
    times = np.array([visit.time for visit in visited.values()], np.int64)
    return Listing(Names.of(files), sorted(skipped), others, Names.of(visited), times, bool(links))


def _new_targets(top: str, links: list[str], visited: dict[str, Visit], wanted: Sequence[str]) -> list[str]:
    """Return the links to files that are not listed already, under their own name or that of another link.

    A file is listed if its folder was, so that a set of a million paths is not needed.
    """
    new: dict[str, str] = {}  # real path → relative path of the link
    for name in links:
        target = os.path.realpath(os.path.join(top, name))
        folder, file = os.path.split(target)
        visit = visited.get(folder)
        is_taken = visit is not None and is_image(file) and _matches(f"{visit.name}{file}".split("/"), wanted)
        if not (is_taken and os.path.isfile(target)):
            new.setdefault(target, name)
    return list(new.values())


def _below(
    top: str, wanted: Sequence[str], skipped: list[Skipped], visited: dict[str, Visit]
) -> Iterator[tuple[str, Entry]]:
    """Yield all files that are not hidden with their relative paths; fill in the folders by their real path."""
    real = [""]
    linked: list[str] = []
    seen: set[str] = set()
    while real or linked:  # real folders first, so that links to them are recognized as visited
        folder = real.pop() if real else linked.pop(0)
        place = os.path.realpath(os.path.join(top, folder))
        if place in seen:
            continue
        seen.add(place)
        changed, entries = _entries(place, folder, skipped)
        visited[place] = Visit(folder, changed)
        if folder and {"config.yaml", "metrics.jsonl"} <= {entry.name for entry in entries}:
            continue  # a run folder: its pictures are not part of the data
        for entry in entries:
            name = f"{folder}{entry.name}"
            if entry.name.startswith("."):
                continue
            if not _is_folder(entry):
                yield name, entry
            elif _may_lead(name.split("/"), wanted):
                (linked if entry.is_symlink() else real).append(f"{name}/")


def _entries(place: str, folder: str, skipped: list[Skipped]) -> tuple[int, list[Entry]]:
    """Return when a folder last changed, and its entries."""
    try:
        changed = os.stat(place).st_mtime_ns  # before it is listed, so that no change is missed
        with os.scandir(place) as entries:
            return changed, list(entries)
    except OSError as error:
        if not folder:
            raise UserError(f"source: cannot read the folder {printable(place)}: {one_line(error)}") from None
        skipped.append((folder, f"folder cannot be read: {one_line(error)}"))
        return 0, []


def _is_folder(entry: Entry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a path matches a pattern, part by part."""
    if not pattern:
        return not names
    if pattern[0] == "**":
        return len(pattern) == 1 or any(_matches(names[i:], pattern[1:]) for i in range(len(names)))
    return bool(names) and fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


def _may_lead(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether files below a folder could match a pattern."""
    for name, part in zip(names, pattern, strict=False):
        if part == "**":
            return True
        if not fnmatchcase(name, part):
            return False
    return len(names) < len(pattern)
