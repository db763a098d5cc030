"""The user's own images: from what they named to uint8 images in memory, decoded once.

``open_source`` lists, ``prepare`` decodes into a cache and loads it; ``Source`` and ``decoded`` serve those who want
one image, or a stream of them.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from secu.data.images import Images, ImageSource
from secu.data.own.archives import TAR_SUFFIXES, TarSource, ZipSource
from secu.data.own.arrays import ArraySource, open_array
from secu.data.own.cache import Progress, Stored, build, cache_file, load
from secu.data.own.decode import BadImage
from secu.data.own.folders import is_image, open_folder, open_glob
from secu.data.own.names import printable
from secu.data.own.source import FileSource, Probe, Skipped, Source
from secu.data.own.stream import decoded, decoded_in_batches, needs_decoding
from secu.data.own.tables import open_manifest
from secu.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ArraySource",
    "BadImage",
    "FileSource",
    "OwnImages",
    "Probe",
    "Skipped",
    "Source",
    "decoded",
    "decoded_in_batches",
    "ids_of",
    "needs_decoding",
    "open_source",
    "pictures_of",
    "prepare",
    "printable",
]

MAX_BAD = 0.05  # of all images: more than that and the run stops, unless it is told not to
LARGEST = 4096  # pixels, the side of a decoded image
KINDS = "a folder, a glob pattern, .npy, .npz, .csv, .tsv, .parquet, .zip, .tar, .tar.gz, .tar.bz2 or .tar.xz"


@dataclass(frozen=True, eq=False)
class OwnImages(Images):
    """Images in memory that the user brought; row ``i`` of everything is about the same image.

    Attributes:
        ids: The id of each image.
        columns: What the source carries along, by column.
        paths: The file of each image; empty where they are no files.
        skipped: Id and reason of each image that could not be read, or was named twice, and is in no list above.
        source: Where they were decoded from.
        numbers: The number of each image in the source.
    """

    ids: tuple[str, ...] = ()
    columns: Mapping[str, list[Any]] = field(default_factory=dict)
    paths: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    source: Source | None = None
    numbers: Sequence[int] = ()

    @cached_property
    def side(self) -> int:
        """The shorter side of the originals, by the median of a sample; 0 where they are not at hand."""
        try:
            seen = self.source.probe() if self.source else None
        except UserError:
            seen = None
        return seen.side if seen else 0

    def pictures(self, index: Tensor, side: int) -> Tensor:
        """Return images for people to look at, uint8 (B, C, S, S): S is at most ``side``, but what is there is used.

        They are decoded once more if the originals are larger than what a model sees; one that is gone is enlarged.
        """
        import torch

        channels, stored, _ = self.shape
        side = min(side, self.side)
        if self.source is None or side <= stored:
            return self.fetch(index)
        numbers = [self.numbers[i] for i in index.tolist()]
        with closing(decoded(self.source, side, channels, only=numbers)) as outcomes:
            found = {number: image for number, image in outcomes if not isinstance(image, BadImage)}
        rows = np.arange(side) * stored // side
        for number, pixels in zip(numbers, self.pixels[index].numpy(), strict=True):
            found.setdefault(number, pixels[:, rows][:, :, rows])
        return torch.from_numpy(np.stack([found[number] for number in numbers]))

    def only(self, rows: list[int]) -> OwnImages:
        """Return some of the images, in this order, with the classes that are left."""
        targets, names = None if self.targets is None else self.targets[rows], self.class_names
        if targets is not None and names:
            left, numbers = targets[targets >= 0].unique(return_inverse=True)
            targets = targets.clone()
            targets[targets >= 0] = numbers
            names = tuple(names[i] for i in left.tolist())
        return OwnImages(
            pixels=self.pixels[rows],
            targets=targets,
            class_names=names,
            ids=tuple(self.ids[i] for i in rows),
            columns={name: [values[i] for i in rows] for name, values in self.columns.items()},
            paths=tuple(self.paths[i] for i in rows) if self.paths else (),
            skipped=self.skipped,
            source=self.source,
            numbers=[self.numbers[i] for i in rows] if self.source else (),
        )


def ids_of(images: ImageSource) -> Sequence[str]:
    """Return what each image is called: own ones by their ids, others by their number in the data set."""
    return images.ids if isinstance(images, OwnImages) else [str(i) for i in range(len(images))]


def pictures_of(images: ImageSource, index: Tensor, side: int) -> Tensor:
    """Return images for people to look at, uint8 (B, C, H, W): own ones from the originals, if that shows more."""
    return images.pictures(index, side) if isinstance(images, OwnImages) else images.fetch(index)


def open_source(source: str | Path, labels: str | None = None) -> Source:
    """List the images that ``source`` names; nothing is decoded yet.

    Args:
        source: A folder, a glob pattern, an array (.npy, .npz), a manifest with a ``path`` column (.csv, .tsv,
            .parquet), an archive (.zip, .tar and compressed ones), or a single image.
        labels: True labels, for scoring only: ``folder`` for the name of the folder that an image lies in, a column of
            the manifest or a key of the .npz; None for none.

    Raises:
        UserError: There is no such thing, it cannot be read, or it has no such labels.
    """
    opened = _open(os.path.expanduser(source))
    if labels is not None:
        opened.require_images()
        opened.label(labels)
    return opened


def _open(name: str) -> Source:
    if os.path.isdir(name):
        return open_folder(name)
    if not os.path.lexists(name):
        if glob.has_magic(name):
            return open_glob(name)
        raise UserError(f"source: {printable(name)} does not exist; name {KINDS}")
    if not (os.path.isfile(name) and os.access(name, os.R_OK)):
        raise UserError(f"source: {printable(name)} cannot be read: no permission, a broken link, or not a file at all")
    lower = name.lower()
    if lower.endswith((".npy", ".npz")):
        return open_array(name)
    if lower.endswith((".csv", ".tsv", ".parquet", ".pq")):
        return open_manifest(name)
    if lower.endswith(".zip"):
        return ZipSource(name)
    if lower.endswith(TAR_SUFFIXES):
        return TarSource(name)
    if is_image(os.path.basename(name)):
        return FileSource(name, os.path.abspath(name), [os.path.basename(name)], [name])
    raise UserError(f"source: {printable(name)} is of an unknown kind; name {KINDS}")


def prepare(
    source: Source,
    size: int,
    channels: int,
    *,
    cache: Path,
    allow_bad: bool = False,
    progress: Progress | None = None,
) -> OwnImages:
    """Return the images of a source as squares, decoding them unless the cache has them as they are now.

    Args:
        source: What ``open_source`` returned.
        size: Side of the squares.
        channels: 1 for grey, 3 for colour.
        cache: A folder for the decoded images; it is made if it is not there. What it keeps of former states of this
            source is removed when the images are decoded anew.
        allow_bad: Go on when more than 5% of the images cannot be read.
        progress: Called with the images decoded so far and of all; not at all if the cache has them.

    Raises:
        UserError: Too many images are bad, less than two are good, or the cache cannot be written.
    """
    if not 1 <= size <= LARGEST:
        raise UserError(f"image_size: {size} must be from 1 to {LARGEST}")
    if channels not in (1, 3):
        raise UserError(f"channels: {channels} must be 1 (grey) or 3 (colour)")
    source.require_images()
    path = cache_file(source, size, channels, Path(cache))
    stored = load(path, len(source), size, channels)
    if stored is None:
        stored = build(path, source, size, channels, progress)
    images = _joined(source, stored)
    _require_enough(source, images, allow_bad)
    return images


def _joined(source: Source, stored: Stored) -> OwnImages:
    """Join pixels and what is known of them, without the bad ones."""
    import torch

    rows = [i for i in range(len(source)) if i not in stored.bad]
    ids = source.ids
    return OwnImages(
        pixels=torch.from_numpy(stored.pixels),
        targets=None if source.targets is None else torch.from_numpy(source.targets[rows]),
        class_names=source.class_names,
        ids=tuple(ids[i] for i in rows),
        columns={name: [values[i] for i in rows] for name, values in source.columns.items()},
        paths=tuple(source.paths[i] for i in rows) if isinstance(source, FileSource) else (),
        skipped=(*source.skipped, *((ids[i], reason) for i, reason in stored.bad.items()), *source.repeated),
        source=source,
        numbers=rows,
    )


def _require_enough(source: Source, images: OwnImages, allow_bad: bool) -> None:
    bad = len(images.skipped) - len(source.repeated)
    total = len(images) + bad
    first = f"the first: {': '.join(map(printable, images.skipped[0]))}" if images.skipped else ""
    if bad > MAX_BAD * total and not allow_bad:
        share = f"{bad} of {total} images in {source.name} cannot be read, more than {MAX_BAD:.0%}"
        raise UserError(f"source: {share}; {first}; to go on without them: --allow-bad, in Python allow_bad=True")
    if len(images) < 2:
        raise UserError(
            f"source: only one image in {source.name}; clusters need at least two{f' ({first})' if first else ''}"
        )
