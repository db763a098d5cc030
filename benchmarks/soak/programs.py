"""Programs under test: each runs in a child of this process, which has everything imported already."""

import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

TOO_LONG = 120  # seconds until a child counts as hanging
POLL = 0.002  # seconds
PROGRESS = ("warning: ", "reading images: ", "assigning all images", "writing exported")  # before the line of an error


@dataclass(frozen=True)
class Limits:
    """What a child may use, in bytes; None for no limit."""

    memory: int | None = None  # more than it has at its start
    file_size: int | None = None


@dataclass
class Child:
    """A program that was started."""

    pid: int
    errors: Path
    started: float = field(default_factory=time.monotonic)

    def signal(self, number: int) -> None:
        """Send a signal; the child may have ended."""
        os.kill(self.pid, number)

    def wait(self) -> "Ended":
        """Wait for the end."""
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() - self.started > TOO_LONG:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                return Ended("hangs", self.errors.read_text(errors="replace"), time.monotonic() - self.started)
            time.sleep(POLL)
        code = os.waitstatus_to_exitcode(status)
        return Ended(code, self.errors.read_text(errors="replace"), time.monotonic() - self.started)


@dataclass(frozen=True)
class Ended:
    """How a program ended: its exit code (negative for a signal), what it printed to stderr, and its seconds."""

    code: int | str
    errors: str
    seconds: float

    def explained(self, *codes: int) -> bool:
        """Return whether it ended with one of these codes and, unless successful or killed, with one line."""
        lines = [line for line in self.errors.splitlines() if not line.startswith(PROGRESS)]
        if self.code not in codes:
            return False
        if not isinstance(self.code, int) or self.code <= 0:
            return "Traceback" not in self.errors
        return len(lines) == 1 and lines[0].startswith("secu: ")

    def by_library(self) -> bool:
        """Return whether a native library ended the program because memory ran out, which Python cannot prevent."""
        return (
            self.code in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS) or "OpenBLAS error: Memory" in self.errors
        )


def import_everything() -> None:
    """Import what the commands import, so that a child starts in milliseconds."""
    import onnxscript
    import PIL.PngImagePlugin
    import pyarrow.parquet
    import sklearn.manifold
    import torch
    import torch.utils.tensorboard

    import secu.apps.demo
    import secu.apps.embed
    import secu.apps.export
    import secu.apps.exports.writing
    import secu.apps.fit
    import secu.apps.hints
    import secu.apps.predict
    import secu.apps.recipe
    import secu.apps.selflabel
    import secu.apps.sort
    import secu.cli
    import secu.results.results  # noqa: F401
    from secu.apps.exports.writing import FORMATS

    assert onnxscript
    assert PIL.PngImagePlugin
    assert pyarrow.parquet
    assert sklearn.manifold
    assert all(FORMATS[tool] for tool in FORMATS.names())
    torch.set_num_threads(1)  # a thread pool does not survive a fork


def start(arguments: Sequence[object], folder: Path, limits: Limits | None = None) -> Child:
    """Start ``secu ARGUMENTS`` in a folder."""
    errors = folder / f"errors-{time.monotonic_ns()}.txt"
    errors.touch()
    pid = os.fork()
    if pid:
        return Child(pid, errors)
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(errors, os.O_WRONLY), 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
        _limit(limits or Limits())
        sys.argv = ["secu", *map(str, arguments)]
        from secu.cli import main

        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _limit(limits: Limits) -> None:
    if limits.memory is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + limits.memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    if limits.file_size is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_size, limits.file_size))


def run(arguments: Sequence[object], folder: Path) -> Ended:
    """Run ``secu ARGUMENTS`` in a folder to its end."""
    return start(arguments, folder).wait()
