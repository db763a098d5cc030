"""Run folders of version 0.1 still open, predict, report and continue with exactly the result that was recorded.

They are described in tests/old_runs/README.md.
"""

import hashlib
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from own_images import fit_now, rows_of
from secu.apps.fit import FitRequest
from secu.apps.images import images_of
from secu.apps.pipeline import Request
from secu.apps.predict import predict_source
from secu.apps.recipe import run_recipes
from secu.apps.selflabel import self_label
from secu.apps.sort import sort_run
from secu.base.errors import UserError
from secu.data import changes, open_source, remember
from secu.results.results import find_results, write_report
from secu.settings import load_config
from secu.train.checkpoint import Checkpoint, load_method, load_predictor
from secu.train.listener import Listener
from secu.train.run import Run
from small_runs import CPU, open_session

FOLDER = Path(__file__).parent / "old_runs"
NAMES = ("digits", "fit", "unfinished", "selflabel")
FINISHED = ("digits", "fit", "selflabel")
UNFINISHED = ["heads=[10,20]", "encoder.dim=8", "encoder.hidden_dim=8", "optim.warmup_epochs=1", "optim.epochs=3"]
EXPECTED = json.loads((FOLDER / "unfinished" / "expected.json").read_text())
# What version 0.1 itself made of the run ``selflabel`` when it was resumed with three epochs instead of two.
THIRD_EPOCH = {
    "epoch": 2,
    "loss": 2.2855188846588135,
    "lr": 0.0,
    "largest": 610,
    "smallest": 3,
    "changed": 0.5403450131416321,
    "taught": 0.5086255073547363,
    "confident": 0.0934891477227211,
    "moved": 0.5592654347419739,
    "boosted": 0.0,
    "sharpness": 11.653715133666992,
    "agreement": 0.30940455198287964,
    "information": 0.0934034105719729,
    "acc": 0.2426265998887034,
    "nmi": 0.13983270867380165,
    "ari": 0.0694059371866652,
}
THIRD_MODEL = "814610a9364d0f96825d162526498fda"
THIRD_TABLE = {"cluster": "1620b27943bcbf4699dcf350330068a8", "confidence": "9cc708eeae003724b411d0196797f1fb"}


def put(place: Path) -> Path:
    """Copy the runs to a place of their own, and complete them."""
    shutil.copytree(FOLDER, place)
    with tarfile.open(place / "tensors.tar.xz") as archive:
        archive.extractall(place, filter="data")
    for name, sign, path in (("fit", "@SOURCE@", "pictures"), ("selflabel", "@DIGITS@", "digits")):
        config = place / name / "config.yaml"
        config.write_text(config.read_text().replace(sign, str(place / path)))
    return place


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECU_DATA", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> dict[str, Run]:
    """Return runs that no test changes."""
    place = put(tmp_path_factory.mktemp("kept") / "runs")
    return {name: Run.open(place / name) for name in NAMES}


@pytest.fixture
def runs(tmp_path) -> dict[str, Run]:
    """Return runs that a test may change."""
    place = put(tmp_path / "runs")
    return {name: Run.open(place / name) for name in NAMES}


@pytest.fixture(scope="module")
def exact() -> bool:
    """Whether numbers must be the same to the last bit: on the CPU and with the torch that recorded them."""
    cpuinfo = Path("/proc/cpuinfo")
    cpu = cpuinfo.read_text().partition("model name")[2].partition("\n")[0].strip("\t :") if cpuinfo.exists() else ""
    return (cpu, torch.__version__) == (EXPECTED["cpu"], EXPECTED["torch"])


def hashed(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def tensors_of(run: Run) -> dict[str, str]:
    """Return a hash of type, shape and bytes of each tensor of the model."""
    content = (run.path / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in sorted(header.items()):
        first, last = entry["data_offsets"]
        found[name] = hashed(f"{entry['dtype']}{entry['shape']}".encode() + content[begin + first : begin + last])
    return found


def table_of(run: Run) -> dict[str, str]:
    """Return a hash of two columns of the assignments."""
    rows = rows_of(run.path / "assignments.csv")
    return {name: hashed("\n".join(row[name] for row in rows).encode()) for name in ("cluster", "confidence")}


def confidences_of(run: Run) -> list[float]:
    return [float(row["confidence"]) for row in rows_of(run.path / "assignments.csv")]


def untimed(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if "seconds" not in name}


# Opened


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_read_under_their_old_names(kept, name):
    run = kept[name]
    config = run.config()
    old = yaml.safe_load((run.path / "config.yaml").read_text())
    assert "grey_prob" in old["augment"]
    assert config.augment.gray_prob == old["augment"]["grey_prob"]
    assert (old["augment"]["plain"], config.augment.plain) == ("centre", "center")
    assert config.data.source == (old["data"]["source"] if name == "fit" else "dataset:digits")
    assert config.method == ("selflabel" if name == "selflabel" else "secu")
    assert (config.head, config.clusters) == (0, old["heads"][0])
    if config.selflabel:
        assert (old["selflabel"]["unsure"], config.selflabel.uncertain) == ("chances", "probabilities")
    assert run.input_shape() == ((3, 12, 12) if name == "fit" else (1, 8, 8))


@pytest.mark.parametrize("name", NAMES)
def test_run_says_whether_it_is_finished(kept, name):
    run = kept[name]
    assert run.finished == (name in FINISHED)
    assert bool(run.unfinished()) == (name == "unfinished")
    assert len(run.metrics()) == run.record()["epochs_done"]


def test_outcome_is_found_under_its_old_name(kept):
    assert kept["selflabel"].outcome()["moved"] == pytest.approx(0.2087, abs=1e-4)
    assert len(kept["selflabel"].warnings()) == 1
    assert kept["digits"].outcome() == {}


def test_images_are_recognized(kept):
    images = images_of(kept["fit"], Listener())
    assert len(images) == 36
    assert changes(kept["fit"].images(), remember(images)) == ""


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint_is_restored_completely(kept, name):
    """Every tensor of the state, and the momentum: names and shapes must be today's."""
    run = kept[name]
    session = open_session(run.path, run.config(), images_of(run, Listener()), resume=True)
    state = Checkpoint.load(run)
    assert session.epochs_done == state.epochs_done == run.record()["epochs_done"]
    for key, tensor in session.method.state_dict().items():
        assert torch.equal(tensor, state.tensors[key]), key
    for key, tensor in session.step.momentum().items():
        assert torch.equal(tensor, state.momentum[key]), key
    assert any(float(tensor.abs().sum()) for tensor in state.momentum.values()) == (name == "unfinished")


# Used


@pytest.mark.parametrize("name", FINISHED)
def test_model_gives_the_recorded_assignments(kept, name):
    run = kept[name]
    images = images_of(run, Listener())
    results = find_results(run, load_predictor(run, CPU), images)
    rows = rows_of(run.path / "assignments.csv")
    assert [row["id"] for row in rows] == list(results.ids)
    assert [int(row["cluster"]) for row in rows] == results.predictions.cluster.tolist()
    confidence = [float(row["confidence"]) for row in rows]
    assert confidence == pytest.approx(results.predictions.confidence.tolist(), abs=2e-5)
    assert [row["outlier"] == "True" for row in rows] == results.outlier.tolist()
    assert [row["label"] for row in rows] == results.labels
    limits = [float(row["outlier_below"]) for row in rows_of(run.path / "clusters.csv")]
    assert limits == pytest.approx(results.limits.tolist(), abs=2e-5)
    last = run.record()["last_epoch"]
    assert (last["acc"], last["nmi"], last["ari"]) == pytest.approx(tuple(results.scores))


def test_new_images_can_be_predicted(kept, tmp_path):
    run = kept["fit"]
    source = open_source(run.config().data.source)
    assert predict_source(run, source, str(tmp_path / "new.csv"), "cpu") == []
    for row, new in zip(rows_of(run.path / "assignments.csv"), rows_of(tmp_path / "new.csv"), strict=True):
        assert (row["id"], row["cluster"], row["outlier"]) == (new["id"], new["cluster"], new["outlier"])
        assert float(row["confidence"]) == pytest.approx(float(new["confidence"]), abs=2e-5)


@pytest.mark.parametrize("name", ["fit", "unfinished", "selflabel"])
def test_report_can_be_written(runs, name):
    run = runs[name]
    method = load_method(run, CPU)
    results = find_results(run, method.predictor(), images_of(run, Listener()), clustering=method.clustering)
    text = write_report(run, results).read_text()
    assert run.path.name in text
    assert ('id="tree"' in text) == (max(run.config().heads) >= 3)
    assert ("training stopped after 2 of 4 epochs" in text) == (name == "unfinished")
    assert ("cluster 2 fell from 7 to 3 images" in text) == (name == "selflabel")


def test_pictures_can_be_sorted(kept, tmp_path):
    assert sort_run(kept["fit"], tmp_path / "sorted", copy=False, device="cpu") == 36
    assert [len(list(folder.iterdir())) for folder in sorted((tmp_path / "sorted").iterdir())] == [12, 12, 12]


# Continued


def test_unfinished_run_is_resumed_by_the_same_recipe_with_the_recorded_result(runs, exact):
    run = runs["unfinished"]
    config = load_config("digits", UNFINISHED)
    (finished,) = run_recipes([Request(config, run.path, Listener())], device="cpu", resume=True)
    assert finished.results is not None
    epochs = {f"epoch {number}": untimed(record) for number, record in enumerate(run.metrics())}
    found = {f"{epoch}.{name}": value for epoch, record in epochs.items() for name, value in record.items()}
    assert found.keys() == EXPECTED["metrics"].keys()
    if not exact:  # the last digits of sums are those of the machine, and training amplifies them
        for name in ("epoch 2.loss", "epoch 3.loss"):
            assert found[name] == pytest.approx(float(EXPECTED["metrics"][name]), rel=0.05)
        return
    assert {name: repr(value) for name, value in found.items()} == EXPECTED["metrics"]
    assert tensors_of(run) == EXPECTED["tensors"]
    assert table_of(run) == EXPECTED["assignments"]


def test_run_is_not_resumed_with_other_settings(runs):
    config = load_config("digits", [*UNFINISHED, "optim.lr=0.3"])
    with pytest.raises(UserError, match=r"was started with optim.lr=0.05, got optim.lr=0.3"):
        run_recipes([Request(config, runs["unfinished"].path, Listener())], device="cpu", resume=True)


@pytest.fixture
def earlier_rules(monkeypatch):
    """Conclude as version 0.1 did: no model is rejected, and the confidence is that of the agreement of views."""
    monkeypatch.setattr("secu.methods.selflabel.doubts", lambda before, after: [])
    monkeypatch.setattr("secu.methods.selflabel.estimate", lambda confidence, agreement: agreement)


@pytest.mark.usefixtures("earlier_rules")
def test_self_labeling_continues_with_the_recorded_result(runs, exact):
    """Its checkpoint holds a student, a teacher and the best epoch so far; one more epoch is asked for."""
    run = runs["selflabel"]
    config = run.path / "config.yaml"
    config.write_text(config.read_text().replace("\n  epochs: 2\n", "\n  epochs: 3\n"))
    self_label(runs["digits"], run.path, device="cpu", resume=True, report=False)
    records = run.metrics()
    assert len(records) == 3
    if not exact:
        assert records[-1]["loss"] == pytest.approx(THIRD_EPOCH["loss"], rel=0.05)
        return
    information = pytest.approx(THIRD_EPOCH["information"], rel=1e-12)  # is computed by scikit-learn now
    assert untimed(records[-1]) == THIRD_EPOCH | {"information": information}
    assert hashed(json.dumps(tensors_of(run)).encode()) == THIRD_MODEL
    assert table_of(run) == THIRD_TABLE


@pytest.mark.usefixtures("earlier_rules")
def test_finished_self_labeling_that_is_resumed_stays_as_it_is(runs, exact):
    """It concludes again, with the same outcome, but for its warning, which belongs to a rule of today."""
    run = runs["selflabel"]
    before = {name: (run.path / name).read_bytes() for name in ("metrics.jsonl", "model.safetensors", "state.pt")}
    outcome = run.outcome()
    table = table_of(run)
    confidences = confidences_of(run)
    self_label(runs["digits"], run.path, device="cpu", resume=True, report=False)
    assert {name: (run.path / name).read_bytes() for name in before} == before
    assert not (run.path / "selflabel.json").exists()  # replaced by outcome.json
    again = run.outcome()
    for state in ("before", "after"):
        assert again[state].pop("sizes") == outcome[state].pop("sizes")
        assert again[state] == pytest.approx(outcome[state], rel=1e-4)
    assert again["moved"] == outcome["moved"]
    assert table_of(run)["cluster"] == table["cluster"]
    assert confidences_of(run) == pytest.approx(confidences, abs=2e-4)  # the calibration depends on the machine
    assert table_of(run) == table or not exact


def test_finished_self_labeling_that_is_resumed_returns_to_the_first_model_if_that_seems_better(runs):
    """By the rules of today; a cluster has less than half of its images."""
    run = runs["selflabel"]
    self_label(runs["digits"], run.path, device="cpu", resume=True, report=False)
    (warning,) = run.outcome()["warnings"]
    assert "cluster 2 fell from 7 to 3 images" in warning
    assert "the previous run's model is kept" in warning
    assert table_of(run)["cluster"] == table_of(runs["digits"])["cluster"]


def test_finished_fit_that_is_resumed_stays_as_it_is(runs, tmp_path):
    """Its images are recognized, and the rules for own images still choose the same settings."""
    run = runs["fit"]
    before = {name: (run.path / name).read_bytes() for name in ("metrics.jsonl", "model.safetensors", "images.json")}
    overrides = {"encoder": {"dim": 8, "hidden_dim": 8}, "optim": {"epochs": 100, "momentum": 0}}
    source = run.config().data.source
    request = FitRequest(source, 3, labels="folder", overrides=overrides, device="cpu", cache=tmp_path / "cache")
    assert fit_now(request, run.path, resume=True, report=False).results is not None
    assert {name: (run.path / name).read_bytes() for name in before} == before


def test_old_run_can_be_self_labeled(runs, tmp_path):
    finished = self_label(runs["fit"], tmp_path / "second", {"optim": {"epochs": 1}}, device="cpu", report=False)
    assert finished.results is not None
    assert finished.run.config().method == "selflabel"
    assert finished.run.outcome()["before"]["acc"] == 1
