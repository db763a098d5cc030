"""What every export contains: one row per image, its embedding, and its place on the map."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from secu.apps.exports.places import place_all
from secu.apps.images import images_of
from secu.base.errors import UserError
from secu.base.names import escape
from secu.data import Images, VectorSource
from secu.results.edits import read_edits, read_rows
from secu.results.found import Results
from secu.results.report.values import Floats
from secu.results.results import find_results
from secu.results.tables import DIGITS, LABEL, OURS, Table, make_table
from secu.train.checkpoint import load_predictor
from secu.train.device import choose_device
from secu.train.listener import Listener
from secu.train.run import Run

Row = dict[str, Any]
# All columns that a row may have; a label only if one is known, a mark only with a table from the report.
COLUMNS: dict[str, type] = {
    **OURS,
    LABEL: str,
    "cluster_name": str,
    "second_name": str,
    "marked_wrong": bool,
    "x": float,
    "y": float,
}


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    run: Run
    names: Path | None = None  # the table downloaded from the report; None for suggested names
    copy: bool = False  # files, instead of linking to them
    data: Path | None = None  # the folder of data sets
    device: str = "auto"
    listener: Listener = Listener()  # noqa: RUF009  (it has no state)


@dataclass(frozen=True, eq=False)
class Content:
    """The clusters of a run's images, in the order in which the source is read fastest.

    The name of a cluster was given in the report, or is its number with suggested words. Clusters that were merged have
    the same name, and one that was split has that of its largest part.
    """

    request: Request
    results: Results
    names: list[str]  # of the clusters
    wrong: set[str] | None  # ids of images that were marked as wrong; None without a table from the report
    name_of: Mapping[str, str]  # of the part or group that each image is in, by id, if clusters were split

    @property
    def images(self) -> Images:
        """The images."""
        return self.results.images

    @property
    def title(self) -> str:
        """The name of the run."""
        return escape(self.request.run.path.resolve().name)

    @property
    def embeddings(self) -> Tensor:
        """The unit embedding of each image, float32 (N, D)."""
        return self.results.embeddings.float()

    @property
    def classes(self) -> list[str]:
        """The different names of clusters, in the order of their numbers."""
        return list(dict.fromkeys([*self.names, *self.name_of.values()]))

    @cached_property
    def places(self) -> Floats:
        """The position of each image on the map, from 0 to 1 (N, 2)."""
        return place_all(self.embeddings)

    @cached_property
    def table(self) -> Table:
        """The columns of all rows, by name."""
        results = self.results
        table = make_table(results.ids, results.predictions, results.outlier, {}, results.labels)
        own_names = [self.names[cluster] for cluster in table["cluster"]]
        table["cluster_name"] = [self.name_of[name] for name in results.ids] if self.name_of else own_names
        table["second_name"] = [self.names[cluster] for cluster in table["second"]]
        if self.wrong is not None:
            table["marked_wrong"] = [name in self.wrong for name in results.ids]
        table["x"], table["y"] = self.places.round(DIGITS).T.tolist()
        return table

    def rows(self) -> Iterator[Row]:
        """Yield the row of each image; every format writes these values."""
        for values in zip(*self.table.values(), strict=True):
            yield dict(zip(self.table, values, strict=True))


def gather(request: Request, *, needs_pictures: bool = False) -> Content:
    """Load the images of a run and find their clusters."""
    run = request.run
    if request.names is not None:
        read_rows(request.names, run.config().clusters)  # fail early, before images are read
    images = images_of(run, request.listener, root=request.data, device=request.device)
    if needs_pictures and not has_pictures(images):
        where = "use --to huggingface or embedding-atlas"
        raise UserError(f"export: {run.path} was trained on feature vectors without pictures; {where}")
    order = sorted(range(len(images)), key=images.position)
    if order != list(range(len(images))):
        images = images.select(order)
    request.listener.busy("assigning all images")
    predictor = load_predictor(run, choose_device(request.device))
    results = find_results(run, predictor, images)
    return Content(request, results, *_names(results, request.names))


def has_pictures(images: Images) -> bool:
    """Return whether there are pictures: vectors may have none."""
    return not isinstance(images.source, VectorSource) or images.source.paths is not None


def _names(results: Results, table: Path | None) -> tuple[list[str], set[str] | None, dict[str, str]]:
    """Return the name of each cluster, the ids of images marked as wrong, and the names of images in split clusters."""
    clusters = len(results.centers)
    cluster_of = dict(zip(results.ids, results.predictions.cluster.tolist(), strict=True))
    edits = read_edits(table, clusters, cluster_of)
    if table is None:
        words = [f": {' '.join(words)}" if words else "" for words in results.suggestions]
        return [escape(number + more) for number, more in zip(edits.folders, words, strict=True)], None, {}
    names = list(edits.folders)
    given = {}
    for row in read_rows(table, clusters):
        given[row.id] = escape(row.name.strip() or edits.group(row.id, row.cluster))
        names[row.cluster] = given[row.id]
    if not edits.by_id:
        return names, edits.wrong, {}
    for name, cluster in cluster_of.items():
        edits.group(name, cluster)  # raises if the table has no row for this image
    parts = Counter((cluster, given[name]) for name, cluster in cluster_of.items())
    for cluster, name in reversed([part for part, _ in parts.most_common()]):  # the largest part comes last and stays
        names[cluster] = name
    return names, edits.wrong, given
