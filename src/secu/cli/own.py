"""Commands for your own images: fit, report, embed, predict, sort, tree."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from secu.base.errors import UserError
from secu.base.names import printable
from secu.cli import options
from secu.cli.app import app, console, errors, parse_time, warn_if_unfinished
from secu.cli.experiments import ran_out_of_time

if TYPE_CHECKING:
    from secu.apps.pipeline import Finished


@app.command()
def fit(
    source: options.Source,
    overrides: options.Overrides = None,
    clusters: options.Clusters = None,
    out: Annotated[Path | None, Option(help="Folder of the run. Default: runs/ and the name of the source.")] = None,
    balance: options.Balance = None,
    encoder: options.EncoderOrRule = None,
    from_scratch: Annotated[bool, Option("--from-scratch", help="Train a network on these images alone.")] = False,
    labels: Annotated[str | None, Option(help="True labels, for scoring only: folder, or a column.")] = None,
    hints: options.Hints = None,
    seed: Annotated[int | None, Option(help="Random seed. Default: 0.")] = None,
    device: options.Device = "auto",
    dry_run: Annotated[bool, Option("--dry-run", help="Print the chosen settings with reasons, and exit.")] = False,
    allow_bad: options.AllowBad = False,
    strict: Annotated[bool, Option("--strict", help="Stop if any image cannot be read.")] = False,
    resume: options.Resume = False,
    force: options.Force = False,
    time_limit: options.TimeLimit = None,
    tensorboard: options.TensorBoard = False,
) -> None:
    """Cluster your own images and write a report."""
    from secu.apps.console import ConsoleListener, show_plan
    from secu.apps.fit import FitRequest, prepare
    from secu.apps.fit import fit as run_fit
    from secu.apps.ranges import parse_clusters
    from secu.apps.tensorboard import with_tensorboard
    from secu.settings import merge, parse_overrides
    from secu.train.run import Run

    began = time.monotonic()
    limit = parse_time(time_limit)
    if overrides and os.path.exists(overrides[0]):  # the shell expanded a pattern such as *.png
        raise UserError(f"source: expected one source, also got {overrides[0]!r}; put a glob pattern in quotes")
    wanted = parse_clusters(clusters)
    path = out or Path("runs") / name_of(source)
    progress = ConsoleListener(console)
    listener = with_tensorboard(tensorboard, path, progress)  # fails early if the package is missing
    before = None
    if not dry_run:
        resume, force = Run.continued(path, resume=resume, force=force)
        Run.check_free(path, resume=resume, force=force)  # fail early, before a million files are listed
        before = Run.to_resume(path) if resume else None
        if resume and before is None:
            console.print(f"{path} holds no run yet: starting a new one", soft_wrap=True)
    settings = merge(parse_overrides(overrides or []), {} if seed is None else {"seed": seed})
    settings = merge(settings, {"data": {"strict": True}} if strict else {})
    if from_scratch and encoder:
        raise UserError(f"--from-scratch: contradicts --encoder {encoder}; give one of them")
    encoder = "scratch" if from_scratch else encoder
    request = FitRequest(source, wanted, balance, labels, settings, device, allow_bad, encoder=encoder, hints=hints)
    prepared = prepare(request, before)
    show_plan(console, prepared, reasons=dry_run)
    if dry_run:
        return
    with progress:
        finished = run_fit(prepared, path, resume=resume, force=force, time_limit=limit, listener=listener)
    if not ran_out_of_time(finished):
        _show_results(finished, time.monotonic() - began)


def _show_results(finished: "Finished", seconds: float) -> None:
    """Print the results of a finished fit: reasons for the number of clusters, hints, images left out, scores, time."""
    results = finished.results
    assert results is not None
    path = finished.run.path
    for reason in finished.run.number_reasons():
        console.print(reason, highlight=False, soft_wrap=True)
    if hints := finished.run.outcome().get("hints"):
        followed = f"{hints['followed']:,} of {hints['images']:,} hinted images are in the cluster of their hint"
        names = ", ".join(f"cluster {cluster} is {printable(name)}" for cluster, name in hints["names"].items())
        console.print(f"{followed}; {names}" if names else followed, highlight=False, markup=False, soft_wrap=True)
    if left_out := len(results.images.skipped) + len(results.images.repeated):
        console.print(f"images left out: {left_out:,}, see {path / 'skipped.csv'}", soft_wrap=True)
    if results.scores is not None:
        console.print("".join(f"{name.upper()} {value:.4f}  " for name, value in results.scores._asdict().items()))
    console.print(f"finished in {seconds:.0f} s; open {path / 'report.html'}", soft_wrap=True)


def name_of(source: str) -> str:
    """Return a default name for a run: that of its source or, for a pattern, the last folder without a wildcard."""
    from secu.data.sources.folders import spelled_out

    path = Path(spelled_out(os.path.expanduser(source))).resolve()
    return (path.name if path.is_dir() else path.name.partition(".")[0]) or "own"


@app.command()
def report(run: options.RunFolder, device: options.Device = "auto", data: options.DataRoot = None) -> None:
    """Write the report of a run again, and print its path."""
    from secu.apps.console import ConsoleListener
    from secu.apps.images import images_of
    from secu.results.results import find_results, write_report
    from secu.train.checkpoint import load_method
    from secu.train.device import choose_device
    from secu.train.run import Run

    folder = Run.open(run)
    with ConsoleListener(errors) as listener:
        images = images_of(folder, listener, root=data, device=device)
    method = load_method(folder, choose_device(device))
    results = find_results(folder, method.predictor(), images, clustering=method.clustering)
    path = write_report(folder, results)
    console.print(str(path), soft_wrap=True)
    warn_if_unfinished(folder)


@app.command()
def embed(
    source: options.Source,
    output: Annotated[Path, Option("--output", "-o", help="File to write: .npy or .parquet.")],
    encoder: options.Encoder = "lite0",
    device: options.Device = "auto",
    allow_bad: options.AllowBad = False,
) -> None:
    """Write the features of your images from a pretrained network."""
    from secu.apps.console import ConsoleListener
    from secu.apps.embed import embed_source
    from secu.data import open_source

    opened = open_source(source)
    with ConsoleListener(errors) as listener:
        images = embed_source(opened, output, encoder=encoder, device=device, allow_bad=allow_bad, listener=listener)
    left_out = len(images.skipped) + len(images.repeated)
    missing = f", {left_out:,} images left out" if left_out else ""
    console.print(f"{len(images):,} vectors of {images.shape[0]:,} features in {output}{missing}", soft_wrap=True)


@app.command()
def predict(
    run: options.RunFolder,
    source: options.Source,
    output: options.Predictions = "-",
    raw: options.Raw = False,
    level: options.Level = None,
    device: options.Device = "auto",
) -> None:
    """Assign new images to the clusters of a run."""
    from secu.apps.console import ConsoleListener
    from secu.apps.predict import predict_source
    from secu.apps.predict_parts import is_folder, predict_parts
    from secu.data import open_source
    from secu.train.listener import Listener
    from secu.train.run import Run

    folder = Run.open(run)
    with ConsoleListener(errors) as progress:
        quiet = output == "-" or not errors.is_terminal  # no progress bar in a table or a log
        opened = open_source(source)
        listener = Listener() if quiet else progress
        if is_folder(output):
            skipped = predict_parts(folder, opened, Path(output), device, listener, level=level)
        else:
            skipped = predict_source(folder, opened, output, device, listener, raw=raw, level=level)
    if note := opened.note(opened.values_of(folder.config().data.values, new=True)):
        errors.print(note, soft_wrap=True)
    if output != "-" and not is_folder(output):  # a folder may hold parts of an earlier command
        count = len(opened) + len(opened.skipped) + len(opened.repeated) - len(skipped)
        console.print(f"{count:,} images in {output}", soft_wrap=True)
    if skipped:
        first = ": ".join(map(printable, skipped[0]))
        errors.print(f"images left out: {len(skipped):,}, the first {first}", soft_wrap=True)


@app.command()
def sort(
    run: options.RunFolder,
    destination: Annotated[Path, Argument(metavar="DEST", help="A folder that does not exist yet.")],
    copy: options.Copy = False,
    names: options.Names = None,
    level: options.Level = None,
    without_duplicates: options.Unique = False,
    device: options.Device = "auto",
    data: options.DataRoot = None,
) -> None:
    """Sort the pictures into one folder per cluster."""
    from secu.apps.console import ConsoleListener
    from secu.apps.sort import sort_run
    from secu.train.run import Run

    folder = Run.open(run)
    with ConsoleListener(errors) as listener:
        count = sort_run(
            folder,
            destination,
            copy=copy,
            names=names,
            level=level,
            without_duplicates=without_duplicates,
            data=data,
            device=device,
            listener=listener,
        )
    console.print(f"{count:,} images in {destination}", soft_wrap=True)
    warn_if_unfinished(folder)


@app.command()
def tree(run: options.RunFolder, output: options.TreeFile = "-") -> None:
    """Write the tree of a run's finest clusters."""
    from secu.apps.trees import write_tree
    from secu.train.run import Run

    folder = Run.open(run)
    found = write_tree(folder, output)
    levels = f"{len(found.leaves):,} clusters; cut it with --level 2 to {len(found.leaves)}"
    (errors if output == "-" else console).print(levels, soft_wrap=True)
    warn_if_unfinished(folder)
