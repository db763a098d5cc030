"""Commands for one's own images: fit, predict, sort, export, report."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from secu.cli.app import (
    DataRoot,
    Device,
    Force,
    Overrides,
    Resume,
    RunFolder,
    TimeLimit,
    app,
    console,
    errors,
    parse_time,
    tell,
    tell_if_unfinished,
    tell_stopped,
)
from secu.errors import UserError

SourceArgument = Annotated[
    str, typer.Argument(metavar="SOURCE", help="Folder, glob, .npy, .npz, .csv, .parquet, .zip or .tar of images.")
]
AllowBad = Annotated[bool, typer.Option("--allow-bad", help="Go on when more than 5% of the images cannot be read.")]


@app.command()
def fit(
    source: SourceArgument,
    overrides: Overrides = None,
    clusters: Annotated[int | None, typer.Option("--clusters", "-k", help="Number of groups. Required.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. Default: runs/NAME of the source.")] = None,
    balance: Annotated[float, typer.Option(help="How equal the groups should be: 0 (any size) to 1 (equal).")] = 0.9,
    labels: Annotated[str | None, typer.Option(help="True labels for scoring only: folder, or a column.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers. Default: 0.")] = None,
    device: Device = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan with its reasons, and stop.")] = False,
    allow_bad: AllowBad = False,
    resume: Resume = False,
    force: Force = False,
    time_limit: TimeLimit = None,
) -> None:
    """Cluster your own images and write a report."""
    from secu.console import DecodeProgress, ProgressListener, show_plan
    from secu.fit import Request, plan_for
    from secu.fit import fit as run_fit
    from secu.run import Run
    from secu.settings import merge, parse_overrides

    limit = parse_time(time_limit)
    if overrides and Path(overrides[0]).exists():  # the shell has turned *.png into many names
        raise UserError(f"source: takes one name, got also {overrides[0]!r}; put a pattern in 'quotes'")
    if clusters is None:
        unknown = "ask for more than you expect and merge in the report (docs/own-images.md, How many clusters?)"
        raise UserError(f"--clusters: say how many groups to look for, for example --clusters 8; if unsure, {unknown}")
    path = out or Path("runs") / name_of(source)
    if not dry_run:
        Run.check_free(path, resume=resume, force=force)  # before a million files are listed
        if resume and Run.to_resume(path) is None:
            console.print(f"{path} holds no run yet: a new one begins", soft_wrap=True)
    settings = merge(parse_overrides(overrides or []), {} if seed is None else {"seed": seed})
    request = Request(source, clusters, balance, labels, settings, device, allow_bad)
    opened, plan = plan_for(request)
    show_plan(console, opened, plan, reasons=dry_run)
    if dry_run:
        return
    request = replace(request, source=opened)
    with DecodeProgress(console) as progress, ProgressListener(console) as listener:
        run, model, results = run_fit(
            request, path, resume=resume, force=force, time_limit=limit, listener=listener, progress=progress
        )
    if results is None:
        tell_stopped(model.epochs_done)
        return
    if skipped := getattr(results.images, "skipped", ()):
        console.print(f"images left out: {len(skipped):,}, see {run.path / 'skipped.csv'}", soft_wrap=True)
    for warning in results.warnings:
        console.print(f"warning: {warning}", soft_wrap=True)
    if results.scores is not None:
        console.print("".join(f"{name.upper()} {value:.4f}  " for name, value in results.scores._asdict().items()))
    console.print(f"finished in {model.seconds:.0f} s; look at {run.path / 'report.html'}", soft_wrap=True)


def name_of(source: str) -> str:
    """Return what to call a run: the folder or file of its source; of a pattern the last folder without a sign."""
    from secu.data.own.folders import spelled_out

    path = Path(spelled_out(os.path.expanduser(source))).resolve()
    return (path.name if path.is_dir() else path.name.partition(".")[0]) or "own"


@app.command()
def report(run: RunFolder, device: Device = "auto", data: DataRoot = None) -> None:
    """Write a run's report again, and print where it is."""
    from secu.checkpoint import load_trained
    from secu.console import DecodeProgress
    from secu.fit import images_of
    from secu.results import find_results, write_run_report
    from secu.run import Run
    from secu.train import choose_device

    folder = Run.open(run)
    with DecodeProgress(errors) as progress:
        images = images_of(folder, data=data, tell=tell, progress=progress)
    model = load_trained(folder, images.shape, choose_device(device))
    console.print(str(write_run_report(folder, model, find_results(folder, model, images))), soft_wrap=True)
    tell_if_unfinished(folder)


@app.command()
def predict(
    run: RunFolder,
    source: SourceArgument,
    output: Annotated[str, typer.Option("--output", "-o", help=".csv, .jsonl or .parquet; - prints CSV.")] = "-",
    device: Device = "auto",
) -> None:
    """Say which cluster new images belong to."""
    from secu.console import DecodeProgress
    from secu.data.own import open_source, printable
    from secu.predict import predict_source
    from secu.run import Run

    with DecodeProgress(errors) as progress:
        shown = progress if errors.is_terminal and output != "-" else None  # not into the table, nor into a log
        opened = open_source(source)
        skipped = predict_source(Run.open(run), opened, output, device, shown)
    if opened.note:
        tell(opened.note)
    if skipped:
        first = ": ".join(map(printable, skipped[0]))
        tell(f"images left out: {len(skipped):,}, the first {first}")


@app.command()
def sort(
    run: RunFolder,
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="A folder that does not exist yet.")],
    copy: Annotated[bool, typer.Option("--copy/--link", help="Copy the files, or link to them (the default).")] = False,
    names: Annotated[Path | None, typer.Option(help="What the report downloads: names, merges, marks.")] = None,
    device: Device = "auto",
    data: DataRoot = None,
) -> None:
    """Put the pictures into a folder for each cluster, best first."""
    from secu.console import DecodeProgress
    from secu.run import Run
    from secu.sorting import sort_run

    folder = Run.open(run)
    with DecodeProgress(errors) as progress:
        count = sort_run(
            folder, destination, copy=copy, names=names, data=data, device=device, tell=tell, progress=progress
        )
    console.print(f"{count:,} images in {destination}", soft_wrap=True)
    tell_if_unfinished(folder)


@app.command()
def export(
    run: RunFolder,
    path: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="File to write.")],
) -> None:
    """Write the model as ONNX: uint8 images in, clusters out."""
    from secu.export import export_onnx
    from secu.run import Run

    if path.suffix != ".onnx":
        raise UserError(f"export: {path} must end in .onnx")
    folder = Run.open(run)
    export_onnx(folder, path)
    console.print(str(path), soft_wrap=True)
    tell_if_unfinished(folder)
