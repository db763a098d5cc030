"""From a finished run to one that taught itself: its folder, what is refused, how it is resumed, and the commands."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch

import secu.train.clock
from own_images import fitted, rows_of, tree, write_folder
from second_runs import COUNT, SHORT, STEPS, TINY, few_digits, make_first, predictions_of
from secu import cli
from secu.apps.images import images_of
from secu.apps.pipeline import Finished
from secu.apps.selflabel import second_config, self_label
from secu.base.errors import UserError
from secu.settings import flatten, load_config
from secu.train.listener import Listener
from secu.train.run import Run
from small_runs import Interrupting, assert_same, model_bytes, trained

FILES = [
    "assignments.csv",
    "assignments.parquet",
    "clusters.csv",
    "config.yaml",
    "exemplars.png",
    "metrics.jsonl",
    "model.safetensors",
    "outcome.json",
    "report.html",
    "run.json",
    "skipped.csv",
    "state.safetensors",
]
ONCE = {"optim": {"epochs": 1}}


@pytest.fixture(scope="module", autouse=True)
def few_images(tmp_path_factory):
    """Let the data set be 240 digits of four kinds, and the cache of own images a new one."""
    with pytest.MonkeyPatch.context() as patch:
        real = secu.apps.images.open_inputs

        def load(config, *arguments, **options):
            few = config.data.source == "dataset:digits"
            return few_digits() if few else real(config, *arguments, **options)

        patch.setattr("secu.apps.images.open_inputs", load)
        patch.setenv("SECU_DATA", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Run:
    """Make the run to start from."""
    return make_first(tmp_path_factory.mktemp("first") / "run")


@pytest.fixture(scope="module")
def second(tmp_path_factory, first) -> Run:
    """Self-label it, with everything that a finished run has."""
    return self_label(first, tmp_path_factory.mktemp("second") / "run", SHORT, device="cpu").run


def labeled(first: Run, path: Path, settings: dict | None = None, **options) -> Finished:
    """Self-label a run without pictures and report, which other tests look at."""
    return self_label(first, path, settings, device="cpu", report=False, **options)


def content_of(run: Run) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.path.iterdir()}


def assert_same_outcome(ours: Run, theirs: Run) -> None:
    """Compare two runs bit for bit, except for their names and times."""
    assert_same(ours, theirs)
    assert ours.outcome() == theirs.outcome()
    assert ours.config() == theirs.config()
    assert rows_of(ours.path / "assignments.csv") == rows_of(theirs.path / "assignments.csv")


# The second run


def test_second_run_is_an_ordinary_run_with_an_outcome(second, first):
    assert tree(second.path) == FILES
    config = second.config()
    before = first.config()
    assert (config.method, config.heads, config.init_from) == ("selflabel", (4,), str(first.path))
    assert config.paper is None
    assert (config.data, config.augment, config.encoder) == (before.data, before.augment, before.encoder)
    assert (config.optim.epochs, config.optim.initial_epochs, config.optim.name) == (3, 0, "sgd")
    assert config.loss.confidence_temperature not in (None, config.loss.temperature)
    record = second.record()
    assert (record["finished"], record["epochs_done"], record["command"]) == (True, 3, "selflabel")


def test_tables_are_those_of_the_calibrated_model(second, first):
    rows = rows_of(second.path / "assignments.csv")
    found = predictions_of(second, few_digits())
    assert [int(row["cluster"]) for row in rows] == found.cluster.tolist()
    assert [float(row["confidence"]) for row in rows] == pytest.approx(found.confidence.tolist(), abs=1e-5)
    assert [int(row["label"]) for row in rows] == few_digits().targets.tolist()
    outcome = second.outcome()
    before = predictions_of(first, few_digits()).cluster
    assert outcome["moved"] == pytest.approx(float((found.cluster != before).float().mean()))
    assert outcome["after"]["sizes"] == [int(row["size"]) for row in rows_of(second.path / "clusters.csv")]


def test_self_labeled_run_can_be_self_labeled_again(tmp_path, second):
    third = labeled(second, tmp_path / "third", ONCE).run
    confident = {"confident": third.outcome()["before"]["confident"]}  # by another limit
    assert third.outcome()["before"] == second.outcome()["after"] | confident
    assert third.config().init_from == str(second.path)


def test_images_at_hand_are_not_loaded_again(tmp_path, first, monkeypatch):
    def load(*_, **__):
        raise AssertionError("loaded")

    monkeypatch.setattr("secu.apps.selflabel.images_of", load)
    monkeypatch.setattr("secu.apps.selflabel.images_to_score", lambda config, images, data: images)
    assert labeled(first, tmp_path / "run", ONCE, images=few_digits()).results.images is few_digits()


# Interrupted, resumed, replaced


@pytest.mark.parametrize("steps", [STEPS // 2, 2 * STEPS + 1], ids=["before-any-checkpoint", "after-two"])
def test_interrupted_run_continues_as_if_it_had_not_been(tmp_path, first, second, monkeypatch, steps):
    monkeypatch.setattr(secu.train.clock, "CHECKPOINT_SECONDS", -1)
    with pytest.raises(KeyboardInterrupt):
        labeled(first, tmp_path / "parts", SHORT, listener=Interrupting(step=steps))
    if steps < STEPS:
        assert not (tmp_path / "parts").exists()
    else:
        assert Run.open(tmp_path / "parts").outcome() == {}
    resumed = labeled(first, tmp_path / "parts", SHORT, resume=True)
    assert resumed.results is not None
    assert_same_outcome(resumed.run, second)


def test_run_stopped_by_the_time_limit_has_no_outcome_and_can_be_resumed(tmp_path, first, second):
    stopped = labeled(first, tmp_path / "run", SHORT, time_limit=0.001)
    assert (stopped.epochs_done, stopped.results) == (1, None)
    assert not (stopped.run.path / "outcome.json").exists()
    assert labeled(first, stopped.run.path, resume=True).results is not None  # its settings need not be repeated
    assert_same_outcome(stopped.run, second)


def test_finished_run_that_is_resumed_stays_as_it_is(tmp_path, first, second):
    shutil.copytree(second.path, tmp_path / "run")
    run = labeled(first, tmp_path / "run", SHORT, resume=True).run
    assert_same_outcome(run, second)
    assert run.record() == second.record()


def test_run_can_be_resumed_from_any_folder(tmp_path, first, monkeypatch):
    monkeypatch.chdir(first.path.parent)
    stopped = labeled(Run.open(Path(first.path.name)), tmp_path / "run", SHORT, time_limit=0.0)
    assert stopped.results is None
    monkeypatch.chdir(tmp_path)
    assert labeled(first, stopped.run.path, SHORT, resume=True).results is not None


def test_existing_folder_is_only_replaced_by_force(tmp_path, first):
    run = labeled(first, tmp_path / "run", ONCE).run
    before = model_bytes(run)
    with pytest.raises(UserError, match="exists; choose another folder, --resume it or replace it with --force"):
        labeled(first, run.path, ONCE)
    with pytest.raises(UserError, match="engine: graph needs a CUDA device"):  # which must not cost the old run
        labeled(first, run.path, {"engine": "graph"}, force=True)
    assert model_bytes(run) == before
    labeled(first, run.path, ONCE | {"seed": 1}, force=True)
    assert model_bytes(run) != before
    assert len(run.metrics()) == 1


def test_run_to_start_from_is_never_the_one_to_write(first, monkeypatch):
    before = content_of(first)
    monkeypatch.chdir(first.path.parent)
    for out in (first.path, Path("run"), first.path / ".." / "run"):
        for how in ({}, {"force": True}, {"resume": True}):
            with pytest.raises(UserError, match="is the run to start from; name another folder"):
                labeled(first, out, **how)
    assert content_of(first) == before


@pytest.mark.parametrize("stopped", ["before the first checkpoint", "after it", "by the time limit"])
def test_unfinished_run_is_refused(tmp_path, monkeypatch, stopped):
    config = load_config("digits", [*TINY, "heads=[4]"])
    if stopped == "by the time limit":
        trained(tmp_path / "first", config, few_digits(), time_limit=0.001)
    else:
        seconds = 1e9 if stopped == "before the first checkpoint" else -1
        monkeypatch.setattr(secu.train.clock, "CHECKPOINT_SECONDS", seconds)
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / "first", config, few_digits(), listener=Interrupting(step=STEPS + 1))
    run = Run.open(tmp_path / "first")
    with pytest.raises(UserError, match=rf"run: {run.path} is not finished; resume it first \(--resume\)"):
        labeled(run, tmp_path / "second", SHORT)
    assert not (tmp_path / "second").exists()


def test_only_a_second_run_of_the_same_first_with_the_same_settings_is_resumed(tmp_path, first, second):
    other = Run.open(Path(shutil.copytree(first.path, tmp_path / "other")))
    before = content_of(second)
    with pytest.raises(UserError, match=rf"was started from {first.path}, got {other.path}"):
        labeled(other, second.path, SHORT, resume=True)
    with pytest.raises(UserError, match=r"was started with optim\.epochs=3, got optim\.epochs=5"):
        labeled(first, second.path, {"optim": {"epochs": 5}}, resume=True)
    with pytest.raises(UserError, match="other is not a self-labeling run"):
        labeled(first, other.path, SHORT, resume=True)
    assert content_of(second) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": [6]}, r"heads: self-labeling continues .*, so it must be \[4\], got \[6\]"),
        ({"heads": [4, 6]}, "needs a single head"),
        ({"selflabel": None}, "selflabel: null would turn off self-labeling; leave it out"),
        ({"method": "secu"}, "selflabel: only used with method=selflabel, got method=secu"),
        ({"data": {"image_size": 32}}, r"data\.image_size: self-labeling continues .*, so it must be 8, got 32"),
        ({"data": {"source": "nope"}}, r"data\.source: self-labeling continues .*, got nope"),
        ({"init_from": "other"}, "init_from: self-labeling starts from .*, got other"),
        ({"loss": {"confidence_temperature": 0.5}}, r"loss\.confidence_temperature: 0.5 would be overwritten"),
        ({"selflabel": {"confidence": 1}}, r"selflabel\.confidence: 1: input should be less than 1"),
        ({"selflabel": {"smalest": 1}}, r"selflabel\.smalest: unknown setting.*smallest"),
        ({"optim": 3}, "optim: 3: "),
        ({"optim": {"batch_size": -5}}, r"optim\.batch_size: -5: "),
        ({"encoder": {"dim": 8}}, r"encoder\.dim: self-labeling continues .*, got 8"),
    ],
)
def test_mistake_is_one_line_and_leaves_nothing(tmp_path, first, settings, message):
    with pytest.raises(UserError, match=message) as error:
        labeled(first, tmp_path / "run", settings)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


# Settings of the second stage


def planned(first: Run, images: int, overrides: dict):
    return second_config(first.config(), first.path, images, overrides)


@pytest.mark.parametrize(
    ("images", "batch"),
    [(1_281_167, 1024), (50_000, 1024), (20_000, 512), (5_000, 128), (1_797, 32), (40, 32), (32, 32), (20, 20)],
)
def test_batch_and_learning_rate_follow_the_number_of_images(first, images, batch):
    config = planned(first, images, {})
    optim = config.optim
    assert (optim.batch_size, optim.epochs, optim.momentum) == (batch, 11 if images > 1_000_000 else 100, 0.9)
    assert optim.lr == pytest.approx(0.1 * batch / 1024)
    assert optim.warmup_epochs == (2 if images > 1_000_000 else 10)
    assert optim.batch_size <= images
    chosen = (config.selflabel.decay, config.selflabel.uncertain, config.selflabel.kept)
    assert chosen == ((0.998, "probabilities", 0.5) if batch < 1024 else (0, "nothing", 0))
    if 32 < images / 49 < 1024:
        assert 49 / math.sqrt(2) <= images / batch <= 49 * math.sqrt(2)


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
def test_shorter_run_has_fewer_epochs_of_fixed_labels(first, asked, fixed):
    config = planned(first, 5_000, asked)
    assert config.selflabel.warmup_epochs == fixed
    assert config.optim.warmup_epochs == min(fixed, config.optim.epochs // 5)


def test_settings_that_are_asked_for_win(first):
    assert first.config().augment.affine is not None
    assert planned(first, 5_000, {"augment": {"affine": None}}).augment.affine is None
    assert planned(first, 5_000, {"optim": {"batch_size": 256}}).optim.lr == pytest.approx(0.025)
    asked = {"optim": {"batch_size": 64, "lr": 0.7, "epochs": 11}, "selflabel": {"smallest": 0.2}}
    config = planned(first, 5_000, asked)
    assert (config.optim.batch_size, config.optim.lr, config.optim.epochs) == (64, 0.7, 11)
    assert config.selflabel.smallest == 0.2
    assert planned(first, 5_000, {"loss": {"temperature": 0.3}}).loss.temperature == 0.3
    assert planned(first, 5_000, {"seed": 7}).seed == 7


@pytest.mark.parametrize("images", [5_000, 50_000])
def test_published_setting_is_the_same_for_few_and_for_many_images(first, images):
    """All differences from our rule for many images; the batch size is that for few, and with it the rates."""
    ours = flatten(planned(first, 50_000, {}).settings())
    settings = flatten(second_config(first.config(), first.path, images, {}, as_published=True).settings())
    rate = 0.1 if images == 50_000 else 0.0125
    assert {key: value for key, value in settings.items() if value != ours[key]} == {
        **({} if images == 50_000 else {"optim.batch_size": 128, "optim.lr": 0.0125}),
        "optim.schedule": "constant",
        "optim.warmup_epochs": 0,
        "centers.lr": rate,
        "selflabel.smallest": 0,
        "selflabel.sharpen": False,
        "selflabel.statistics": "separate",
        "selflabel.weak_flip": False,
        "selflabel.strong_style": "scan",
        "selflabel.crop_padding": 0,
    }


def test_published_setting_can_be_changed(first):
    asked = {"optim": {"lr": 0.03, "epochs": 20}, "selflabel": {"weak_flip": True}}
    config = second_config(first.config(), first.path, COUNT, asked, as_published=True)
    assert (config.optim.lr, config.centers.lr) == (0.03, 0.03)
    assert (config.selflabel.weak_flip, config.selflabel.statistics) == (True, "separate")
    assert (config.optim.warmup_epochs, config.selflabel.warmup_epochs) == (0, 4)
    fixed = second_config(first.config(), first.path, COUNT, {"centers": {"lr": 0}}, as_published=True)
    assert (fixed.optim.lr, fixed.centers.lr) == (0.1 * 32 / 1024, 0)


def test_published_setting_is_trained_and_resumed(tmp_path, first):
    whole = labeled(first, tmp_path / "whole", SHORT, as_published=True).run
    centers = "clustering.centers.weight"
    assert not torch.equal(whole.load_model()[centers][0], first.load_model()[centers][0, :4])
    assert [record["lr"] for record in whole.metrics()] == pytest.approx([0.1 * 32 / 1024] * 3)
    assert {record["sharpness"] for record in whole.metrics()} == {1.0}
    assert {record["boosted"] for record in whole.metrics()} == {0.0}
    stopped = labeled(first, tmp_path / "parts", SHORT, as_published=True, time_limit=0.001)
    assert stopped.results is None
    assert_same_outcome(labeled(first, stopped.run.path, SHORT, as_published=True, resume=True).run, whole)


def test_head_that_answers_is_the_one_that_is_self_labeled(first):
    other = first.config().model_copy(update={"head": 1})
    config = second_config(other, first.path, COUNT, {})
    assert (config.heads, config.head) == ((6,), 0)


# Own images, and the commands


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("pictures") / "digits", 90)


@pytest.fixture(scope="module")
def own(tmp_path_factory, pictures) -> Run:
    return fitted(tmp_path_factory.mktemp("own"), pictures, labels="folder")


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Call the program in this process; it must succeed without any complaint. Return what it prints."""
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


@pytest.mark.parametrize("doubts", [(), ("worse",)], ids=["used", "rejected"])
def test_command_compares_both_models_and_says_which_is_kept(tmp_path, own, command, monkeypatch, doubts):
    monkeypatch.setattr("secu.methods.selflabel.doubts", lambda before, after: list(doubts))
    out = tmp_path / "second"
    printed = command("selflabel", own.path, "--out", out, "optim.epochs=1", "--device", "cpu")
    outcome = json.loads((out / "outcome.json").read_text())
    after = outcome["rejected"] if doubts else outcome["after"]
    for name in ("information", "agreement", "calibration_error"):
        line = next(line for line in printed.splitlines() if name.replace("_", " ") in line)
        assert f"{outcome['before'][name]:.4f}" in line
        assert f"{after[name]:.4f}" in line
    moved = after["moved"] if doubts else outcome["moved"]
    kept = ", but the previous model is kept" * bool(doubts)
    assert f"{moved:.1%} of the images changed their label{kept}; finished in" in printed.replace("\n", " ")


def test_commands_take_a_second_run_of_own_images(tmp_path, own, pictures, command):
    """``secu selflabel`` with its default folder, then everything that one does with a run."""
    run = Path(shutil.copytree(own.path, tmp_path / "mine"))
    settings = ("optim.epochs=2", "selflabel.warmup_epochs=1")
    command("selflabel", run, *settings, "--as-published", "--device", "cpu")
    second = Run.open(tmp_path / "mine-selflabel")
    assert tree(second.path) == sorted([*FILES, "best.safetensors", "images.json"])
    assert second.config().optim.schedule == "constant"  # as published
    assert "acc" in second.metrics()[-1]  # the pictures lie in folders with the names of their classes

    rows = rows_of(second.path / "assignments.csv")
    sizes = [int(row["size"]) for row in rows_of(second.path / "clusters.csv")]
    scores = command("evaluate", second.path, "--device", "cpu")
    for value in (second.outcome()["after"]["acc"], second.record()["kept"]["nmi"]):
        assert f"{value:.4f}" in scores
    (second.path / "report.html").unlink()
    assert command("report", second.path, "--device", "cpu").strip() == str(second.path / "report.html")
    assert (second.path / "report.html").exists()
    assert command("sort", second.path, tmp_path / "sorted") == f"{len(rows)} images in {tmp_path / 'sorted'}\n"
    assert [len(list((tmp_path / "sorted" / f"cluster-{k}").iterdir())) for k in range(3)] == sizes
    command("predict", second.path, pictures, "--output", tmp_path / "new.csv", "--device", "cpu")
    for row, new in zip(rows, rows_of(tmp_path / "new.csv"), strict=True):
        assert (row["id"], row["cluster"]) == (new["id"], new["cluster"])
        assert float(row["confidence"]) == pytest.approx(float(new["confidence"]), abs=1e-5)


def test_exported_model_is_as_confident_as_the_table(tmp_path, own, command):
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    run = labeled(own, tmp_path / "second", ONCE).run
    command("export", run.path, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    images = images_of(run, Listener())
    cluster, confidence = session.run(None, {"images": images.fetch(torch.arange(len(images))).numpy()})
    rows = rows_of(run.path / "assignments.csv")
    assert cluster.tolist() == [int(row["cluster"]) for row in rows]
    assert confidence.tolist() == pytest.approx([float(row["confidence"]) for row in rows], abs=1e-5)


def test_second_run_records_which_pictures_it_learned_from(tmp_path, pictures):
    """Those of the first run that are still there: not one that came later, nor one that is gone or changed."""
    mine = Path(shutil.copytree(pictures, tmp_path / "mine"))
    first = fitted(tmp_path, mine)
    names = list(first.images())
    shutil.copy(mine / names[0], mine / "new.png")
    (mine / names[3]).unlink()
    shutil.copy(mine / names[1], mine / names[2])
    notes = []

    class Noting(Listener):
        def note(self, text: str) -> None:
            notes.append(text)

    twice = {"optim": {"epochs": 2}}
    run = labeled(first, tmp_path / "second", twice, listener=Noting(), time_limit=0.001).run
    left = [name for i, name in enumerate(names) if i not in (2, 3)]
    assert run.images() == {name: first.images()[name] for name in left}
    assert list(images_of(run, Listener()).ids) == left
    assert len(run.load_state()["tensors"]["clustering.labels"]) == len(left)
    assert len(notes) == 1
    assert notes[0].startswith("2 of 90 images of the run are left out: 1 gone")
    (mine / names[5]).unlink()
    with pytest.raises(UserError, match=r"the images changed since .*second began: 1 gone \(first "):
        labeled(first, run.path, twice, resume=True)
