"""Compute the results of a trained model and write the files of a finished run: tables, exemplars, report."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from secu.base.errors import UserError
from secu.base.files import write_atomically, write_text
from secu.base.names import escape, escape_text
from secu.cluster.clustering import Clustering
from secu.cluster.metrics import score_known
from secu.data import Images
from secu.methods.predictor import Predictor, outlier_limits
from secu.nets.pretrained import describe
from secu.results.duplicates import is_searched
from secu.results.exemplars import choose_exemplars, draw_exemplars
from secu.results.found import Results
from secu.results.health import warnings_of
from secu.results.leaves import find_leaves
from secu.results.pictures import Pictures
from secu.results.report import Report, ReportData
from secu.results.report.build import LOSSES
from secu.results.tables import Table, make_table, write_table
from secu.train.listener import Listener
from secu.train.run import Run

ROUNDING = 1e-4  # tolerance for cosines, which depend slightly on the batch: exact duplicates are never outliers


def find_results(
    run: Run,
    predictor: Predictor,
    images: Images,
    embeddings_ND: Tensor | None = None,
    clustering: Clustering | None = None,
) -> Results:
    """Assign every image to its nearest center; without the heads of the run, there is no tree of clusters."""
    embeddings_ND = predictor.embed(images).cpu() if embeddings_ND is None else embeddings_ND.cpu()
    rows = images.readable_rows()
    if len(rows) < len(images):
        embeddings_ND = embeddings_ND[list(rows)]
        images = images.without_broken()
    centers_KD = predictor.centers.detach().cpu()
    predictions = predictor.choose(predictor.compare(embeddings_ND))
    return Results(
        images=images,
        embeddings=embeddings_ND,
        centers=centers_KD,
        predictions=predictions,
        limits=outlier_limits(predictions, len(centers_KD)) - ROUNDING,
        scores=score_known(images.targets, predictions.cluster),
        warnings=run.warnings() + warnings_of(run.model_metrics(), predictions, run.config()),
        leaves=find_leaves(clustering, embeddings_ND) if clustering is not None else None,
    )


def write_results(
    run: Run, results: Results, *, pictures: bool = True, busy: Callable[[str], None] | None = None
) -> None:
    """Write the tables of a finished run and, with ``pictures``, exemplars.png and report.html."""
    busy = busy or Listener().busy  # does nothing
    if is_searched(results.images):
        busy("looking for near-duplicates")
    kept = results.kept
    busy("writing the tables")
    _write_tables(run, results, None if kept is None else kept.tolist())
    if not pictures:
        return
    busy("writing the report")
    report = _report(run, results)
    exemplars = choose_exemplars(results.predictions, len(results.centers))
    typical = [index for row in exemplars for index in row]
    shown = Pictures(results.images, large=typical + report.on_cards, small=report.on_map)
    sheet = draw_exemplars(results.predictions, exemplars, shown)
    write_atomically(run.path / "exemplars.png", lambda path: sheet.save(path, "PNG"))
    write_text(run.path / "report.html", report.render(shown))


def write_report(run: Run, results: Results) -> Path:
    """Write only report.html, and return its path."""
    report = _report(run, results)
    path = run.path / "report.html"
    write_text(path, report.render(Pictures(results.images, large=report.on_cards, small=report.on_map)))
    return path


def _report(run: Run, results: Results) -> Report:
    unfinished = run.unfinished()
    warnings = (unfinished, *results.warnings) if unfinished else results.warnings
    return Report(
        ReportData(
            title=run.path.resolve().name,
            results=results,
            metrics=run.metrics(),
            config=run.config(),
            facts=_facts(run),
            warnings=warnings,
            number=run.number_reasons(),
            losses=run.record().get("losses") or LOSSES,
        )
    )


def _facts(run: Run) -> dict[str, str]:
    """Return facts about the run for display, such as device and versions."""
    record = run.record()
    if not record:
        raise UserError(f"run: {run.path} has no run.json; was it stopped early?")
    for key in ("device", "engine", "versions", "seed"):
        if key not in record:
            raise UserError(f"run: {run.path / 'run.json'} is damaged: it has no {key}")
    facts = {
        "device": record["device"],
        "engine": record["engine"],
        "versions": ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        "seed": str(record["seed"]),
    }
    with suppress(UserError):  # a model of the hub may be gone
        if pretraining := describe(run.config().encoder.backbone):
            facts["weights"] = f"{pretraining.weights} ({pretraining.license}), trained on {pretraining.taught}"
    return facts


def _write_tables(run: Run, results: Results, kept: Sequence[int] | None) -> None:
    """Write assignments.csv, assignments.parquet, clusters.csv and skipped.csv."""
    table = make_table(
        results.ids,
        results.predictions,
        results.outlier,
        results.images.columns,
        results.labels,
        kept=kept,
        leaf=results.leaves.column(results.predictions.cluster) if results.leaves else None,
    )
    for kind in ("csv", "parquet"):
        write_table(run.path / f"assignments.{kind}", lambda writer: writer.write(table))
    write_table(run.path / "clusters.csv", lambda writer: writer.write(_cluster_table(results)))
    skipped = [*results.images.skipped, *results.images.repeated]
    reasons = [escape_text(reason) for _, reason in skipped]
    left_out: Table = {"id": [escape(name) for name, _ in skipped], "reason": reasons}
    write_table(run.path / "skipped.csv", lambda writer: writer.write(left_out))


def _cluster_table(results: Results) -> Table:
    of_each = [results.predictions.cosine[results.predictions.cluster == c] for c in range(len(results.limits))]
    return {
        "cluster": list(range(len(of_each))),
        "size": [len(cosines) for cosines in of_each],
        "cohesion": [f"{cosines.mean() if len(cosines) else 0.0:.6f}" for cosines in of_each],
        "outlier_below": [f"{limit:.6f}" for limit in results.limits.tolist()],
        "suggested_name": [" ".join(words) for words in results.suggestions],
    }
