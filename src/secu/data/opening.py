"""Open a source by name: a path, a pattern, ``dataset:NAME``, or ``KIND:rest`` for a registered kind."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from secu.base.errors import UserError
from secu.base.names import printable
from secu.data.sources.archives import TAR_SUFFIXES, TarSource, ZipSource
from secu.data.sources.arrays import open_array
from secu.data.sources.base import FileSource, Shape, Source
from secu.data.sources.datasets import find_dataset, open_dataset
from secu.data.sources.folders import NoImages, is_image, open_folder, open_glob
from secu.data.sources.manifest import open_manifest
from secu.data.sources.parquet import PARQUET, holds_images, open_parquet_images
from secu.data.sources.patterns import is_pattern, matching_files, shards_in
from secu.data.sources.shards import open_shards
from secu.data.sources.vectors import has_vectors, open_vectors
from secu.registry import SOURCES

if TYPE_CHECKING:
    from secu.config import DataConfig

FILES = ".npy, .npz, .csv, .tsv, .parquet, .zip, .tar, .tar.gz, .tar.bz2 or .tar.xz"  # .npy and .parquet: or vectors
KINDS = f"a folder, a glob pattern, {FILES}, shard-{{000..012}}.tar, hf://NAME, or dataset:NAME"


def open_source(
    name: str | Path, labels: str | None = None, split: str | None = None, *, root: Path | None = None
) -> Source:
    """Open a source and list its images, without decoding them.

    Args:
        name: A folder, a glob pattern, an array (.npy, .npz), a manifest with a ``path`` column (.csv, .tsv,
            .parquet), feature vectors (a float matrix in .npy, a list column in .parquet), an archive (.zip, .tar and
            compressed ones), several tar shards or Parquet files with images (``shard-{000..012}.tar``,
            ``train-*.parquet``, or their folder), a single image, a data set (``dataset:cifar10``, ``hf://NAME``), or a
            kind registered in ``secu.registry.SOURCES`` (``KIND:rest``).
        labels: True labels, for scoring only: ``folder`` for the name of an image's folder, a column of the manifest
            or a key of the .npz; if None, the source's own labels are used, if any.
        split: A split of the source, if it has splits; if None, its default split.
        root: The folder of all named data sets; by default ``data_root()``.

    Raises:
        UserError: The source does not exist, cannot be read, or does not have this split or these labels.
    """
    text = os.path.expanduser(name)
    kind, rest = _kind_of(text)
    if kind == "dataset":
        source = open_dataset(rest, split, root)
    elif kind:
        opened: Source = SOURCES[kind](rest, split)
        source = opened.replaced(place=text)  # the name by which a run reopens it
    elif split is not None:
        raise UserError(f"split: {printable(text)} has no splits, got {split!r}")
    else:
        source = _open_path(text)
    return source if labels is None else source.label(labels)


def open_data(data: DataConfig, split: str | None = None, root: Path | None = None) -> Source:
    """Open the source in a run's settings; if it has splits, by default the one to train on."""
    if data.source is None:
        raise UserError("data.source: must be dataset:NAME, a folder or another source, got null")
    if split is None and splits_of(data.source):
        split = data.train
    return open_source(data.source, data.labels, split, root=root).limited(data.max_pixels)


def splits_of(name: str | Path | None) -> tuple[str, ...]:
    """Return the names of the splits of a source; empty if it has none.

    For a registered kind of source, these are the attribute ``splits`` of its class or function.
    """
    kind, rest = _kind_of(str(name))
    if kind == "dataset":
        return find_dataset(rest).splits
    return tuple(getattr(SOURCES[kind], "splits", ())) if kind else ()


def shape_of(data: DataConfig) -> Shape:
    """Return the shape that a source is read in, from the settings alone: of decoded images, or of given vectors."""
    if data.features and data.image_size is None:
        return (data.features,)  # vectors that were not computed from images
    kind, rest = _kind_of(data.source or "")
    natural = find_dataset(rest).shape if kind == "dataset" else None
    size = data.image_size or (natural[1] if natural else None)
    if size is None:
        raise UserError(f"data.image_size: must be a number of pixels for data.source={data.source}, got null")
    # Old runs did not store data.channels, but had one mean per channel.
    channels = data.channels or (natural[0] if natural else len(data.mean))
    return channels, size, size


def input_shape(data: DataConfig) -> Shape:
    """Return the shape of what a model is trained on: feature vectors, or decoded images."""
    return (data.features,) if data.features else shape_of(data)


def _kind_of(name: str) -> tuple[str, str]:
    """Return kind and rest of ``KIND:rest``; the kind is empty for a path."""
    kind, colon, rest = name.partition(":")
    return (kind, rest) if colon and kind in SOURCES else ("", name)


def _holds(test: Callable[[str], bool], name: str) -> bool:
    try:
        return test(name)
    except UserError:
        raise
    except Exception:  # a damaged file; the reader of images or manifests says why
        return False


def _open_path(name: str) -> Source:
    if os.path.isdir(name):
        return _open_folder(name)
    if not os.path.lexists(name):
        return _open_pattern(name)
    if not (os.path.isfile(name) and os.access(name, os.R_OK)):
        raise UserError(
            f"source: {printable(name)} cannot be read: permission denied, broken link, or not a regular file"
        )
    lower = name.lower()
    if lower.endswith((".npy", *PARQUET)) and _holds(has_vectors, name):
        return open_vectors(name)
    if lower.endswith(PARQUET) and _holds(holds_images, name):
        return open_parquet_images(name, [name])
    if lower.endswith((".npy", ".npz")):
        return open_array(name)
    if lower.endswith((".csv", ".tsv", *PARQUET)):
        return open_manifest(name)
    if lower.endswith(".zip"):
        return ZipSource(name)
    if lower.endswith(TAR_SUFFIXES):
        return TarSource(name)
    if is_image(os.path.basename(name)):
        return FileSource(name, os.path.abspath(name), [os.path.basename(name)], [name])
    raise UserError(f"source: {printable(name)} has an unsupported type; expected {KINDS}")


def _open_folder(name: str) -> Source:
    """Open a folder of images or, if there are none, of shards."""
    try:
        return open_folder(name)
    except NoImages:
        files = shards_in(name)
        if files and (not files[0].endswith(PARQUET) or _holds(holds_images, files[0])):
            return _open_shards(name, files)
        raise


def _open_pattern(name: str) -> Source:
    """Open what a pattern stands for: shards if it ends like one, otherwise images."""
    if not is_pattern(name):
        raise UserError(f"source: {printable(name)} does not exist; expected {KINDS}")
    if name.lower().endswith((*TAR_SUFFIXES, *PARQUET)):
        return _open_shards(name, matching_files(name))
    if not glob.has_magic(name):
        raise UserError(f"source: braces in {printable(name)} are only for .tar and .parquet files; use * and ?")
    return open_glob(name)


def _open_shards(name: str, files: list[str]) -> Source:
    return open_parquet_images(name, files) if files[0].lower().endswith(PARQUET) else open_shards(name, files)
