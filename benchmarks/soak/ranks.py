"""Kill processes of a run that torchrun shares among two of them, and compare with an undisturbed run."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from soak.cases import TRAIN, spelled_out
from soak.judge import outcome

EPOCHS = 1500  # more than twenty kills leave time for
LONGEST = 10.0  # seconds between two kills
TOO_LONG = 1200  # seconds


def kill_ranks(references: Path, folder: Path, kills: int, moments: random.Random) -> tuple[int, str]:
    """Kill one of two processes at random moments, up to ``kills`` times.

    Returns:
        The number of kills before the run ended, and what is wrong in the end.
    """
    settings = tuple(word for word in TRAIN if not word.startswith("optim.epochs="))[:-1]
    command = spelled_out((*settings, "{out}", f"optim.epochs={EPOCHS}"), references)
    undisturbed = _launch([str(folder / "whole") if word == "{out}" else word for word in command], 0)
    if _wait(undisturbed):
        return 0, "unexplained: an undisturbed run of two processes failed"
    shared = _launch([str(folder / "run") if word == "{out}" else word for word in command], kills)
    done = 0
    while done < kills:
        time.sleep(moments.uniform(0, LONGEST))
        if shared.poll() is not None:
            break
        if processes := children(shared.pid):
            os.kill(moments.choice(processes), signal.SIGKILL)
            done += 1
    if code := _wait(shared):
        return done, f"lost: torchrun ended with {code}"
    same = outcome(folder / "run") == outcome(folder / "whole")
    return done, "" if same else "corrupt: it differs from an undisturbed run"


def _wait(process: subprocess.Popen[bytes]) -> int | str:
    try:
        return process.wait(TOO_LONG)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        return "hangs"


def _launch(arguments: Sequence[str], restarts: int) -> subprocess.Popen[bytes]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "--max-restarts", str(restarts), str(Path(__file__).with_name("eager.py")), *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def children(parent: int) -> list[int]:
    """Return the processes that a process started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == parent:
            found.append(int(path.parent.name))
    return found
