"""The command line: parses, calls, prints. Everything heavy is imported when it is needed.

A mistake of the user's is one line on stderr and exit code 2; an interruption is 130; what is left is a bug of ours,
exit code 1, with a traceback only behind ``--debug``.
"""

import os
import sys
from typing import NoReturn

import typer

from secu.cli import experiments, own
from secu.cli.app import app, parse_time
from secu.errors import UserError, nearest

__all__ = ["app", "experiments", "main", "own", "parse_time"]

GOES_ON = {name: f"secu {name} --resume" for name in ("train", "fit", "selflabel")} | {"repeat": "the same command"}


def main() -> NoReturn:
    """Run the program and turn exceptions into one line and an exit code."""
    # Threads of torch wait for each other in a busy loop. A shorter one costs nothing on an idle CPU; where another
    # program keeps one of two cores busy, a step takes 0.24 s by it instead of 1.1. Read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
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
        how = GOES_ON.get(arguments[0])
        print(f"secu: interrupted{f'; {how} goes on after the last whole epoch' if how else ''}", file=sys.stderr)
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
