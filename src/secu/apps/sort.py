"""Sort a run's images into one folder per cluster, most typical first, as links or as copies."""

import os
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path

from PIL import Image

from secu.apps.images import images_of
from secu.data import Images, printable
from secu.data.decode import BadImage, opened
from secu.data.folders import is_image, spelled_out
from secu.errors import UserError
from secu.results.edits import WRONG, ranked, read_edits
from secu.train.checkpoint import load_predictor
from secu.train.device import choose_device
from secu.train.files import aside
from secu.train.listener import Listener
from secu.train.run import Run


def sort_run(
    run: Run,
    destination: Path,
    *,
    copy: bool,
    names: Path | None = None,
    data: Path | None = None,
    device: str = "auto",
    listener: Listener | None = None,
) -> int:
    """Create a folder with one subfolder per cluster, and return the number of images.

    File names start with the image's rank in its cluster, so that a file browser shows the most typical images first.
    Images in an archive are extracted; images of an array or a data set are written as PNG.

    Args:
        run: A run.
        destination: A folder that does not exist yet.
        copy: Copy files instead of linking to them.
        names: The table downloaded from the report: its cluster names become folder names, merged clusters share a
            folder, and images marked as wrong get a separate one.
        data: The folder of data sets.
        device: auto, cuda, mps or cpu.
        listener: Notified of images that no longer exist.
    """
    _check_destination(run, destination, copy=copy)
    images = images_of(run, listener or Listener(), root=data, device=device)
    found = load_predictor(run, choose_device(device)).predict(images)
    ids = [printable(name) for name in images.ids]
    cluster_of = found.cluster.tolist()
    edits = read_edits(names, run.config().clusters, dict(zip(ids, cluster_of, strict=True)))
    with aside(destination) as folder:
        place = folder / destination.name
        for name in edits.folders if names is None else ():  # include empty clusters, unless clusters were merged
            (place / name).mkdir(parents=True)
        ranks: Counter[str] = Counter()
        wanted = []
        readable = set(images.readable_rows()) if images.broken else range(len(images))
        for index in filter(readable.__contains__, found.cosine.argsort(descending=True, stable=True).tolist()):
            name = WRONG if ids[index] in edits.wrong else edits.folders[cluster_of[index]]
            wanted.append((images.position(index), index, place / name, ranks[name]))
            ranks[name] += 1
        for _, index, target, rank in sorted(wanted):  # in archive order, which is the fastest to read
            target.mkdir(parents=True, exist_ok=True)
            put(images, index, target, rank, copy=copy)
        place.rename(destination)
    return len(wanted)


def _check_destination(run: Run, destination: Path, *, copy: bool) -> None:
    if destination.exists():
        raise UserError(f"sort: {destination} already exists; choose a new folder")
    source = run.config().data.source
    base = Path(spelled_out(source)) if source else None
    if copy and base and base.is_dir() and destination.resolve().is_relative_to(base.resolve()):
        raise UserError(
            f"sort: {destination} is inside {base}, so the next run would include the sorted files; "
            "choose another folder"
        )


def _file_name(name: str, content: bytes) -> str:
    """Return the file name of an image, with an ending by its content if it has none, such as the row of a table."""
    last = name.rpartition("/")[2]
    if is_image(last):
        return last
    with suppress(BadImage), opened(content) as image:
        return f"{last}.{str(image.format).lower()}"
    return last


def put(images: Images, index: int, folder: Path, rank: int, *, copy: bool) -> None:
    """Link, copy, unpack or write one image."""
    original = images.original(index)
    if isinstance(original, Path):
        target = folder / ranked(rank, original.name)
        if copy:
            shutil.copy2(original, target)
        else:
            os.symlink(original.resolve(), target)
    elif isinstance(original, bytes):
        (folder / ranked(rank, _file_name(images.ids[index], original))).write_bytes(original)
    else:
        Image.fromarray(original).save(folder / ranked(rank, f"{images.ids[index]}.png"))
