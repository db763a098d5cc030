"""What a person sees while a command works: bars in a terminal, a few lines in a log."""

import io
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from own_images import digits, request_of
from secu.apps import console
from secu.apps.console import ConsoleListener, duration, show_plan
from secu.apps.fit import prepare
from secu.data import ArraySource

LOSSES = {"loss": 1.0, "center_loss": 0.25}
EPOCH = {"epoch": 0, **LOSSES, "smallest": 3, "largest": 5_000, "seconds": 1.0}


def screen(terminal, width=100):
    return Console(file=io.StringIO(), force_terminal=terminal, width=width)


def start(listener, epochs=2, epochs_done=0, steps=4):
    listener.started(engine="eager", device="cpu", epochs=epochs, epochs_done=epochs_done, steps=steps)


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that stands still until it is moved."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


# Reading


def test_a_log_has_a_line_about_reading_now_and_then(clock):
    log = screen(False)
    with ConsoleListener(log) as listener:
        for done in range(1, 10_001):
            clock.seconds += 0.01
            listener.reading(done, 10_000)
    lines = log.file.getvalue().splitlines()
    assert lines[0] == "reading images: 1 of 10,000"
    assert lines[1] == "reading images: 3,002 of 10,000"
    assert lines[-1] == "reading images: 10,000 of 10,000"
    assert len(lines) == 5


def test_a_terminal_shows_a_bar_that_goes_away():
    terminal = screen(True)
    with ConsoleListener(terminal) as listener:
        listener.reading(1, 2)
        assert listener.reading_bar.live.is_started
        listener.reading(2, 2)
        assert not listener.reading_bar.live.is_started
    assert "reading images:" not in terminal.file.getvalue()


def test_no_bar_is_left_when_reading_fails():
    listener = ConsoleListener(screen(True))
    listener.reading(1, 2)
    with pytest.raises(OSError, match="gone"), listener:
        raise OSError("gone")
    assert not listener.reading_bar.live.is_started


# Training


def test_training_takes_the_place_of_reading():
    with ConsoleListener(screen(True)) as listener:
        listener.reading(1, 2)
        start(listener)
        assert not listener.reading_bar.live.is_started
        assert listener.bar.live.is_started


def test_the_first_line_names_device_and_engine():
    log = screen(False)
    with ConsoleListener(log, "seed 3: ") as listener:
        start(listener)
        start(listener, epochs_done=1)
        start(listener, epochs_done=2)
    assert log.file.getvalue().splitlines() == [
        "seed 3: training on cpu, engine eager",
        "seed 3: training on cpu, engine eager, resumed after 1 epoch",
        "seed 3: training on cpu, engine eager, resumed after 2 epochs",
    ]


def test_the_bar_moves_by_steps_and_by_epochs():
    with ConsoleListener(screen(True)) as listener:
        start(listener, epochs=5, epochs_done=2, steps=4)
        task = listener.bar.tasks[0]
        assert (task.completed, task.total) == (2, 5)
        listener.stepped()
        assert task.completed == 2.25
        listener.epoch_ended(EPOCH | {"epoch": 2}, LOSSES)
        assert task.completed == 3
        assert task.fields["note"] == "loss 1.000  center loss 0.250  clusters 3 to 5,000"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_narrow_terminal_shortens_the_losses_but_never_the_times(width):
    terminal = screen(True, width)
    with ConsoleListener(terminal) as listener:
        start(listener, epochs=1_000, epochs_done=99)
        listener.epoch_ended(EPOCH | {"epoch": 99}, LOSSES)
    line = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", terminal.file.getvalue()).rstrip().splitlines()[-1]
    assert re.search(r" 100/1000 loss.* 0:00:00 left -:--:--$", line)
    assert ("loss 1.000  center loss 0.250  clusters 3 to 5,000 0:00:00" in line) is (width == 200)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_score_is_a_line(terminal):
    shown = screen(terminal)
    with ConsoleListener(shown, "seed 1: ") as listener:
        start(listener)
        listener.epoch_ended(EPOCH | {"acc": 0.5, "nmi": 0.25, "ari": 0.125}, LOSSES)
    line = "seed 1: epoch    1 of 2  loss 1.000  center loss 0.250  clusters 3 to 5,000"
    assert f"{line}  ACC 0.5000  NMI 0.2500  ARI 0.1250  1.0 s" in shown.file.getvalue()


def test_a_log_has_a_line_for_the_first_and_the_last_epoch_and_now_and_then(clock):
    log = screen(False)
    with ConsoleListener(log) as listener:
        start(listener, epochs=10)
        for epoch in range(10):
            listener.epoch_ended(EPOCH | {"epoch": epoch}, LOSSES)
            clock.seconds += 8
    lines = [line.split()[1] for line in log.file.getvalue().splitlines() if line.startswith("epoch")]
    assert lines == ["1", "5", "9", "10"]


def test_a_log_says_how_much_longer_training_takes_at_the_speed_since_the_first_epoch(clock):
    log = screen(False)
    with ConsoleListener(log) as listener:
        start(listener, epochs=10, epochs_done=4)
        for epoch in range(4, 10):
            clock.seconds += 400 if epoch == 4 else 40
            listener.epoch_ended(EPOCH | {"epoch": epoch}, LOSSES)
    ends = [line.partition("5,000  ")[2] for line in log.file.getvalue().splitlines()[1:]]
    left = ["3 minutes", "2 minutes", "80 seconds", "40 seconds"]
    assert ends == ["1.0 s", *(f"1.0 s, about {time} left" for time in left), "1.0 s"]


def test_a_terminal_has_no_line_for_an_epoch_without_a_score():
    terminal = screen(True)
    with ConsoleListener(terminal) as listener:
        start(listener)
        listener.epoch_ended(EPOCH, LOSSES)
    assert "epoch    1 of 2" not in terminal.file.getvalue()


# After training


@pytest.mark.parametrize("terminal", [False, True])
def test_what_comes_after_the_last_epoch_is_reported(terminal):
    shown = screen(terminal)
    with ConsoleListener(shown) as listener:
        start(listener, epochs=1)
        listener.epoch_ended(EPOCH, LOSSES)
        listener.busy("writing the tables")
        assert not listener.bar.live.is_started
        listener.busy("writing the report")
    text = shown.file.getvalue()
    assert "writing the report" in text
    if not terminal:
        assert text.splitlines()[-2:] == ["writing the tables", "writing the report"]


def test_a_warning_is_one_line_however_long_and_whatever_it_contains():
    shown = screen(True, width=20)
    with ConsoleListener(shown, "seed 0: ") as listener:
        start(listener)
        listener.warned("cluster [red]3[/red] contains 90% of all images")
        assert not listener.bar.live.is_started
    assert "seed 0: warning: cluster [red]3[/red] contains 90% of all images\n" in shown.file.getvalue()


def test_remarks_do_not_go_into_a_pipe_that_carries_the_answer():
    answer = screen(False)
    remarks = screen(False)
    ConsoleListener(answer, notes=remarks).note("2 of 30 images of the run are left out")
    assert (answer.file.getvalue(), remarks.file.getvalue()) == ("", "2 of 30 images of the run are left out\n")


@pytest.mark.parametrize("bar", [False, True])
def test_only_one_of_the_runs_side_by_side_shows_a_bar(bar):
    terminal = screen(True)
    with ConsoleListener(terminal, bar=bar) as listener:
        start(listener)
        listener.epoch_ended(EPOCH, LOSSES)
    assert ("clusters 3 to 5,000" in terminal.file.getvalue()) is bar


# The plan


def planned(**more):
    return prepare(replace(request_of(""), source=ArraySource("dark", digits(40)[0]), **more))


def test_a_plan_is_shown_with_its_reasons_on_request():
    short = screen(False)
    show_plan(short, planned(), reasons=False)
    lines = short.file.getvalue().splitlines()
    assert lines == ["40 images in dark", "about 5 seconds on this device"]  # most of them to start
    long = screen(False)
    prepared = planned()
    show_plan(long, prepared, reasons=True)
    assert long.file.getvalue().splitlines() == [
        lines[0],
        *(f"  {reason}" for reason in prepared.plan.reasons),
        lines[1],
    ]


def test_a_plan_tells_how_values_are_read_where_that_had_to_be_decided():
    shown = screen(False)
    array = ArraySource("deep", digits(40)[0].astype("uint16") * 16)
    show_plan(shown, prepare(replace(request_of(""), source=array)), reasons=False)
    assert shown.file.getvalue().splitlines()[1] == "values from 0 to 4080 are interpreted as int 0..4095"


def test_a_plan_that_takes_too_long_comes_with_advice():
    prepared = planned()
    slow = replace(prepared, plan=replace(prepared.plan, seconds=20 * 3600))
    shown = screen(False)
    show_plan(shown, slow, reasons=False)
    assert shown.file.getvalue().splitlines()[1:] == [
        "about 20.0 hours on this device",
        "this would take too long here: use a GPU, smaller images (data.image_size) or fewer images",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 seconds"), (89.4, "89 seconds"), (90, "2 minutes"), (5399, "90 minutes"), (5400, "1.5 hours")],
)
def test_a_time_in_words(seconds, text):
    assert duration(seconds) == text
