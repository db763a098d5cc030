"""What a person sees while a run goes on: bars on a terminal, a few lines in a log."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from secu import console
from secu.console import DecodeProgress, ProgressListener
from secu.settings import load_config

EPOCH = {"epoch": 0, "loss": 1.0, "smallest": 3, "largest": 5, "seconds": 1.0}


def screen(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=100)


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that stands still until it is moved."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def test_a_log_hears_now_and_then_of_decoding(clock):
    log = screen(False)
    with DecodeProgress(log) as progress:
        for done in range(1, 10_001):
            clock.seconds += 0.01
            progress(done, 10_000)
    lines = log.file.getvalue().splitlines()
    assert lines[0] == "reading images: 1 of 10,000"
    assert lines[1] == "reading images: 3,002 of 10,000"
    assert lines[-1] == "reading images: 10,000 of 10,000"
    assert len(lines) == 5


def test_a_terminal_sees_a_bar_that_goes_away():
    terminal = screen(True)
    with DecodeProgress(terminal) as progress:
        progress(1, 2)
        assert progress.bar.live.is_started
        progress(2, 2)
        assert not progress.bar.live.is_started
    assert "reading images:" not in terminal.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_what_comes_after_the_last_epoch_is_said(terminal):
    shown = screen(terminal)
    model = SimpleNamespace(config=load_config("digits", ["optim.epochs=1"]), epochs_done=0)
    with ProgressListener(shown) as listener:
        listener.started(engine="eager", device="cpu", model=model, steps=1)
        listener.epoch_ended(EPOCH)
        listener.busy("writing the tables")
        assert not listener.bar.live.is_started
        listener.busy("writing the report")
    text = shown.file.getvalue()
    assert "writing the report" in text
    if not terminal:
        assert text.splitlines()[-2:] == ["writing the tables", "writing the report"]


def test_a_log_has_a_line_for_the_last_epoch():
    shown = screen(False)
    model = SimpleNamespace(config=load_config("digits", ["optim.epochs=3", "optim.initial_epochs=0"]), epochs_done=0)
    with ProgressListener(shown) as listener:
        listener.started(engine="eager", device="cpu", model=model, steps=1)
        for epoch in range(3):
            listener.epoch_ended(EPOCH | {"epoch": epoch})
    lines = [line.split()[1] for line in shown.file.getvalue().splitlines() if line.startswith("epoch")]
    assert lines == ["1", "3"]
