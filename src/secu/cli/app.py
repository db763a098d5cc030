"""What all commands share: the program itself, its console and its options."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from secu import __version__
from secu.errors import UserError

if TYPE_CHECKING:
    from secu.run import Run

app = typer.Typer(add_completion=False, rich_markup_mode=None)
console = Console(highlight=False, markup=False)  # a path may hold [brackets]
errors = Console(stderr=True, highlight=False, markup=False)

Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to change.")]
DataRoot = Annotated[
    Path | None, typer.Option("--data", help="Folder of data sets. Default: $SECU_DATA, else a cache.")
]
Device = Annotated[str, typer.Option(help="auto, cuda, mps or cpu.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where the run in --out stopped.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the run in --out.")]
TimeLimit = Annotated[str | None, typer.Option(help="Stop cleanly after this time: 90s, 9m, 2h.")]


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


def tell(line: str) -> None:
    """Print what the user should know beside the answer, where it does not get into a pipe."""
    errors.print(line, soft_wrap=True)


def tell_stopped(epochs: int) -> None:
    """Say how to go on after --time-limit."""
    console.print(f"stopped by --time-limit after {epochs} epochs; the same command with --resume goes on")


def tell_if_unfinished(run: "Run") -> None:
    """Warn whoever has used a model whose training has not come to its end."""
    if told := run.unfinished():
        tell(f"warning: {told}")


def parse_time(text: str | None) -> float:
    """Turn 90, 90s, 9m or 2h into seconds; nothing into infinity."""
    if text is None:
        return float("inf")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if match is None or float(match[1]) == 0:
        raise UserError(f"--time-limit: {text!r} must be a number over 0 with s, m or h, for example 9m")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
