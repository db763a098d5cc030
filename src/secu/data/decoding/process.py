"""A process that decodes images for a thread of this one, over two pipes.

It ends when its input does, so that it never outlives the main process, and after a while without work. It has its own
session, so that Ctrl-C does not reach it. The pools of multiprocessing and loky do more than that: they run the user's
script again, share semaphores that a killed program leaves behind, or fail in processes that were forked.
"""

import fcntl
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import IO, Any

from secu.data.decoding.decode import share_turns

IDLE = 30  # seconds without work after which a process ends
PIPE = 2**20  # bytes that a pipe holds; with less, both sides wait for each other more often
# The path may contain folders that only the main process knows.
START = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from secu.data.decoding.process import serve; serve()"
)


class Ended(ChildProcessError):
    """A process ended before it answered.

    Attributes:
        idle: Whether it had nothing to do for too long.
        killed: Whether another signal ended it.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.idle = code == -signal.SIGALRM
        self.killed = code < 0 and not self.idle


class Process:
    """A process that calls functions; one thread may use it at a time."""

    def __init__(self) -> None:
        self.stopped = False
        turns = _turns().fileno()
        self.popen = subprocess.Popen(
            [sys.executable, "-c", START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pipesize=PIPE,
            start_new_session=True,
            pass_fds=[turns],
        )
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.requests: IO[bytes] = self.popen.stdin
        self.answers: IO[bytes] = self.popen.stdout
        self._send(sys.path)
        self._send(turns)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function returns, or raise what it raises, in the process."""
        self._send((function, arguments))
        try:
            succeeded, answer = pickle.load(self.answers)
        except (EOFError, pickle.UnpicklingError):  # also if it ended in the middle of an answer
            raise self._ended() from None
        if not succeeded:
            raise answer
        return answer

    def _send(self, message: object) -> None:
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)  # before anything is written, as it may fail
        try:
            self.requests.write(content)
            self.requests.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _ended(self) -> Ended:
        self.end()
        return Ended(self.popen.returncode)

    @property
    def runs(self) -> bool:
        """Whether the process has not ended."""
        return self.popen.poll() is None

    def stop(self) -> None:
        """End the process at once; the thread that waits for it gets ``Ended``."""
        self.stopped = True
        self.popen.kill()

    def end(self) -> None:
        """End the process, which no thread uses, and wait for its end."""
        self.popen.kill()
        self.popen.wait()
        for pipe in (self.requests, self.answers):
            with suppress(BrokenPipeError):  # what could not be sent
                pipe.close()


@cache
def _turns() -> IO[bytes]:
    """Return an empty file that processes lock while they decode a large image."""
    return tempfile.TemporaryFile()


class _Turns:
    """A lock that processes share; it is released when its process ends."""

    def __init__(self, file: int) -> None:
        self.file = file

    def __enter__(self) -> None:
        fcntl.lockf(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self.file, fcntl.LOCK_UN)


def serve() -> None:
    """Call functions until the requests end."""
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may write between the answers
    warnings.filterwarnings("ignore", module=r"PIL\.")  # see ``quiet``
    try:
        share_turns(_Turns(pickle.load(requests)))
        while True:
            signal.alarm(IDLE)
            function, arguments = pickle.load(requests)
            signal.alarm(0)
            pickle.dump(_outcome(function, arguments), answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
    except (EOFError, pickle.UnpicklingError, BrokenPipeError):  # the main process ended, maybe in a request
        os._exit(0)  # nothing to flush


def _outcome(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[bool, Any]:
    try:
        return True, function(*arguments)
    except Exception as error:
        return False, error
