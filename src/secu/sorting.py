"""A run's pictures in a folder for each cluster, best first: links to the originals, or copies."""

import os
import re
import shutil
import tempfile
from pathlib import Path

import torch
from PIL import Image

from secu.checkpoint import load_trained
from secu.data import ImageSource
from secu.data.own import FileSource, OwnImages, open_source
from secu.errors import UserError
from secu.evaluate import embed, predict
from secu.fit import images_of
from secu.results import nearest_to_center
from secu.run import Run
from secu.train import choose_device

SAFE = re.compile(r"[^\w.\-]+")
LONGEST = 200  # bytes of a name; file systems take 255


def sort_run(run: Run, destination: Path, *, copy: bool) -> int:
    """Fill a new folder with a folder a cluster; return the number of images.

    A name starts with the image's rank in its cluster, so that a file browser shows the most typical first. Images that
    are no files (an array, an archive, a data set) are written as PNG, in the size the model sees.
    """
    if destination.exists():
        raise UserError(f"sort: {destination} exists; name a folder that does not")
    images = images_of(run)
    model = load_trained(run, images.shape, choose_device("auto"))
    embeddings = embed(model.encoder, model.augmentation, images).cpu()
    found = predict(embeddings, model.clustering.head().cpu(), model.config.loss.temperature)
    destination.parent.mkdir(parents=True, exist_ok=True)
    place = Place(run, images, copy)
    temporary = Path(tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}."))
    try:
        digits = len(str(model.config.heads[0] - 1))
        for cluster in range(model.config.heads[0]):
            folder = temporary / f"cluster-{cluster:0{digits}d}"
            folder.mkdir()
            for rank, index in enumerate(nearest_to_center(found, cluster).tolist()):
                place.put(index, folder, rank)
        temporary.chmod(0o755)
        temporary.rename(destination)
    except BaseException:
        shutil.rmtree(temporary)
        raise
    return len(images)


class Place:
    """Puts one image after another where it belongs."""

    def __init__(self, run: Run, images: ImageSource, copy: bool) -> None:
        self.images, self.copy = images, copy
        source = run.config().data.source
        opened = None if source is None else open_source(source)
        self.files = opened if isinstance(opened, FileSource) and isinstance(images, OwnImages) else None

    def put(self, index: int, folder: Path, rank: int) -> None:
        """Link, copy or write one image."""
        if self.files is None or not isinstance(self.images, OwnImages):
            pixels = self.images.fetch(torch.tensor([index]))[0].permute(1, 2, 0).squeeze(-1)
            Image.fromarray(pixels.contiguous().numpy()).save(folder / f"{rank:06d}-{index}.png")
            return
        original = Path(self.files.paths[int(self.images.rows[index])])
        name = SAFE.sub("_", original.name).encode()[-LONGEST:].decode(errors="ignore")  # letters have many bytes
        target = folder / f"{rank:06d}-{name}"
        if self.copy:
            shutil.copy2(original, target)
        else:
            os.symlink(original.resolve(), target)
