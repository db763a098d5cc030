"""Sort a run's images into one folder per cluster, most typical first, as links or as copies."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from secu.apps.images import images_of
from secu.apps.originals import put, require_outside
from secu.base.errors import UserError
from secu.base.files import aside
from secu.data import Images
from secu.data.text import one_line
from secu.results.edits import read_edits, read_rows
from secu.results.reading import read_assignments
from secu.results.tables import DUPLICATE_OF
from secu.train.checkpoint import load_predictor
from secu.train.device import choose_device
from secu.train.listener import Listener
from secu.train.run import Run


def sort_run(
    run: Run,
    destination: Path,
    *,
    copy: bool,
    names: Path | None = None,
    level: int | None = None,
    without_duplicates: bool = False,
    data: Path | None = None,
    device: str = "auto",
    listener: Listener | None = None,
) -> int:
    """Create a folder with one subfolder per cluster, and return the number of images.

    File names start with the image's rank in its cluster, so that a file browser shows the most typical images first.
    Images in an archive are extracted; images of an array or a data set are written as PNG. ``names`` is the table
    downloaded from the report: its cluster names become folder names, merged clusters share a folder, and images marked
    as wrong get a separate one. With a ``level``, there are this many groups of the tree instead of the run's clusters.
    """
    if os.path.lexists(destination):
        raise UserError(f"sort: {destination} already exists; choose a new folder")
    if copy:
        require_outside(run, destination, "sort", "sorted files")
    clusters = run.config().clusters if level is None else level
    if names is not None and level is not None:
        raise UserError(f"names: the report's names are not those of --level {level}; give one of them")
    predictor = load_predictor(run, choose_device(device), level)
    if names is not None:
        read_rows(names, clusters)  # fail early, before images are read
    kept_instead = _duplicates(run) if without_duplicates else {}
    with _building(destination) as place:
        images = images_of(run, listener or Listener(), root=data, device=device)
        found = predictor.predict(images)
        cluster_of = found.cluster.tolist()
        edits = read_edits(names, clusters, dict(zip(images.ids, cluster_of, strict=True)))
        readable = set(images.readable_rows()) if images.broken else range(len(images))
        present = {images.ids[index] for index in readable} if kept_instead else set()
        best_first = filter(readable.__contains__, found.cosine.argsort(descending=True, stable=True).tolist())
        folder_of = {
            index: edits.folder(images.ids[index], cluster_of[index])
            for index in best_first
            if kept_instead.get(images.ids[index]) not in present
        }
        try:
            # Include empty clusters, unless clusters were merged.
            _make_folders(place, edits.folders if names is None else folder_of.values())
            _fill(place, images, folder_of, copy=copy)
        except OSError as error:
            raise UserError(f"sort: cannot write {destination}: {one_line(error)}") from None
    return len(folder_of)


def _duplicates(run: Run) -> dict[str, str]:
    """Return the image to keep instead of each near-duplicate."""
    path = run.path / "assignments.csv"
    table = read_assignments(path)
    if DUPLICATE_OF not in table:
        raise UserError(
            f"without-duplicates: {path} has no column {DUPLICATE_OF}: an earlier version wrote it, or its images are "
            "a named data set or were decoded on demand; sort without it"
        )
    return {name: kept for name, kept in zip(table["id"], table[DUPLICATE_OF], strict=True) if kept}


@contextmanager
def _building(destination: Path) -> Iterator[Path]:
    """Yield a hidden folder that is renamed to the destination at the end; if anything fails, nothing is left."""
    missing = [parent for parent in destination.parents if not parent.exists()]
    try:
        with aside(destination) as folder:
            place = folder / destination.name  # fails now if no folder can have this name
            try:
                place.mkdir()
            except OSError as error:
                raise UserError(f"sort: cannot create {destination}: {one_line(error)}") from None
            yield place
            place.rename(destination)
    except BaseException:
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()
        raise


def _make_folders(place: Path, names: Iterable[str]) -> None:
    for name in dict.fromkeys(names):
        try:
            (place / name).mkdir()
        except FileExistsError:  # a disk that ignores case
            raise UserError(f"names: {name} and another name are the same folder on this disk; rename one") from None


def _fill(place: Path, images: Images, folder_of: Mapping[int, str], *, copy: bool) -> None:
    """Put every image into its folder, in which the images of ``folder_of`` are ranked in their order."""
    ranks: Counter[str] = Counter()
    wanted = []
    for index, name in folder_of.items():
        wanted.append((images.position(index), index, place / name, ranks[name]))
        ranks[name] += 1
    for _, index, target, rank in sorted(wanted):  # in archive order, which is the fastest to read
        put(images, index, target, rank, copy=copy, command="sort")
