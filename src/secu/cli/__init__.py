"""The command line interface. Heavy modules are imported only when a command needs them.

A user error prints one line to stderr and exits with code 2. Ctrl-C exits with code 130, SIGTERM with 143 and SIGHUP
with 129, after whatever can be saved is saved. Anything else is a bug and exits with code 1; ``--debug`` shows the
traceback. Of several processes that torchrun started, only the main one prints; an error names the process that failed.
"""

import contextlib
import os
import signal
import sys
from itertools import pairwise
from typing import NoReturn

import typer

from secu.base import processes
from secu.base.errors import UserError, shortened
from secu.base.names import printable
from secu.base.threads import wait_briefly
from secu.cli import experiments, exports, extras, own
from secu.cli.app import app, invocation, parse_time, show_only_errors
from secu.train.signals import STOPPING

__all__ = ["app", "experiments", "exports", "extras", "main", "own", "parse_time"]

INTERRUPTED = 130
LONGEST_MESSAGE = 2_000  # characters
ONEDNN = "could not create a primitive"  # how oneDNN reports that memory ran out
NO_STACK = "can't start new thread"  # how Python reports it for the stack of a thread
RESUMED_BY = dict.fromkeys(("train", "fit", "selflabel"), "the same command with --resume")
RESUMED_BY["repeat"] = "the same command"


class Interrupted(KeyboardInterrupt):
    """A signal to stop; a plain KeyboardInterrupt raised during an import would make Python exit by the signal."""


def main() -> NoReturn:
    """Run the program and turn exceptions into a one-line message and an exit code."""
    wait_briefly()
    invocation.debug = False
    received = _watch_signals()
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _report_unraisable
    code: object = 0
    try:
        if processes.launched():
            processes.start()
            show_only_errors(processes.is_main())
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
    _leave(code if isinstance(code, int) else 0)


def _leave(code: int) -> NoReturn:
    """End the program; of several processes, at once: the threads of a process group may abort while Python ends."""
    if processes.world() > 1:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    raise SystemExit(code)


def _watch_signals() -> list[int]:
    """Make Ctrl-C, SIGTERM and SIGHUP raise ``Interrupted``; their numbers are appended to the returned list."""
    received: list[int] = []

    def interrupt(number: int, _: object) -> NoReturn:
        received.append(number)
        raise Interrupted

    for number in STOPPING:
        # A signal may be ignored, for example SIGHUP under nohup.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, interrupt)
    return received


def _report_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Stay silent if a signal arrived in a destructor, where Python ignores exceptions and goes on."""
    if not isinstance(unraisable.exc_value, Interrupted):
        sys.__unraisablehook__(unraisable)


def _ignore_signals() -> None:
    """Ignore signals while the program ends: people are impatient, and torchrun sends one to every process."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def _report_interruption(received: list[int]) -> None:
    if received:
        _ignore_signals()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if not processes.is_main() or processes.failed_elsewhere():
        return
    what = "interrupted" if not received or received[0] == signal.SIGINT else "terminated"
    how = RESUMED_BY.get(invocation.command)
    message = f"secu: {what}; {how} continues from the last checkpoint, if any" if how else f"secu: {what}"
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(message, file=sys.stderr, flush=True)


def _fail(error: Exception) -> NoReturn:
    if processes.world() > 1:
        _ignore_signals()
    if invocation.debug:
        raise error
    code = 2
    message = str(error)
    if hasattr(error, "format_message"):  # a click error; typer vendors click under varying names
        message = _with_value(error.format_message(), error)
    elif _is_out_of_memory(error):
        message = "out of memory: lower optim.batch_size or data.image_size, use fewer images, or close other programs"
    elif processes.world() > 1 and _is_disconnected(error):
        code = 1
        message = "another process ended"
    elif not isinstance(error, UserError | OSError):
        code = 1
        message = f"unexpected {type(error).__name__}: {error} (--debug shows where)"
    who = f"rank {processes.rank()}: " if processes.world() > 1 else ""
    if processes.report_failure():  # otherwise this process fails because another one did
        line = shortened(printable(" ".join(message.split())), LONGEST_MESSAGE)
        print(f"secu: {who}{line}", file=sys.stderr, flush=True)
    _leave(code)


def _is_disconnected(error: Exception) -> bool:
    """Return whether a collective operation failed, which is how a process learns that another one ended."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in ("gloo", "NCCL", "Connection"))


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out, in the host's memory or in the device's; torch has no exception for the former."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    allocators = ("can't allocate memory", "Unable to allocate", "std::bad_alloc", "malloc of size", "out of memory")
    texts = (*allocators, ONEDNN, NO_STACK)
    return isinstance(error, RuntimeError | OSError) and any(text in str(error) for text in texts)


def _with_value(message: str, error: Exception) -> str:
    """Return click's error message for an option, with the invalid value, which click omits for some types."""
    names = getattr(getattr(error, "param", None), "opts", ())
    words = [word for argument in sys.argv[1:] for word in argument.split("=", 1)]
    given = [value for name, value in pairwise(words) if name in names]
    return f"{message}, got {given[-1]!r}" if given and repr(given[-1]) not in message else message
