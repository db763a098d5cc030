"""A run's pictures in a folder for each cluster, best first: links to the originals, or copies."""

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from secu.checkpoint import load_trained
from secu.data import ImageSource
from secu.data.own import OwnImages
from secu.data.own.cache import Progress
from secu.errors import UserError
from secu.evaluate import embed, predict
from secu.fit import images_of
from secu.results import nearest_to_center
from secu.run import Run, void
from secu.train import choose_device

SAFE = re.compile(r"[^\w.\-]+")
LONGEST = 200  # bytes of a name; file systems take 255


def sort_run(
    run: Run,
    destination: Path,
    *,
    copy: bool,
    tell: Callable[[str], None] = void,
    progress: Progress | None = None,
) -> int:
    """Fill a new folder with a folder a cluster; return the number of images.

    A name starts with the image's rank in its cluster, so that a file browser shows the most typical first. Images in
    an archive are unpacked, those of an array or a data set are written as PNG. ``tell`` hears of images that are no
    longer there.
    """
    if destination.exists():
        raise UserError(f"sort: {destination} exists; name a folder that does not")
    source = run.config().data.source
    if copy and source and Path(source).is_dir() and destination.resolve().is_relative_to(Path(source).resolve()):
        raise UserError(f"sort: {destination} is inside {source}, whose next run would find all copies; name another")
    images = images_of(run, tell=tell, progress=progress)
    model = load_trained(run, images.shape, choose_device("auto"))
    embeddings = embed(model.encoder, model.augmentation, images).cpu()
    found = predict(embeddings, model.clustering.head().cpu(), model.config.loss.prediction_temperature)
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}."))
    try:
        digits = len(str(model.config.heads[0] - 1))
        for cluster in range(model.config.heads[0]):
            folder = temporary / f"cluster-{cluster:0{digits}d}"
            folder.mkdir()
            for rank, index in enumerate(nearest_to_center(found, cluster).tolist()):
                put(images, index, folder, rank, copy=copy)
        temporary.chmod(0o755)
        temporary.rename(destination)
    except BaseException:
        shutil.rmtree(temporary)
        raise
    return len(images)


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
    Image.fromarray(raw).save(folder / f"{rank:06d}-{index}.png")


def ranked(rank: int, name: str) -> str:
    """Return a file's name behind its rank, without what a file system or a shell may stumble on."""
    return f"{rank:06d}-{SAFE.sub('_', name).encode()[-LONGEST:].decode(errors='ignore')}"  # letters have many bytes
