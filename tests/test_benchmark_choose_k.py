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
    assert row["others"].keys() == tables.OTHERS.keys() - {"the rule", tables.SEEDS}


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


def test_a_probe_finds_separate_clusters_on_the_other_half_and_random_ones_by_chance_alone(scores):
    numbers = np.random.default_rng(0)
    label = np.arange(200) % 4
    points = np.eye(4)[label] + 0.05 * numbers.standard_normal((200, 4))
    assert scores.probe_across_halves(points, label, 0) > 0.99
    assert abs(scores.probe_across_halves(points, numbers.permutation(label), 0)) < 0.15
    assert scores.probe_across_halves(points, np.zeros(200, int), 0) == 0


def test_seeds_are_compared_whatever_their_clusters_are_called(scores):
    labels = np.array([[0, 0, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]], np.uint8)
    others = np.array([[1, 1, 0, 0], [0, 0, 1, 2], [3, 2, 1, 0]], np.uint8)
    same, different = scores.agreement_of_seeds(labels, others)
    assert same == 1
    assert different < 0.5


def test_runs_without_a_score_are_not_counted_for_it(tables):
    known = dict.fromkeys(tables.OTHERS, 8)
    missing = {name: 8 for name in tables.OTHERS if name != "probes"}
    lines = tables.score_table([row("a", 0, 8, others=known), row("b", 0, 8, others=missing)])
    found = {line.split(" | ")[0]: line.split(" | ")[2] for line in lines[2:]}
    assert found["| " + tables.OTHERS["neighbors"]] == "2 of 2 |"
    assert found["| " + tables.OTHERS["probes"]] == "1 of 1 |"


def row(case, seed, recommended, **more):
    """Return a row of a case of eight groups, as far as the tables read it."""
    uneven = "uneven" in case
    found = {
        "low": 6,
        "high": 12,
        "in_range": True,
        "close": abs(recommended - 8) <= 2,
        "acc_head": 0.8,
        "acc_cut": 0.9,
    }
    about = {"case": case, "seed": seed, "source": case.split("-")[0], "groups": 8, "uneven": uneven, "images": 100}
    return {**about, "part": "check", "recommended": recommended, **found, **more}


def test_rows_of_a_case_and_seed_are_replaced_and_others_stay(choose_k, tmp_path):
    names = [case.name for case in choose_k.CASES[:2]]
    out = tmp_path / "rows.json"
    choose_k.merge([row(names[1], 0, 7), row(names[0], 1, 8)], out)
    choose_k.merge([row(names[1], 0, 9), row(names[0], 0, 10)], out)
    stored = json.loads(out.read_text())["rows"]
    assert [(r["case"], r["seed"], r["recommended"]) for r in stored] == [
        (names[0], 0, 10),
        (names[0], 1, 8),
        (names[1], 0, 9),
    ]


def test_cases_are_chosen_by_name_and_by_source(choose_k):
    assert [case.name for case in choose_k.chosen_cases([], ["digits-10-0"])] == ["digits-10-0"]
    assert {case.source for case in choose_k.chosen_cases(["digits", "blobs"], [])} == {"digits", "blobs"}
    everything = choose_k.chosen_cases([], [])
    assert sorted(everything) == sorted(choose_k.CASES)
    assert everything[0].is_scratch
    with pytest.raises(SystemExit, match="no such case or data set: digits-11-0"):
        choose_k.chosen_cases([], ["digits-10-0", "digits-11-0"])


def test_the_answers_of_all_seeds_are_counted(tables):
    rows = [row("a", 0, 8), row("a", 1, 8), row("b", 0, 7), row("b", 1, 12, low=9, in_range=False, acc_head=0.6)]
    assert tables.agreeing(rows) == "1 of 2"
    assert tables.agreeing(rows[::2]) == "one seed only"
    assert tables.share(rows, "in_range") == "3 of 4 (75%)"
    lines = tables.case_table(rows)
    assert lines[2:] == [
        "| a * | 100 | 8 | 6 to 12 | 8, 8 | 80.0 | 90.0 |",
        "| b * | 100 | 8 | 6 to 12; 9 to 12 (misses it) | 7, 12 (far) | 70.0 | 90.0 |",
    ]


def test_every_run_is_of_one_kind(choose_k, tables):
    for case in choose_k.CASES:
        about = {"source": case.source, "uneven": case.uneven}
        assert sum(belongs(about) for belongs in tables.KINDS.values()) == 1


@pytest.fixture
def cases(choose_k):
    import choose_k_cases

    return choose_k_cases


def test_classes_of_caltech_are_large_and_not_twice_the_same_photos(cases, tmp_path):
    sizes = {"ant": 42, "chair": 62, "Faces": 435, "Faces_easy": 435, "BACKGROUND_Google": 468, "lamp": 60}
    for name, size in sizes.items():
        (tmp_path / name).mkdir()
        for number in range(size):
            (tmp_path / name / f"image_{number:04d}.jpg").touch()
    pictures = cases.caltech101_large(tmp_path)
    assert pictures.names == ("Faces", "chair", "lamp")
    assert np.bincount(pictures.targets).tolist() == [435, 62, 60]
    assert {Path(path).parent.name for path in pictures.pixels[pictures.targets == 1]} == {"chair"}


def test_only_features_that_a_case_uses_are_computed(cases, monkeypatch, tmp_path):
    pixels = np.arange(120, dtype=np.uint8)[:, None, None].repeat(2, 1)
    pictures = cases.Pictures(pixels, np.arange(120) % 4, tuple("abcd"))
    monkeypatch.setitem(cases.READERS, "digits", lambda data: pictures)
    monkeypatch.setattr(cases, "CASES", (cases.Case("digits", 2), cases.Case("digits", 2, uneven=True)))
    monkeypatch.setattr(cases, "PER_CLASS", 25)
    monkeypatch.setattr(cases, "features_of", lambda pictures: pictures.pixels[:, 0].astype(np.float32))
    cases.embed("digits", tmp_path, None)
    kept = np.load(tmp_path / "digits.npz")
    assert np.bincount(kept["targets"]).tolist() == [25] * 4
    assert np.isnan(kept["inputs"]).sum() == 50
    for case in cases.CASES:
        inputs, targets = cases.inputs_of(case, tmp_path)
        assert inputs.dtype == np.float32
        classes = np.unique(inputs[:, 0] % 4)
        assert np.array_equal(np.searchsorted(classes, inputs[:, 0] % 4), targets)


def test_pixels_are_kept_as_they_are(cases, monkeypatch, tmp_path):
    pixels = np.arange(120, dtype=np.uint8)[:, None, None].repeat(2, 1)
    pictures = cases.Pictures(pixels, np.arange(120) % 4, tuple("abcd"))
    monkeypatch.setitem(cases.READERS, "cifar10-scratch", lambda data: pictures)
    cases.embed("cifar10-scratch", tmp_path, None)
    inputs, targets = cases.inputs_of(cases.Case("cifar10-scratch", 4), tmp_path)
    assert inputs.dtype == np.uint8
    assert sorted(inputs[:, 0, 0]) == list(range(120))
    assert np.array_equal(inputs[:, 0, 0] % 4, targets)


def test_the_tables_are_those_of_the_kept_results(choose_k, tables):
    kept = json.loads(choose_k.RESULT.read_text())
    rows = [(row["case"], row["seed"]) for row in kept["rows"]]
    assert len(set(rows)) == len(rows)
    assert {name for name, seed in rows} <= {case.name for case in choose_k.CASES}
    assert {row["source"] for row in kept["rows"] if row["seed"] == 0} == {case.source for case in choose_k.CASES}
    assert all(row["commit"] for row in kept["rows"])
    assert f"{choose_k.BEGIN}{tables.tables(kept['rows'])}{choose_k.END}" in choose_k.DOC.read_text()
    answers, cuts = tables.guide_tables(kept["rows"])
    guide = choose_k.GUIDE.read_text()
    assert f"{choose_k.BEGIN}{answers}{choose_k.END}" in guide
    assert f"{choose_k.BEGIN_CUTS}{cuts}{choose_k.END}" in guide


@pytest.fixture
def weaker(choose_k):
    import choose_k_settings

    return choose_k_settings


def test_a_setting_is_trained_and_clusters_with_images_are_counted(choose_k, weaker, monkeypatch, tmp_path):
    monkeypatch.setattr("choose_k_cases.BLOB_IMAGES", 60)
    monkeypatch.setattr("choose_k.RANGE", Range(2, 4))
    case = choose_k.Case("blobs", 3, seed=1, distance=2.0)
    row = weaker.measure_setting(case, "entropy-0.005", tmp_path)
    assert (tmp_path / "runs-entropy-0.005").is_dir()
    assert len(row["filled"]) == len(row["sizes"]) + 1
    assert max(row["filled"]) <= row["finest"]
    assert weaker.settings_of("entropy-0.03", 200) == {"constraint": {"kind": "entropy", "alpha": 6.0}}
    assert weaker.settings_of("size-0.3", 200)["constraint"]["lower"] == 0.3
    assert weaker.settings_of("default", 200) == {}


def test_a_setting_is_compared_with_the_default_on_the_same_cases_and_seed(weaker):
    misses = row("b-uneven", 0, 3, setting=weaker.ON_ALL, in_range=False)
    changed = [row("a", 0, 8, setting=weaker.ON_ALL), misses, row("a", 0, 3, setting="size-0.3")]
    defaults = [row("a", 0, 3), row("a", 1, 8), row("b-uneven", 0, 9), row("c", 0, 8)]
    lines = weaker.table_of_all(changed, defaults).splitlines()[2:]
    counts = [" ".join(line.split(" | ")[2:4]) for line in lines]
    assert counts == [
        "1 of 1 (100%) 0 of 1 (0%)",
        "1 of 1 (100%) 1 of 1 (100%)",
        "1 of 1 (100%) 1 of 1 (100%)",
        "0 of 1 (0%) 0 of 1 (0%)",
        "2 of 2 (100%) 1 of 2 (50%)",
        "1 of 2 (50%) 1 of 2 (50%)",
    ]


def test_the_tables_of_settings_are_those_of_the_kept_results(choose_k, weaker):
    rows = json.loads(weaker.RESULT.read_text())["rows"]
    assert all(row["commit"] for row in rows)
    assert {row["case"] for row in rows if row["setting"] == weaker.ON_ALL} == {*weaker.ALL}
    defaults = json.loads(choose_k.RESULT.read_text())["rows"]
    page = weaker.DOC.read_text()
    assert f"{weaker.BEGIN}{weaker.table(rows)}{weaker.END}" in page
    assert f"{weaker.BEGIN_ALL}{weaker.table_of_all(rows, defaults)}{weaker.END}" in page
