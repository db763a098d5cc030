"""A run's pictures in a folder for each cluster, best first: links to the originals, or copies."""

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

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

    A name starts with the image's rank in its cluster, so that a file browser shows the most typical first. Images that
    are no files (an array, an archive, a data set) are written as PNG, in the size the model sees. ``tell`` hears of
    images that are no longer there.
    """
    if destination.exists():
        raise UserError(f"sort: {destination} exists; name a folder that does not")
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
    """Link, copy or write one image."""
    if not isinstance(images, OwnImages) or not images.paths:
        pixels = images.fetch(torch.tensor([index]))[0].permute(1, 2, 0).squeeze(-1)
        Image.fromarray(pixels.contiguous().numpy()).save(folder / f"{rank:06d}-{index}.png")
        return
    original = Path(images.paths[index])
    name = SAFE.sub("_", original.name).encode()[-LONGEST:].decode(errors="ignore")  # letters have many bytes
    target = folder / f"{rank:06d}-{name}"
    if copy:
        shutil.copy2(original, target)
    else:
        os.symlink(original.resolve(), target)
