"""Folders and glob patterns → the images in them, each once, whatever links there are."""

import glob
import os
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from secu.data.images import SUFFIXES
from secu.data.own.names import natural, one_line, printable
from secu.data.own.source import FileSource, Skipped
from secu.errors import UserError

# HEIC is listed although pillow cannot read it: photos of a phone are not to vanish without a word.
IMAGE_SUFFIXES = (*SUFFIXES, ".jpe", ".jfif", ".avif", ".heic", ".heif")


class Listing(NamedTuple):
    """The images below a folder by relative path, what was refused, and how many other files there were."""

    ids: list[str]
    skipped: list[Skipped]
    others: int


def is_image(name: str) -> bool:
    """Say whether a file's name (without folders) is one of an image; hidden files are not."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def open_folder(name: str) -> FileSource:
    """List the images in a folder and its subfolders; hidden ones and other files are passed over.

    Raises:
        UserError: The folder may not be read.
    """
    return _files(name, os.path.abspath(name), name, walk(name))


def open_glob(pattern: str) -> FileSource:
    """List the images that a pattern names: ``*``, ``?`` and ``[ab]`` within a name, ``**`` for any folders.

    Ids are relative to the deepest folder that the pattern spells out. ``glob.glob`` would follow loops of links.
    """
    top, wanted = split_pattern(pattern)
    if not os.path.isdir(top):
        raise UserError(f"source: {printable(top)} in the pattern {printable(pattern)} is not a folder")
    listing = walk(
        top,
        takes=lambda name: _matches(name.split("/"), wanted),
        enters=lambda name: _may_lead(name.split("/"), wanted),
    )
    return _files(pattern, os.path.abspath(pattern), top, listing)


def split_pattern(pattern: str) -> tuple[str, list[str]]:
    """Return the deepest folder that a pattern spells out, and the parts from the first wildcard on."""
    parts = os.path.normpath(pattern).split(os.sep)
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return os.sep.join(parts[:fixed]) or (os.sep if os.path.isabs(pattern) else "."), parts[fixed:]


def spelled_out(name: str) -> str:
    """Return where the images that a source names lie: its name, or of a pattern the folder that it spells out."""
    return split_pattern(name)[0] if glob.has_magic(name) and not os.path.lexists(name) else name


def _files(name: str, place: str, top: str, listing: Listing) -> FileSource:
    if not listing.ids and not listing.skipped:
        others = f"; {listing.others} files there are of other kinds" if listing.others else ""
        raise UserError(f"source: no images in {printable(name)} (looked for {' '.join(IMAGE_SUFFIXES)}){others}")
    paths = [os.path.join(top, *name.split("/")) for name in listing.ids]
    return FileSource(name, place, listing.ids, paths, skipped=listing.skipped)


def walk(
    top: str,
    takes: Callable[[str], bool] = lambda name: True,
    enters: Callable[[str], bool] = lambda name: True,
) -> Listing:
    """List the images below ``top`` in natural order.

    A folder is entered once and a file listed once, by its real path rather than by a link to it. Links that lead
    nowhere are listed, so that they are reported; two names of one file on disk (hard links) are two files.

    Args:
        top: The folder.
        takes: Whether an image of this relative path is wanted.
        enters: Whether a folder of this relative path is to be looked into.
    """
    files: dict[str, str] = {}  # real path → relative path
    links: list[str] = []
    skipped: list[Skipped] = []
    others = 0
    for place, name, entry in _below(top, enters, skipped):
        if not (is_image(entry.name) and takes(name)):
            others += 1
        elif entry.is_symlink():
            links.append(name)
        elif entry.is_file():
            files[os.path.join(place, entry.name)] = name
        else:
            skipped.append((name, "not a file"))
    for name in sorted(links, key=natural):
        files.setdefault(os.path.realpath(os.path.join(top, name)), name)
    return Listing(sorted(files.values(), key=natural), sorted(skipped), others)


def _below(
    top: str, enters: Callable[[str], bool], skipped: list[Skipped]
) -> Iterator[tuple[str, str, "os.DirEntry[str]"]]:
    """Return all that is neither hidden nor a folder, with the real path of its folder and its own relative one."""
    real, linked = [""], list[str]()
    seen: set[str] = set()
    while real or linked:  # real folders first: a link to one of them then finds it seen
        folder = real.pop() if real else linked.pop(0)
        place = os.path.realpath(os.path.join(top, folder))
        if place in seen:
            continue
        seen.add(place)
        entries = _entries(place, folder, skipped)
        if folder and {"config.yaml", "metrics.jsonl"} <= {entry.name for entry in entries}:
            continue  # a run of ours that lies among the images: its pictures are none of them
        for entry in entries:
            name = f"{folder}{entry.name}"
            if entry.name.startswith("."):
                continue
            if not _is_folder(entry):
                yield place, name, entry
            elif enters(name):
                (linked if entry.is_symlink() else real).append(f"{name}/")


def _entries(place: str, folder: str, skipped: list[Skipped]) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(place) as entries:
            return list(entries)
    except OSError as error:
        if not folder:
            raise UserError(f"source: cannot read the folder {printable(place)}: {one_line(error)}") from None
        skipped.append((folder, f"folder cannot be read: {one_line(error)}"))
        return []


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _matches(names: list[str], pattern: list[str]) -> bool:
    """Say whether a path matches a pattern, part by part."""
    if not pattern:
        return not names
    if pattern[0] == "**":
        return pattern[1:] == [] or any(_matches(names[i:], pattern[1:]) for i in range(len(names)))
    return bool(names) and fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


def _may_lead(names: list[str], pattern: list[str]) -> bool:
    """Say whether files below a folder could match a pattern."""
    for name, part in zip(names, pattern, strict=False):
        if part == "**":
            return True
        if not fnmatchcase(name, part):
            return False
    return len(names) < len(pattern)
