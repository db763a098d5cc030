"""From a finished run to the one that taught itself: what it leaves, refuses and goes on with, and the commands."""

import json
import math
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from own_images import fitted, rows_of, tree, write_folder
from secu import cli, selflabel
from secu.checkpoint import load_trained
from secu.data import Images, load
from secu.errors import UserError
from secu.evaluate import choose, consistency, embed
from secu.fit import images_of
from secu.metrics import calibration_error, matched
from secu.run import Run
from secu.second_stage import second_config
from secu.selflabel import State, self_label, worries
from secu.settings import load_config
from secu.teaching import surest
from secu.train import train
from secu.training import Listener

TINY = ["heads=[4,6]", "optim.epochs=1", "optim.warmup_epochs=0", "encoder.dim=16"]
SHORT = {"optim": {"epochs": 3}, "selflabel": {"warmup_epochs": 1, "confidence": 0.6, "keep_best": False}}
FILES = [
    *("assignments.csv", "assignments.parquet", "clusters.csv", "config.yaml", "exemplars.png", "metrics.jsonl"),
    *("model.safetensors", "report.html", "run.json", "selflabel.json", "state.pt"),
]
KINDS = torch.tensor([0, 1, -1, -1, 2, -1, 3])  # the number of each digit among those here
STEPS = 8  # of an epoch of 240 images
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def digits(tmp_path_factory):
    """Let the data set be 240 digits of four kinds, and the cache of own images a new one."""
    everything = load("digits", "all")
    chosen = torch.isin(everything.targets, torch.tensor([0, 1, 4, 6])).nonzero()[:240, 0]
    few = Images(everything.pixels[chosen], everything.targets[chosen])
    with pytest.MonkeyPatch.context() as patch:
        for module in ("fit", "selflabel"):
            patch.setattr(f"secu.{module}.load", lambda *_: few)
        patch.setenv("SECU_DATA", str(tmp_path_factory.mktemp("cache")))
        yield few


@pytest.fixture(scope="module")
def source(tmp_path_factory, digits) -> Run:
    """Make the run to start from: one that knows the digits somewhat, which is told to it as learning it takes long."""
    config = load_config("digits", TINY)
    run = Run.create(tmp_path_factory.mktemp("source") / "run", config)
    model = train(config, digits, run, test=digits, device="cpu")
    assert model.finished
    optimizer, numbers = torch.optim.SGD(model.encoder.parameters(), 0.05, 0.9), torch.Generator().manual_seed(0)
    for _ in range(20):
        for index in torch.randperm(240, generator=numbers).split(40):
            views = model.augmentation(digits.pixels[index], numbers).flatten(0, 1)
            logits = model.encoder(views) @ model.clustering.head().T / 0.2
            optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), KINDS.index_select(0, digits.targets[index]).repeat(2)).backward()
            optimizer.step()
    run.save_model("model.safetensors", {"encoder": model.encoder, "clustering": model.clustering})
    return run


@pytest.fixture(scope="module")
def second(tmp_path_factory, source):
    """Let it teach itself; return the new run, its model and the outcome."""
    return self_label(source, tmp_path_factory.mktemp("second") / "run", SHORT, device="cpu")


@pytest.fixture
def quick(monkeypatch):
    """Leave out tables and report, which other tests look at."""
    monkeypatch.setattr("secu.selflabel.write_results", lambda *_, **__: SimpleNamespace(warnings=()))


class Interrupt(Listener):
    """Presses Ctrl-C after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def stepped(self) -> None:
        self.steps -= 1
        if self.steps == 0:
            raise KeyboardInterrupt


def assert_same(ours: Run, theirs: Run) -> None:
    """Compare two runs bit for bit, but for their names and the clock."""
    for name in ("model.safetensors", "selflabel.json"):
        assert (ours.path / name).read_bytes() == (theirs.path / name).read_bytes(), name
    states = [run.load_state() for run in (ours, theirs)]
    for part in ("tensors", "momentum"):
        assert states[0][part].keys() == states[1][part].keys()
        for key, value in states[0][part].items():
            assert torch.equal(value, states[1][part][key]), key
    records = [[{k: v for k, v in r.items() if "seconds" not in k} for r in run.metrics()] for run in (ours, theirs)]
    assert records[0] == records[1]
    assert ours.config() == theirs.config()


# What comes out


def test_the_second_run_is_an_ordinary_run_with_an_outcome(second, source):
    run, model, outcome = second
    assert tree(run.path) == FILES
    config, first = run.config(), source.config()
    assert (config.heads, config.init_from, config.paper) == ((4,), str(source.path), None)
    assert (config.data, config.augment, config.encoder) == (first.data, first.augment, first.encoder)
    assert (config.optim.epochs, config.optim.initial_epochs, config.optim.name) == (3, 0, "sgd")
    assert model.config == config
    assert config.loss.confidence_temperature not in (None, config.loss.temperature)
    assert json.loads((run.path / "selflabel.json").read_text()) == json.loads(json.dumps(asdict(outcome)))
    record = json.loads((run.path / "run.json").read_text())
    assert (record["finished"], record["epochs_done"]) == (True, 3)


def test_the_encoder_has_learned_and_the_centers_stand_still(second, source):
    before, after = source.load_model(), second[0].load_model()
    centers = "clustering.centers.weight"
    assert torch.equal(after[centers][0], before[centers][0, :4])
    assert not torch.equal(after["encoder.projection.0.weight"], before["encoder.projection.0.weight"])


def test_epochs_tell_of_themselves_without_true_labels(second, source, digits):
    run, model, _ = second
    records, teaching = run.metrics(), model.clustering
    warmup = run.config().selflabel.warmup_epochs
    assert all(record["taught"] == 1 for record in records[:warmup])
    assert all(0 < record["taught"] < 1 for record in records[warmup:])
    for record in records:
        assert 0 <= record["information"] <= 1
        assert 0 < record["agreement"] <= 1
        assert 0 < record["sure"] <= 1
        assert record["center_loss"] == 0
    first = clusters_of(source, digits).cluster
    assert torch.equal(teaching.first_labels, first)
    assert records[-1]["moved"] == pytest.approx(float((teaching.labels[:, 0] != first).float().mean()))
    assert (records[-1]["largest"], records[-1]["smallest"]) == (max(teaching.sizes()), min(teaching.sizes()))


def clusters_of(run: Run, images: Images):
    """Return what a run's model says of images, read from its folder."""
    model = load_trained(run, images.shape, CPU)
    cosines = embed(model.encoder, model.augmentation, images) @ model.clustering.head().T
    return choose(cosines, model.config.loss.prediction_temperature)


def test_the_outcome_agrees_with_the_tables(second, source, digits):
    run, _, outcome = second
    rows, clusters = rows_of(run.path / "assignments.csv"), rows_of(run.path / "clusters.csv")
    now, before = [int(row["cluster"]) for row in rows], clusters_of(source, digits)
    assert outcome.moved == pytest.approx(sum(a != b for a, b in zip(now, before.cluster.tolist(), strict=True)) / 240)
    sizes = [int(row["size"]) for row in clusters]
    assert (outcome.after.largest, outcome.after.smallest) == (max(sizes), min(sizes))
    sizes = [before.cluster.tolist().count(k) for k in range(4)]
    assert (outcome.before.largest, outcome.before.smallest) == (max(sizes), min(sizes))
    confidence = [float(row["confidence"]) for row in rows]
    views_of = load_trained(source, digits.shape, CPU).augmentation
    for state, sure, model_run in (
        (outcome.after, confidence, run),
        (outcome.before, before.confidence.tolist(), source),
    ):
        assert state.confidence == pytest.approx(sum(sure) / 240, abs=1e-5)
        assert state.confident == pytest.approx(sum(value > 0.6 for value in sure) / 240)
        found = clusters_of(model_run, digits)
        right = matched(digits.targets.numpy(), found.cluster.numpy())
        assert state.calibration_error == pytest.approx(calibration_error(found.confidence.numpy(), right), abs=1e-5)
        assert state.acc == pytest.approx(right.mean())
        looked = load_trained(model_run, digits.shape, CPU)
        parts = (looked.clustering.head(), digits, torch.arange(240))
        seen = consistency(looked.encoder, views_of, *parts)
        strong = consistency(looked.encoder, load_trained(run, digits.shape, CPU).augmentation, *parts, views=(1,))
        assert state.agreement == pytest.approx(max(seen.agreement, strong.agreement))
        assert state.information == pytest.approx((seen.information + strong.information) / 2)
        assert seen.information > strong.information > 0
    assert [int(row["label"]) for row in rows] == digits.targets.tolist()


def test_the_surest_half_of_every_cluster_keeps_its_label(second, source, digits):
    """Sure at the temperature of the run before."""
    run, model, _ = second
    assert run.config().loss.temperature == source.config().loss.temperature
    found = clusters_of(source, digits)
    kept = model.clustering.kept
    assert torch.equal(kept, surest(found.cluster, found.confidence, 0.5))
    for cluster in range(4):
        inside = found.cluster == cluster
        assert int(kept[inside].sum()) == math.ceil(int(inside.sum()) / 2)


def test_in_the_end_it_is_as_sure_as_views_agree(second, source, digits):
    run, _, _ = second
    model, views_of = load_trained(run, digits.shape, CPU), load_trained(source, digits.shape, CPU).augmentation
    cosines = embed(model.encoder, model.augmentation, digits) @ model.clustering.head().T
    agreement = consistency(model.encoder, views_of, model.clustering.head(), digits, torch.arange(240)).agreement
    temperature = run.config().loss.confidence_temperature
    assert 0.003 < temperature < 1
    assert float(choose(cosines, temperature).confidence.mean()) == pytest.approx(agreement, abs=5e-3)


def test_a_second_run_can_be_taught_again(tmp_path, second, quick):
    third, model, outcome = self_label(second[0], tmp_path / "third", {"optim": {"epochs": 1}}, device="cpu")
    assert outcome.before == replace(second[2].after, confident=outcome.before.confident)
    assert third.config().loss.temperature == second[0].config().loss.temperature
    assert model.finished


def test_a_run_whose_views_are_smaller_than_its_images_can_be_taught(tmp_path, digits, quick):
    config = load_config("digits", [*TINY, "augment.size=6", "augment.plain=whole"])
    run = Run.create(tmp_path / "run", config)
    train(config, digits, run, test=digits, device="cpu")
    _, model, outcome = self_label(run, tmp_path / "second", SHORT, device="cpu")
    assert model.augmentation.view_size == (8, 8)
    assert outcome is not None
    assert 0 <= outcome.before.information <= 1


def test_images_whose_classes_are_unknown_have_no_calibration_error(tmp_path, source, digits, quick, monkeypatch):
    for module in ("fit", "selflabel"):
        monkeypatch.setattr(f"secu.{module}.load", lambda *_: Images(digits.pixels))
    run, _, outcome = self_label(source, tmp_path / "run", {"optim": {"epochs": 1}}, device="cpu")
    assert (outcome.before.calibration_error, outcome.after.calibration_error) == (None, None)
    assert (outcome.before.acc, outcome.after.acc) == (None, None)
    assert "acc" not in run.metrics()[-1]


# Interrupted, resumed, replaced


@pytest.mark.parametrize("keep_best", [False, True])
@pytest.mark.parametrize("steps", [STEPS // 2, 2 * STEPS + 1])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path, source, quick, monkeypatch, steps, keep_best):
    """Before there is any checkpoint, and after two of them."""
    monkeypatch.setattr("secu.train.CHECKPOINT_SECONDS", -1)
    settings = SHORT | {"selflabel": SHORT["selflabel"] | {"keep_best": keep_best}}
    whole, _, _ = self_label(source, tmp_path / "whole", settings, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        self_label(source, tmp_path / "parts", settings, device="cpu", listener=Interrupt(steps))
    begun = Run.open(tmp_path / "parts")
    assert begun.has_checkpoint() == (steps > STEPS)
    assert not (begun.path / "selflabel.json").exists()
    parts, model, outcome = self_label(source, tmp_path / "parts", settings, device="cpu", resume=True)
    assert model.finished
    assert outcome is not None
    assert_same(parts, whole)


def test_an_interruption_while_the_end_is_scored_costs_an_epoch(tmp_path, source, quick, monkeypatch):
    """The last epoch is far from the best: what is on disk in the end must be the best one, and no half of each."""
    best = iter([1.0, 0.5, 0.4, 0.4, 0.3])

    def look(lesson, model):
        return {"information": next(best), "agreement": 0.5}

    def pressed(training, test):
        raise KeyboardInterrupt

    monkeypatch.setattr(selflabel.Lesson, "after_epoch", look)
    settings = SHORT | {"selflabel": SHORT["selflabel"] | {"keep_best": True}}
    with monkeypatch.context() as patch:
        patch.setattr("secu.training.Training.finish", pressed)
        with pytest.raises(KeyboardInterrupt):
            self_label(source, tmp_path / "run", settings, device="cpu")
    assert Run.open(tmp_path / "run").load_state()["epochs_done"] == 2
    run, model, _ = self_label(source, tmp_path / "run", settings, device="cpu", resume=True)
    kept, written = run.load_model("best.safetensors"), run.load_model()
    assert run.metadata("best.safetensors")["epoch"] == "0"
    for name, tensor in model.encoder.state_dict().items():
        assert torch.equal(tensor, kept[f"encoder.{name}"])
        assert torch.equal(tensor, written[f"encoder.{name}"])


def test_a_run_stopped_by_the_time_limit_has_no_outcome_and_goes_on(tmp_path, source, second, quick):
    run, model, outcome = self_label(source, tmp_path / "run", SHORT, device="cpu", time_limit=0.001)
    assert (model.epochs_done, model.finished, outcome) == (1, False, None)
    assert not (run.path / "selflabel.json").exists()
    run, _, outcome = self_label(source, run.path, device="cpu", resume=True)
    assert outcome == replace(second[2], warnings=())
    assert_same(run, second[0])


def test_a_finished_run_that_is_resumed_stays_as_it_is(tmp_path, source, second, quick):
    shutil.copytree(second[0].path, tmp_path / "run")
    run, _, outcome = self_label(source, tmp_path / "run", SHORT, device="cpu", resume=True)
    assert outcome == replace(second[2], warnings=())
    assert_same(run, second[0])


class Snapshots(Listener):
    """Keeps a copy of the encoder's first weights after each epoch."""

    def started(self, *, engine, device, model, steps) -> None:
        self.model, self.weights = model, []

    def epoch_ended(self, record) -> None:
        self.weights.append(self.model.encoder.state_dict()["projection.0.weight"].clone())


@pytest.mark.parametrize("keep_best", [False, True])
def test_keep_best_ends_with_the_last_epoch_near_the_best_score(tmp_path, source, quick, monkeypatch, keep_best):
    told = [0.3, 0.8, 0.76, 0.74]
    scores = iter(told)
    seen_by = selflabel.Lesson.look

    def look(lesson, model, strong, most):
        real = seen_by(lesson, model, strong, most)
        return real._replace(information=next(scores)) if most == selflabel.GLANCED_AT else real

    monkeypatch.setattr(selflabel.Lesson, "look", look)
    teaching = {"warmup_epochs": 4, "keep_best": keep_best}
    settings = {"optim": {"epochs": 4}, "selflabel": teaching, "evaluate_every": 1}
    seen = Snapshots()
    run, model, outcome = self_label(source, tmp_path / "run", settings, device="cpu", listener=seen)
    assert [record["information"] for record in run.metrics()] == told
    written = run.load_model()["encoder.projection.0.weight"]
    equal = [torch.equal(written, weights) for weights in seen.weights]
    assert equal == ([False, False, True, False] if keep_best else [False, False, False, True])
    noted = json.loads((run.path / "run.json").read_text())
    assert noted.get("kept", {}).get("epoch") == (2 if keep_best else None)
    if keep_best:  # the last record is of the last epoch; what is kept has its own scores
        assert noted["kept"]["acc"] == pytest.approx(run.metrics()[2]["acc"])
        assert len({record["acc"] for record in run.metrics()}) > 1
        assert noted["last_epoch"]["epoch"] == 3
    assert torch.equal(model.encoder.state_dict()["projection.0.weight"], written)
    assert (run.path / "best.safetensors").exists() == keep_best
    self_label(source, run.path, settings, device="cpu", resume=True)
    assert json.loads((run.path / "run.json").read_text()).get("kept") == noted.get("kept")
    images = images_of(source)
    assert outcome.after.largest == int(clusters_of(run, images).cluster.bincount().max())


def test_an_existing_folder_is_only_replaced_by_force(tmp_path, source, quick):
    once = {"optim": {"epochs": 1}}
    run, _, _ = self_label(source, tmp_path / "run", once, device="cpu")
    before = (run.path / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="exists; choose another folder, --resume it or replace it with --force"):
        self_label(source, run.path, once, device="cpu")
    with pytest.raises(UserError, match="engine: graph needs a CUDA device"):  # which must not cost the old run
        self_label(source, run.path, {"engine": "graph"}, device="cpu", force=True)
    assert (run.path / "model.safetensors").read_bytes() == before
    self_label(source, run.path, once | {"seed": 1}, device="cpu", force=True)
    assert (run.path / "model.safetensors").read_bytes() != before
    assert len(run.metrics()) == 1


def test_the_run_to_start_from_is_never_the_one_to_write(source, monkeypatch):
    before = {path.name: path.read_bytes() for path in source.path.iterdir()}
    monkeypatch.chdir(source.path.parent)
    for out in (source.path, Path("run"), source.path / ".." / "run"):
        for how in ({}, {"force": True}, {"resume": True}):
            with pytest.raises(UserError, match="is the run to start from; name another folder"):
                self_label(source, out, device="cpu", **how)
    assert {path.name: path.read_bytes() for path in source.path.iterdir()} == before


@pytest.mark.parametrize("stopped", ["before the first checkpoint", "after it", "by the time limit"])
def test_an_unfinished_run_is_refused(tmp_path, digits, monkeypatch, stopped):
    config = load_config("digits", [*TINY, "heads=[4]"])
    run = Run.create(tmp_path / "first", config)
    if stopped == "by the time limit":
        train(config, digits, run, device="cpu", time_limit=0.001)
    else:
        monkeypatch.setattr("secu.train.CHECKPOINT_SECONDS", 1e9 if stopped == "before the first checkpoint" else -1)
        with pytest.raises(KeyboardInterrupt):
            train(config, digits, run, device="cpu", listener=Interrupt(STEPS + 1))
    with pytest.raises(UserError, match=f"run: {run.path} is not finished; go on with it first"):
        self_label(run, tmp_path / "second", SHORT, device="cpu")
    assert not (tmp_path / "second").exists()


def test_only_a_second_run_of_the_same_first_with_the_same_settings_is_resumed(tmp_path, source, second):
    other = shutil.copytree(source.path, tmp_path / "other")
    before = {path.name: path.read_bytes() for path in second[0].path.iterdir()}
    with pytest.raises(UserError, match=r"was started from .*/source\d+/run, got .*/other"):
        self_label(Run.open(other), second[0].path, SHORT, device="cpu", resume=True)
    with pytest.raises(UserError, match=r"was started with optim\.epochs=3, got optim\.epochs=5"):
        self_label(source, second[0].path, {"optim": {"epochs": 5}}, device="cpu", resume=True)
    with pytest.raises(UserError, match="is no run of self-labeling"):
        self_label(source, other, SHORT, device="cpu", resume=True)
    assert {path.name: path.read_bytes() for path in second[0].path.iterdir()} == before


def test_a_first_run_that_was_replaced_meanwhile_is_noticed(tmp_path, source):
    first = Run.open(Path(shutil.copytree(source.path, tmp_path / "first")))
    settings = SHORT | {"optim": {"epochs": 30}}
    _, model, outcome = self_label(first, tmp_path / "second", settings, device="cpu", time_limit=0.001)
    assert (model.epochs_done, outcome) == (1, None)
    tensors = first.load_model()
    tensors["clustering.centers.weight"] = tensors["clustering.centers.weight"].flip(1).contiguous()
    save_file(tensors, first.path / "model.safetensors")
    with pytest.raises(UserError, match=r"resume: the run that .*second was started from changed: \d+% of the labels"):
        self_label(first, tmp_path / "second", settings, device="cpu", resume=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": [6]}, r"heads: self-labeling teaches .*, so it must be \[4\], got \[6\]"),
        ({"heads": [4, 6]}, "needs a single head"),
        ({"selflabel": None}, "selflabel: None turns off what this command is for"),
        ({"data": {"image_size": 32}}, r"data\.image_size: self-labeling teaches .*, so it must be .*, got 32"),
        ({"data": {"source": "nope"}}, r"data\.source: self-labeling teaches .*, got nope"),
        ({"init_from": "other"}, "init_from: self-labeling starts from .*, got other"),
        ({"loss": {"confidence_temperature": 0.5}}, r"loss\.confidence_temperature: 0.5 would be replaced"),
        ({"selflabel": {"confidence": 1}}, r"selflabel\.confidence: 1: input should be less than 1"),
        ({"selflabel": {"smalest": 1}}, r"selflabel\.smalest: unknown setting.*smallest"),
        ({"optim": 3}, "optim: 3: "),
        ({"optim": {"batch_size": -5}}, r"optim\.batch_size: -5: "),
        ({"encoder": {"dim": 8}}, r"encoder\.dim: self-labeling teaches .*, got 8"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(tmp_path, source, settings, message):
    with pytest.raises(UserError, match=message) as error:
        self_label(source, tmp_path / "run", settings, device="cpu")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


# Settings of the second stage


def planned(source, images, overrides):
    return second_config(source.config(), source.path, images, overrides)


@pytest.mark.parametrize(
    ("images", "batch"),
    [(1_281_167, 1024), (50_000, 1024), (20_000, 512), (5_000, 128), (1_797, 32), (40, 32), (32, 32), (20, 20)],
)
def test_batch_and_learning_rate_follow_the_number_of_images(source, images, batch):
    optim = planned(source, images, {}).optim
    assert (optim.batch_size, optim.epochs, optim.momentum) == (batch, 11 if images > 1_000_000 else 100, 0.9)
    assert optim.lr == pytest.approx(0.1 * batch / 1024)
    assert optim.warmup_epochs == (2 if images > 1_000_000 else 10)
    assert optim.batch_size <= images
    taught = planned(source, images, {}).selflabel
    careful = (0.998, "chances", 0.5)
    assert (taught.decay, taught.unsure, taught.kept) == (careful if batch < 1024 else (0, "nothing", 0))
    if 32 < images / 49 < 1024:
        assert 49 / math.sqrt(2) <= images / batch <= 49 * math.sqrt(2)


def test_a_run_is_resumed_from_any_folder(tmp_path, source, quick, monkeypatch):
    monkeypatch.chdir(source.path.parent)
    stopped = {"resume": False, "time_limit": 0.0, "device": "cpu"}
    run, _, outcome = self_label(Run.open(Path(source.path.name)), tmp_path / "run", SHORT, **stopped)
    assert outcome is None
    monkeypatch.chdir(tmp_path)
    assert self_label(source, run.path, SHORT, device="cpu", resume=True)[2] is not None


@pytest.mark.parametrize(
    ("asked", "fixed"),
    [
        ({}, 10),
        ({"optim": {"epochs": 60}}, 10),
        ({"optim": {"epochs": 20}}, 4),
        ({"optim": {"epochs": 3}}, 0),
        ({"optim": {"epochs": 3}, "selflabel": {"warmup_epochs": 2}}, 2),
    ],
)
def test_a_shorter_training_has_fewer_epochs_of_fixed_labels(source, asked, fixed):
    config = planned(source, 5_000, asked)
    assert config.selflabel.warmup_epochs == fixed
    assert config.optim.warmup_epochs == min(fixed, config.optim.epochs // 5)


def test_what_is_asked_for_wins(source):
    assert source.config().augment.affine is not None
    without = {"augment": {"affine": None}}
    assert planned(source, 5_000, without).augment.affine is None
    assert planned(source, 5_000, {"optim": {"batch_size": 256}}).optim.lr == pytest.approx(0.025)
    asked = {"optim": {"batch_size": 64, "lr": 0.7, "epochs": 11}, "selflabel": {"smallest": 0.2}}
    config = planned(source, 5_000, asked)
    assert (config.optim.batch_size, config.optim.lr, config.optim.epochs) == (64, 0.7, 11)
    assert config.selflabel.smallest == 0.2
    assert planned(source, 5_000, {"loss": {"temperature": 0.3}}).loss.temperature == 0.3
    assert planned(source, 5_000, {"seed": 7}).seed == 7


def test_warnings_name_what_got_worse():
    good = State(0.8, 0.9, 0.9, 0.7, (110, 60, 90), 110, 60, None)
    assert worries(good, replace(good, information=0.71, sizes=(60, 30, 45))) == []
    (line,) = worries(good, replace(good, information=0.6))
    assert "label-free score 0.800 before, 0.600 now" in line
    (line,) = worries(good, replace(good, sizes=(54, 60, 90)))  # not the smallest, but less than half of what it was
    assert "cluster 0 fell from 110 to 54 images" in line
    assert len(worries(good, replace(good, information=0.1, sizes=(0, 60, 0)))) == 3


# Own images, and the commands


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("pictures") / "digits", 90)


@pytest.fixture(scope="module")
def own(tmp_path_factory, pictures) -> Run:
    return fitted(tmp_path_factory.mktemp("own"), pictures, labels="folder")


@pytest.fixture
def secu(tmp_path, monkeypatch, capsys):
    """Call the program in this process; it must succeed without a word of complaint. Return what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments) -> str:
        monkeypatch.setattr(sys, "argv", ["secu", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        assert (ended.value.code, captured.err) == (0, "")
        return captured.out

    return call


def test_the_commands_take_a_second_run_of_own_images(tmp_path, own, pictures, secu):
    """Selflabel with its default folder, then everything that one does with a run."""
    run = Path(shutil.copytree(own.path, tmp_path / "mine"))
    printed = secu("selflabel", run, "optim.epochs=2", "selflabel.warmup_epochs=1", "--device", "cpu")
    second = Run.open(tmp_path / "mine-selflabel")
    outcome = json.loads((second.path / "selflabel.json").read_text())
    assert f"{outcome['moved']:.1%} of the images have another label" in printed
    for name in ("information", "agreement", "calibration_error"):
        line = next(line for line in printed.splitlines() if name.replace("_", " ") in line)
        assert f"{outcome['before'][name]:.4f}" in line
        assert f"{outcome['after'][name]:.4f}" in line
    assert tree(second.path) == sorted([*FILES, "best.safetensors", "images.json", "skipped.csv"])
    assert "acc" in second.metrics()[-1]  # the pictures lie in folders with the names of their classes

    rows = rows_of(second.path / "assignments.csv")
    sizes = [int(row["size"]) for row in rows_of(second.path / "clusters.csv")]
    scores = secu("evaluate", second.path, "--device", "cpu")
    for value in (second.metrics()[-1]["acc"], second.metrics()[-1]["nmi"]):
        assert f"{value:.4f}" in scores
    (second.path / "report.html").unlink()
    assert secu("report", second.path, "--device", "cpu").strip() == str(second.path / "report.html")
    assert (second.path / "report.html").exists()
    assert secu("sort", second.path, tmp_path / "sorted") == f"{len(rows)} images in {tmp_path / 'sorted'}\n"
    assert [len(list((tmp_path / "sorted" / f"cluster-{k}").iterdir())) for k in range(3)] == sizes
    secu("predict", second.path, pictures, "--output", tmp_path / "new.csv", "--device", "cpu")
    for row, new in zip(rows, rows_of(tmp_path / "new.csv"), strict=True):
        assert (row["id"], row["cluster"]) == (new["id"], new["cluster"])
        assert float(row["confidence"]) == pytest.approx(float(new["confidence"]), abs=1e-5)


def test_the_exported_model_is_as_sure_as_the_table(tmp_path, own, pictures, secu):
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    run, _, _ = self_label(own, tmp_path / "second", {"optim": {"epochs": 1}}, device="cpu")
    secu("export", run.path, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    cluster, confidence = session.run(None, {"images": images_of(run).pixels.numpy()})
    rows = rows_of(run.path / "assignments.csv")
    assert cluster.tolist() == [int(row["cluster"]) for row in rows]
    assert confidence.tolist() == pytest.approx([float(row["confidence"]) for row in rows], abs=1e-5)


def test_a_second_run_notes_which_pictures_it_learned_from(tmp_path, pictures, monkeypatch, quick):
    """Those of the first run that are still there: not one that came later, nor one that is gone or changed."""
    mine = shutil.copytree(pictures, tmp_path / "mine")
    first = fitted(tmp_path, mine)
    names = list(first.images())
    shutil.copy(mine / names[0], mine / "new.png")
    (mine / names[3]).unlink()
    shutil.copy(mine / names[1], mine / names[2])
    told = []
    once = {"optim": {"epochs": 2}}
    run, model, _ = self_label(first, tmp_path / "second", once, device="cpu", tell=told.append, time_limit=0.001)
    left = [name for i, name in enumerate(names) if i not in (2, 3)]
    assert run.images() == {name: first.images()[name] for name in left}
    assert list(images_of(run).ids) == left
    assert len(model.clustering.labels) == len(left)
    assert len(told) == 1
    assert told[0].startswith("2 of 90 images of the run are left out: 1 gone")
    (mine / names[5]).unlink()
    with pytest.raises(UserError, match=r"the images changed since .*second began: 1 gone \(first "):
        self_label(first, run.path, once, device="cpu", resume=True)
