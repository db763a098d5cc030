"""What measures hints: which images are labeled, the baselines, and the tables in the documentation."""

import json
from pathlib import Path

import numpy as np
import pytest

from feature_runs import blobs

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import hints

    return hints


def test_so_many_images_of_each_class_are_labeled(script):
    targets = np.repeat([0, 1, 2], [30, 20, 10])
    rows = script.labeled(targets, 5, seed=0)
    assert np.bincount(targets[rows]).tolist() == [5, 5, 5]
    assert len(set(rows.tolist())) == 15
    assert rows.tolist() != script.labeled(targets, 5, seed=1).tolist()


def test_baselines_solve_what_is_easy_and_guess_what_cannot_be_known(script):
    vectors, groups = blobs(300)
    rows = script.labeled(groups, 5, seed=0)
    rest = np.setdiff1d(np.arange(300), rows)
    assert min(script.baselines(vectors, groups, rows, rest).values()) > 0.95
    noise = np.random.default_rng(0).standard_normal(vectors.shape).astype(np.float32)
    assert max(script.baselines(noise, groups, rows, rest).values()) < 0.55


def test_the_tables_are_those_of_the_kept_results(script):
    rows = json.loads(script.RESULT.read_text())["rows"]
    assert script.tables(rows) in script.DOC.read_text()
    ten = [row for row in rows if (row["data"], row.get("labels")) == ("cifar10-test", 10)]
    assert {row["seed"] for row in ten} == set(script.SEEDS)
    assert all(row["hints"] > row["without"] for row in ten)
