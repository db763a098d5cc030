"""The command line: parses, calls, prints. Everything heavy is imported when it is needed.

A mistake of the user's is one line on stderr and exit code 2; an interruption is 130; what is left is a bug of ours,
exit code 1, with a traceback only behind ``--debug``.
"""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from secu import __version__
from secu.errors import UserError, nearest

if TYPE_CHECKING:
    from secu.config import Config
    from secu.run import Run

app = typer.Typer(add_completion=False, rich_markup_mode=None)
console = Console(highlight=False, markup=False)  # a path may hold [brackets]

Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to change.")]
DataRoot = Annotated[
    Path | None, typer.Option("--data", help="Folder of data sets. Default: $SECU_DATA, else a cache.")
]
Device = Annotated[str, typer.Option(help="auto, cuda, mps or cpu.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"secu {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Cluster images without labels: stable cluster discrimination (SeCu)."""


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe (secu recipes) or path of a .yaml file.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. Default: runs/RECIPE.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers.")] = None,
    device: Device = "auto",
    data: DataRoot = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run in --out stopped.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the run in --out.")] = False,
    time_limit: Annotated[str | None, typer.Option(help="Stop cleanly after this time: 90s, 9m, 2h.")] = None,
) -> None:
    """Train a recipe and leave a run folder."""
    from secu.config import load_config

    limit = parse_time(time_limit)
    config = load_config(recipe, [*(overrides or []), *([] if seed is None else [f"seed={seed}"])])
    path = out or Path("runs") / Path(recipe).stem

    from secu.console import ProgressListener
    from secu.data import load
    from secu.results import write_results
    from secu.train import choose_device
    from secu.train import train as train_run

    # The folder comes last: a wrong device or missing data shall neither leave an empty run nor cost an old one.
    choose_device(device)
    images = load(config.data.name, config.data.train, data, config.data.image_size)
    test = load(config.data.name, config.data.test, data, config.data.image_size)
    run = open_run(path, config, resume=resume, force=force)
    try:
        with ProgressListener(console) as listener:
            model = train_run(
                config, images, run, test=test, device=device, resume=resume, time_limit=limit, listener=listener
            )
    except UserError:
        run.discard_empty()
        raise
    if not model.finished:
        console.print(f"stopped by --time-limit after {model.epochs_done} epochs; go on with --resume")
        return
    write_results(run, model, images)
    console.print(f"finished in {model.seconds:.0f} s: {path}", soft_wrap=True)


@app.command()
def evaluate(
    run: RunFolder,
    split: Annotated[str, typer.Option(help="Split of the run's data set.")] = "test",
    device: Device = "auto",
    data: DataRoot = None,
) -> None:
    """Score a finished run: ACC, NMI, ARI and cluster sizes."""
    from secu.checkpoint import load_trained
    from secu.data import load
    from secu.evaluate import embed, predict, score_clusters
    from secu.run import Run
    from secu.train import choose_device

    folder = Run.open(run)
    config = folder.config()
    source = load(config.data.name, split, data, config.data.image_size)
    model = load_trained(folder, source.shape, choose_device(device))
    embeddings = embed(model.encoder, model.augmentation, source)
    found = predict(embeddings, model.clustering.head(), config.loss.temperature)
    sizes = found.cluster.bincount(minlength=config.heads[0])
    scores = score_clusters(source, found.cluster)
    table = Table("images", "ACC", "NMI", "ARI", "largest", "smallest")
    values = [f"{value:.4f}" for value in scores] if scores else ["no labels", "", ""]
    table.add_row(f"{len(source):,}", *values, f"{int(sizes.max()):,}", f"{int(sizes.min()):,}")
    console.print(table)


@app.command()
def recipes(name: Annotated[str | None, typer.Argument(help="Show this one, as resolved.")] = None) -> None:
    """List the recipes, or show one with all its settings."""
    import yaml

    from secu.config import load_config, recipe_names

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
    name: Annotated[str, typer.Argument(help="Data set to download.")],
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


def open_run(path: Path, config: "Config", *, resume: bool, force: bool) -> "Run":
    """Create the run's folder, or open it to resume with the very same settings."""
    from secu.run import Run

    if resume and force:
        raise UserError("--resume and --force contradict each other; choose one")
    if not (resume and path.is_dir() and any(path.iterdir())):
        return Run.create(path, config, force=force)
    run = Run.open(path)
    ours, theirs = flatten(config.model_dump(mode="json")), flatten(run.config().model_dump(mode="json"))
    if different := [key for key in ours | theirs if ours.get(key) != theirs.get(key)]:
        key = different[0]
        raise UserError(f"--resume: {path} was started with {key}={theirs.get(key)}, got {key}={ours.get(key)}")
    return run


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested settings into dotted ones."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def parse_time(text: str | None) -> float:
    """Turn 90, 90s, 9m or 2h into seconds; nothing into infinity."""
    if text is None:
        return float("inf")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if match is None or float(match[1]) == 0:
        raise UserError(f"--time-limit: {text!r} must be a number over 0 with s, m or h, for example 9m")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def main() -> NoReturn:
    """Run the program and turn exceptions into one line and an exit code."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"] or ["--help"]
    try:
        _check_command(arguments[0])
        code = app(arguments, prog_name="secu", standalone_mode=False)
        if code == 130:  # what typer makes of Ctrl-C, without a word
            raise KeyboardInterrupt
    except UserError as error:
        _fail(error, 2, debug)
    except (KeyboardInterrupt, typer.Abort):
        print("secu: interrupted; secu train --resume goes on from the last checkpoint", file=sys.stderr)
        raise SystemExit(130) from None
    except OSError as error:
        _fail(error, 2, debug)
    except Exception as error:
        if hasattr(error, "format_message"):  # click's, which typer carries under varying names
            _fail(error, 2, debug, error.format_message())
        _fail(error, 1, debug, f"unexpected {type(error).__name__}: {error} (--debug shows where)")
    raise SystemExit(code if isinstance(code, int) else 0)


def _check_command(word: str) -> None:
    names = [command.callback.__name__ for command in app.registered_commands if command.callback]
    if not word.startswith("-") and word not in names:
        raise UserError(f"command: unknown {word!r}; {nearest(word, names)}")


def _fail(error: Exception, code: int, debug: bool, message: str | None = None) -> NoReturn:
    if debug:
        raise error
    print(f"secu: {' '.join((message or str(error)).split())}", file=sys.stderr)
    raise SystemExit(code)
