"""Commands for the paper's experiments: train, repeat, selflabel, evaluate."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Argument, Option

from secu.base.errors import UserError
from secu.cli import options
from secu.cli.app import app, console, errors, parse_time, warn_if_unfinished

if TYPE_CHECKING:
    from secu.apps.pipeline import Finished


def ran_out_of_time(finished: "Finished") -> bool:
    """Return whether the run was stopped by --time-limit, and if so print how to continue."""
    if finished.results is not None:
        return False
    done = f"{finished.epochs_done} epoch{'s' * (finished.epochs_done != 1)}"
    console.print(f"stopped by --time-limit after {done}; the same command with --resume continues")
    return True


@app.command()
def train(
    recipe: Annotated[str, Argument(help="Name of a recipe (secu recipes) or path of a .yaml file.")],
    overrides: options.Overrides = None,
    out: Annotated[Path | None, Option(help="Folder of the run. Default: runs/RECIPE.")] = None,
    seed: Annotated[int | None, Option(help="Random seed.")] = None,
    device: options.Device = "auto",
    data: options.DataRoot = None,
    resume: options.Resume = False,
    force: options.Force = False,
    time_limit: options.TimeLimit = None,
    tensorboard: options.TensorBoard = False,
) -> None:
    """Train a recipe and write a run folder."""
    from secu.settings import load_config

    limit = parse_time(time_limit)
    config = load_config(recipe, [*(overrides or []), *([] if seed is None else [f"seed={seed}"])])
    path = out or Path("runs") / Path(recipe).stem

    from secu.apps.console import ConsoleListener
    from secu.apps.pipeline import Request
    from secu.apps.recipe import run_recipes
    from secu.apps.tensorboard import with_tensorboard
    from secu.train.run import Run

    resume, force = Run.continued(path, resume=resume, force=force)

    with ConsoleListener(console) as listener:
        request = Request(config, path, with_tensorboard(tensorboard, path, listener))
        finished = run_recipes([request], data=data, device=device, resume=resume, force=force, time_limit=limit)[0]
    if ran_out_of_time(finished):
        return
    console.print(f"finished in {finished.seconds:.0f} s: {path}", soft_wrap=True)
    if config.paper is not None:
        paper = config.paper
        console.print(f"the paper reports ACC {paper.acc}, NMI {paper.nmi}, ARI {paper.ari} (percent)")


@app.command()
def repeat(
    recipe: Annotated[str, Argument(help="Name of a recipe or path of a .yaml file.")],
    overrides: options.Overrides = None,
    seeds: Annotated[str, Option(help="A range such as 0..7, or a list such as 1,4,9.")] = "0..7",
    together: Annotated[int, Option(help="Seeds to train side by side. On a GPU, 2 or 3 save time.")] = 1,
    out: Annotated[Path | None, Option(help="Folder of the runs. Default: runs/RECIPE-seeds.")] = None,
    device: options.Device = "auto",
    data: options.DataRoot = None,
) -> None:
    """Train a recipe with many seeds. After an interruption, the same command continues."""
    from secu.apps.console import ConsoleListener
    from secu.apps.recipe import parse_seeds, summary
    from secu.apps.recipe import repeat as repeat_seeds

    numbers = parse_seeds(seeds)
    path = out or Path("runs") / f"{Path(recipe).stem}-seeds"
    with ExitStack() as stack:

        def listen(seed: int, first: bool) -> ConsoleListener:
            return stack.enter_context(ConsoleListener(console, f"seed {seed}: ", bar=first))

        records = repeat_seeds(
            recipe, overrides or [], numbers, path, together=together, data=data, device=device, listener=listen
        )
    table = Table(recipe, f"mean ± std of {len(records)}", "best")
    for row in summary(records):
        table.add_row(*row)
    console.print(table)


@app.command()
def selflabel(
    run: options.RunFolder,
    overrides: options.Overrides = None,
    out: Annotated[Path | None, Option(help="Folder of the new run. Default: RUN-selflabel.")] = None,
    keep_best: options.KeepBest = True,
    as_published: options.AsPublished = False,
    device: options.Device = "auto",
    data: options.DataRoot = None,
    resume: options.Resume = False,
    force: options.Force = False,
    time_limit: options.TimeLimit = None,
    tensorboard: options.TensorBoard = False,
) -> None:
    """Improve a finished run by self-labeling, in a second run."""
    from secu.apps.console import ConsoleListener
    from secu.apps.selflabel import self_label
    from secu.apps.tensorboard import with_tensorboard
    from secu.settings import merge, parse_overrides
    from secu.train.run import Run

    limit = parse_time(time_limit)
    settings = parse_overrides(overrides or [])
    if not keep_best:
        settings = merge(settings, {"selflabel": {"keep_best": False}})
    named = run if run.name not in ("", "..") else run.resolve()
    path = out or named.with_name(f"{named.name}-selflabel")
    resume, force = Run.continued(path, resume=resume, force=force)
    with ConsoleListener(console, notes=errors) as listener:
        finished = self_label(
            Run.open(run),
            path,
            settings,
            as_published=as_published,
            data=data,
            device=device,
            resume=resume,
            force=force,
            time_limit=limit,
            listener=with_tensorboard(tensorboard, path, listener),
        )
    if ran_out_of_time(finished):
        return
    outcome = finished.run.outcome()
    rejected = outcome.get("rejected")
    console.print(comparison(outcome["before"], rejected or outcome["after"]))
    changed = f"{(rejected or outcome)['moved']:.1%} of the images changed their label"
    console.print(
        f"{changed}{', but the previous model is kept' if rejected else ''}; "
        f"finished in {finished.seconds:.0f} s: {finished.run.path}",
        soft_wrap=True,
    )


def comparison(before: dict[str, Any], after: dict[str, Any]) -> Table:
    """Return a before/after table; unknown values are left out."""
    table = Table("", "before", "after")
    for name, value in before.items():
        if name != "sizes" and value is not None:
            values = [f"{v:,}" if isinstance(v, int) else f"{v:.4f}" for v in (value, after[name])]
            table.add_row("ACC" if name == "acc" else name.replace("_", " "), *values)
    return table


@app.command()
def evaluate(
    run: options.RunFolder,
    split: Annotated[str | None, Option(help="Split of the run's data set. Default: its test split.")] = None,
    device: options.Device = "auto",
    data: options.DataRoot = None,
) -> None:
    """Score a finished run: ACC, NMI, ARI and cluster sizes."""
    from secu.apps.console import ConsoleListener
    from secu.apps.images import images_of
    from secu.cluster.metrics import score_known
    from secu.data import splits_of
    from secu.train.checkpoint import load_predictor
    from secu.train.device import choose_device
    from secu.train.run import Run

    folder = Run.open(run)
    settings = folder.config().data
    if splits_of(settings.source):
        split = split or settings.test
    elif split is not None:
        raise UserError(f"split: {split!r} is only valid for named data sets; these images have no splits")
    with ConsoleListener(errors) as listener:
        images = images_of(folder, listener, split, data, device)
    clusters = load_predictor(folder, choose_device(device)).predict_together(images).cluster
    if images.broken:
        errors.print(f"warning: {images.broken.report()}", soft_wrap=True)
        clusters = clusters[list(images.readable_rows())]
        images = images.without_broken()
    sizes = clusters.bincount(minlength=folder.config().clusters)
    scores = score_known(images.targets, clusters)
    table = Table("images", "ACC", "NMI", "ARI", "largest", "smallest")
    values = [f"{value:.4f}" for value in scores] if scores else ["no labels", "", ""]
    labeled = len(images) if images.targets is None else int((images.targets >= 0).sum())
    count = f"{len(images):,}" + (f", {labeled:,} with a label" if labeled < len(images) else "")
    table.add_row(count, *values, f"{int(sizes.max()):,}", f"{int(sizes.min()):,}")
    console.print(table)
    warn_if_unfinished(folder)
