"""Commands for your own images: fit, predict, sort, report."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from secu.base.errors import UserError
from secu.base.names import printable
from secu.cli.app import (
    DataRoot,
    Debug,
    Device,
    Force,
    Overrides,
    Resume,
    RunFolder,
    TensorBoard,
    TimeLimit,
    app,
    console,
    errors,
    parse_time,
    warn_if_unfinished,
)
from secu.cli.experiments import ran_out_of_time

if TYPE_CHECKING:
    from secu.results.found import Results

SourceArgument = Annotated[
    str, typer.Argument(metavar="SOURCE", help="Folder, glob, .npy, .csv, .parquet, .zip or .tar of images, or shards.")
]
Level = Annotated[
    int | None, typer.Option(help="Use this many groups of the tree (secu tree) instead of the clusters.")
]
AllowBad = Annotated[bool, typer.Option("--allow-bad", help="Continue if more than 5% of the images cannot be read.")]


@app.command()
def fit(
    source: SourceArgument,
    overrides: Overrides = None,
    clusters: Annotated[
        str | None,
        typer.Option(
            "--clusters", "-k", help="Number of clusters, or a range such as 5..40. Default: chosen by the run."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: runs/ and the name of the source.")
    ] = None,
    balance: Annotated[
        float | None, typer.Option(help="Minimum size of a cluster, as a share of an equal size: from 0 to 1.")
    ] = None,
    encoder: Annotated[
        str | None, typer.Option(help="Pretrained network: lite0, or hf:NAME-OR-FOLDER. Default: chosen by rule.")
    ] = None,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Train a network on these images alone.")
    ] = False,
    labels: Annotated[str | None, typer.Option(help="True labels, for scoring only: folder, or a column.")] = None,
    hints: Annotated[
        Path | None, typer.Option(help="Table of names or links of some images, or one downloaded from a report.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed. Default: 0.")] = None,
    device: Device = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the chosen settings with reasons, and exit.")
    ] = False,
    allow_bad: AllowBad = False,
    strict: Annotated[bool, typer.Option("--strict", help="Stop if any image cannot be read.")] = False,
    resume: Resume = False,
    force: Force = False,
    time_limit: TimeLimit = None,
    tensorboard: TensorBoard = False,
    debug: Debug = False,
) -> None:
    """Cluster your own images and write a report."""
    from secu.apps.console import ConsoleListener, show_plan
    from secu.apps.fit import FitRequest, prepare
    from secu.apps.fit import fit as run_fit
    from secu.apps.ranges import parse_clusters
    from secu.apps.tensorboard import with_tensorboard
    from secu.settings import merge, parse_overrides
    from secu.train.run import Run

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
    if not ran_out_of_time(finished) and finished.results is not None:
        _show_results(finished.results, finished.seconds, path, finished.run.outcome())


def _show_results(results: "Results", seconds: float, path: Path, outcome: Mapping[str, Any]) -> None:
    """Print the results of a finished fit: reasons for the number of clusters, hints, images left out, and scores."""
    for reason in outcome.get("number", {}).get("reasons", ()):
        console.print(reason, highlight=False, soft_wrap=True)
    if hints := outcome.get("hints"):
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
def report(run: RunFolder, device: Device = "auto", data: DataRoot = None, debug: Debug = False) -> None:
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
    source: SourceArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write: .npy or .parquet.")],
    encoder: Annotated[str, typer.Option(help="Pretrained network: lite0, or hf:NAME-OR-FOLDER.")] = "lite0",
    device: Device = "auto",
    allow_bad: AllowBad = False,
    debug: Debug = False,
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
    run: RunFolder,
    source: SourceArgument,
    output: Annotated[
        str, typer.Option("--output", "-o", help="File (.csv, .jsonl, .parquet) or folder/; - prints CSV.")
    ] = "-",
    raw: Annotated[
        bool, typer.Option("--raw", help="In CSV, omit the ' before text that a spreadsheet would evaluate.")
    ] = False,
    level: Level = None,
    device: Device = "auto",
    debug: Debug = False,
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
    if skipped:
        first = ": ".join(map(printable, skipped[0]))
        errors.print(f"images left out: {len(skipped):,}, the first {first}", soft_wrap=True)


@app.command()
def sort(
    run: RunFolder,
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="A folder that does not exist yet.")],
    copy: Annotated[bool, typer.Option("--copy/--link", help="Copy the files, or link to them.")] = False,
    names: Annotated[
        Path | None, typer.Option(help="Table downloaded from the report, with names, merges and marks.")
    ] = None,
    level: Level = None,
    without_duplicates: Annotated[
        bool, typer.Option("--without-duplicates", help="Of near-duplicates, keep only the largest picture.")
    ] = False,
    device: Device = "auto",
    data: DataRoot = None,
    debug: Debug = False,
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
