"""What measures the choice of the number of clusters: its cases, a tiny run, and the tables in the documentation."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import norm
from sklearn.cluster import KMeans

from secu.apps.ranges import Range

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def choose_k(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import choose_k

    return choose_k


@pytest.fixture
def tables(choose_k):
    import choose_k_tables

    return choose_k_tables


def test_cases_differ_and_both_parts_have_photos_and_blobs(choose_k):
    assert len({case.name for case in choose_k.CASES}) == len(choose_k.CASES)
    for took_part in (True, False):
        sources = {case.source for case in choose_k.CASES if case.took_part is took_part}
        assert "blobs" in sources
        assert sources & {"cifar10", "cifar100"}
    images = [{case.source for case in choose_k.CASES if case.took_part is part} - {"blobs"} for part in (True, False)]
    assert not images[0] & images[1]


def test_a_case_has_as_many_groups_as_it_says(choose_k, tmp_path):
    features = np.arange(600, dtype=np.float32)[:, None].repeat(4, 1)
    np.savez(tmp_path / "cifar10.npz", inputs=features, targets=np.arange(600) % 10)
    for uneven in (False, True):
        case = choose_k.Case("cifar10", 4, uneven=uneven, seed=3)
        inputs, targets = choose_k.inputs_of(case, tmp_path)
        sizes = np.bincount(targets)
        assert len(sizes) == 4
        assert sizes.tolist() == [60] * 4 or (uneven and sorted(sizes)[0] == 6)
        classes = [set((inputs[targets == group, 0] % 10).tolist()) for group in range(4)]
        assert all(len(found) == 1 for found in classes)


@pytest.mark.parametrize("uneven", [False, True])
def test_blobs_are_trained_and_measured(choose_k, tables, monkeypatch, tmp_path, uneven):
    monkeypatch.setattr("choose_k_cases.BLOB_IMAGES", 90)
    monkeypatch.setattr("choose_k.RANGE", Range(2, 5))
    case = choose_k.Case("blobs", 3, uneven=uneven, seed=1, distance=2.0)
    choose_k.train(case, tmp_path, tmp_path / "runs", seed=1)
    assert choose_k.seeds_of(case, tmp_path / "runs") == [1]
    row = choose_k.measure(case, tmp_path, tmp_path / "runs", seed=1)
    assert row["seed"] == 1
    assert row["sizes"] == [2, 3, 4, 5]
    assert row["in_range"] is (row["low"] <= 3 <= row["high"])
    assert row["nearest_size"] == 3
    if not uneven:
        assert row["recommended"] == 3
        assert min(row["acc_head"], row["acc_cut"]) > 0.9
    assert row["others"].keys() == tables.OTHERS.keys() - {"the rule"}


@pytest.fixture
def scores(choose_k):
    import choose_k_scores

    return choose_k_scores


def test_coding_length_is_that_of_a_mixture_written_out(scores):
    points = np.random.default_rng(0).standard_normal((30, 3))
    label = np.arange(30) % 4
    centers = np.array([points[label == group].mean(0) for group in range(4)])
    variance = sum(((points[i] - centers[label[i]]) ** 2).sum() for i in range(30)) / (3 * 26)
    likelihood = 0.0
    for i in range(30):
        density = norm(centers[label[i]], variance**0.5).logpdf(points[i]).sum()
        likelihood += density + np.log((label == label[i]).mean())
    expected = 4 * 4 / 2 * np.log(30) - likelihood
    found = scores.coding_length(torch.from_numpy(points), torch.from_numpy(label))
    assert found == pytest.approx(expected, rel=1e-9)


def test_prediction_strength_counts_pairs_that_stay_together(scores):
    points = np.random.default_rng(0).standard_normal((40, 2))
    order = np.random.default_rng(0).permutation(40)
    halves = points[order[::2]], points[order[1::2]]
    models = [KMeans(3, n_init=2, random_state=0).fit(half) for half in halves]
    worst = []
    for half, own, other in zip(halves, models, models[::-1], strict=True):
        predicted = other.predict(half)
        shares = []
        for group in range(3):
            pairs = list(itertools.permutations(np.flatnonzero(own.labels_ == group), 2))
            shares.append(np.mean([predicted[a] == predicted[b] for a, b in pairs]) if pairs else 0.0)
        worst.append(min(shares))
    assert scores.strength_of(points, 3, 0) == pytest.approx(np.mean(worst))


def test_the_tables_are_those_of_the_kept_results(choose_k):
    kept = json.loads(choose_k.RESULT.read_text())
    assert len(kept["rows"]) == len(choose_k.CASES)
    assert kept["commit"]
    assert f"{choose_k.BEGIN}{choose_k.tables(kept['rows'])}{choose_k.END}" in choose_k.DOC.read_text()
