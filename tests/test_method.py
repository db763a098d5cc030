"""A method from outside the package: the trainer calls its hooks and knows nothing else about it."""

import json
import math
from io import StringIO

import pytest
import torch
from rich.console import Console
from torch import Tensor

import secu.train.clock
from secu.apps import pipeline
from secu.apps.console import ConsoleListener
from secu.base.errors import UserError
from secu.methods import Conclusion, Method, build_method
from secu.methods.secu import StableClustering
from secu.registry import METHODS
from secu.settings import load_config
from secu.train.checkpoint import load_method
from secu.train.clock import Clock
from secu.train.listener import Listener
from secu.train.loop import train
from secu.train.run import Run
from small_runs import CPU, STEPS, Interrupting, assert_same, config_of, digits, open_session, trained


class Outside(StableClustering):
    """SeCu with a third loss, a state of its own and all hooks."""

    trained_tensors = (*StableClustering.trained_tensors, "average")

    def __init__(self, config, images, shape) -> None:
        super().__init__(config, images, shape)
        self.register_buffer("average", torch.zeros(self.encoder.dim))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.seen: list[dict[str, float]] = []
        self.prepared: list[tuple[object, bool]] = []

    def losses(self, batch: Tensor, index_B: Tensor) -> dict[str, Tensor]:
        losses = super().losses(batch, index_B)
        last = list(self.encoder.parameters())[-1]
        found = {**losses, "spread": last.square().sum() + len(index_B)}
        self.seen.append({"images": len(index_B), **{name: value.item() for name, value in found.items()}})
        return found

    def after_step(self) -> None:
        self.steps += 1
        self.average.lerp_(self.clustering.centers.weight.detach()[0, 0], 0.5)

    def record(self) -> dict[str, float]:
        return super().record() | {"steps": int(self.steps), "length": float(self.average.norm())}

    def prepare(self, images, first, *, resumed: bool) -> None:
        self.prepared.append((first, resumed))
        super().prepare(images, first, resumed=resumed)


@pytest.fixture
def register(monkeypatch):
    """Return METHODS.register, whose effect ends with the test."""
    monkeypatch.setattr(METHODS, "_parts", dict(METHODS._parts))
    return METHODS.register


@pytest.fixture
def outside(register):
    """Register the method above."""
    return register("outside")(Outside)


# Losses


def test_every_loss_is_recorded_as_a_mean_over_images(tmp_path, outside):
    heard = []

    class Hearing(Listener):
        def epoch_ended(self, record, losses) -> None:
            heard.append(losses)

    session = trained(tmp_path / "run", config_of("method=outside"), digits(), listener=Hearing())
    names = ["loss", "center_loss", "spread"]
    seen = session.method.seen
    for epoch, record in enumerate(session.run.metrics()):
        assert list(record)[:5] == ["epoch", *names, "lr"]
        steps = seen[epoch * STEPS : (epoch + 1) * STEPS]
        assert sum(step["images"] for step in steps) == 200
        for name in names:
            mean = sum(step["images"] * step[name] for step in steps) / 200
            assert record[name] == pytest.approx(mean, rel=1e-5)
        assert list(heard[epoch].items()) == [(name, record[name]) for name in names]
    assert session.step.loss_names == tuple(names)


def test_sum_of_all_losses_is_minimized(tmp_path, outside):
    """The third loss pulls weights towards zero, which the other two do not."""
    lengths = {}
    for method in ("secu", "outside"):
        session = trained(tmp_path / method, config_of(f"method={method}", "optim.weight_decay=0"), digits(100))
        lengths[method] = list(session.method.encoder.parameters())[-1].norm().item()
    assert lengths["outside"] < 0.9 * lengths["secu"]


def test_every_loss_is_shown(tmp_path, outside):
    text = StringIO()
    with ConsoleListener(Console(file=text, width=200)) as listener:
        trained(tmp_path / "run", config_of("method=outside", "optim.epochs=0"), digits(48), listener=listener)
    (line,) = [line for line in text.getvalue().splitlines() if line.startswith("epoch")]
    record = Run(tmp_path / "run").metrics()[-1]
    for name, label in {"loss": "loss", "center_loss": "center loss", "spread": "spread"}.items():
        assert f"{label} {record[name]:.3f}" in line


def test_single_loss_of_any_name_is_enough(tmp_path, register):
    @register("single")
    class Single(StableClustering):
        def losses(self, batch, index_B):
            return {"everything": sum(super().losses(batch, index_B).values())}

    single = trained(tmp_path / "single", config_of("method=single"), digits()).run
    both = trained(tmp_path / "both", config_of(), digits()).run
    assert single.load_model().keys() == both.load_model().keys()
    for record, other in zip(single.metrics(), both.metrics(), strict=True):
        assert record["everything"] == pytest.approx(other["loss"] + other["center_loss"], rel=1e-4)
        assert not {"loss", "center_loss"} & record.keys()


def test_loss_that_is_not_finite_is_named(tmp_path, register):
    @register("broken")
    class Broken(StableClustering):
        def losses(self, batch, index_B):
            losses = super().losses(batch, index_B)
            return {**losses, "spread": losses["loss"] * math.inf}

    with pytest.raises(UserError, match=r"^spread: inf after epoch 0 of .* is not finite"):
        trained(tmp_path / "run", config_of("method=broken"), digits(48))


# State and steps


def test_own_state_is_saved_and_resumed(tmp_path, outside):
    config = config_of("method=outside")
    whole = trained(tmp_path / "whole", config, digits()).run
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "parts", config, digits(), listener=Interrupting(step=12))
    parts = trained(tmp_path / "parts", config, digits(), resume=True)
    assert_same(parts.run, whole)
    assert [record["steps"] for record in whole.metrics()] == [STEPS, 2 * STEPS, 3 * STEPS, 4 * STEPS]
    assert whole.metrics()[-1]["length"] > 0
    loaded = load_method(whole, CPU)
    assert torch.equal(loaded.average, parts.method.average)
    assert "average" in whole.load_model()  # part of the trained model
    assert "steps" not in whole.load_model()  # and only of the checkpoint
    assert int(loaded.steps) == 0


def test_after_step_follows_the_optimizer(tmp_path, register):
    seen = []

    @register("watching")
    class Watching(StableClustering):
        def losses(self, batch, index_B):
            self.before = self.clustering.centers.weight.detach().clone()
            return super().losses(batch, index_B)

        def after_step(self) -> None:
            seen.append(torch.equal(self.before, self.clustering.centers.weight))

    trained(tmp_path / "run", config_of("method=watching", "optim.epochs=1"), digits())
    assert seen == [False] * 2 * STEPS


def test_start_epoch_receives_the_epoch_and_the_share_of_the_run(tmp_path, register):
    seen = []

    @register("starting")
    class Starting(StableClustering):
        def start_epoch(self, epoch, done) -> None:
            seen.append((epoch, done))
            super().start_epoch(epoch, done)

    trained(tmp_path / "run", config_of("method=starting"), digits(48))
    assert seen == [(0, 0), (1, 0.25), (2, 0.5), (3, 0.75)]


@pytest.mark.parametrize("needed", [False, True])
def test_prepare_receives_the_first_run_unless_a_resumed_one_does_without(tmp_path, outside, monkeypatch, needed):
    monkeypatch.setattr(Outside, "needs_first_run", needed)
    first = trained(tmp_path / "first", config_of("optim.epochs=0"), digits(48)).run
    alone = open_session(tmp_path / "alone", config_of("method=outside"), digits(48))
    assert alone.method.prepared == [(None, False)]
    config = config_of("method=outside", f"init_from={first.path}")
    begun = trained(tmp_path / "run", config, digits(48), time_limit=1e-9)
    assert begun.method.prepared[0][0].config == first.config()
    assert not begun.method.prepared[0][1]
    resumed = open_session(tmp_path / "run", config, digits(48), resume=True)
    assert [(given is not None, again) for given, again in resumed.method.prepared] == [(needed, True)]
    weights = resumed.method.clustering.centers.weight  # those of the checkpoint, not of the first run
    assert torch.equal(weights, begun.method.clustering.centers.weight)


# Best epoch


def scoring(register, scores: list[float]):
    """Register a method whose epochs have these scores."""

    @register("scoring")
    class Scoring(StableClustering):
        def score(self, record):
            return scores[record["epoch"]]

    return config_of("method=scoring", "evaluate_every=1")


class Snapshots(Listener):
    """Keeps the centers at the end of every epoch."""

    def __init__(self) -> None:
        self.session = None
        self.centers: list[Tensor] = []

    def epoch_ended(self, record, losses) -> None:
        self.centers.append(self.session.method.clustering.centers.weight.detach().clone())


@pytest.mark.parametrize(
    ("scores", "kept"),
    [([0.1, 0.8, 0.76, 0.74], 2), ([0.9, 0.1, 0.1, 0.1], 0), ([0.1, 0.2, 0.3, 0.4], 3), ([-5.0, -9, -8, -7], 0)],
    ids=["last-good-one", "first", "last", "negative"],
)
def test_model_of_the_last_epoch_near_the_best_score_is_final(tmp_path, register, scores, kept):
    config = scoring(register, scores)
    listener = Snapshots()
    listener.session = open_session(tmp_path / "run", config, digits(), listener=listener)
    listener.session.begin()
    train([listener.session], Clock(math.inf), digits())
    session = listener.session
    run = session.run
    final = run.load_model()["clustering.centers.weight"]
    assert [torch.equal(final, centers) for centers in listener.centers] == [epoch == kept for epoch in range(4)]
    assert torch.equal(session.method.clustering.centers.weight, final)
    noted = run.record()
    assert noted["kept"]["epoch"] == kept
    assert noted["kept"]["acc"] == run.metrics()[kept]["acc"]
    assert noted["last_epoch"]["epoch"] == 3
    assert run.metadata("best.safetensors")["epoch"] == str(kept)
    for name, tensor in run.load_model("best.safetensors").items():
        assert torch.equal(tensor, run.load_model()[name]), name


@pytest.mark.parametrize("interruption", [{"step": 12}, {"epoch": 2}, {"epoch": 3}])
def test_best_epoch_survives_an_interruption(tmp_path, register, monkeypatch, interruption):
    """Its score, too: an epoch that is only good for want of a better one is not taken for it."""
    monkeypatch.setattr(secu.train.clock, "CHECKPOINT_SECONDS", -1)
    config = scoring(register, [0.1, 0.8, 0.3, 0.7])
    whole = trained(tmp_path / "whole", config, digits(), test=digits()).run
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "parts", config, digits(), test=digits(), listener=Interrupting(**interruption))
    parts = trained(tmp_path / "parts", config, digits(), test=digits(), resume=True).run
    assert_same(parts, whole)
    assert parts.record()["kept"] == whole.record()["kept"]
    assert whole.record()["kept"]["epoch"] == 1


def test_without_scores_the_last_epoch_is_final(tmp_path):
    run = trained(tmp_path / "run", config_of(), digits(48)).run
    assert not (run.path / "best.safetensors").exists()
    assert "kept" not in run.record()


# Conclusion


def test_conclusion_is_written_down(tmp_path, register):
    given = []

    @register("concluding")
    class Concluding(StableClustering):
        def conclude(self, images, scored):
            given.append((images, scored))
            settings = {"loss": {"confidence_temperature": 0.3}}
            return Conclusion({"found": 7}, settings, ("be careful",))

    config = config_of("method=concluding", "optim.epochs=1")
    heard = []

    class Hearing(Listener):
        def warned(self, warning) -> None:
            heard.append(warning)

    finished = pipeline.run(
        config, digits(), tmp_path / "run", command="x", test=digits(), device="cpu", listener=Hearing(), report=False
    )
    run = finished.run
    assert given == [(digits(), None)]  # scored on the training images: None
    assert json.loads((run.path / "outcome.json").read_text()) == {"found": 7, "warnings": ["be careful"]}
    assert run.outcome()["found"] == 7
    assert run.config().loss.confidence_temperature == 0.3
    assert run.config().loss.temperature == config.loss.temperature
    assert finished.warnings[0] == heard[0] == run.warnings()[0] == "be careful"
    # The amended temperature is the one that the tables were made with.
    assert finished.results is not None
    found = load_method(run, CPU).predictor().predict(digits())
    torch.testing.assert_close(found.confidence, finished.results.predictions.confidence)
    session = trained(tmp_path / "again", config, digits(48))
    session.conclude(digits(100))
    assert given[-1] == (digits(48), digits(100))
    assert session.method.predictor().temperature == 0.3


def test_finished_run_whose_settings_were_amended_can_be_resumed(tmp_path, register):
    """With the settings that it was started with, and with no others."""

    @register("concluding")
    class Concluding(StableClustering):
        def conclude(self, images, scored):
            return Conclusion(settings={"loss": {"confidence_temperature": 0.3}})

    config = config_of("method=concluding", "optim.epochs=0")
    options = {"command": "x", "device": "cpu", "report": False}
    run = pipeline.run(config, digits(48), tmp_path / "run", **options).run
    assert run.record()["amended"] == ["loss.confidence_temperature"]
    before = {path.name: path.read_bytes() for path in run.path.iterdir()}
    pipeline.run(config, digits(48), run.path, resume=True, **options)
    assert {path.name: path.read_bytes() for path in run.path.iterdir()} == before
    session = open_session(run.path, config, digits(48), resume=True)
    session.describe()  # an interruption right after that leaves a run that can still be resumed
    assert run.record()["amended"] == ["loss.confidence_temperature"]
    other = config_of("method=concluding", "optim.epochs=0", "loss.temperature=0.1")
    with pytest.raises(UserError, match=r"was started with loss.temperature=0.05, got loss.temperature=0.1"):
        pipeline.run(other, digits(48), run.path, resume=True, **options)


def test_empty_conclusion_leaves_no_file(tmp_path):
    session = trained(tmp_path / "run", config_of("optim.epochs=0"), digits(48))
    before = session.run.config()
    assert session.conclude(None) == Conclusion()
    assert session.run.outcome() == {}
    assert session.run.warnings() == ()
    assert session.run.config() == before
    assert not (session.run.path / "outcome.json").exists()


def test_method_from_outside_makes_a_whole_run(tmp_path, outside):
    finished = pipeline.run(config_of("method=outside"), digits(), tmp_path / "run", command="x", device="cpu")
    names = {path.name for path in finished.run.path.iterdir()}
    assert names >= {"assignments.csv", "clusters.csv", "exemplars.png", "report.html", "model.safetensors"}
    assert finished.run.config().method == "outside"


# The base


def test_untrained_method_has_the_same_weights_for_the_same_seed_alone():
    config = load_config("digits", ["heads=[3]"])
    first, second = (build_method(config, 10, (1, 8, 8), CPU).state_dict() for _ in range(2))
    other = build_method(load_config("digits", ["heads=[3]", "seed=1"]), 10, (1, 8, 8), CPU).state_dict()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    for name in ("clustering.centers.weight", "encoder.projection.0.weight"):
        assert not torch.equal(first[name], other[name])


def test_method_without_losses_is_abstract():
    method = Method(load_config("digits"), 10, (1, 8, 8))
    with pytest.raises(NotImplementedError):
        method.losses(torch.zeros(1), torch.zeros(1))
    assert method.score({}) is None


def test_arithmetic_is_exact_on_the_cpu():
    method = build_method(load_config("digits", ["heads=[3]"]), 10, (1, 8, 8), CPU)
    assert method.config.optim.precision == "bf16"
    with method.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
