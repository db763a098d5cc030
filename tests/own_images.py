"""Pictures as a user has them, for tests: digits as PNG files, an array, a manifest, an archive; and short fits."""

import csv
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from secu.apps.fit import FitRequest, fit, prepare
from secu.apps.pipeline import Finished
from secu.apps.ranges import Range
from secu.config import DataConfig
from secu.data import load
from secu.train.place import LOCK
from secu.train.run import Run

SHORT = {"optim": {"epochs": 2, "warmup_epochs": 0}, "encoder": {"dim": 8}}


def digits(count: int = 200, kinds: tuple[int, ...] = (0, 1, 4)) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels (N, 8, 8) and digits (N,) of a few kinds."""
    images = load(DataConfig(source="dataset:digits"))
    assert images.targets is not None
    targets = images.targets.numpy()
    chosen = np.flatnonzero(np.isin(targets, kinds))[:count]
    return images.fetch(chosen)[:, 0].numpy(), targets[chosen]


def write_folder(folder: Path, count: int = 200, *, color: bool = False) -> Path:
    """Write digits as PNG files in a folder for each digit."""
    for number, (pixels, target) in enumerate(zip(*digits(count), strict=True)):
        (folder / str(target)).mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(pixels)
        if color:
            image = Image.merge("RGB", (image, Image.fromarray(255 - pixels), image))
        image.save(folder / str(target) / f"{number}.png")
    return folder


def write_manifest(path: Path, folder: Path, **columns: list[str]) -> Path:
    """Write a CSV file that names the pictures of a folder, with the digit in a column and with other columns."""
    files = sorted(folder.rglob("*.png"))
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "digit", *columns])
        for number, name in enumerate(files):
            extra = [values[number % len(values)] for values in columns.values()]
            writer.writerow([name.relative_to(path.parent).as_posix(), name.parent.name, *extra])
    return path


def write_zip(path: Path, folder: Path) -> Path:
    """Write the pictures of a folder into an archive."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in sorted(folder.rglob("*.png")):
            archive.write(name, name.relative_to(folder).as_posix())
    return path


def request_of(source: Path | str, clusters: int | Range | None = 3, **more) -> FitRequest:
    """Return the request for a short run on the CPU."""
    return FitRequest(str(source), clusters, **{"overrides": SHORT, "device": "cpu", **more})


def fit_now(request: FitRequest, out: Path, *, resume: bool = False, force: bool = False, **more) -> Finished:
    """Prepare and fit, as ``secu fit`` does."""
    Run.check_free(out, resume=resume, force=force)
    before = Run.to_resume(out) if resume else None
    return fit(prepare(request, before), out, resume=resume, force=force, **more)


def fitted(folder: Path, source: Path | str, clusters: int | Range = 3, *, report: bool = False, **more) -> Run:
    """Train for a moment and return the run, which lies in the folder; so does the cache.

    Without a report it takes half as long.
    """
    finished = fit_now(request_of(source, clusters, cache=folder / "cache", **more), folder / "run", report=report)
    assert finished.results is not None
    return finished.run


def rows_of(path: Path) -> list[dict[str, str]]:
    """Read a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def tree(folder: Path) -> list[str]:
    """Return everything in a folder, without the locks of runs."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != LOCK)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files in a folder, without the lock of a run."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != LOCK}
