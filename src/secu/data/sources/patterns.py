"""Several files under one name: ``shard-{000..012}.tar``, ``data/train-*.parquet``, or all such files of a folder."""

import glob
import os
import re
from collections.abc import Sequence
from itertools import product
from math import prod

from secu.base.errors import UserError
from secu.base.names import printable
from secu.data.text import natural

SHARDS = (".tar", ".parquet", ".pq")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
MOST = 1_000_000  # files that a pattern with braces may expand to


def is_pattern(name: str) -> bool:
    """Return whether a name expands to several files: it contains wildcards, ``{000..012}`` or ``{train,val}``."""
    return glob.has_magic(name) or any(_choices(match[1]) for match in _BRACES.finditer(name))


def matching_files(pattern: str) -> list[str]:
    """Return the files that a pattern expands to, in natural order within a wildcard."""
    found: dict[str, None] = {}
    names = _expanded(pattern)
    missing = [name for name in names if not glob.has_magic(name) and not os.path.isfile(name)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        stands = f"{printable(pattern)} expands to {len(names)} files"
        raise UserError(f"source: {stands}, but {printable(missing[0])}{more} does not exist")
    for name in names:
        matches = sorted(glob.glob(name, recursive=True), key=natural) if glob.has_magic(name) else [name]
        files = [match for match in matches if os.path.isfile(match)]
        if not files:
            raise UserError(f"source: no file matches {printable(name)}")
        found |= dict.fromkeys(files)
    return list(found)


def shards_in(folder: str) -> list[str]:
    """Return the .tar or, if there are none, the .parquet files in a folder, or in its subfolder ``data``."""
    for place in (folder, os.path.join(folder, "data")):
        for ending in SHARDS:
            if names := glob.glob(f"*{ending}", root_dir=place):
                return [os.path.join(place, name) for name in sorted(names, key=natural)]
    return []


def _expanded(pattern: str) -> list[str]:
    """Return the names that braces stand for: ``{000..012}`` counts, ``{train,val}`` lists."""
    parts = _BRACES.split(pattern)  # text, inside of braces, text, …
    choices = [[part] if i % 2 == 0 else _choices(part) or [f"{{{part}}}"] for i, part in enumerate(parts)]
    total = prod(map(len, choices))
    if total > MOST:
        raise UserError(f"source: {printable(pattern)} expands to {total:,} files; the limit is {MOST:,}")
    return ["".join(chosen) for chosen in product(*choices)]


def _choices(inside: str) -> list[str]:
    count = _RANGE.fullmatch(inside)
    if count is None:
        return inside.split(",") if "," in inside else []
    first, last = count.groups()
    if int(last) - int(first) > MOST:
        raise UserError(f"source: {{{inside}}} expands to too many files; the limit is {MOST:,}")
    return [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]


def distinct(files: Sequence[str]) -> list[str]:
    """Return the name of each file, with as many folders as it takes to tell them apart."""
    names = [os.path.basename(file) for file in files]
    if len(set(names)) == len(names):
        return names
    top = os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in files])
    return [os.path.relpath(os.path.abspath(file), top).replace(os.sep, "/") for file in files]
