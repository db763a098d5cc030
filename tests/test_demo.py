"""The demo: shortened, to see what it leaves, and once as it is, to see that it works."""

import json
import sys
import time

import pytest
from PIL import Image

from secu import cli
from secu.apps.demo import Demo, free_folder, kmeans_on_pixels, run_demo
from secu.base.errors import UserError
from secu.cluster.metrics import score
from secu.config import DataConfig
from secu.data import load
from secu.train.listener import Listener
from secu.train.place import LOCK

DIGITS = DataConfig(source="dataset:digits")
SHORT = ("optim.epochs=1", "optim.batch_size=256", "encoder.dim=8")


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secu.results.report.layout.LEAST_POINTS", 10**9)  # see quick_map
        return run_demo(out, seed=4, overrides=SHORT, listener=Listener())


def test_the_demo_leaves_a_complete_run_folder(short):
    assert sorted(path.name for path in short.run.path.iterdir()) == [
        LOCK,
        "assignments.csv",
        "assignments.parquet",
        "clusters.csv",
        "config.yaml",
        "exemplars.png",
        "metrics.jsonl",
        "model.safetensors",
        "report.html",
        "run.json",
        "skipped.csv",
        "state.safetensors",
        "summary.json",
    ]
    config = short.run.config()
    assert (config.seed, config.data.source, config.clusters, config.optim.epochs) == (4, "dataset:digits", 10, 1)
    assert short.run.record()["command"] == "train"  # secu demo has no --resume; secu train digits continues it
    with Image.open(short.run.path / "exemplars.png") as picture:
        assert picture.width > 800
        assert picture.getextrema() == ((0, 255),) * 3


def test_the_summary_holds_the_scores_and_the_time(short):
    assert isinstance(short, Demo)
    summary = json.loads((short.run.path / "summary.json").read_text())
    assert sorted(summary) == ["acc", "ari", "kmeans_acc", "nmi", "seconds"]
    assert (summary["acc"], summary["nmi"], summary["ari"]) == short.secu
    assert summary["kmeans_acc"] == short.kmeans.acc
    assert summary["seconds"] == pytest.approx(short.seconds, abs=0.051)
    last = short.run.metrics()[-1]
    assert (last["acc"], last["nmi"], last["ari"]) == short.secu


def test_the_scores_are_those_of_the_assignments(short):
    rows = (short.run.path / "assignments.csv").read_text().splitlines()[1:]
    images = load(DIGITS)
    found = images.targets.new_tensor([int(row.split(",")[1]) for row in rows])
    assert score(images.targets.numpy(), found.numpy()) == short.secu


@pytest.mark.parametrize("seed", [0, 1])
def test_k_means_on_the_pixels_reaches_0_79(seed):
    scores = kmeans_on_pixels(load(DIGITS), 10, seed)
    assert scores.acc == pytest.approx(0.79, abs=0.015)
    assert scores.nmi == pytest.approx(0.74, abs=0.015)


@pytest.mark.usefixtures("quick_map")
def test_a_second_demo_gets_another_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tables = []
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["secu", "demo", *SHORT, "optim.epochs=0", "--out", "mine"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
        tables.append(capsys.readouterr().out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "mine-2"]
    for table, folder in zip(tables, ("mine", "mine-2"), strict=True):
        assert f"run folder: {folder}, pictures of the clusters: {folder}/exemplars.png\n" in table
        summary = json.loads((tmp_path / folder / "summary.json").read_text())
        lines = {line.split("│")[1].strip(): line.split("│")[2:6] for line in table.splitlines() if "│" in line}
        assert lines["k-means on pixels"][0].strip() == f"{summary['kmeans_acc']:.3f}"
        assert [cell.strip() for cell in lines["SeCu"][:3]] == [f"{summary[key]:.3f}" for key in ("acc", "nmi", "ari")]
    assert (tmp_path / "mine" / "model.safetensors").read_bytes() == (
        tmp_path / "mine-2" / "model.safetensors"
    ).read_bytes()


def test_a_free_folder_is_the_first_that_does_not_exist(tmp_path):
    wanted = tmp_path / "demo"
    assert free_folder(wanted) == wanted
    wanted.mkdir()
    (tmp_path / "demo-2").write_text("a file is in the way too")
    assert free_folder(wanted) == tmp_path / "demo-3"


def test_a_mistake_is_found_before_any_work_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("secu.apps.demo.kmeans_on_pixels", lambda *a: pytest.fail("work was started"))
    with pytest.raises(UserError, match="device: 'gpu'"):
        run_demo(tmp_path / "run", seed=0, overrides=(), listener=Listener(), device="gpu")
    with pytest.raises(UserError, match=r"optim\.epoch: unknown"):
        run_demo(tmp_path / "run", seed=0, overrides=("optim.epoch=1",), listener=Listener())
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_as_it_is_finds_the_digits(tmp_path):
    """ACC of at least 0.95 (k-means: 0.79) with the recipe's own settings, in four minutes of the CPU's time."""
    began = time.process_time()
    found = run_demo(tmp_path / "run", seed=0, overrides=(), listener=Listener())
    assert found.secu.acc >= 0.95
    assert found.secu.nmi >= 0.9
    assert time.process_time() - began <= 240
    records = found.run.metrics()
    assert len(records) == 121
    assert records[-1]["smallest"] > 100
