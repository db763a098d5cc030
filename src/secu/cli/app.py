"""Shared by all commands: the Typer app and its consoles."""

import io
import os
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from secu import __version__
from secu.base import processes
from secu.base.errors import UserError, nearest
from secu.base.names import HANDLER

if TYPE_CHECKING:
    from secu.train.run import Run


@dataclass
class Invocation:
    """What the user called."""

    debug: bool = False
    command: str = ""


class Commands(TyperGroup):
    """Command group that suggests a name for a misspelled command, and gives its option --debug to every command."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        debug = next(option for option in self.params if option.name == "debug")
        for command in self.commands.values():
            command.params.append(debug)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the requested command."""
        invocation.command = args[0]
        if not args[0].startswith("-") and args[0] not in self.commands:
            raise UserError(f"command: unknown {args[0]!r}; {nearest(args[0], self.commands)}")
        if processes.world() > 1 and args[0] in self.commands and args[0] not in SHARED:
            shared = ", ".join(SHARED)
            raise UserError(f"command: {args[0]} runs in one process; start it without torchrun, which is for {shared}")
        return super().resolve_command(ctx, args)


SHARED = ("train", "fit", "selflabel", "evaluate", "embed", "predict")  # commands that several processes can share
invocation = Invocation()
app = typer.Typer(cls=Commands, add_completion=False, rich_markup_mode=None, invoke_without_command=True)
console = Console(highlight=False, markup=False)  # a path may contain [brackets]
errors = Console(stderr=True, highlight=False, markup=False)


def show_only_errors(main: bool) -> None:
    """Silence all output but the last line of a failing process, unless this is the main process."""
    if not main:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        console.quiet = True
        errors.quiet = True


def _set_debug(wanted: bool) -> None:
    invocation.debug = invocation.debug or wanted


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"secu {__version__}")
        raise typer.Exit


_VERSION = typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
_HELP = "Show the traceback of an error."
_DEBUG = typer.Option("--debug", help=_HELP, callback=_set_debug, is_eager=True, expose_value=False)


@app.callback()
def _program(
    context: typer.Context,
    version: Annotated[bool, _VERSION] = False,
    debug: Annotated[bool, _DEBUG] = False,
) -> None:
    """Cluster images without labels: stable cluster discrimination (SeCu)."""
    _escape_output()
    if context.invoked_subcommand is None:
        print(context.get_help())


def _escape_output() -> None:
    """Let the console show any name: characters that it cannot encode are escaped, not an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=HANDLER)


def warn_if_unfinished(run: "Run") -> None:
    """Print a warning if the run's training is not complete."""
    if warning := run.unfinished():
        errors.print(f"warning: {warning}", soft_wrap=True)


def parse_time(text: str | None) -> float:
    """Convert 90, 90s, 9m or 2h to seconds; None to infinity."""
    if text is None:
        return float("inf")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if match is None or float(match[1]) == 0:
        raise UserError(
            f"--time-limit: {text!r} must be a positive number, optionally followed by s, m or h, for example 9m"
        )
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
