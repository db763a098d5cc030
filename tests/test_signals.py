"""Signals: the first one interrupts, none of them a checkpoint, and later ones wait."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from secu.train.place import LOCK
from secu.train.run import Run
from secu.train.signals import STOPPING, OneInterruption
from waiting import epochs_of, wait_for


class Stop(Exception):
    """Raised by the handlers of these tests."""


@contextmanager
def raising():
    """Let every signal that stops a program raise ``Stop``."""

    def handle(number, frame):
        raise Stop(number)

    before = {number: signal.signal(number, handle) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", STOPPING)
def test_only_the_first_signal_interrupts(number):
    after = []
    with raising(), OneInterruption() as interruption:
        assert not interruption.requested
        with pytest.raises(Stop):
            os.kill(os.getpid(), number)
        assert interruption.requested
        for later in STOPPING:
            os.kill(os.getpid(), later)
            after.append(later)
    assert after == STOPPING


def test_handlers_are_restored():
    with raising():
        before = [signal.getsignal(number) for number in STOPPING]
        with OneInterruption():
            assert [signal.getsignal(number) for number in STOPPING] != before
        assert [signal.getsignal(number) for number in STOPPING] == before


def test_a_signal_waits_for_the_checkpoint():
    written = []
    with raising(), OneInterruption() as interruption:
        with pytest.raises(Stop), interruption.postponed():  # noqa: PT012
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            written.append("whole")
        with interruption.postponed():  # the one after the interruption
            os.kill(os.getpid(), signal.SIGINT)
            written.append("again")
    assert written == ["whole", "again"]


def test_default_and_ignored_signals_are_left_alone():
    """A program that uses the estimator may be stopped by SIGTERM as before."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with OneInterruption() as interruption:
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGTERM)
            assert not interruption.requested
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_have_no_handlers():
    found = []

    def work():
        with OneInterruption() as interruption:
            found.append(interruption.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]


@pytest.mark.parametrize(
    ("number", "times", "code"),
    [(signal.SIGTERM, 1, 143), (signal.SIGHUP, 1, 129), (signal.SIGINT, 3, 130), (signal.SIGTERM, 3, 143)],
)
def test_a_signal_saves_and_the_run_goes_on(tmp_path, number, times, code):
    path = tmp_path / "run"
    settings = ["digits", "heads=[3]", "optim.epochs=100000", "optim.batch_size=256", "--out", str(path)]
    command = [sys.executable, "-m", "secu", "train", *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        # The record of an epoch is written just before its state is kept, so two records mean that one state is kept.
        wait_for(lambda: epochs_of(path) >= 2, process)
        for _ in range(times):
            process.send_signal(number)
            time.sleep(0.001)
        try:
            errors = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == code
    what = "interrupted" if number == signal.SIGINT else "terminated"
    assert errors == f"secu: {what}; the same command with --resume continues from the last checkpoint, if any\n"
    run = Run.open(path)
    assert run.load_state()["epochs_done"] == run.record()["epochs_done"] >= 1
    assert sorted(entry.name for entry in path.iterdir() if entry.name.startswith(".")) == [LOCK]


UNRAISABLE = """
import os, signal, sys
from secu.cli import main, own

class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):  # the handler runs between two of these
            pass

def late():
    Late()
    print("done")

own.app.command("late")(late)
sys.argv = ["secu", "late"]
main()
"""


def test_a_signal_in_a_destructor_is_silent():
    """Python ignores exceptions there, and would print a traceback."""
    done = subprocess.run([sys.executable, "-c", UNRAISABLE], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("done\n", "")
