"""The command line: parses, calls, prints. Everything heavy is imported when it is needed.

A mistake of the user's is one line on stderr and exit code 2; an interruption is 130; what is left is a bug of ours,
exit code 1, with a traceback only behind ``--debug``.
"""

import contextlib
import os
import signal
import sys
import threading
from itertools import pairwise
from typing import NoReturn

import typer

from secu.cli import experiments, own
from secu.cli.app import app, parse_time
from secu.errors import UserError, nearest

__all__ = ["app", "experiments", "main", "own", "parse_time"]

GOES_ON = dict.fromkeys(("train", "fit", "selflabel"), "the same command with --resume")
GOES_ON |= {"repeat": "the same command"}


def main() -> NoReturn:
    """Run the program and turn exceptions into one line and an exit code."""
    # Threads of torch wait for each other in a busy loop. A shorter one costs nothing on an idle CPU; where another
    # program keeps one of two cores busy, a step takes 0.24 s by it instead of 1.1. Read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"] or ["--help"]
    pressed = _watch_ctrl_c()
    try:
        _check_command(arguments[0])
        code = app(arguments, prog_name="secu", standalone_mode=False)
        if code == 130:  # what typer makes of Ctrl-C, without a word
            _end_interrupted(arguments[0])
    except (KeyboardInterrupt, typer.Abort):
        _end_interrupted(arguments[0])
    except Exception as error:
        if pressed.is_set():  # and caught by a library, which then stumbled over what it had left undone
            _end_interrupted(arguments[0])
        if isinstance(error, UserError | OSError):
            _fail(error, 2, debug)
        if hasattr(error, "format_message"):  # click's, which typer carries under varying names
            _fail(error, 2, debug, _with_value(error.format_message(), error, arguments))
        _fail(error, 1, debug, f"unexpected {type(error).__name__}: {error} (--debug shows where)")
    raise SystemExit(code if isinstance(code, int) else 0)


def _watch_ctrl_c() -> threading.Event:
    """Have Ctrl-C raise ``KeyboardInterrupt`` as ever, and remember that it was pressed."""
    pressed = threading.Event()

    def interrupt(*_: object) -> NoReturn:
        pressed.set()
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as behind nohup
        signal.signal(signal.SIGINT, interrupt)
    return pressed


def _end_interrupted(command: str) -> NoReturn:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    how = GOES_ON.get(command)
    message = f"secu: interrupted; {how} goes on after the last whole epoch" if how else "secu: interrupted"
    print(message, file=sys.stderr, flush=True)
    # At once: Python would wait for threads whose work nobody wants, and end by the signal instead of with the code if
    # Ctrl-C fell into an exec(), of which the imports of libraries are full.
    os._exit(130)


def _check_command(word: str) -> None:
    names = [command.callback.__name__ for command in app.registered_commands if command.callback]
    if not word.startswith("-") and word not in names:
        raise UserError(f"command: unknown {word!r}; {nearest(word, names)}")


def _with_value(message: str, error: Exception, arguments: list[str]) -> str:
    """Return what click says of an option, with the value that it leaves out where that is no number."""
    names = getattr(getattr(error, "param", None), "opts", ())
    words = [word for argument in arguments for word in argument.split("=", 1)]
    given = [value for name, value in pairwise(words) if name in names]
    return f"{message}, got {given[-1]!r}" if given and repr(given[-1]) not in message else message


def _fail(error: Exception, code: int, debug: bool, message: str | None = None) -> NoReturn:
    if debug:
        raise error
    print(f"secu: {' '.join((message or str(error)).split())}", file=sys.stderr)
    raise SystemExit(code)
