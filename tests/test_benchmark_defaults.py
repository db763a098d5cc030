"""What measures the default rules: it runs at tiny sizes, takes the images that it names, and keeps no trial."""

import argparse
import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from secu.apps.plan import Facts, make_plan
from secu.base.errors import UserError
from secu.data import open_source
from secu.settings import merge

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "defaults.py"


@pytest.fixture
def defaults(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import defaults

    monkeypatch.setattr(defaults, "KEPT", tmp_path / "kept")
    defaults.KEPT.mkdir()
    return defaults


@pytest.fixture
def data_sets(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import data_sets

    return data_sets


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "run", *arguments, "--device", "cpu"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def write_fashion(folder: Path, count: int = 400) -> Path:
    """Write images whose pixels hold their number, and whose group is the last digit of that number."""
    number = np.arange(count, dtype=">u2")
    pixels = np.tile(number.view(np.uint8).reshape(-1, 1, 2), (1, 28, 14))
    for name, array in {"images-idx3": pixels, "labels-idx1": (number % 10).astype(np.uint8)}.items():
        head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
        (folder / f"train-{name}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))
    return folder


def write_cifar10(folder: Path, count: int = 60) -> Path:
    """Write five files of random images, with all labels in turn."""
    (folder / "cifar-10-batches-bin").mkdir()
    for number in range(1, 6):
        records = np.random.default_rng(number).integers(0, 256, (count, 3073), np.uint8)
        records[:, 0] = np.arange(count) % 10
        (folder / "cifar-10-batches-bin" / f"data_batch_{number}.bin").write_bytes(records.tobytes())
    return folder


def result(defaults, name: str = "digits", seed: int = 0, **more) -> dict:
    scores = {"acc": 0.5 + seed / 10, "nmi": 0.25, "ari": 0.125, "largest": 60 + seed, "smallest": 40}
    config = make_plan(Facts(100, 8, 1, "cpu"), 2, 0.9, {"seed": seed}).config.model_dump(mode="json")
    return {
        **{"name": name, "seed": seed, "commit": "abcdef0123", "images": 100, "side": 8, "clusters": 2, **scores},
        **{"groups": {"a": 30, "b": 70}, "decode_seconds": 6.0, "seconds": 54.0, "kmeans": {**scores, "seconds": 1.0}},
        **{"hardware": {"device": "cpu", "gpu": None, "threads": 2}, "config": config, "from_scratch": False, **more},
    }


def test_a_trial_is_written_beside_its_run_and_not_kept(tmp_path):
    before = sorted((ROOT / "benchmarks" / "results").iterdir())
    done = run("digits", "optim.epochs=1", "--limit", "120", "--seed", "3", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "not kept: a trial" in done.stdout
    record = json.loads((tmp_path / "out" / "trial.json").read_text())
    words = "--out FOLDER --seed 3 --device cpu --limit 120 optim.epochs=1"
    assert record["command"] == f"OMP_NUM_THREADS=1 python benchmarks/defaults.py run digits {words}"
    assert record["images"] == 120 == sum(record["groups"].values())
    assert (record["config"]["seed"], record["config"]["optim"]["epochs"]) == (3, 1)
    assert 0 <= record["smallest"] <= 12 <= record["largest"] <= 120
    assert record["kmeans"]["acc"] > 0.5
    assert record["acc"] > 0
    assert (record["encoder"], record["from_scratch"], record["kmeans"]["on"]) == ("small", False, "pixels")
    assert record["whole_seconds"] > record["seconds"]
    assert record["promised_seconds"] > 0
    assert record["decode_seconds"] > 0
    assert record["seconds"] > 0
    assert str(tmp_path) not in json.dumps(record)
    assert sorted((ROOT / "benchmarks" / "results").iterdir()) == before


def test_a_folder_that_is_not_empty_and_an_unknown_word_are_refused(tmp_path):
    (tmp_path / "note.txt").touch()
    assert "exists; name a folder" in run("digits", "--out", str(tmp_path)).stderr
    done = run("digits", "--out", str(tmp_path / "new"), "--epoch")
    assert done.returncode == 1
    assert "'--epoch' must look like key=value" in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_part_is_the_first_images_of_one_order(data_sets, tmp_path):
    data = write_fashion(tmp_path)
    many, few = (data_sets.take("fashion-5000", data, limit) for limit in (300, 50))
    number = few.pixels[:, 0, 0].astype(int) * 256 + few.pixels[:, 0, 1]
    assert few.pixels.shape == (50, 28, 28)
    assert (many.pixels[:50] == few.pixels).all()
    assert len(set(number)) == 50
    assert (number % 10 == few.targets).all()
    assert number.tolist() != sorted(number)


def test_groups_of_uneven_sets_fall_to_a_tenth(data_sets, tmp_path):
    sizes = np.bincount(data_sets.take("digits-uneven", None, None).targets)
    assert sizes[0] == 178  # all zeros there are
    assert sizes[9] == 17
    ratios = sizes[1:] / sizes[:-1]
    assert np.allclose(ratios, 0.1 ** (1 / 9), atol=0.03)
    assert len(data_sets.take("fashion-uneven", write_fashion(tmp_path), 100).targets) in range(90, 101)


def test_vehicles_and_animals_are_two_groups(data_sets, tmp_path):
    pictures = data_sets.take("cifar10-vehicles", write_cifar10(tmp_path), 100)
    every = data_sets.take("cifar10-5000", tmp_path, 100)
    assert pictures.names == ("animal", "vehicle")
    assert (pictures.pixels == every.pixels).all()
    assert pictures.pixels.shape == (100, 32, 32, 3)
    assert (pictures.targets == np.isin(every.targets, (0, 1, 8, 9))).all()


@pytest.mark.parametrize("files_up_to", [10_000, 10])
def test_images_on_disk_are_those_taken(data_sets, monkeypatch, tmp_path, files_up_to):
    monkeypatch.setattr(data_sets, "FILES_UP_TO", files_up_to)
    pictures = data_sets.take("cifar10-vehicles", write_cifar10(tmp_path), 20)
    source, labels = data_sets.write_images(pictures, tmp_path)
    opened = open_source(str(source), labels)
    assert opened.class_names == ("animal", "vehicle")
    assert sorted(opened.targets) == sorted(pictures.targets)
    if labels == "folder":
        first = next((source / pictures.names[pictures.targets[0]]).glob("00000.png"))
        assert (np.asarray(Image.open(first)) == pictures.pixels[0]).all()
    else:
        assert (opened.read(0) == pictures.pixels[0]).all()
        assert (opened.targets == pictures.targets).all()


def test_a_broken_file_is_named(data_sets, tmp_path):
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz: cannot be read: .*--data names the folder"):
        data_sets.take("fashion-5000", tmp_path, None)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"PNG"))
    with pytest.raises(UserError, match="is not an idx file of bytes"):
        data_sets.take("fashion-5000", tmp_path, None)


def test_only_what_the_rules_decided_on_committed_code_is_kept(defaults, monkeypatch, tmp_path):
    monkeypatch.setattr(defaults, "measure", lambda arguments: result(defaults, commit=arguments.commit))
    monkeypatch.setattr(defaults, "checked_out", lambda: None)
    asked = {"overrides": [], "limit": None, "balance": None, "commit": "abc"}
    changes = [{"overrides": ["optim.lr=1"]}, {"limit": 9}, {"balance": 0.5}, {"commit": None}, {}]
    for number, change in enumerate(changes):
        out = tmp_path / str(number)
        out.mkdir()
        defaults.run(argparse.Namespace(**asked | change, out=out))
        name = "trial.json" if change else "defaults-digits-cpu-0.json"
        assert [path.name for path in out.iterdir()] == [name]
        assert [path.name for path in defaults.KEPT.iterdir()] == ([] if change else [name])


def test_the_table_has_a_row_for_each_set_and_device(defaults):
    for name, seed in (("fashion-5000", 0), ("digits", 1), ("digits", 0)):
        record = result(defaults, name, seed)
        (defaults.KEPT / defaults.file_name(record)).write_text(json.dumps(record))
    lines = defaults.as_table(defaults.kept()).splitlines()
    measured = "55.0 / 25.0 / 12.5 | 55.00 ± 7.07 | 25.00 ± 0.00 | 12.50 ± 0.00 | 40 to 61 | 0, 1 | 1.0"
    assert lines[2] == f"| `digits` | 100 of 8 px | 2 of 30 to 70 | small | {measured} | cpu, 2 threads | abcdef0 |"
    assert lines[3].startswith("| `fashion-5000` |")
    assert len(lines) == 4
    other = result(defaults, seed=2)
    changed = other | {"config": merge(other["config"], {"heads": [2]})}
    with pytest.raises(UserError, match="digits: the seeds were run with different rules"):
        defaults.as_table([[result(defaults), changed]])


def test_a_row_made_under_earlier_rules_says_so(defaults):
    for old in ({"optim": {"epochs": 7}}, {"centers": {"a setting that is gone": 1}}):
        record = result(defaults)
        row = defaults.as_table([[record | {"config": merge(record["config"], old)}]]).splitlines()[-1]
        assert row.endswith("| abcdef0, under earlier rules |")


def test_the_page_is_made_from_the_kept_results(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import defaults

    page = defaults.DOC.read_text()
    assert defaults.with_table(page, defaults.as_table(defaults.kept()), defaults.BEGIN, defaults.END) == page
