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
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from secu.data.decoding.decode import share_turns

IDLE = 30  # seconds without work after which a process ends
PATIENCE = 5  # seconds in which a process may say why it fails
PIPE = 2**18  # bytes that a pipe holds, if that many are allowed; with less, both sides wait for each other more often
LENGTH = 8  # bytes before a message that state its length
# The path may contain folders that only the main process knows.
FIRST = "import ast, os, sys; sys.path[:] = ast.literal_eval(os.environ.pop('SECU_PATH')); "
START = "from secu.data.decoding.process import serve; serve()"

_lock = threading.Lock()
_turns: int | None = None
_all: "WeakSet[Process]" = WeakSet()


class Ended(ChildProcessError):
    """A process ended before it answered."""


class Process:
    """A process that calls functions; one thread may use it at a time."""

    def __init__(self) -> None:
        self.stopped = False
        with _lock:
            turns = _file_of_turns()
        asked, self.requests = os.pipe()
        self.answers, answered = os.pipe()
        try:
            for pipe in (asked, answered):
                with suppress(OSError, AttributeError):  # more than this user may have, or not Linux
                    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE)
            self.popen = subprocess.Popen(
                [sys.executable, "-P", f"-Xutf8={sys.flags.utf8_mode}", "-c", FIRST + START],
                env={**os.environ, "SECU_PATH": ascii([path for path in sys.path if isinstance(path, str)])},
                stdin=asked,
                stdout=answered,
                stderr=None if _is_open(2) else subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[turns],
            )
        except BaseException:
            os.close(self.requests)
            os.close(self.answers)
            raise
        finally:
            os.close(asked)
            os.close(answered)
        with _lock:
            _all.add(self)
        with suppress(BrokenPipeError):  # the first call will notice
            _send(self.requests, turns)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function returns, or raise what it raises, in the process."""
        try:
            _send(self.requests, (function, arguments))
            succeeded, answer = _receive(self.answers)
        except (EOFError, BrokenPipeError):
            raise Ended from None
        if not succeeded:
            raise answer
        return answer

    @property
    def runs(self) -> bool:
        """Whether the process has not ended."""
        return self.popen.poll() is None

    def stop(self) -> None:
        """Kill the process, which another thread uses; that gets ``Ended``, and must then call ``end``."""
        self.stopped = True
        if self.popen.returncode is None:  # otherwise its number may be that of another one
            with suppress(ProcessLookupError):
                os.kill(self.popen.pid, signal.SIGKILL)  # Popen.kill takes a lock, which a second Ctrl-C may leave held

    def end(self, *, gently: bool = False) -> int:
        """End the process, which no thread uses any more, and return its exit code."""
        self._close()
        if gently:
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(PATIENCE)
        self.popen.kill()
        return self.popen.wait()

    def forget(self) -> None:
        """Leave the process to the program that this one was forked from."""
        self.popen.returncode = 0
        self._close()

    def _close(self) -> None:
        if self.requests >= 0:
            os.close(self.requests)
            os.close(self.answers)
            self.requests = -1


def forget_all() -> None:
    """Leave all processes to the program that this one was forked from."""
    global _lock
    _lock = threading.Lock()
    for process in list(_all):
        process.forget()
    _all.clear()


def _is_open(file: int) -> bool:
    with suppress(OSError):
        os.fstat(file)
        return True
    return False


def _send(pipe: int, message: object) -> None:
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    for part in (len(content).to_bytes(LENGTH, "big"), content):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(pipe, rest) :]


def _receive(pipe: int) -> Any:
    return pickle.loads(_read(pipe, int.from_bytes(_read(pipe, LENGTH), "big")))


def _read(pipe: int, count: int) -> bytearray:
    content = bytearray(count)
    rest = memoryview(content)
    while rest:
        read = os.readv(pipe, [rest])
        if not read:
            raise EOFError
        rest = rest[read:]
    return content


def _file_of_turns() -> int:
    """Return an empty file that processes lock while they decode a large image."""
    global _turns
    if _turns is None:
        file, name = tempfile.mkstemp(prefix="secu-")
        os.unlink(name)
        _turns = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3)  # a process has its own 0, 1 and 2
        os.close(file)
    return _turns


class _Turns:
    """A lock that processes share; it is released when its process ends."""

    def __init__(self, file: int) -> None:
        self.file = file

    def __enter__(self) -> None:
        fcntl.lockf(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self.file, fcntl.LOCK_UN)


def serve() -> None:
    """Call functions until the requests end, or until there are none for a while, or nobody takes an answer."""
    answers = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)
    os.dup2(2, 1)  # nothing else may write between the answers
    warnings.filterwarnings("ignore", module=r"PIL\.")  # see ``quiet``
    with suppress(EOFError, BrokenPipeError):  # the main process has ended
        share_turns(_Turns(_receive(0)))
        while True:
            signal.alarm(IDLE)
            answer = _answer(_read(0, int.from_bytes(_read(0, LENGTH), "big")))
            signal.alarm(IDLE)
            _send(answers, answer)
    os._exit(0)  # there is nothing to flush


def _answer(request: bytearray) -> tuple[bool, Any]:
    signal.alarm(0)
    try:
        function, arguments = pickle.loads(request)
        return True, function(*arguments)
    except Exception as error:
        error.add_note(traceback.format_exc())
        return False, error
