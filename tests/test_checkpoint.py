"""Checkpoints: nothing of a run is lost, what is taken stays as it was, and no foreign file is trusted."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from secu.base.errors import UserError
from secu.data import Images
from secu.methods import Method, build_method
from secu.train.checkpoint import Checkpoint, load_method, load_predictor, load_tensors, method_of, select
from secu.train.engine import Engine
from secu.train.run import Run
from secu.train.step import Step
from small_runs import CPU, config_of, digits, new_run

IMAGES = 60


def make(*overrides: str, images: int = IMAGES) -> tuple[Method, Step]:
    """Return an untrained method and its step."""
    few = digits(images)
    method = build_method(config_of(*overrides), images, few.shape, CPU)
    return method, Step(method, few, CPU)


def state_of(method: Method, step: Step) -> dict[str, Tensor]:
    """Return a copy of everything that training changes."""
    momentum = {f"momentum.{name}": value for name, value in step.momentum().items()}
    return {name: value.clone() for name, value in (method.state_dict() | momentum).items()}


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name, value in first.items() if not torch.equal(value, second[name])]


@pytest.fixture
def trained() -> tuple[Method, Step]:
    """Train for two epochs, so that momentum, labels and duals are there."""
    method, step = make()
    for number in range(2):
        Engine([step], "eager").epoch(number)
    return method, step


@pytest.fixture
def run(tmp_path) -> Run:
    return new_run(tmp_path / "run", config_of("data.channels=1", "data.image_size=8"))


@pytest.fixture
def saved(run, trained) -> Run:
    """Save the trained method, and return its run."""
    method, step = trained
    Checkpoint.take(method, step, 2, 1.5).save(run, method.trained_tensors)
    return run


VARIANTS = {
    "size": (),
    "entropy": ("constraint.kind=entropy",),
    "bounds": ("constraint.upper=1.2", "constraint.dual_schedule=falling"),
    "closed-form": ("centers.kind=closed_form",),
    "kmeans": ("centers.kind=kmeans",),
    "lars": ("optim.name=lars",),
}

# Taken, saved, loaded, restored


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_restored_run_continues_bit_for_bit(run, overrides):
    method, step = make(*overrides)
    engine = Engine([step], "eager")
    for number in range(2):
        engine.epoch(number)
    before = state_of(method, step)
    Checkpoint.take(method, step, 2, 1.5).save(run, method.trained_tensors)

    other, other_step = make("seed=1", *overrides)
    assert differing(state_of(other, other_step), before)
    checkpoint = Checkpoint.load(run)
    checkpoint.restore(run, other, other_step)
    assert (checkpoint.epochs_done, checkpoint.seconds) == (2, 1.5)
    assert differing(state_of(other, other_step), before) == []

    other_step.config = step.config  # the same seed from here on
    assert Engine([other_step], "eager").epoch(2) == engine.epoch(2)
    assert differing(state_of(other, other_step), state_of(method, step)) == []
    assert differing(state_of(method, step), before)


def test_state_holds_everything_that_training_changes(trained):
    """Guards the test above: each part is in the checkpoint, and has moved."""
    start = state_of(*make())
    moved = differing(state_of(*trained), start)
    for part in ("encoder.", "clustering.labels", "clustering.centers", "clustering.constraint", "momentum."):
        assert any(name.startswith(part) for name in moved), part


def test_copies_do_not_move_with_training(trained):
    method, step = trained
    checkpoint = Checkpoint.take(method, step, 2, 1.5)
    tensors = {name: value.clone() for name, value in checkpoint.tensors.items()}
    momentum = {name: value.clone() for name, value in checkpoint.momentum.items()}
    Engine([step], "eager").epoch(2)
    assert differing(tensors, method.state_dict())
    assert differing(dict(checkpoint.tensors), tensors) == []
    assert differing(dict(checkpoint.momentum), momentum) == []


def test_interrupted_epoch_can_be_undone(trained):
    """The copy is what an interruption saves: restored, it takes the method back to the end of the last epoch."""
    method, step = trained
    before = state_of(method, step)
    checkpoint = Checkpoint.take(method, step, 2, 1.5)
    step.start_epoch(2)
    step.feed.next()
    step.run(step.sizes[0])
    assert differing(state_of(method, step), before)
    checkpoint.restore(Run(Path("anywhere")), method, step)
    assert differing(state_of(method, step), before) == []


def test_restoring_is_done_in_place(saved, trained):
    """A captured graph refers to the tensors by their addresses."""
    method, step = trained
    before = {name: value.data_ptr() for name, value in (method.state_dict() | step.momentum()).items()}
    Checkpoint.load(saved).restore(saved, method, step)
    after = {name: value.data_ptr() for name, value in (method.state_dict() | step.momentum()).items()}
    assert after == before


# Files


def test_model_is_what_the_method_calls_trained_and_the_state_is_everything(saved, trained):
    method, _ = trained
    model = saved.load_model()
    assert {name.split(".")[0] for name in model} == {"encoder", "clustering"}
    assert [name for name in model if not name.startswith("encoder.")] == ["clustering.centers.weight"]
    state = saved.load_state()
    assert state["tensors"].keys() == method.state_dict().keys() > model.keys()
    assert differing(model, select(method.state_dict(), method.trained_tensors)) == []


def test_weights_in_the_memory_order_of_gpus_can_be_saved(run, trained):
    method, step = trained
    method.to(memory_format=torch.channels_last)
    name, weight = next((name, weight) for name, weight in method.named_parameters() if weight.ndim == 4)
    weight.data = weight.data.expand(-1, 4, -1, -1).clone(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
    Checkpoint.take(method, step, 2, 1.5).save(run, method.trained_tensors)
    assert run.load_model()[name].is_contiguous()
    assert torch.equal(run.load_model()[name], weight)


def test_state_is_written_after_the_model(run, trained, monkeypatch):
    """Resuming relies on the state: written first, an interruption could leave an older model beside it for good."""
    order = []
    real = os.replace

    def replace(path, target):
        order.append(target.name)
        real(path, target)

    monkeypatch.setattr("pathlib.Path.replace", replace)
    method, step = trained
    Checkpoint.take(method, step, 2, 1.5).save(run, method.trained_tensors)
    assert order == ["model.safetensors", "state.safetensors"]


def test_interruption_between_the_two_files_leaves_the_older_state(saved, trained, monkeypatch):
    method, step = trained
    state = (saved.path / "state.safetensors").read_bytes()
    model = (saved.path / "model.safetensors").read_bytes()
    Engine([step], "eager").epoch(2)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "save_state", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Checkpoint.take(method, step, 3, 2.0).save(saved, method.trained_tensors)
    assert (saved.path / "state.safetensors").read_bytes() == state
    assert (saved.path / "model.safetensors").read_bytes() != model  # written again when the epoch is repeated
    assert Checkpoint.load(saved).epochs_done == 2


def test_checkpoint_that_cannot_be_written_leaves_the_previous_one(saved):
    before = {path.name: path.read_bytes() for path in saved.path.iterdir()}
    with pytest.raises((AttributeError, TypeError, KeyError)):
        saved.save_state({"tensors": lambda: None})
    assert {path.name: path.read_bytes() for path in saved.path.iterdir()} == before


def test_checkpoint_of_version_0_1_has_other_names(run):
    """A student network was kept with the momentum, and confident images were called sure."""
    tensors = {"clustering.sure": torch.ones(()), "encoder.weight": torch.ones(2)}
    momentum = {"0": torch.zeros(2), "student.weight": torch.ones(2)}
    run.save_state({"tensors": tensors, "momentum": momentum, "epochs_done": 1, "seconds": 0.5})
    checkpoint = Checkpoint.load(run)
    assert set(checkpoint.tensors) == {"clustering.confident", "encoder.weight", "student.weight"}
    assert set(checkpoint.momentum) == {"0"}


# What does not fit


def message_of(error: pytest.ExceptionInfo, run: Run) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert str(run.path) in text
    return text


OTHER_MODELS = {
    "images": {"images": 50},
    "heads": {"overrides": ("heads=[3,6]",)},
    "one-head": {"overrides": ("heads=[3]",)},
    "dim": {"overrides": ("encoder.dim=8",)},
    "backbone": {"overrides": ("encoder.backbone=resnet18",)},
    "constraint": {"overrides": ("constraint.kind=entropy",)},
    "layers": {"overrides": ("encoder.projection_layers=3",)},
}


@pytest.mark.parametrize("other", OTHER_MODELS.values(), ids=OTHER_MODELS.keys())
def test_checkpoint_of_another_model_is_refused(saved, other):
    method, step = make(*other.get("overrides", ()), images=other.get("images", IMAGES))
    before = state_of(method, step)
    with pytest.raises(UserError, match="does not match its data and config") as error:
        Checkpoint.load(saved).restore(saved, method, step)
    message_of(error, saved)
    assert differing(state_of(method, step), before) == []


def without_last(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensors[name] for name in list(tensors)[:-1]}


def with_one_more(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"more": torch.zeros(1)}


def with_other_shape(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One number, which torch would broadcast."""
    return tensors | {next(iter(tensors)): torch.zeros(1)}


@pytest.mark.parametrize("change", [without_last, with_one_more, with_other_shape])
@pytest.mark.parametrize("part", ["tensors", "momentum"])
def test_checkpoint_with_other_names_or_shapes_is_refused(saved, part, change):
    state = saved.load_state()
    saved.save_state(state | {part: change(state[part])})
    method, step = make()
    with pytest.raises(UserError, match="does not match its data and config") as error:
        Checkpoint.load(saved).restore(saved, method, step)
    message_of(error, saved)


@pytest.mark.parametrize("change", [without_last, with_one_more, with_other_shape])
def test_model_with_other_names_or_shapes_is_refused(saved, change):
    save_file(change(saved.load_model()), saved.path / "model.safetensors")
    with pytest.raises(UserError, match="does not match its data and config") as error:
        load_method(saved, CPU)
    message_of(error, saved)


def test_foreign_model_is_refused(saved):
    save_file({"bert.weight": torch.zeros(2)}, saved.path / "model.safetensors")
    with pytest.raises(UserError, match=r"run: .* is not a model written by secu$") as error:
        load_predictor(saved, CPU)
    message_of(error, saved)


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors"])
@pytest.mark.parametrize("content", [b"", b"hello", b"\0" * 100])
def test_file_that_is_neither_is_refused(saved, name, content):
    (saved.path / name).write_bytes(content)
    with pytest.raises(UserError, match=name) as error:
        Checkpoint.load(saved) if name == "state.safetensors" else load_method(saved, CPU)
    message_of(error, saved)


# Loaded models


def test_loaded_model_predicts_the_same(saved, trained):
    method, _ = trained
    images = digits(IMAGES)
    loaded = load_method(saved, CPU)
    assert not loaded.training
    assert torch.equal(loaded.clustering.head(), method.clustering.head())
    assert loaded.clustering.head().shape == (3, 16)
    ours = method.predictor().predict(images)
    theirs = load_predictor(saved, CPU).predict(images)
    for column in vars(ours):
        assert torch.equal(getattr(ours, column), getattr(theirs, column)), column


def test_loaded_model_knows_nothing_of_the_training_images(saved):
    """So that a model trained on a million images is not larger than one trained on few."""
    assert len(load_method(saved, CPU).clustering.labels) == 3


def test_model_without_a_folder_can_be_loaded(saved, trained):
    method, _ = trained
    again = method_of(saved.config(), saved.load_model(), CPU, "my model")
    assert torch.equal(again.clustering.head(), method.clustering.head())
    with pytest.raises(UserError, match="run: my model is not a model written by secu"):
        load_tensors(again, {}, "my model")


def test_answer_may_be_another_head(run):
    method, step = make("head=1")
    run = new_run(run.path / "other", config_of("head=1", "data.channels=1", "data.image_size=8"))
    Checkpoint.take(method, step, 0, 0.0).save(run, method.trained_tensors)
    predictor = load_predictor(run, CPU)
    assert predictor.centers.shape == (5, 16)
    assert torch.equal(predictor.centers, method.clustering.head(1))
    assert int(predictor.predict(Images(digits(IMAGES).tensor)).cluster.max()) < 5
