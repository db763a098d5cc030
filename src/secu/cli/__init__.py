"""The command line interface. Heavy modules are imported only when a command needs them.

A user error prints one line to stderr and exits with code 2. Ctrl-C exits with code 130, SIGTERM with 143 and SIGHUP
with 129, after whatever can be saved is saved. Anything else is a bug and exits with code 1; ``--debug`` shows the
traceback.
"""

import contextlib
import os
import signal
import sys
from itertools import pairwise
from typing import NoReturn

import typer

from secu.cli import experiments, own, trees
from secu.cli.app import app, options, parse_time
from secu.errors import UserError, shortened

__all__ = ["app", "experiments", "main", "own", "parse_time", "trees"]

INTERRUPTED = 130
LONGEST_MESSAGE = 2_000  # characters
RESUMED_BY = {
    "train": "the same command with --resume",
    "fit": "the same command with --resume",
    "selflabel": "the same command with --resume",
    "repeat": "the same command",
}


class Interrupted(KeyboardInterrupt):
    """A signal to stop; a plain KeyboardInterrupt raised during an import would make Python exit by the signal."""


def main() -> NoReturn:
    """Run the program and turn exceptions into a one-line message and an exit code."""
    # OpenMP threads of torch busy-wait for each other. A shorter wait costs nothing on an idle CPU; when another
    # program occupies one of two cores, a step takes 0.24 s instead of 1.1 s. Read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    options.debug = False
    received = _watch_signals()
    code: object = 0
    try:
        code = app(prog_name="secu", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        if not received:  # otherwise a library caught the interruption and failed later
            _fail(error)
        code = INTERRUPTED
    if code == INTERRUPTED:  # also what typer returns after Ctrl-C
        _report_interruption(received)
        code = 128 + received[0] if received else INTERRUPTED
    raise SystemExit(code if isinstance(code, int) else 0)


def _watch_signals() -> list[int]:
    """Make Ctrl-C, SIGTERM and SIGHUP raise ``Interrupted``; their numbers are appended to the returned list."""
    received: list[int] = []

    def interrupt(number: int, _: object) -> NoReturn:
        received.append(number)
        raise Interrupted

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
        number = getattr(signal, name, None)
        # A signal may be ignored, for example SIGHUP under nohup.
        if number is not None and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, interrupt)
    return received


def _report_interruption(received: list[int]) -> None:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    what = "interrupted" if not received or received[0] == signal.SIGINT else "terminated"
    how = RESUMED_BY.get(options.command)
    message = f"secu: {what}; {how} continues after the last complete epoch, if any" if how else f"secu: {what}"
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(message, file=sys.stderr, flush=True)


def _fail(error: Exception) -> NoReturn:
    """Print an error as one line and exit."""
    if options.debug:
        raise error
    code = 2
    message = str(error)
    if hasattr(error, "format_message"):  # a click error; typer vendors click under varying names
        message = _with_value(error.format_message(), error)
    elif _is_out_of_memory(error):
        message = "out of memory: lower optim.batch_size or data.image_size, use fewer images, or close other programs"
    elif not isinstance(error, UserError | OSError):
        code = 1
        message = f"unexpected {type(error).__name__}: {error} (--debug shows where)"
    print(f"secu: {shortened(' '.join(message.split()), LONGEST_MESSAGE)}", file=sys.stderr)
    raise SystemExit(code)


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out, in the host's memory or in the device's; torch has no exception for the former."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    texts = ("can't allocate memory", "Unable to allocate", "std::bad_alloc", "malloc of size", "out of memory")
    return isinstance(error, RuntimeError | OSError) and any(text in str(error) for text in texts)


def _with_value(message: str, error: Exception) -> str:
    """Return click's error message for an option, with the invalid value, which click omits for some types."""
    names = getattr(getattr(error, "param", None), "opts", ())
    words = [word for argument in sys.argv[1:] for word in argument.split("=", 1)]
    given = [value for name, value in pairwise(words) if name in names]
    return f"{message}, got {given[-1]!r}" if given and repr(given[-1]) not in message else message
