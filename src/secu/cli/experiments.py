"""Commands for the paper's experiments: train, repeat, selflabel, evaluate, recipes, data, demo."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

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
    parse_time,
    tell,
    tell_if_unfinished,
    tell_stopped,
)
from secu.errors import UserError


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe (secu recipes) or path of a .yaml file.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. Default: runs/RECIPE.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers.")] = None,
    device: Device = "auto",
    data: DataRoot = None,
    resume: Resume = False,
    force: Force = False,
    time_limit: TimeLimit = None,
) -> None:
    """Train a recipe and leave a run folder."""
    from secu.settings import load_config

    limit = parse_time(time_limit)
    config = load_config(recipe, [*(overrides or []), *([] if seed is None else [f"seed={seed}"])])
    path = out or Path("runs") / Path(recipe).stem

    from secu.console import ProgressListener
    from secu.recipe_runs import run_recipe

    with ProgressListener(console) as listener:
        model = run_recipe(
            config, path, data=data, device=device, resume=resume, force=force, time_limit=limit, listener=listener
        )
    if not model.finished:
        tell_stopped(model.epochs_done)
        return
    console.print(f"finished in {model.seconds:.0f} s: {path}", soft_wrap=True)
    if config.paper is not None:
        found = config.paper
        console.print(f"the paper reports ACC {found.acc}, NMI {found.nmi}, ARI {found.ari} (percent)")


@app.command()
def repeat(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe or path of a .yaml file.")],
    overrides: Overrides = None,
    seeds: Annotated[str, typer.Option(help="A range, 0..7, or a list, 1,4,9.")] = "0..7",
    together: Annotated[int, typer.Option(help="Seeds to train side by side: on a GPU 2 or 3 save time.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs. Default: runs/RECIPE-seeds.")] = None,
    device: Device = "auto",
    data: DataRoot = None,
) -> None:
    """Train a recipe with many seeds. Interrupted, the same command goes on."""
    from secu.console import ProgressListener
    from secu.recipe_runs import parse_seeds, summary
    from secu.recipe_runs import repeat as repeat_seeds

    numbers = parse_seeds(seeds)
    path = out or Path("runs") / f"{Path(recipe).stem}-seeds"
    with ExitStack() as stack:

        def listen(seed: int, first: bool) -> ProgressListener:
            return stack.enter_context(ProgressListener(console, f"seed {seed}: ", bar=first))

        records = repeat_seeds(
            *(recipe, overrides or [], numbers, path), together=together, data=data, device=device, listener=listen
        )
    table = Table(recipe, f"mean ± std of {len(records)}", "best")
    for row in summary(records):
        table.add_row(*row)
    console.print(table)


@app.command()
def selflabel(
    run: RunFolder,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the new run. Default: RUN-selflabel.")] = None,
    keep_best: Annotated[
        bool,
        typer.Option(
            "--keep-best/--keep-last",
            help="End with the last epoch near the best label-free score, or the last of all.",
        ),
    ] = True,
    device: Device = "auto",
    data: DataRoot = None,
    resume: Resume = False,
    force: Force = False,
    time_limit: TimeLimit = None,
) -> None:
    """Let a finished run teach itself, in a second training."""
    from secu.console import ProgressListener
    from secu.run import Run
    from secu.selflabel import self_label
    from secu.settings import merge, parse_overrides

    limit = parse_time(time_limit)
    settings = parse_overrides(overrides or [])
    if not keep_best:
        settings = merge(settings, {"selflabel": {"keep_best": False}})
    named = run if run.name not in ("", "..") else run.resolve()
    path = out or named.with_name(f"{named.name}-selflabel")
    with ProgressListener(console) as listener:
        second, model, outcome = self_label(
            *(Run.open(run), path, settings),
            data=data,
            device=device,
            resume=resume,
            force=force,
            time_limit=limit,
            listener=listener,
            tell=tell,
        )
    if outcome is None:
        tell_stopped(model.epochs_done)
        return
    table = Table("", "before", "after")
    for name, before in vars(outcome.before).items():
        if name == "sizes":
            continue
        values = [before, getattr(outcome.after, name)]
        if values[0] is not None:
            table.add_row(
                "ACC" if name == "acc" else name.replace("_", " "),
                *(f"{value:,}" if isinstance(value, int) else f"{value:.4f}" for value in values),
            )
    console.print(table)
    for warning in outcome.warnings:
        console.print(f"warning: {warning}", soft_wrap=True)
    console.print(
        f"{outcome.moved:.1%} of the images have another label; finished in {model.seconds:.0f} s: {second.path}",
        soft_wrap=True,
    )


@app.command()
def evaluate(
    run: RunFolder,
    split: Annotated[str | None, typer.Option(help="Split of the run's data set. Default: its test split.")] = None,
    device: Device = "auto",
    data: DataRoot = None,
) -> None:
    """Score a finished run: ACC, NMI, ARI and cluster sizes."""
    from secu.checkpoint import load_trained
    from secu.evaluate import embed, predict, score_clusters
    from secu.fit import images_of
    from secu.run import Run
    from secu.train import choose_device

    folder = Run.open(run)
    config = folder.config()
    if split is not None and config.data.name == "own":
        raise UserError(f"split: {split!r} is a part of a data set; own images have none, leave it out")
    source = images_of(folder, split or config.data.test, data, tell=tell)
    model = load_trained(folder, source.shape, choose_device(device))
    embeddings = embed(model.encoder, model.augmentation, source)
    found = predict(embeddings, model.clustering.head(), config.loss.prediction_temperature)
    sizes = found.cluster.bincount(minlength=config.heads[0])
    scores = score_clusters(source, found.cluster)
    table = Table("images", "ACC", "NMI", "ARI", "largest", "smallest")
    values = [f"{value:.4f}" for value in scores] if scores else ["no labels", "", ""]
    labelled = len(source) if source.targets is None else int((source.targets >= 0).sum())
    images = f"{len(source):,}" + (f", {labelled:,} with a label" if labelled < len(source) else "")
    table.add_row(images, *values, f"{int(sizes.max()):,}", f"{int(sizes.min()):,}")
    console.print(table)
    tell_if_unfinished(folder)


@app.command()
def recipes(name: Annotated[str | None, typer.Argument(help="Show this one, as resolved.")] = None) -> None:
    """List the recipes, or show one with all its settings."""
    import yaml

    from secu.settings import load_config, recipe_names

    if name is not None:
        print(yaml.safe_dump(load_config(name).model_dump(mode="json"), sort_keys=False, allow_unicode=True), end="")
        return
    table = Table("recipe", "what it is", "paper's ACC")
    for known in recipe_names():
        config = load_config(known)
        table.add_row(known, config.description, f"{config.paper.acc}" if config.paper else "")
    console.print(table)


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="cifar10, cifar100 or stl10.")],
    root: DataRoot = None,
) -> None:
    """Download a data set's official archive, check it and unpack it."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from secu.data.download import data_root, download

    place = data_root(root)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        folder = download(name, place, progress=lambda done, total: bar.update(task, completed=done, total=total))
    console.print(f"{name}: {folder}")


@app.command()
def demo(
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Folder of the run; a number is added if it exists.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    device: Device = "cpu",
) -> None:
    """Cluster 1,797 handwritten digits: two minutes on two CPU cores."""
    from secu.console import ProgressListener
    from secu.demo import free_folder, run_demo

    with ProgressListener(console) as listener:
        result = run_demo(
            free_folder(out), seed=seed, overrides=tuple(overrides or ()), listener=listener, device=device
        )
    table = Table("digits", "ACC", "NMI", "ARI", "seconds")
    table.add_row("k-means on pixels", *(f"{value:.3f}" for value in result.kmeans), f"{result.kmeans_seconds:.1f}")
    table.add_row("SeCu", *(f"{value:.3f}" for value in result.secu), f"{result.seconds:.1f}")
    console.print(table)
    path = result.run.path
    console.print(f"run folder: {path}, pictures of the clusters: {path / 'exemplars.png'}", soft_wrap=True)
    console.print(f"look at {path / 'report.html'}", soft_wrap=True)
