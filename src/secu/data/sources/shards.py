"""Images in tar shards: ``shard-{000..012}.tar`` or ``shards/*.tar``, in the layout of WebDataset.

A sample consists of the members that share a name up to its first dot: ``cat/17.jpg`` and ``cat/17.cls``. Members
``.cls`` and ``.txt`` become columns, and so do the plain values in a ``.json``; ``cls`` holds the true labels. Each
shard is indexed once. Later, an image is read by its offset, which is why shards must not be compressed.
"""

import json
import os
import posixpath
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import repeat
from typing import IO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from secu.base.errors import UserError
from secu.base.names import printable
from secu.data.decoding.decode import Raw
from secu.data.decoding.image_files import BadImage
from secu.data.sources.archives import MAX_MEMBER, members_of, open_tar
from secu.data.sources.base import Skipped, Source, file_stamp
from secu.data.sources.folders import SUFFIXES, is_image
from secu.data.sources.listing import Content, indexed
from secu.data.sources.patterns import distinct
from secu.data.strings import Names
from secu.data.text import reading

LABELS = "cls"  # the column with the true labels
MOST_COLUMNS = 1_000
MAX_NOTE = 1 << 20  # bytes of a .cls, .txt or .json
NOTES = (".cls", ".txt", ".json")


class Shard(NamedTuple):
    """The images in one shard, in its order: their names, and where their bytes are."""

    names: Names
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    columns: dict[str, Names]
    skipped: list[Skipped]


class ShardSource(Source):
    """Images in uncompressed tar files. Ids are ``SHARD.tar/member``, in the order of the shards."""

    def __init__(self, name: str, place: str, files: Sequence[str]) -> None:
        shards = [_open(file) for file in files]
        starts = distinct(files)
        super().__init__(
            name,
            place,
            Names.of(f"{start}/{image}" for start, shard in zip(starts, shards, strict=True) for image in shard.names),
            columns=_join_columns(shards),
            skipped=[(f"{s}/{i}", why) for s, shard in zip(starts, shards, strict=True) for i, why in shard.skipped],
            stamps=map(file_stamp, files),
        )
        self.files = tuple(files)
        self.shard = np.repeat(np.arange(len(files), dtype=np.int32), [len(shard.names) for shard in shards])
        self.offsets = np.concatenate([shard.offsets for shard in shards])
        self.sizes = np.concatenate([shard.sizes for shard in shards])

    def read(self, i: int, values: str | None = None) -> Raw:
        """Return the bytes of image ``i``; no file stays open, so that threads and processes need not share one."""
        path = self.files[self.shard[i]]
        with open(path, "rb", buffering=0) as file:
            file.seek(int(self.offsets[i]))
            data = file.read(int(self.sizes[i]))
        if len(data) < self.sizes[i]:
            raise BadImage(f"{os.path.basename(path)} was truncated after it was indexed")
        return data


def open_shards(pattern: str, files: Sequence[str]) -> Source:
    """Open tar shards; if they have ``.cls`` members, these are the true labels."""
    source = ShardSource(pattern, os.path.abspath(pattern), files)
    if not source.ids and not source.skipped:
        raise UserError(f"source: no images in the {len(files)} shards of {printable(pattern)}")
    return source.label(LABELS) if source.ids and any(source.columns.get(LABELS, ())) else source


def _open(path: str) -> Shard:
    """Return the index of a shard, from the cache if the file has not changed."""
    with reading(f"the shard {printable(path)}"):
        index = indexed(path, f"shard {file_stamp(path)}", lambda: _index(path))
    columns = {key: index[f"column{number}"] for number, key in enumerate(index["keys"])}
    skipped = list(zip(index["bad"], index["why"], strict=True))
    return Shard(index["names"], index["offsets"], index["sizes"], columns, skipped)


def _index(path: str) -> Content:
    """List the members of a shard: its images, and the notes on them."""
    images: dict[str, dict[str, tuple[int, int]]] = {}  # key of a sample → name of an image → offset and size
    notes: dict[str, dict[str, str]] = {}
    skipped: list[Skipped] = []
    with open(path, "rb", buffering=0) as file:
        _refuse_compressed(path, file.read(6))
        end = file.seek(0, os.SEEK_END)
        file.seek(0)
        with open_tar(file, MAX_NOTE) as archive:
            for info in members_of(archive):
                if info.isdir():
                    continue
                if info.isfile() and info.offset_data + info.size > end:
                    raise tarfile.ReadError(f"it is truncated in {printable(info.name)}")
                name = posixpath.normpath(info.name).lstrip("/")
                key, ending = _split(name)
                if is_image(posixpath.basename(name)):
                    if refusal := _refusal(info):
                        skipped.append((name, refusal))
                    else:
                        images.setdefault(key, {})[name] = (info.offset_data, info.size)
                elif ending in NOTES and info.isfile() and info.size <= MAX_NOTE:
                    content = cast("IO[bytes]", archive.extractfile(info)).read()
                    _add_note(notes.setdefault(key, {}), ending, content)
    skipped += [(key, "sample has no image") for key in notes if key not in images]
    return _content(images, notes, skipped)


def _split(name: str) -> tuple[str, str]:
    """Return the key of a member's sample, up to the first dot of its name, and the rest."""
    folder, slash, file = name.rpartition("/")
    key, dot, ending = file.partition(".")
    return f"{folder}{slash}{key}", f"{dot}{ending}".lower()


def _add_note(notes: dict[str, str], ending: str, content: bytes) -> None:
    """Add the values of a .cls, .txt or .json; a damaged .json has none, so that the image's values are unknown."""
    text = content.decode("utf-8", "replace").strip()
    if ending != ".json":
        notes[ending[1:]] = text
        return
    with suppress(ValueError, RecursionError):
        values = json.loads(text)
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, str | int | float):
                notes.setdefault(key, str(value))


def _content(
    images: dict[str, dict[str, tuple[int, int]]], notes: dict[str, dict[str, str]], skipped: list[Skipped]
) -> Content:
    """Return the index of a shard as arrays and names."""
    chosen = [(key, name, *place) for key, found in images.items() for name, place in _main_images(found).items()]
    keys = list(dict.fromkeys(key for values in notes.values() for key in values))
    if len(keys) > MOST_COLUMNS:
        raise ValueError(f"its .json members have {len(keys):,} different keys; the limit is {MOST_COLUMNS:,}")
    columns = [Names.of(notes.get(sample, {}).get(key, "") for sample, *_ in chosen) for key in keys]
    return {
        "names": Names.of(name for _, name, _, _ in chosen),
        "offsets": np.array([offset for _, _, offset, _ in chosen], np.int64),
        "sizes": np.array([size for _, _, _, size in chosen], np.int64),
        "keys": Names.of(keys),
        **{f"column{number}": column for number, column in enumerate(columns)},
        "bad": Names.of(name for name, _ in skipped),
        "why": Names.of(why for _, why in skipped),
    }


def _main_images(found: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Return the images ``KEY.jpg`` of a sample rather than ``KEY.mask.png``, unless it has no others."""
    return {name: place for name, place in found.items() if _split(name)[1] in SUFFIXES} or found


def _refuse_compressed(path: str, magic: bytes) -> None:
    kinds = {b"\x1f\x8b": "gzip -d", b"BZh": "bzip2 -d", b"\xfd7zXZ": "xz -d", b"\x28\xb5\x2f\xfd": "zstd -d"}
    for start, command in kinds.items():
        if magic.startswith(start):
            why = "is compressed, so single images cannot be read from it; images hardly shrink anyway"
            raise UserError(f"source: the shard {printable(path)} {why}: unpack it with {command}")


def _refusal(info: tarfile.TarInfo) -> str:
    if not info.isfile() or info.sparse is not None:
        return "a link, a device or a sparse file"
    if info.size > MAX_MEMBER:
        return f"{info.size / 1e6:,.0f} MB; the limit is {MAX_MEMBER / 1e6:,.0f} MB"
    return ""


def _join_columns(shards: Sequence[Shard]) -> dict[str, Names]:
    """Return the columns of all shards; a shard without one has empty values."""
    keys = dict.fromkeys(key for shard in shards for key in shard.columns)
    return {
        key: Names.of(value for shard in shards for value in shard.columns.get(key, repeat("", len(shard.names))))
        for key in keys
    }
