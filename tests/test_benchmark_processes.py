"""The comparison of processes notices what differs; test_processes.py trains in several."""

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
TINY = ["optim.epochs=1", "optim.warmup_epochs=0", "optim.batch_size=600", "heads=[3,5]", "encoder.dim=8"]


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        patch.setattr(torch, "set_num_threads", lambda count: None)
        import processes

        yield processes


@pytest.fixture(scope="module")
def trained(benchmark, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    benchmark.record(folder, argparse.Namespace(precision="single", overrides=TINY))
    return folder


@pytest.fixture
def runs(trained, tmp_path):
    """A run of two epochs of three steps, and its copy."""
    return trained, Path(shutil.copytree(trained, tmp_path / "several"))


def test_equal_runs_are_equal(benchmark, runs):
    report = benchmark.compare(*runs)
    assert (report["epochs_compared"], report["steps_compared"]) == (2, 6)
    assert report["first_step_with_other_labels"] is None
    assert report["first_step_with_another_constraint"] is None
    assert report["all_processes_equal"]
    assert report["largest_difference"] == 0
    assert report["after_epoch"][2]["labels_that_differ"] == 0
    assert report["acc"][0] == report["acc"][1] > 0


def test_every_step_has_other_labels(benchmark, runs):
    record = json.loads((runs[0] / "record.json").read_text())
    assert len(set(record["labels"])) == len(set(record["constraint"])) == 6


def test_differences_are_found(benchmark, runs):
    one, several = runs
    record = json.loads((several / "record.json").read_text())
    record["labels"][4] = "other"
    record["constraint"][5] = "other"
    (several / "record.json").write_text(json.dumps(record))
    state = torch.load(several / "epoch-2.pt")
    state["clustering.labels"][0] = (state["clustering.labels"][0] + 1) % 3
    name = "encoder.projection.0.weight"
    state[name].view(-1)[0] += 0.5 * state[name].abs().max()
    torch.save(state, several / "epoch-2.pt")
    report = benchmark.compare(one, several)
    assert report["first_step_with_other_labels"] == 5
    assert report["first_step_with_another_constraint"] == 6
    assert report["after_epoch"][1]["difference"] == 0
    assert report["after_epoch"][2]["labels_that_differ"] == pytest.approx(1 / 1797)
    assert report["after_epoch"][2]["tensor"] == name
    assert report["after_epoch"][2]["difference"] == pytest.approx(0.5)


def test_the_documentation_repeats_the_kept_result():
    record = json.loads((ROOT / "benchmarks" / "results" / "processes-digits.json").read_text())
    assert record["commit"]
    assert record["overrides"] == []
    assert (record["precision"], record["processes"]) == ("double", 2)
    assert record["first_step_with_other_labels"] is record["first_step_with_another_constraint"] is None
    assert record["all_processes_equal"]
    assert record["largest_difference"] <= 8.2e-14
    page = (ROOT / "docs" / "scale.md").read_text().replace("\n", " ")
    assert f"{record['epochs_compared']} epochs, {record['steps_compared']:,} steps" in page
