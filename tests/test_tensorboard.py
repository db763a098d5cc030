"""Events for TensorBoard, read back by its own reader: every number of every epoch once, and the exemplars."""

import io
import json
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image

from own_images import SHORT, fit_now, request_of, tree, write_folder
from secu.apps.tensorboard import TensorBoard, with_tensorboard
from secu.base import processes
from secu.settings import merge
from secu.train.listener import Listener, Listeners
from secu.train.place import EVENTS
from secu.train.run import Run
from small_runs import Interrupting

pytestmark = pytest.mark.usefixtures("own_cache", "quick_map")

EPOCHS = merge(SHORT, {"optim": {"epochs": 4, "initial_epochs": 0}})
needs_tensorboard = pytest.mark.skipif(find_spec("tensorboard") is None, reason="not installed: tensorboard")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("pictures") / "p", 60)


def fit(pictures, out, *listeners, overrides=EPOCHS, **more):
    listener = Listeners(*listeners, TensorBoard(out))
    return fit_now(request_of(pictures, overrides=overrides), out, listener=listener, **more).run


def events(run_path):
    """Return what TensorBoard reads: steps and values of each scalar, and the encoded pictures."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run_path / EVENTS))
    reader.Reload()
    tags = reader.Tags()
    scalars = {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in tags["scalars"]}
    images = {tag: [(event.step, event.encoded_image_string) for event in reader.Images(tag)] for tag in tags["images"]}
    times = [event.wall_time for event in reader.Scalars("loss")]
    assert times == sorted(times)
    return scalars, images


def assert_complete(path):
    """Compare the events of a finished run with its metrics and its exemplars."""
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    scalars, images = events(path)
    assert scalars.keys() == {name for record in records for name in record} - {"epoch"}
    for name, found in scalars.items():
        expected = [(record["epoch"], record[name]) for record in records if name in record]
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert np.allclose([value for _, value in found], [value for _, value in expected], rtol=1e-6)
    ((step, picture),) = images["exemplars"]
    assert step == records[-1]["epoch"]
    shown = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))
    assert np.array_equal(shown, np.asarray(Image.open(path / "exemplars.png").convert("RGB")))


@needs_tensorboard
def test_every_number_of_every_epoch_and_the_exemplars(pictures, tmp_path):
    run = fit(pictures, tmp_path / "run")
    assert len(run.metrics()) == 4
    assert_complete(run.path)


@needs_tensorboard
@pytest.mark.parametrize("interruption", [{"epoch": 2}, {"step": 3}], ids=["after an epoch", "in an epoch"])
def test_a_resumed_run_has_every_epoch_once(pictures, tmp_path, interruption):
    """An interrupted run may have recorded an epoch that its checkpoint does not include."""
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fit(pictures, out, Interrupting(**interruption))
    fit(pictures, out, resume=True)
    assert_complete(out)


@needs_tensorboard
def test_an_epoch_that_was_not_kept_is_forgotten(pictures, tmp_path):
    """The process is killed after an epoch's events were written, and before its checkpoint was."""
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fit(pictures, out, Interrupting(epoch=1))
    run = Run.open(out)
    listener = TensorBoard(out)
    listener.started(engine="eager", device="cpu", epochs=4, epochs_done=len(run.metrics()), steps=1)
    ghost = {**run.metrics()[-1], "epoch": len(run.metrics()), "loss": 77.0}
    listener.epoch_ended(ghost, {"loss": 77.0})
    assert 77.0 in [value for _, value in events(out)[0]["loss"]]
    del listener
    fit(pictures, out, resume=True)
    assert_complete(out)


@needs_tensorboard
def test_events_asked_for_late_include_all_epochs(pictures, tmp_path):
    out = tmp_path / "run"
    request = request_of(pictures, overrides=EPOCHS)
    with pytest.raises(KeyboardInterrupt):
        fit_now(request, out, listener=Interrupting(epoch=2))
    assert not (out / EVENTS).exists()
    fit(pictures, out, resume=True)
    assert_complete(out)


@needs_tensorboard
def test_a_run_stopped_by_the_clock_has_its_epochs(pictures, tmp_path):
    out = tmp_path / "run"
    finished = fit_now(request_of(pictures, overrides=EPOCHS), out, listener=TensorBoard(out), time_limit=0.001)
    assert finished.results is None
    scalars, images = events(out)
    assert [step for step, _ in scalars["loss"]] == list(range(finished.epochs_done))
    assert images == {}


class Looking(Listener):
    """Notes what is in the folder after an epoch."""

    def __init__(self, path):
        self.path = path
        self.seen = None

    def epoch_ended(self, record, losses):
        if record["epoch"] == 2:
            self.seen = sorted(path.name for path in self.path.rglob("events*"))
            self.old = Run(self.path).metrics()


@needs_tensorboard
def test_events_of_the_old_run_stay_until_it_is_replaced(pictures, tmp_path):
    out = tmp_path / "run"
    old = fit(pictures, out)
    names = sorted(path.name for path in out.rglob("events*"))
    looking = Looking(out)
    longer = merge(EPOCHS, {"optim": {"epochs": 6}})
    run = fit(pictures, out, looking, overrides=longer, force=True)
    assert looking.seen == names
    assert len(looking.old) == 4
    assert old.path == run.path
    assert len(run.metrics()) == 6
    assert_complete(out)


@needs_tensorboard
def test_a_new_run_without_events_removes_those_of_the_old_one(pictures, tmp_path):
    out = tmp_path / "run"
    fit(pictures, out)
    fit_now(request_of(pictures, overrides=EPOCHS), out, force=True)
    assert not (out / EVENTS).exists()
    assert (out / "report.html").is_file()


@needs_tensorboard
def test_a_run_that_fails_before_it_can_be_resumed_leaves_nothing(pictures, tmp_path):
    class Failing(Listener):
        def epoch_ended(self, record, losses):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fit(pictures, tmp_path / "run", Failing())
    assert tree(tmp_path) == []


def test_a_missing_package_is_one_line_before_anything_happens(tmp_path, monkeypatch, capsys):
    from secu import cli

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.chdir(tmp_path)
    for command in (["train", "digits"], ["fit", "nowhere", "-k", "3"]):
        monkeypatch.setattr(sys, "argv", ["secu", *command, "--tensorboard"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        expected = "secu: --tensorboard: needs the package tensorboard: pip install 'secu[tensorboard]'\n"
        assert capsys.readouterr().err == expected
    assert tree(tmp_path) == []


@needs_tensorboard
def test_only_the_main_process_writes(tmp_path, monkeypatch):
    other = Listener()
    both = with_tensorboard(True, tmp_path, other)
    assert isinstance(both, Listeners)
    assert [type(listener) for listener in both.listeners] == [Listener, TensorBoard]
    monkeypatch.setattr(processes._Group, "rank", 1)
    second = with_tensorboard(True, tmp_path, other)
    assert isinstance(second, Listeners)
    assert second.listeners == (other,)


def test_several_listeners_receive_every_event():
    received = []

    def record(name):
        return lambda self, *values, **named: received.append((id(self), name, values, named))

    names = [name for name in vars(Listener) if not name.startswith("_")]
    recorder = type("Recorder", (Listener,), {name: record(name) for name in names})
    two = (recorder(), recorder())
    both = Listeners(*two)
    facts = {"engine": "eager", "device": "cpu", "epochs": 3, "epochs_done": 1, "steps": 5}
    arguments = {"note": ("a",), "reading": (1, 2), "epoch_ended": ({"epoch": 0}, {"loss": 1.0})}
    arguments |= {"busy": ("b",), "warned": ("c",)}
    for name in names:
        received.clear()
        values = arguments.get(name, ())
        named = facts if name == "started" else {}
        getattr(both, name)(*values, **named)
        assert received == [(id(one), name, values, named) for one in two]


@needs_tensorboard
def test_every_command_that_trains_has_the_option(tmp_path, monkeypatch, pictures):
    from secu import cli

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["secu", *map(str, arguments), "--tensorboard", "--device", "cpu"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0

    monkeypatch.setenv("SECU_DATA", str(tmp_path / "data"))
    tiny = ("optim.epochs=2", "optim.warmup_epochs=0", "encoder.dim=8")
    call("fit", pictures, "-k", 3, "--from-scratch", "--out", tmp_path / "fit", *tiny)
    short = ("optim.epochs=1", "selflabel.warmup_epochs=0", "selflabel.confidence=0.1", "selflabel.keep_best=false")
    call("selflabel", tmp_path / "fit", "--out", tmp_path / "second", *short)
    call("train", "digits", "--out", tmp_path / "train", "heads=[3,5]", "optim.initial_epochs=0", *tiny)
    for name in ("fit", "second", "train"):
        assert_complete(tmp_path / name)
