"""A run's pictures in a folder for each cluster, best first: links to the originals, or copies."""

import csv
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from secu.checkpoint import load_trained
from secu.data import ImageSource
from secu.data.own import OwnImages, ids_of, printable
from secu.data.own.cache import Progress
from secu.data.own.folders import spelled_out
from secu.data.own.tables import separator
from secu.errors import UserError
from secu.evaluate import embed, predict
from secu.files import aside, void
from secu.fit import images_of
from secu.run import Run
from secu.train import choose_device

SAFE = re.compile(r"[^\w.\-]+")
LONGEST = 200  # bytes of a name; file systems take 255
FORMULA = re.compile(r"^'(?=[=+\-@\t\r])")  # how the report keeps a spreadsheet from taking an id for a formula
WRONG = "marked-as-wrong"
SAME = 0.95  # of the images that a table knows: another device may put a few elsewhere


def sort_run(
    run: Run,
    destination: Path,
    *,
    copy: bool,
    names: Path | None = None,
    data: Path | None = None,
    device: str = "auto",
    tell: Callable[[str], None] = void,
    progress: Progress | None = None,
) -> int:
    """Fill a new folder with a folder a cluster; return the number of images.

    ``names`` is the table that the report downloads: folders get the names given there, clusters that were merged share
    one, and pictures marked as wrong have one of their own.

    A name starts with the image's rank in its cluster, so that a file browser shows the most typical first. Images in
    an archive are unpacked, those of an array or a data set are written as PNG. ``tell`` hears of images that are no
    longer there.
    """
    if destination.exists():
        raise UserError(f"sort: {destination} exists; name a folder that does not")
    source = run.config().data.source
    base = Path(spelled_out(source)) if source else None
    if copy and base and base.is_dir() and destination.resolve().is_relative_to(base.resolve()):
        raise UserError(f"sort: {destination} is inside {base}, whose next run would find all copies; name another")
    images = images_of(run, data=data, tell=tell, progress=progress)
    model = load_trained(run, images.shape, choose_device(device))
    embeddings = embed(model.encoder, model.augmentation, images).cpu()
    found = predict(embeddings, model.clustering.head().cpu(), model.config.loss.prediction_temperature)
    ids, cluster_of = ids_of(images), found.cluster.tolist()
    edits = read_edits(names, model.config.heads[0], dict(zip(map(printable, ids), cluster_of, strict=True)))
    with aside(destination) as folder:
        place = folder / destination.name
        for name in edits.folders if names is None else ():  # an empty cluster, too, unless it may have been merged
            (place / name).mkdir(parents=True)
        ranks: Counter[str] = Counter()
        wanted = []
        for index in found.cosine.argsort(descending=True, stable=True).tolist():
            name = WRONG if printable(ids[index]) in edits.wrong else edits.folders[cluster_of[index]]
            wanted.append((position(images, index), index, place / name, ranks[name]))
            ranks[name] += 1
        for _, index, target, rank in sorted(wanted):
            target.mkdir(parents=True, exist_ok=True)
            put(images, index, target, rank, copy=copy)
        place.rename(destination)
    return len(images)


class Edits(NamedTuple):
    """What a reader of the report decided: the folder of each cluster, and the ids of pictures that are wrong there."""

    folders: list[str]
    wrong: set[str]


def read_edits(names: Path | None, clusters: int, cluster_of: Mapping[str, int]) -> Edits:
    """Read the table that the report downloads; without one every cluster has its number.

    Clusters of another run have other numbers, so the table must know those of this one's images (``cluster_of``).
    """
    digits = len(str(clusters - 1))
    folders, wrong = [f"cluster-{cluster:0{digits}d}" for cluster in range(clusters)], set[str]()
    if names is None:
        return Edits(folders, wrong)
    plain, asked, agreed, known_ids = list(folders), dict[str, dict[str, None]](), 0, 0
    try:
        with names.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file, delimiter=separator(file)))  # a spreadsheet may have saved it since
        known = {str(cluster): cluster for cluster in range(clusters)}
        for row in rows:
            safe = SAFE.sub("_", row["name"]).strip("._").encode()[:LONGEST].decode(errors="ignore")
            cluster, merged = known[row["cluster"]], known[row["merged_cluster"]]
            folders[cluster] = safe or plain[merged]
            asked.setdefault(folders[cluster], {})[row["name"] if safe else f"cluster {merged}"] = None
            name = FORMULA.sub("", row["id"])
            known_ids += name in cluster_of
            agreed += cluster_of.get(name) == cluster
            if row["marked_wrong"] == "yes":
                wrong.add(name)
    except OSError as error:
        raise UserError(f"names: cannot read {names}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, csv.Error):
        rows = []
    if not rows:
        raise UserError(f"names: {names} is not the table that the report of this run downloads")
    if agreed < SAME * max(1, known_ids):
        told = f"it knows {known_ids:,} of {len(cluster_of):,} images, and {agreed:,} of those in the same cluster"
        raise UserError(f"names: {names} is of another run: {told}")
    for folder, given in asked.items():
        if len(given) > 1:
            raise UserError(f"names: {' and '.join(map(repr, given))} would share the folder {folder}; rename one")
    return Edits(folders, wrong)


def position(images: ImageSource, index: int) -> int:
    """Return a number that grows along the order in which the originals are read fast: a .tar.gz has no way back."""
    if isinstance(images, OwnImages) and images.source:
        return images.source.position(images.numbers[index])
    return index


def put(images: ImageSource, index: int, folder: Path, rank: int, *, copy: bool) -> None:
    """Link, copy, unpack or write one image."""
    if isinstance(images, OwnImages) and images.paths:
        original = Path(images.paths[index])
        target = folder / ranked(rank, original.name)
        if copy:
            shutil.copy2(original, target)
        else:
            os.symlink(original.resolve(), target)
        return
    raw = images.source.read(images.numbers[index]) if isinstance(images, OwnImages) and images.source else None
    if isinstance(images, OwnImages) and isinstance(raw, bytes):
        (folder / ranked(rank, images.ids[index].rpartition("/")[2])).write_bytes(raw)
        return
    if not isinstance(raw, np.ndarray):
        raw = images.fetch(torch.tensor([index]))[0].permute(1, 2, 0).squeeze(-1).contiguous().numpy()
    name = images.ids[index] if isinstance(images, OwnImages) else index
    Image.fromarray(raw).save(folder / f"{rank:06d}-{name}.png")


def ranked(rank: int, name: str) -> str:
    """Return a file's name behind its rank, without what a file system or a shell may stumble on."""
    return f"{rank:06d}-{SAFE.sub('_', name).encode()[-LONGEST:].decode(errors='ignore')}"  # letters have many bytes
