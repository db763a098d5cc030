"""One pipeline for every command: nothing is done twice, nothing is left by a failure, and every run can be used."""

import csv
import io
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from own_images import SHORT, contents, digits, fit_now, fitted, request_of, rows_of, tree
from secu import cli
from secu.apps import pipeline
from secu.apps.demo import run_demo
from secu.apps.export import export_onnx
from secu.apps.fit import FitRequest, fit, prepare
from secu.apps.images import images_of
from secu.apps.pipeline import Request, run_together
from secu.apps.predict import predict_source
from secu.apps.selflabel import self_label
from secu.apps.sort import sort_run
from secu.base.errors import UserError
from secu.cluster.metrics import score
from secu.config import DataConfig
from secu.data import Images, load, open_images, open_source
from secu.methods import Method
from secu.results.results import find_results, write_report
from secu.settings import load_config, merge
from secu.train.checkpoint import load_method, load_predictor
from secu.train.listener import Listener
from secu.train.run import Run

CPU = torch.device("cpu")
TINY = ("heads=[3]", "optim.epochs=1", "optim.warmup_epochs=0", "optim.batch_size=48", "encoder.dim=8")

pytestmark = pytest.mark.usefixtures("own_cache", "quick_map")


@pytest.fixture
def secu(monkeypatch, capsys):
    """Return a function that runs a command, which must succeed, and returns what it printed."""

    def call(*arguments) -> str:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["secu", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        assert ended.value.code == 0, shown.err
        return shown.out

    return call


def copied(run: Run, folder: Path) -> Run:
    """Return a copy of a run that may be changed."""
    return Run(Path(shutil.copytree(run.path, folder / "run")))


def counted(monkeypatch, name: str) -> list[tuple]:
    """Let a function note the arguments of every call."""
    module, _, attribute = name.rpartition(".")
    usual = getattr(sys.modules[module], attribute)
    calls = []

    def call(*arguments, **options):
        calls.append(arguments)
        return usual(*arguments, **options)

    monkeypatch.setattr(name, call)
    return calls


@pytest.fixture
def built(monkeypatch) -> list[str]:
    """Return the names of the methods that are built, as it happens."""
    names = []
    usual = Method.__init__

    def build(self, config, images, shape):
        names.append(config.method)
        usual(self, config, images, shape)

    monkeypatch.setattr(Method, "__init__", build)
    return names


def some_digits(count: int = 96) -> Images:
    images = load(DataConfig(source="dataset:digits"))
    assert images.targets is not None
    return Images(images.tensor[:count], images.targets[:count])


# Nothing is done twice


def test_a_fit_plans_once_probes_once_and_builds_one_method(tiny_pictures, tmp_path, monkeypatch, secu, built):
    plans = counted(monkeypatch, "secu.apps.fit.make_plan")
    samples = counted(monkeypatch, "secu.data.sources.base.take_sample")
    secu("fit", tiny_pictures, "-k", 3, "--labels", "folder", "--out", tmp_path / "run", "optim.epochs=0")
    assert (tmp_path / "run" / "report.html").is_file()
    assert (len(plans), len(samples), built) == (1, 1, ["secu"])


def test_a_dry_run_plans_and_probes_once_and_builds_nothing(tiny_pictures, tmp_path, monkeypatch, secu, built):
    plans = counted(monkeypatch, "secu.apps.fit.make_plan")
    samples = counted(monkeypatch, "secu.data.sources.base.take_sample")
    secu("fit", tiny_pictures, "-k", 3, "--out", tmp_path / "run", "--dry-run")
    assert (len(plans), len(samples), built) == (1, 1, [])
    assert tree(tmp_path) == []


def test_runs_side_by_side_build_one_method_each(tmp_path, built):
    images = some_digits()
    requests = [Request(load_config("digits", [*TINY, f"seed={i}"]), tmp_path / str(i), Listener()) for i in range(3)]
    run_together(requests, images, device="cpu", report=False)
    assert built == ["secu"] * 3


def test_a_resumed_run_builds_one_method(tmp_path, built):
    config = load_config("digits", TINY)
    stopped = pipeline.run(config, some_digits(), tmp_path / "run", device="cpu", time_limit=1e-9)
    assert stopped.results is None
    built.clear()
    finished = pipeline.run(config, some_digits(), tmp_path / "run", device="cpu", resume=True, report=False)
    assert finished.results is not None
    assert built == ["secu"]


def test_self_labeling_builds_its_own_method_and_that_of_the_first_run(tiny_fit, tmp_path, built):
    self_label(tiny_fit, tmp_path / "second", {"optim": {"epochs": 1}}, device="cpu", report=False)
    assert sorted(built) == ["secu", "selflabel"]


@pytest.mark.parametrize("command", ["predict", "sort", "report", "evaluate"])
def test_a_command_that_uses_a_run_builds_its_method_once(tiny_fit, tiny_pictures, tmp_path, secu, built, command):
    run = copied(tiny_fit, tmp_path)
    more = {"predict": [tiny_pictures], "sort": [tmp_path / "sorted"]}.get(command, [])
    secu(command, run.path, *more)
    assert built == ["secu"]


class Phases(Listener):
    """Notes how many calls there were before each slow step."""

    def __init__(self, calls: list) -> None:
        self.calls = calls
        self.before: dict[str, int] = {}

    def busy(self, what: str) -> None:
        self.before.setdefault(what, len(self.calls))


def test_each_picture_is_decoded_once_for_training_hashes_and_report(tmp_path, monkeypatch):
    """The originals are larger than what the model sees, so the report shows them."""
    (tmp_path / "p").mkdir()
    for number, pixels in enumerate(digits(40)[0]):
        Image.fromarray(pixels).resize((80, 80)).save(tmp_path / "p" / f"{number}.png")
    decoded = counted(monkeypatch, "secu.data.decoding.workers.decode")
    phases = Phases(decoded)
    none = {"optim": {"epochs": 0}}
    prepared = prepare(request_of(tmp_path / "p", encoder="scratch", overrides=none, cache=tmp_path / "cache"))
    finished = fit(prepared, tmp_path / "run", listener=phases)
    assert finished.results.images.shape == (1, 16, 16)
    first = phases.before["looking for near-duplicates"]
    last = phases.before["writing the report"]
    training, hashes, report = (
        Counter(Path(path).name for path, *_ in part) for part in (decoded[:first], decoded[first:last], decoded[last:])
    )
    assert training == {f"{number}.png": 1 for number in range(40)}
    assert max(hashes.values()) == 1
    assert report == training  # all 40 are shown: on cards, on the sheet of exemplars or on the map


# A failure leaves nothing, and costs no old run


def test_a_run_whose_loss_is_not_finite_leaves_nothing(tmp_path):
    config = load_config("digits", [*TINY, "optim.lr=1e30"])
    with pytest.raises(UserError, match=r"loss: (nan|inf) after epoch \d of .*run is not finite"):
        pipeline.run(config, some_digits(), tmp_path / "run", device="cpu")
    assert tree(tmp_path) == []


def test_none_of_several_runs_is_left_if_one_fails(tmp_path):
    broken = load_config("digits", [*TINY, "optim.lr=1e30"])
    requests = [
        Request(load_config("digits", TINY), tmp_path / "a", Listener()),
        Request(broken, tmp_path / "b", Listener()),
    ]
    with pytest.raises(UserError, match=r"of .*b is not finite"):
        run_together(requests, some_digits(), device="cpu")
    assert tree(tmp_path) == []


def test_a_run_that_fails_after_a_checkpoint_keeps_it(tmp_path, monkeypatch):
    monkeypatch.setattr("secu.train.clock.CHECKPOINT_SECONDS", -1)

    class Failing(Listener):
        def epoch_ended(self, record, losses):
            if record["epoch"] == 1:
                raise UserError("loss: nan is not finite")

    config = load_config("digits", TINY)
    with pytest.raises(UserError, match="is not finite"):
        pipeline.run(config, some_digits(), tmp_path / "run", device="cpu", listener=Failing())
    assert Run(tmp_path / "run").load_state()["epochs_done"] == 1
    finished = pipeline.run(config, some_digits(), tmp_path / "run", device="cpu", resume=True, report=False)
    assert finished.epochs_done == 2


def test_an_old_run_and_files_of_others_survive_a_failure(tiny_digits, tmp_path):
    old = copied(tiny_digits, tmp_path)
    (old.path / "notes.txt").write_text("mine")
    before = contents(old.path)
    config = load_config("digits", [*TINY, "optim.lr=1e30"])
    with pytest.raises(UserError, match="is not finite"):
        pipeline.run(config, some_digits(), old.path, device="cpu", force=True)
    assert contents(old.path) == before


MISTAKES = [
    ({"heads": [1798]}, "clusters need at least 1798 images"),
    ({"data": {"mean": [0.5, 0.5, 0.5]}}, "data.mean: 3 values"),
    ({"engine": "graph"}, "engine: graph needs"),
    ({"init_from": "/nowhere"}, "/nowhere is not a run folder"),
    ({"method": "selflabel", "selflabel": {}}, "there are no labels to start from"),
]


@pytest.mark.parametrize(("change", "message"), MISTAKES)
def test_an_old_run_survives_a_mistake_in_the_settings_of_the_new_one(tiny_digits, tmp_path, change, message):
    """Even one that was finished and whose checkpoint was deleted to save space."""
    old = copied(tiny_digits, tmp_path)
    (old.path / "state.safetensors").unlink()
    before = contents(old.path)
    config = load_config("digits", TINY)
    config = type(config).model_validate(merge(config.model_dump(), change))
    with pytest.raises(UserError, match=message):
        pipeline.run(config, some_digits(), old.path, device="cpu", force=True)
    assert contents(old.path) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exists; choose another folder"),
        ({"resume": True}, r"has no checkpoint \(state.safetensors\) to resume from"),
        ({"resume": True, "force": True}, "--resume and --force cannot be combined"),
        ({"force": True, "device": "gpu"}, "device: 'gpu'"),
    ],
)
def test_an_old_run_survives_a_mistake_in_the_options(tiny_digits, tmp_path, options, message):
    old = copied(tiny_digits, tmp_path)
    (old.path / "state.safetensors").unlink()
    before = contents(old.path)
    with pytest.raises(UserError, match=message):
        pipeline.run(load_config("digits", TINY), some_digits(), old.path, **{"device": "cpu", **options})
    assert contents(old.path) == before


def test_a_run_is_not_resumed_with_other_settings_which_are_named(tiny_digits, tmp_path):
    old = copied(tiny_digits, tmp_path)
    before = contents(old.path)
    with pytest.raises(UserError, match=r"was started with heads=\[10, 20\], got heads=\[3\]"):
        pipeline.run(load_config("digits", TINY), some_digits(), old.path, device="cpu", resume=True)
    assert contents(old.path) == before


def test_no_old_run_is_replaced_if_another_one_beside_it_cannot_start(tiny_digits, tmp_path):
    old = copied(tiny_digits, tmp_path)
    before = contents(old.path)
    shutil.copytree(old.path, tmp_path / "other")
    itself = load_config("digits", [*TINY, f"init_from={tmp_path / 'other'}"])
    requests = [
        Request(load_config("digits", TINY), old.path, Listener()),
        Request(itself, tmp_path / "other", Listener()),
    ]
    with pytest.raises(UserError, match="other is the run that would be replaced"):
        run_together(requests, some_digits(), device="cpu", force=True)
    assert contents(old.path) == contents(tmp_path / "other") == before


# What is reported


class Everything(Listener):
    """Notes all that is reported."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.records: list[dict] = []

    def started(self, **facts) -> None:
        self.heard.append("started")
        assert facts == {"engine": "eager", "device": "cpu", "epochs": 2, "epochs_done": 0, "steps": 2}

    def stepped(self) -> None:
        self.heard.append("stepped")

    def epoch_ended(self, record, losses) -> None:
        self.heard.append("epoch")
        self.records.append(record)
        assert losses == {name: record[name] for name in ("loss", "center_loss")}

    def busy(self, what) -> None:
        self.heard.append(what)

    def warned(self, warning) -> None:
        self.heard.append("warned")

    def ended(self) -> None:
        self.heard.append("ended")


def test_a_listener_hears_everything_in_order(tmp_path):
    listener = Everything()
    images = some_digits()
    config = load_config("digits", TINY)
    finished = pipeline.run(config, images, tmp_path / "run", device="cpu", test=images, listener=listener)
    epoch = ["stepped", "stepped", "epoch"]
    heard = list(dict.fromkeys(listener.heard[7:]))
    assert listener.heard[:7] == ["started", *epoch, *epoch]
    steps = ["assigning all images", "looking for near-duplicates", "writing the tables", "writing the report"]
    assert heard[:4] == steps
    assert heard[4:] == (["warned", "ended"] if finished.warnings else ["ended"])
    assert listener.records == finished.run.metrics()
    assert finished.results.scores._asdict() == {name: listener.records[-1][name] for name in ("acc", "nmi", "ari")}


def test_a_run_states_the_shape_of_its_inputs(tmp_path):
    images = some_digits()
    finished = pipeline.run(load_config("digits", TINY), images, tmp_path / "run", device="cpu", report=False)
    data = finished.run.config().data
    assert (data.channels, data.image_size, finished.run.input_shape()) == (1, 8, (1, 8, 8))


# Every run can be used, however it was made


@pytest.fixture(scope="module")
def tiny_demo(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secu.results.report.layout.LEAST_POINTS", 10**9)  # see quick_map
        short = ("heads=[10]", "optim.epochs=0", "optim.batch_size=256", "encoder.dim=8")
        return run_demo(tmp_path_factory.mktemp("demo") / "run", seed=0, overrides=short, listener=Listener()).run


@pytest.fixture(params=["fit", "train", "demo"])
def used(request, tmp_path) -> Run:
    """Return a copy of a finished run of each command."""
    name = {"fit": "tiny_fit", "train": "tiny_digits", "demo": "tiny_demo"}[request.param]
    run = copied(request.getfixturevalue(name), tmp_path)
    assert run.record()["command"] == ("fit" if request.param == "fit" else "train")
    return run


def test_predict_gives_the_images_of_training_the_clusters_of_training(used, tmp_path, secu):
    secu("predict", used.path, used.config().data.source, "-o", tmp_path / "p.csv", "--device", "cpu")
    found = rows_of(tmp_path / "p.csv")
    expected = rows_of(used.path / "assignments.csv")
    for name in ("id", "outlier"):
        assert [row[name] for row in found] == [row[name] for row in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert float(ours["cosine"]) == pytest.approx(float(theirs["cosine"]), abs=3e-6)
        if float(theirs["confidence"]) - float(theirs["second_confidence"]) > 1e-4:
            assert ours["cluster"] == theirs["cluster"]


def test_predict_takes_pictures_whatever_the_run_was_trained_on(used, tiny_pictures, secu):
    rows = list(csv.DictReader(io.StringIO(secu("predict", used.path, tiny_pictures, "--device", "cpu"))))
    assert len(rows) == 120
    assert {int(row["cluster"]) for row in rows} <= set(range(used.config().clusters))


def test_export_writes_a_graph_that_answers_as_predict_does(used, tmp_path, secu):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert secu("export", used.path, tmp_path / "m.onnx").strip() == str(tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    images = images_of(used, Listener())
    cluster, confidence = session.run(None, {"images": images.tensor.numpy()})
    found = load_predictor(used, CPU).predict(images)
    np.testing.assert_allclose(confidence, found.confidence.numpy(), atol=2e-5)
    clear = (found.confidence - found.second_confidence).numpy() > 1e-4
    assert (cluster == found.cluster.numpy())[clear].all()


def test_sort_puts_every_image_into_the_folder_of_its_cluster(used, tmp_path, secu):
    secu("sort", used.path, tmp_path / "sorted", "--copy", "--device", "cpu")
    sizes = Counter(int(path.parent.name.removeprefix("cluster-")) for path in (tmp_path / "sorted").rglob("*.png"))
    assert sizes == Counter({int(row["cluster"]): int(row["size"]) for row in rows_of(used.path / "clusters.csv")})


def test_the_report_is_written_again_as_it_was(used, secu):
    before = (used.path / "report.html").read_text()
    (used.path / "report.html").unlink()
    assert secu("report", used.path, "--device", "cpu").strip() == str(used.path / "report.html")
    again = (used.path / "report.html").read_text()
    if used.config().data.source.startswith("dataset:"):  # otherwise the first map was laid out by t-SNE
        assert again == before
    assert f"<title>{used.path.name}" in again


def test_evaluate_prints_the_scores_of_the_last_epoch(used, secu):
    shown = secu("evaluate", used.path, "--device", "cpu")
    last = used.metrics()[-1]
    for name in ("acc", "nmi", "ari"):
        assert f"{last[name]:.4f}" in shown


# The head that answers


@pytest.fixture(scope="module")
def second_head(tmp_path_factory, tiny_pictures) -> Run:
    """Return a run whose second head answers."""
    asked = merge(SHORT, {"heads": [6, 3], "head": 1, "optim": {"epochs": 12}})
    folder = tmp_path_factory.mktemp("second-head")
    return fitted(folder, tiny_pictures, labels="folder", overrides=asked, report=True)


@pytest.fixture(scope="module")
def by_hand(second_head) -> np.ndarray:
    """Return the cluster of each image, computed from the weights of the second head."""
    method = load_method(second_head, CPU)
    weights_KD = second_head.load_model()["clustering.centers.weight"][1, :3]
    embeddings_ND = method.predictor().embed(images_of(second_head, Listener()))
    return (embeddings_ND @ torch.nn.functional.normalize(weights_KD, dim=-1).T).argmax(-1).numpy()


def test_the_tables_are_those_of_the_head_that_answers(second_head, by_hand):
    rows = rows_of(second_head.path / "assignments.csv")
    assert [int(row["cluster"]) for row in rows] == by_hand.tolist()
    assert len(set(by_hand)) > 1
    sizes = [int(row["size"]) for row in rows_of(second_head.path / "clusters.csv")]
    assert sizes == np.bincount(by_hand, minlength=3).tolist()


def test_the_scores_are_those_of_the_head_that_answers(second_head, by_hand):
    truth = [int(row["label"]) for row in rows_of(second_head.path / "assignments.csv")]
    expected = score(np.searchsorted([0, 1, 4], truth), by_hand)
    last = second_head.metrics()[-1]
    assert (last["acc"], last["nmi"], last["ari"]) == pytest.approx(expected)


def test_the_recorded_sizes_are_those_of_the_head_that_answers(second_head):
    labels = second_head.load_state()["tensors"]["clustering.labels"]
    sizes = torch.bincount(labels[:, 1], minlength=3)
    last = second_head.metrics()[-1]
    assert (last["largest"], last["smallest"]) == (int(sizes.max()), int(sizes.min()))


def test_predict_answers_by_that_head(second_head, by_hand, tiny_pictures, tmp_path):
    predict_source(second_head, open_source(tiny_pictures), str(tmp_path / "p.csv"), "cpu")
    assert [int(row["cluster"]) for row in rows_of(tmp_path / "p.csv")] == by_hand.tolist()


def test_sort_makes_the_folders_of_that_head(second_head, by_hand, tmp_path):
    sort_run(second_head, tmp_path / "sorted", copy=True, device="cpu")
    folders = {path.name: len(list(path.iterdir())) for path in (tmp_path / "sorted").iterdir()}
    assert folders == {f"cluster-{i}": size for i, size in enumerate(np.bincount(by_hand, minlength=3).tolist())}


def test_the_report_shows_that_head(second_head, by_hand, tmp_path):
    run = copied(second_head, tmp_path)
    results = find_results(run, load_predictor(run, CPU), images_of(run, Listener()))
    assert results.predictions.cluster.tolist() == by_hand.tolist()
    assert results.centers.shape[0] == 3
    page = write_report(run, results).read_text()
    assert "120 images in 3 clusters" in page.replace("<b>", "").replace("</b>", "")


def test_export_answers_by_that_head(second_head, by_hand, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    export_onnx(second_head, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    pixels = images_of(second_head, Listener()).tensor.numpy()
    cluster, _ = session.run(None, {"images": pixels})
    assert cluster.tolist() == by_hand.tolist()


@pytest.mark.parametrize("heads", [[6, 3], [3, 3]])
def test_self_labeling_continues_that_head(tiny_pictures, tmp_path, heads):
    """Also where another head has as many clusters."""
    asked = merge(SHORT, {"heads": heads, "head": 1})
    first = fitted(tmp_path, tiny_pictures, overrides=asked)
    second = self_label(
        first,
        tmp_path / "second",
        {"optim": {"epochs": 1, "lr": 0.0}, "selflabel": {"keep_best": False}},
        device="cpu",
        report=False,
    ).run
    assert (second.config().heads, second.config().head) == ((3,), 0)
    ours = second.load_model()["clustering.centers.weight"][0, :3]
    theirs = first.load_model()["clustering.centers.weight"][1, :3]
    assert torch.equal(ours, theirs)


def test_a_fit_takes_images_in_memory_and_nothing_is_remembered(tmp_path):
    request = FitRequest(open_images(digits(40)[0]), 3, overrides=SHORT, device="cpu")
    finished = fit_now(request, tmp_path / "run", report=False)
    assert finished.run.config().data.source is None
    assert not (finished.run.path / "images.json").exists()
