"""The training loop, on small real runs: repeatable, resumable at any point, on time."""

import json
from pathlib import Path

import pytest
import torch

import secu.train.clock
from secu.base.errors import UserError
from secu.data import Images
from secu.train.checkpoint import Checkpoint
from secu.train.clock import Clock
from secu.train.listener import Listener
from secu.train.loop import train
from secu.train.run import Run
from secu.train.session import Session
from small_runs import (
    EPOCHS,
    STEPS,
    Interrupting,
    assert_same,
    config_of,
    digits,
    model_bytes,
    open_session,
    records,
    trained,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Run:
    """Train the tiny config without interruption."""
    return trained(tmp_path_factory.mktemp("whole") / "run", config_of(), digits(), test=digits()).run


# Repeatable


def test_same_seed_gives_the_same_bits_and_another_does_not(tmp_path, whole):
    torch.manual_seed(12345)
    torch.rand(7)  # the global generator's past must not matter
    assert_same(trained(tmp_path / "second", config_of(), digits(), test=digits()).run, whole)
    other = trained(tmp_path / "other", config_of("seed=1"), digits(), test=digits()).run
    assert model_bytes(other) != model_bytes(whole)
    assert records(other) != records(whole)


def test_seed_determines_the_augmentation_too(tmp_path):
    """From the same weights, on copies of one image, so that their order cannot matter: only the views are left."""
    first = trained(tmp_path / "first", config_of("optim.epochs=0"), digits()).run
    copies = Images(digits().tensor[:1].repeat(200, 1, 1, 1))
    losses = []
    for seed in range(2):
        config = config_of("optim.epochs=0", f"init_from={first.path}", f"seed={seed}")
        losses.append(trained(tmp_path / str(seed), config, copies).run.metrics()[0]["loss"])
    assert losses[0] != losses[1]


def test_training_does_not_touch_the_global_generator(tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    trained(tmp_path / "run", config_of("optim.epochs=1"), digits(48))
    assert torch.equal(torch.rand(2), expected)


def test_every_weight_moves(tmp_path, whole):
    """Guards the tests above: bits that never move are always the same."""
    start = trained(tmp_path / "start", config_of("optim.epochs=0"), digits()).run.load_model()
    end = whole.load_model()
    weights = [key for key in end if "running" not in key and "batches" not in key]
    assert all(not torch.equal(start[key], end[key]) for key in weights)


# Resumable

VARIANTS = {
    "size-sgd": (),
    "size-upper": ("constraint.upper=1.2",),
    "entropy-sgd": ("constraint.kind=entropy",),
    "size-closed-form": ("centers.kind=closed_form",),
    "entropy-closed-form": ("constraint.kind=entropy", "centers.kind=closed_form"),
    "averaged": ("optim.average_from=0.3", "centers.schedule=settling"),
    "averaged-closed-form": ("optim.average_from=0.3", "centers.kind=closed_form"),
    "lars-rising": ("optim.name=lars", "optim.lr=1", "centers.schedule=rising"),
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_run_stopped_by_the_time_limit_and_resumed_equals_an_uninterrupted_one(tmp_path, overrides):
    config = config_of(*overrides)
    uninterrupted = trained(tmp_path / "whole", config, digits(), test=digits()).run
    stops = 0
    centers = None
    finished = False
    while not finished:
        session = trained(tmp_path / "parts", config, digits(), test=digits(), resume=stops > 0, time_limit=1e-9)
        finished = session.finished
        stops += not finished
        state = session.run.load_state()
        assert state["epochs_done"] == stops + finished == len(session.run.metrics())  # one epoch per call
        # The encoder learns against the centers of the start of the epoch.
        if centers is not None:
            assert torch.equal(state["tensors"]["clustering.epoch_centers"], centers)
        centers = torch.nn.functional.normalize(state["tensors"]["clustering.centers.weight"], dim=-1)
    assert stops == EPOCHS - 1
    assert_same(session.run, uninterrupted)


@pytest.mark.parametrize(
    "interruption",
    [{"step": 12}, {"step": 1}, {"epoch": 1}, {"epoch": 3}, {"epoch": 0}],
    ids=["mid-epoch", "first-step", "before-checkpoint", "before-last-checkpoint", "before-first-checkpoint"],
)
@pytest.mark.parametrize("often", [True, False], ids=["checkpoint-every-epoch", "no-checkpoint-yet"])
def test_run_interrupted_anywhere_and_resumed_equals_an_uninterrupted_one(
    tmp_path, whole, monkeypatch, interruption, often
):
    if often:
        monkeypatch.setattr(secu.train.clock, "CHECKPOINT_SECONDS", 0)
    run = Run(tmp_path / "interrupted")
    options = {"test": digits()}
    with pytest.raises(KeyboardInterrupt):
        trained(run.path, config_of(), digits(), listener=Interrupting(**interruption), **options)
    done = interruption.get("epoch", (interruption.get("step", 0) - 1) // STEPS)
    assert (run.load_state()["epochs_done"] if run.has_checkpoint() else 0) == done
    if done:  # run.json describes what was saved
        record = run.record()
        assert (record["epochs_done"], record["finished"], record["last_epoch"]["epoch"]) == (done, False, done - 1)
    assert [path.name for path in run.path.iterdir() if path.name.startswith(".")] == ([] if done else [".next"])
    trained(run.path, config_of(), digits(), resume=True, **options)
    assert_same(run, whole)
    assert run.finished


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    run = trained(tmp_path / "run", config_of("optim.epochs=1"), digits(48)).run
    names = ("model.safetensors", "state.safetensors", "metrics.jsonl", "run.json", "config.yaml")
    before = {name: (run.path / name).read_bytes() for name in names}
    session = trained(run.path, run.config(), digits(48), resume=True)
    assert session.finished
    assert {name: (run.path / name).read_bytes() for name in before} == before


def test_resuming_with_other_images_is_refused(tmp_path):
    run = trained(tmp_path / "run", config_of("optim.epochs=1"), digits(48)).run
    with pytest.raises(UserError, match=r"run: the model in .*run does not match its data and config"):
        trained(run.path, run.config(), digits(40), resume=True)


def test_training_starts_over_by_force_alone(tmp_path):
    class Starting(Listener):
        def started(self, *, epochs_done: int, **_) -> None:
            self.epochs_done = epochs_done

    listener = Starting()
    for how, done in (({}, 0), ({"resume": True}, 1), ({"force": True}, 0)):
        run = trained(tmp_path / "run", config_of(), digits(48), time_limit=1e-9, listener=listener, **how).run
        assert listener.epochs_done == done
    assert [record["epoch"] for record in run.metrics()] == [0]
    with pytest.raises(UserError, match="exists; choose another folder, --resume it or replace it with --force"):
        trained(run.path, config_of(), digits(48))


def test_seconds_add_up_over_a_resumed_run(tmp_path):
    trained(tmp_path / "run", config_of(), digits(48), time_limit=1e-9)
    run = trained(tmp_path / "run", config_of(), digits(48), resume=True).run
    seconds = [record["seconds"] for record in run.metrics()]
    assert seconds == sorted(seconds)
    assert sum(record["epoch_seconds"] for record in run.metrics()) <= seconds[-1] + 0.01
    assert run.record()["seconds"] == seconds[-1]


# Runs side by side


def open_two(folder: Path, *, resume: bool = False, **listeners: Listener) -> list[Session]:
    """Open two runs of different settings on the same images."""
    sessions = []
    for name, overrides in {"first": (), "second": ("seed=1", "constraint.kind=entropy", "heads=[4]")}.items():
        options = {"listener": listeners.get(name), "resume": resume}
        sessions.append(open_session(folder / name, config_of(*overrides), digits(), **options))
    for session in sessions:
        session.begin()
    return sessions


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[Run]:
    """Train each of the two runs by itself."""
    sessions = open_two(tmp_path_factory.mktemp("alone"))
    for session in sessions:
        train([session], Clock(float("inf")))
    return [session.run for session in sessions]


def test_runs_side_by_side_equal_the_runs_alone(tmp_path, alone):
    sessions = open_two(tmp_path)
    train(sessions, Clock(float("inf")))
    for session, run in zip(sessions, alone, strict=True):
        assert_same(session.run, run)


@pytest.mark.parametrize("interruption", [{"step": 12}, {"epoch": 2}], ids=["mid-epoch", "end-of-epoch"])
def test_interrupted_runs_side_by_side_stay_together(tmp_path, alone, interruption):
    sessions = open_two(tmp_path, first=Interrupting(**interruption))
    with pytest.raises(KeyboardInterrupt):
        train(sessions, Clock(float("inf")))
    assert [session.run.load_state()["epochs_done"] for session in sessions] == [2, 2]
    resumed = open_two(tmp_path, resume=True)
    train(resumed, Clock(float("inf")))
    for session, run in zip(resumed, alone, strict=True):
        assert_same(session.run, run)


def test_interruption_between_two_runs_does_not_separate_their_checkpoints(tmp_path, monkeypatch):
    """The first run has remembered its second epoch, and the other has not: the checkpoints of one epoch stay."""
    monkeypatch.setattr(secu.train.clock, "CHECKPOINT_SECONDS", -1)
    sessions = open_two(tmp_path)
    remember = sessions[1].remember

    def interrupted() -> None:
        if sessions[1].epochs_done == 2:
            raise KeyboardInterrupt
        remember()

    monkeypatch.setattr(sessions[1], "remember", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(sessions, Clock(float("inf")))
    assert [session.run.load_state()["epochs_done"] for session in sessions] == [1, 1]


def test_runs_side_by_side_must_have_completed_the_same_epochs(tmp_path):
    first, _ = open_two(tmp_path)
    train([first], Clock(1e-9))
    with pytest.raises(UserError, match="must have completed the same number of epochs; resume them one by one"):
        train(open_two(tmp_path, resume=True), Clock(float("inf")))


# On time


class Watch:
    """A clock that advances by two seconds with every training step; of five steps per epoch here."""

    def __init__(self, monkeypatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(secu.train.clock, "time", self)

    def monotonic(self) -> float:
        return self.seconds

    def train(self, path: Path, *overrides: str, **options) -> Session:
        class Ticking(Listener):
            def stepped(_) -> None:
                self.seconds += 2

        config = config_of("optim.batch_size=10", *overrides)
        return trained(path, config, digits(50), listener=Ticking(), **options)


def test_time_limit_stops_with_a_checkpoint_and_says_so(tmp_path):
    session = trained(tmp_path / "run", config_of("optim.epochs=1000"), digits(48), time_limit=0.2)
    run = session.run
    assert not session.finished
    assert 0 < session.epochs_done < 1000
    assert run.load_state()["epochs_done"] == session.epochs_done == len(run.metrics())
    assert run.load_model()
    assert json.loads((run.path / "run.json").read_text())["finished"] is False
    assert not run.finished


@pytest.mark.parametrize(("limit", "epochs"), [(1, 1), (19, 1), (20, 2), (25, 2), (30, 3), (1000, 4)])
def test_no_epoch_begins_that_would_end_after_the_time_limit(tmp_path, monkeypatch, limit, epochs):
    """An epoch takes 10 seconds of this clock; the first is always trained."""
    session = Watch(monkeypatch).train(tmp_path / "run", time_limit=limit)
    assert session.epochs_done == epochs == session.run.load_state()["epochs_done"]
    assert session.seconds == epochs * 10


@pytest.mark.parametrize(("limit", "epochs"), [(19, 1), (42, 1), (44, 2), (53, 2), (65, 2), (66, 3), (1000, 4)])
def test_scores_and_checkpoints_take_their_share_of_the_time_limit(tmp_path, monkeypatch, limit, epochs):
    """An epoch takes 10 seconds of this clock, its scores 7 and a checkpoint 5; one comes after each epoch."""
    watch = Watch(monkeypatch)

    def taking(seconds, real):
        def slow(*arguments):
            watch.seconds += seconds
            return real(*arguments)

        return slow

    monkeypatch.setattr(secu.train.clock, "CHECKPOINT_SECONDS", -1)
    monkeypatch.setattr(Session, "scores_on", taking(7, Session.scores_on))
    monkeypatch.setattr(Checkpoint, "save", taking(5, Checkpoint.save))
    session = watch.train(tmp_path / "run", "evaluate_every=1", time_limit=limit, test=digits(50))
    assert session.epochs_done == epochs
    assert watch.seconds == 22 * epochs
    assert epochs == 1 or watch.seconds <= limit


def test_checkpoint_is_written_every_minute(tmp_path, monkeypatch):
    watch = Watch(monkeypatch)
    saved = []
    real = Checkpoint.save

    def save(*parts) -> None:
        saved.append(watch.seconds)
        real(*parts)

    monkeypatch.setattr(Checkpoint, "save", save)
    watch.train(tmp_path / "run", "optim.epochs=8")
    assert saved == [70, 90]


# Reports


def test_listener_receives_every_step_and_epoch(tmp_path):
    class Counting(Listener):
        def __init__(self) -> None:
            self.heard = []

        def started(self, **facts) -> None:
            self.heard.append(facts)

        def stepped(self) -> None:
            self.heard.append("step")

        def epoch_ended(self, record, losses) -> None:
            assert {name: record[name] for name in losses} == losses
            self.heard.append((record["epoch"], *losses))

    listener = Counting()
    trained(tmp_path / "run", config_of("optim.epochs=1"), digits(), listener=listener)
    start = {"engine": "eager", "device": "cpu", "epochs": 2, "epochs_done": 0, "steps": STEPS}
    steps = ["step"] * STEPS
    assert listener.heard == [start, *steps, (0, "loss", "center_loss"), *steps, (1, "loss", "center_loss")]
