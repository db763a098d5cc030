"""A trained model → what a person looks at: the table of assignments, a picture of each cluster, the report."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from secu.checkpoint import Trained
from secu.data import ImageSource
from secu.data.own import OwnImages, ids_of, pictures_of, printable
from secu.errors import UserError
from secu.evaluate import Predictions, embed, outlier_limits, predict, score_clusters
from secu.files import void, write_atomically
from secu.health import warnings_of
from secu.metrics import Scores
from secu.report import ReportData, write_report
from secu.run import Run
from secu.tables import Table, make_table, table_writer

TILE, GAP, MARGIN = 64, 4, 92  # pixels of the exemplar picture
COLUMNS, MOST_ROWS = 12, 50
ROUNDING = 1e-4  # of a cosine: twins of an image are no outliers, in whatever batch they are embedded


@dataclass(frozen=True, eq=False)
class Results:
    """What a finished run says of the images it was trained on."""

    images: ImageSource
    embeddings: Tensor
    centers: Tensor
    predictions: Predictions
    limits: Tensor
    scores: Scores | None
    warnings: tuple[str, ...]

    @property
    def outlier(self) -> Tensor:
        """Whether each image lies too far from its center to belong there."""
        return self.predictions.cosine < self.limits[self.predictions.cluster]

    @property
    def ids(self) -> Sequence[str]:
        """What each image is called: its path, or its number in the data set."""
        return ids_of(self.images)

    @property
    def labels(self) -> list[str] | None:
        """The name of each image's true class, where known."""
        if self.images.targets is None:
            return None
        names = self.images.class_names
        return [(names[t] if names else str(t)) if t >= 0 else "" for t in self.images.targets.tolist()]


def find_results(run: Run, model: Trained, images: ImageSource) -> Results:
    """Assign every image to its nearest center."""
    embeddings = embed(model.encoder, model.augmentation, images).cpu()
    centers = model.clustering.head().cpu()
    predictions = predict(embeddings, centers, model.config.loss.prediction_temperature)
    warnings = run.warnings() + warnings_of(run.metrics(), predictions, model.config)
    limits = outlier_limits(predictions, len(centers)) - ROUNDING
    return Results(
        images, embeddings, centers, predictions, limits, score_clusters(images, predictions.cluster), warnings
    )


def write_results(
    run: Run,
    model: Trained,
    images: ImageSource,
    *,
    pictures: bool = True,
    tell: Callable[[str], None] = void,
) -> Results:
    """Write the tables of a finished run and, with ``pictures``, exemplars.png and the report.

    All of that takes its time with many images; ``tell`` hears what is going on.
    """
    tell("writing the tables")
    results = find_results(run, model, images)
    columns = images.columns if isinstance(images, OwnImages) else {}
    table = make_table(results.ids, results.predictions, results.outlier, columns, results.labels)
    for kind in ("csv", "parquet"):
        write_atomically(run.path / f"assignments.{kind}", partial(_write_table, kind=kind, table=table))
    run.write_csv("clusters.csv", ("cluster", "size", "cohesion", "outlier_below"), _cluster_rows(results))
    if isinstance(images, OwnImages):
        run.write_csv("skipped.csv", ("id", "reason"), [(printable(name), why) for name, why in images.skipped])
    if pictures:
        tell("writing the report")
        picture = draw_exemplars(images, results.predictions, len(results.centers))
        write_atomically(run.path / "exemplars.png", lambda path: picture.save(path, "PNG"))
        write_run_report(run, model, results)
    return results


def write_run_report(run: Run, model: Trained, results: Results) -> Path:
    """Write report.html."""
    try:
        record: dict[str, Any] = json.loads((run.path / "run.json").read_text())
    except FileNotFoundError:
        raise UserError(f"run: {run.path} has no run.json; was it stopped early?") from None
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    facts = {"device": record["device"], "engine": record["engine"], "versions": versions, "seed": str(record["seed"])}
    found, warnings = results.predictions, results.warnings
    if told := run.unfinished():
        warnings = (told, *warnings)
    data = ReportData(
        title=run.path.resolve().name,
        ids=[printable(name) for name in results.ids],  # as in the table, which the page can take back
        images=results.images,
        embeddings=results.embeddings,
        centers=results.centers,
        cluster=found.cluster,
        confidence=found.confidence,
        second=found.second,
        second_confidence=found.second_confidence,
        cosine=found.cosine,
        outlier=results.outlier,
        metrics=run.metrics(),
        config=model.config,
        targets=results.images.targets,
        class_names=results.images.class_names,
        facts=facts,
        scores=results.scores,
        warnings=warnings,
    )
    path = run.path / "report.html"
    write_report(path, data)
    return path


def _write_table(path: Path, *, kind: str, table: Table) -> None:
    with table_writer(path, kind) as writer:
        writer.write(table)


def _cluster_rows(results: Results) -> list[tuple[int, int, str, str]]:
    rows = []
    for cluster, limit in enumerate(results.limits.tolist()):
        cosines = results.predictions.cosine[results.predictions.cluster == cluster]
        cohesion = float(cosines.mean()) if len(cosines) else 0.0
        rows.append((cluster, len(cosines), f"{cohesion:.6f}", f"{limit:.6f}"))
    return rows


def nearest_to_center(predictions: Predictions, cluster: int, count: int | None = None) -> Tensor:
    """Return the index of a cluster's most typical images, best first."""
    members = torch.nonzero(predictions.cluster == cluster).squeeze(1)
    best = predictions.cosine[members].argsort(descending=True, stable=True)[:count]
    return members[best]


def draw_exemplars(images: ImageSource, predictions: Predictions, clusters: int) -> Image.Image:
    """Draw a row for each cluster: its number and size, and the images closest to its center."""
    rows = min(clusters, MOST_ROWS)
    pitch = TILE + GAP
    sheet = Image.new("RGB", (MARGIN + COLUMNS * pitch + GAP, rows * pitch + GAP), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for cluster in range(rows):
        top = GAP + cluster * pitch
        size = int((predictions.cluster == cluster).sum())
        pen.text((8, top + TILE // 2 - 16), f"cluster {cluster}\n{size:,}", fill="#333333", font=font)
        index = nearest_to_center(predictions, cluster, COLUMNS)
        for column, pixels in enumerate(pictures_of(images, index, TILE) if len(index) else ()):
            sheet.paste(tile(pixels), (MARGIN + column * pitch, top))
    return sheet


def tile(pixels_CHW: Tensor) -> Image.Image:
    """Return one image as a square of TILE pixels; small images keep their pixels visible."""
    array = pixels_CHW.permute(1, 2, 0).expand(-1, -1, 3).contiguous().numpy()
    smooth = max(array.shape[:2]) >= TILE
    return Image.fromarray(array).resize((TILE, TILE), Image.Resampling.LANCZOS if smooth else Image.Resampling.NEAREST)
