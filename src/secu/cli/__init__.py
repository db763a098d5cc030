"""The command line interface. Heavy modules are imported only when a command needs them.

A user error prints one line to stderr and exits with code 2. An interruption exits with code 130. Anything else is a
bug and exits with code 1; ``--debug`` shows the traceback.
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
from secu.cli.app import app, options, parse_time
from secu.errors import UserError

__all__ = ["app", "experiments", "main", "own", "parse_time"]

RESUMED_BY = {
    "train": "the same command with --resume",
    "fit": "the same command with --resume",
    "selflabel": "the same command with --resume",
    "repeat": "the same command",
}


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; a plain KeyboardInterrupt raised during an import would make Python exit by the signal."""


def main() -> NoReturn:
    """Run the program and turn exceptions into a one-line message and an exit code."""
    # OpenMP threads of torch busy-wait for each other. A shorter wait costs nothing on an idle CPU; when another
    # program occupies one of two cores, a step takes 0.24 s instead of 1.1 s. Read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    options.debug = False
    pressed = _watch_ctrl_c()
    try:
        code = app(prog_name="secu", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        if not pressed.is_set():  # if set, a library caught Ctrl-C and failed later
            _fail(error)
        code = 130
    if code == 130:  # also what typer returns after Ctrl-C
        _report_interruption()
    raise SystemExit(code if isinstance(code, int) else 0)


def _watch_ctrl_c() -> threading.Event:
    """Make Ctrl-C raise ``Interrupted`` and set the returned event."""
    pressed = threading.Event()

    def interrupt(*_: object) -> NoReturn:
        pressed.set()
        raise Interrupted

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # SIGINT may be ignored, for example under nohup
        signal.signal(signal.SIGINT, interrupt)
    return pressed


def _report_interruption() -> None:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    how = RESUMED_BY.get(options.command)
    message = f"secu: interrupted; {how} continues after the last complete epoch" if how else "secu: interrupted"
    print(message, file=sys.stderr, flush=True)


def _fail(error: Exception) -> NoReturn:
    """Print an error as one line and exit."""
    if options.debug:
        raise error
    code = 2
    message = str(error)
    if hasattr(error, "format_message"):  # a click error; typer vendors click under varying names
        message = _with_value(error.format_message(), error)
    elif not isinstance(error, UserError | OSError):
        code = 1
        message = f"unexpected {type(error).__name__}: {error} (--debug shows where)"
    print(f"secu: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


def _with_value(message: str, error: Exception) -> str:
    """Return click's error message for an option, with the invalid value, which click omits for some types."""
    names = getattr(getattr(error, "param", None), "opts", ())
    words = [word for argument in sys.argv[1:] for word in argument.split("=", 1)]
    given = [value for name, value in pairwise(words) if name in names]
    return f"{message}, got {given[-1]!r}" if given and repr(given[-1]) not in message else message
