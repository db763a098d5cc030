"""Checkpoints in the middle of a long epoch: a resumed run equals an uninterrupted one bit for bit."""

import pytest

from process_cases import CASES, run_case
from secu.train import clock
from secu.train.checkpoint import Checkpoint
from secu.train.run import Run
from small_runs import Interrupting, assert_same

NAMES = (*CASES, "features", "selflabel", "selflabel-many")


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return run_case("size", tmp_path_factory.mktemp("first"), None).run.path


@pytest.fixture
def every_step(monkeypatch):
    """Copy the state after every step; write it only when interrupted."""
    monkeypatch.setattr(clock, "COPY_SECONDS", -1)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumed_in_the_middle_of_an_epoch_equals_an_uninterrupted_one(name, first, tmp_path, every_step):
    whole = run_case(name, tmp_path / "whole", first)
    steps = len(whole.step.sizes)
    for step in (2, steps + 1, steps - 2):  # counted from the start of each attempt: once in an epoch already resumed
        with pytest.raises(KeyboardInterrupt):
            run_case(name, tmp_path / "parts", first, resume=True, listener=Interrupting(step=step))
        assert Checkpoint.load(Run.open(tmp_path / "parts" / name)).middle
    resumed = run_case(name, tmp_path / "parts", first, resume=True)
    assert_same(resumed.run, whole.run)
    assert not Checkpoint.load(resumed.run).middle


def test_short_epochs_are_not_copied_in_the_middle(first, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_case("size", tmp_path, first, listener=Interrupting(step=8))
    checkpoint = Checkpoint.load(Run.open(tmp_path / "size"))
    assert checkpoint.place == (1, 0)


def test_a_long_epoch_is_written_now_and_then(first, tmp_path, every_step, monkeypatch):
    monkeypatch.setattr(clock, "MIDDLE_SECONDS", -1)
    places = []

    class Look(Interrupting):
        def stepped(self) -> None:
            if (tmp_path / "size" / "state.safetensors").is_file():
                places.append(Checkpoint.load(Run.open(tmp_path / "size")).place)
            super().stepped()

    with pytest.raises(KeyboardInterrupt):
        run_case("size", tmp_path, first, listener=Look(step=7))
    # Nothing is written after an epoch's last step: the end of the epoch does so, if a checkpoint is due.
    assert places == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 4), (1, 1)]
    record = Run.open(tmp_path / "size").record()
    assert (record["epochs_done"], record["finished"]) == (1, False)
