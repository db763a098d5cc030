"""Commands for getting started: recipes, data, demo."""

from pathlib import Path
from typing import Annotated

from rich.table import Table
from typer import Argument, Option

from secu.cli import options
from secu.cli.app import app, console


@app.command()
def recipes(name: Annotated[str | None, Argument(help="Recipe to show with all its settings.")] = None) -> None:
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
    name: Annotated[str, Argument(help="cifar10, cifar100 or stl10.")],
    root: options.DataRoot = None,
) -> None:
    """Download, verify and unpack the official archive of a data set."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from secu.data import data_root, download

    place = data_root(root)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        folder = download(name, place, progress=lambda done, total: bar.update(task, completed=done, total=total))
    console.print(f"{name}: {folder}")


@app.command()
def demo(
    overrides: options.Overrides = None,
    out: Annotated[Path, Option(help="Folder of the run; a number is added if it exists.")] = Path("runs/demo"),
    seed: Annotated[int, Option(help="Random seed.")] = 0,
    device: options.Device = "cpu",
) -> None:
    """Cluster 1,797 handwritten digits: two minutes on two CPU cores."""
    from secu.apps.console import ConsoleListener
    from secu.apps.demo import free_folder, run_demo

    with ConsoleListener(console) as listener:
        result = run_demo(
            free_folder(out), seed=seed, overrides=tuple(overrides or ()), listener=listener, device=device
        )
    table = Table("digits", "ACC", "NMI", "ARI", "seconds")
    table.add_row("k-means on pixels", *(f"{value:.3f}" for value in result.kmeans), f"{result.kmeans_seconds:.1f}")
    table.add_row("SeCu", *(f"{value:.3f}" for value in result.secu), f"{result.seconds:.1f}")
    console.print(table)
    path = result.run.path
    console.print(f"run folder: {path}, pictures of the clusters: {path / 'exemplars.png'}", soft_wrap=True)
    console.print(f"open {path / 'report.html'}", soft_wrap=True)
