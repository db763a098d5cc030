"""From what a person names to a finished run: any kind of source, interruptions, mistakes, labels that only score."""

import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from safetensors.torch import load_file

from own_images import (
    SHORT,
    contents,
    digits,
    fit_now,
    fitted,
    request_of,
    rows_of,
    tree,
    write_folder,
    write_manifest,
    write_zip,
)
from secu.apps.fit import FitRequest, prepare
from secu.apps.parameters import nested
from secu.base.errors import UserError
from secu.cluster.metrics import score
from secu.data import open_source, shape_of
from secu.settings import merge
from secu.train.listener import Listener
from secu.train.run import Run
from small_runs import new_run

FILES = [
    "assignments.csv",
    "assignments.parquet",
    "clusters.csv",
    "config.yaml",
    "exemplars.png",
    "images.json",
    "metrics.jsonl",
    "model.safetensors",
    "outcome.json",
    "report.html",
    "run.json",
    "skipped.csv",
    "state.safetensors",
]
COLUMNS = ["id", "cluster", "confidence", "second", "second_confidence", "cosine", "outlier", "duplicate_of"]

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def pictures(tiny_pictures) -> Path:
    return tiny_pictures


@pytest.fixture(scope="module")
def finished(tiny_fit) -> Run:
    return tiny_fit


def model_bytes(run: Run) -> bytes:
    return (run.path / "model.safetensors").read_bytes()


def few(pictures: Path, folder: Path, count: int) -> Path:
    """Copy a few of the pictures."""
    folder.mkdir(parents=True)
    for name in sorted(pictures.rglob("*.png"))[:count]:
        shutil.copy(name, folder)
    return folder


class Interrupt(Listener):
    """Presses Ctrl-C after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def stepped(self) -> None:
        self.steps -= 1
        if self.steps == 0:
            raise KeyboardInterrupt


class Counter(Listener):
    """Counts epochs, and the images that are read."""

    def __init__(self) -> None:
        self.epochs = 0
        self.read: list[tuple[int, int]] = []

    def reading(self, done, total) -> None:
        self.read.append((done, total))

    def epoch_ended(self, record, losses) -> None:
        self.epochs += 1


# What comes out


def test_a_fit_leaves_a_complete_run_folder(finished, pictures):
    assert tree(finished.path) == FILES
    config = finished.config()
    assert (config.data.source, config.data.labels) == (str(pictures), "folder")
    assert (shape_of(config.data), config.heads, config.optim.epochs) == ((1, 8, 8), (3, 6), 2)
    assert config.data.channels == len(config.data.mean) == len(config.data.std) == 1


def test_assignments_hold_one_row_per_image(finished, pictures):
    rows = rows_of(finished.path / "assignments.csv")
    assert list(rows[0]) == [*COLUMNS, "label", "leaf"]
    names = [row["id"] for row in rows]
    assert sorted(names) == sorted(path.relative_to(pictures).as_posix() for path in pictures.rglob("*.png"))
    for row in rows:
        assert row["label"] == row["id"].split("/")[0]
        assert row["second"] != row["cluster"]
        assert {row["cluster"], row["second"]} <= {"0", "1", "2"}
        assert 1 / 3 - 1e-6 <= float(row["confidence"]) <= 1
        assert float(row["second_confidence"]) <= float(row["confidence"])
        assert float(row["confidence"]) + float(row["second_confidence"]) <= 1 + 2e-6
        assert row["outlier"] in ("True", "False")


def test_the_table_as_parquet_is_the_same(finished):
    table = pq.read_table(finished.path / "assignments.parquet").to_pylist()
    assert [{key: str(value) for key, value in row.items()} for row in table] == rows_of(
        finished.path / "assignments.csv"
    )


def test_clusters_are_counted_and_outliers_lie_below_the_limit(finished):
    rows = rows_of(finished.path / "assignments.csv")
    clusters = rows_of(finished.path / "clusters.csv")
    for number, cluster in enumerate(clusters):
        members = [row for row in rows if row["cluster"] == str(number)]
        assert cluster["cluster"] == str(number)
        assert int(cluster["size"]) == len(members)
        cosines = [float(row["cosine"]) for row in members]
        assert float(cluster["cohesion"]) == pytest.approx(np.mean(cosines) if cosines else 0, abs=2e-6)
        for row in members:
            assert (row["outlier"] == "True") == (float(row["cosine"]) < float(cluster["outlier_below"]))


def test_a_table_of_skipped_images_may_be_empty(finished):
    assert (finished.path / "skipped.csv").read_text().splitlines() == ["id,reason"]


def test_twins_are_no_outliers(tmp_path):
    """None of several equal images is an outlier, however small the deviation of their cosines is."""
    pixels = np.repeat(digits(2)[0], 20, 0)
    np.save(tmp_path / "twins.npy", pixels)
    run = fitted(tmp_path, tmp_path / "twins.npy", 2)
    assert {row["outlier"] for row in rows_of(run.path / "assignments.csv")} == {"False"}


# Labels score, and nothing else


def test_labels_give_scores(finished):
    rows = rows_of(finished.path / "assignments.csv")
    truth, found = (np.array([int(row[name]) for row in rows]) for name in ("label", "cluster"))
    expected = score(np.searchsorted([0, 1, 4], truth), found)
    last = finished.metrics()[-1]
    assert (last["acc"], last["nmi"], last["ari"]) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["folder", "pattern"])
def test_labels_do_not_change_the_model(finished, pictures, tmp_path, kind):
    run = fitted(tmp_path, pictures if kind == "folder" else f"{pictures}/*/*.png")
    assert "acc" not in run.metrics()[-1]
    assert run.config().data.labels is None
    assert model_bytes(run) == model_bytes(finished)
    plain = rows_of(run.path / "assignments.csv")
    scored = rows_of(finished.path / "assignments.csv")
    assert plain == [{key: value for key, value in row.items() if key != "label"} for row in scored]


def test_labels_from_a_column_score_and_are_carried(pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "p")
    run = fitted(tmp_path, write_manifest(tmp_path / "table.csv", tmp_path / "p"), labels="digit")
    rows = rows_of(run.path / "assignments.csv")
    truth, found = (np.array([int(row[name]) for row in rows]) for name in ("digit", "cluster"))
    assert run.metrics()[-1]["acc"] == pytest.approx(score(np.searchsorted([0, 1, 4], truth), found).acc)
    assert [row["label"] for row in rows] == [row["digit"] for row in rows]


def test_wrong_labels_leave_nothing(pictures, tmp_path):
    with pytest.raises(UserError, match=r"labels: .* has no 'species'; .*folder"):
        fit_now(request_of(pictures, labels="species"), tmp_path / "run")
    assert tree(tmp_path) == []


# Every kind of source


def test_an_array_of_the_same_pixels_gives_the_same_clusters(finished, pictures, tmp_path):
    files = [pictures / row["id"] for row in rows_of(finished.path / "assignments.csv")]
    np.save(tmp_path / "a.npy", np.stack([np.asarray(Image.open(name)) for name in files]))
    run = fitted(tmp_path, tmp_path / "a.npy")
    assert model_bytes(run) == model_bytes(finished)
    assert [row["id"] for row in rows_of(run.path / "assignments.csv")] == [str(i) for i in range(120)]


def test_an_archive_of_the_same_files_gives_the_same_clusters(finished, pictures, tmp_path):
    run = fitted(tmp_path, write_zip(tmp_path / "a.zip", pictures), labels="folder")
    assert model_bytes(run) == model_bytes(finished)
    assert (run.path / "assignments.csv").read_bytes() == (finished.path / "assignments.csv").read_bytes()


def test_a_manifest_carries_its_columns_even_those_of_another_alphabet(pictures, tmp_path):
    """Excel writes Latin-1 where it can: bytes that are not UTF-8 must not end a run that took hours."""
    shutil.copytree(pictures, tmp_path / "p")
    extra = {"cluster": ["mine"], "St\udce4dte": ["K\udcf6ln", "Bonn, am\nRhein"], "note": ["<b>&", ""]}
    run = fitted(tmp_path, write_manifest(tmp_path / "table.csv", tmp_path / "p", **extra))
    rows = rows_of(run.path / "assignments.csv")
    assert list(rows[0]) == [*COLUMNS, "leaf", "digit", "source_cluster", "St\\xe4dte", "note"]
    assert {row["source_cluster"] for row in rows} == {"mine"}
    assert {row["St\\xe4dte"] for row in rows} == {"K\\xf6ln", "Bonn, am\nRhein"}
    assert all(row["digit"] == row["id"].split("/")[1] for row in rows)
    assert pq.read_table(run.path / "assignments.parquet").to_pylist()[0]["note"] == "<b>&"


def test_color_images_are_trained_in_color(tmp_path):
    run = fitted(tmp_path, write_folder(tmp_path / "color", 60, color=True))
    assert run.config().data.channels == len(run.config().data.mean) == 3
    tensors = load_file(run.path / "model.safetensors").values()
    assert any(tensor.ndim == 4 and tensor.shape[1] == 3 for tensor in tensors)


def test_images_of_all_sizes_and_of_one_pixel(tmp_path):
    (tmp_path / "p").mkdir()
    for number in range(12):
        side = (1, 5, 40)[number % 3]
        Image.new("L", (side, side + number), number * 20).save(tmp_path / "p" / f"{number}.png")
    run = fitted(tmp_path, tmp_path / "p", 2)
    assert len(rows_of(run.path / "assignments.csv")) == 12


# Bad files


def test_a_bad_file_is_left_out_and_listed(pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "p")
    (tmp_path / "p" / "0" / "bad\n<name>.png").write_text("not a picture")
    run = fitted(tmp_path, tmp_path / "p")
    (bad,) = rows_of(run.path / "skipped.csv")
    assert bad["id"] == "0/bad\\x0a<name>.png"
    assert bad["reason"]
    assert len(rows_of(run.path / "assignments.csv")) == 120


def test_many_bad_files_stop_the_run_unless_allowed(pictures, tmp_path):
    folder = few(pictures, tmp_path / "p", 20)
    for number in range(2):
        (folder / f"bad{number}.png").write_text("x")
    with pytest.raises(UserError, match=r"2 of 22 images .* more than 5%.* --allow-bad"):
        fit_now(request_of(folder, cache=tmp_path / "cache"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert len(rows_of(fitted(tmp_path, folder, allow_bad=True).path / "skipped.csv")) == 2


# Mistakes


def mistake(tmp_path, source, message, **more):
    """Check that a fit fails with this message and leaves no run folder."""
    with pytest.raises(UserError, match=message):
        fit_now(request_of(source, cache=tmp_path / "cache", **more), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_mistake_leaves_no_run_folder(pictures, tmp_path):
    mistake(tmp_path, tmp_path / "nowhere", "nowhere does not exist")
    (tmp_path / "empty").mkdir()
    mistake(tmp_path, tmp_path / "empty", "no images in .*empty")
    mistake(
        tmp_path, few(pictures, tmp_path / "one", 1), "clusters: 2 clusters need at least 2 images, got 1", clusters=2
    )
    mistake(tmp_path, few(pictures, tmp_path / "two", 2), "clusters: 3 clusters need at least 3 images, got 2")
    mistake(tmp_path, pictures, "clusters: 1 must be at least 2", clusters=1)
    mistake(tmp_path, pictures, "121 clusters need at least 121 images, got 120", clusters=121)
    mistake(tmp_path, pictures, "balance: 2 must be from 0", balance=2)
    mistake(tmp_path, pictures, "device: 'gpu' is not available", device="gpu")
    mistake(tmp_path, pictures, "optim.epoch: unknown", overrides={"optim": {"epoch": 3}})
    mistake(tmp_path, pictures, "engine", overrides=merge(SHORT, {"engine": "graph"}))


def test_only_readable_images_count_for_the_number_of_clusters(pictures, tmp_path):
    folder = few(pictures, tmp_path / "p", 3)
    (folder / "bad.png").write_text("x")
    mistake(tmp_path, folder, "clusters: 4 clusters need at least 4 readable images, got 3", clusters=4, allow_bad=True)


def test_not_a_number_in_an_array_is_named(tmp_path):
    array = np.ones((10, 8, 8), np.float32)
    array[3, 2, 1] = np.nan
    np.save(tmp_path / "a.npy", array)
    mistake(tmp_path, tmp_path / "a.npy", "(?i)nan|finite")


def test_a_loss_that_is_not_finite_says_what_to_do(pictures, tmp_path):
    asked = merge(SHORT, {"optim": {"lr": 1e30}})
    with pytest.raises(UserError, match=r"loss: .* is not finite; lower optim.lr"):
        fit_now(request_of(pictures, overrides=asked, cache=tmp_path / "cache"), tmp_path / "run")


def test_a_batch_may_be_larger_than_the_data(pictures, tmp_path):
    asked = merge(SHORT, {"optim": {"batch_size": 512}})
    run = fitted(tmp_path, few(pictures, tmp_path / "p", 40), overrides=asked)
    assert len(rows_of(run.path / "assignments.csv")) == 40


def test_as_many_clusters_as_images(pictures, tmp_path):
    run = fitted(tmp_path, few(pictures, tmp_path / "p", 5), 5)
    assert len(rows_of(run.path / "clusters.csv")) == 5


# A folder that is there already


def test_an_existing_run_is_neither_changed_nor_lost(finished, pictures, tmp_path):
    shutil.copytree(finished.path, tmp_path / "run")
    before = contents(tmp_path / "run")
    request = request_of(pictures, labels="folder", cache=finished.path.parent / "cache")
    with pytest.raises(UserError, match="exists; choose another folder, --resume it or replace it with --force"):
        fit_now(request, tmp_path / "run")
    with pytest.raises(UserError, match="--resume and --force cannot be combined"):
        fit_now(request, tmp_path / "run", resume=True, force=True)
    with pytest.raises(UserError, match="clusters: 1"):
        fit_now(request_of(pictures, 1), tmp_path / "run", force=True)
    with pytest.raises(UserError, match=r"was started with heads=\[3.*got heads=\[4"):
        fit_now(request_of(pictures, 4, labels="folder"), tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == before


def test_force_replaces_a_run(finished, pictures, tmp_path):
    shutil.copytree(finished.path, tmp_path / "run")
    run = fit_now(request_of(pictures, 4), tmp_path / "run", force=True).run
    assert run.config().clusters == 4
    assert len(rows_of(run.path / "clusters.csv")) == 4
    assert tree(run.path) == [name for name in FILES if name != "outcome.json"]  # there is only one head to report


def test_force_does_not_cost_the_old_run_what_the_new_one_cannot_do(finished, pictures, tmp_path):
    """Whatever can be known before the first step is known before the old run is gone."""
    shutil.copytree(finished.path, tmp_path / "run")
    new_run(tmp_path / "empty", finished.config())
    before = contents(tmp_path / "run")
    folder = few(pictures, tmp_path / "p", 5)
    (folder / "bad.png").write_text("x")

    def refused(message, source=pictures, clusters=3, **asked):
        more = {"cache": tmp_path / "cache", "allow_bad": True, "overrides": merge(SHORT, asked)}
        with pytest.raises(UserError, match=message):
            fit_now(request_of(source, clusters, **more), tmp_path / "run", force=True)
        assert contents(tmp_path / "run") == before

    refused("6 clusters need at least 6 readable images, got 5", folder, 6)
    refused("nowhere is not a run folder", init_from=str(tmp_path / "nowhere"))
    refused("empty has no model yet", init_from=str(tmp_path / "empty"))
    refused("has no head of 4 clusters", clusters=4, init_from=str(finished.path))
    refused("does not match these settings", encoder={"dim": 16}, init_from=str(finished.path))
    refused("is the run that would be replaced", init_from=str(tmp_path / "run"))
    refused("data.mean: 3 values", data={"mean": [0.5, 0.5, 0.5]})
    refused("data.source: 'dataset:digits' cannot be set here", data={"source": "dataset:digits"})
    refused("data.source: 'dataset:digits' cannot be set here", data={"name": "digits"})
    refused("data.labels: 'folder' cannot be set here", data={"labels": "folder"})
    refused(r"heads: \[6, 3\] must start with the requested 3 clusters", heads=[6, 3])
    refused(r"heads: \[3, 6\] must contain the requested 3 clusters at position 1 \(head\)", head=1)
    refused("there are no labels to start from", heads=[3], selflabel={"confidence": 0.9})


# Interruptions


@pytest.mark.parametrize("steps", [1, 4, 5, 12])
def test_an_interrupted_run_continues_as_if_nothing_had_happened(finished, pictures, tmp_path, monkeypatch, steps):
    """An epoch has 4 steps, and each is followed by a checkpoint."""
    monkeypatch.setattr("secu.train.clock.CHECKPOINT_SECONDS", -1)
    request = request_of(pictures, labels="folder", cache=finished.path.parent / "cache")
    with pytest.raises(KeyboardInterrupt):
        fit_now(request, tmp_path / "run", listener=Interrupt(steps))
    assert not (tmp_path / "run" / "assignments.csv").exists()
    counter = Counter()
    resumed = fit_now(request, tmp_path / "run", resume=True, listener=counter)
    assert resumed.results is not None
    assert resumed.epochs_done == 3
    assert counter.epochs == 3 - (steps - 1) // 4
    assert tree(resumed.run.path) == FILES
    for name in ("model.safetensors", "assignments.csv", "clusters.csv", "config.yaml", "exemplars.png"):
        assert (resumed.run.path / name).read_bytes() == (finished.path / name).read_bytes(), name


def test_an_interruption_while_decoding_leaves_no_run_and_costs_nothing(finished, pictures, tmp_path):
    class Stop(Listener):
        def reading(self, done, total):
            if done == 50:
                raise KeyboardInterrupt

    request = request_of(pictures, labels="folder", cache=tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        fit_now(request, tmp_path / "run", listener=Stop())
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert model_bytes(fit_now(request, tmp_path / "run", resume=True, report=False).run) == model_bytes(finished)


def test_an_interruption_while_writing_the_report_can_be_resumed(finished, pictures, tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    request = request_of(pictures, labels="folder", cache=finished.path.parent / "cache")
    with monkeypatch.context() as patch:
        patch.setattr("secu.results.results.Report.render", stop)
        with pytest.raises(KeyboardInterrupt):
            fit_now(request, tmp_path / "run")
    assert not (tmp_path / "run" / "report.html").exists()
    counter = Counter()
    fit_now(request, tmp_path / "run", resume=True, listener=counter)
    assert counter.epochs == 0
    assert tree(tmp_path / "run") == FILES
    assert (tmp_path / "run" / "assignments.csv").read_bytes() == (finished.path / "assignments.csv").read_bytes()


def test_the_time_limit_stops_with_a_checkpoint_and_without_results(finished, pictures, tmp_path):
    request = request_of(pictures, labels="folder", cache=finished.path.parent / "cache")
    stopped = fit_now(request, tmp_path / "run", time_limit=1e-9)
    assert (stopped.epochs_done, stopped.results) == (1, None)
    assert tree(stopped.run.path) == [
        "config.yaml",
        "images.json",
        "metrics.jsonl",
        "model.safetensors",
        "run.json",
        "state.safetensors",
    ]
    resumed = fit_now(request, tmp_path / "run", resume=True, report=False)
    assert resumed.epochs_done == 3
    assert model_bytes(resumed.run) == model_bytes(finished)


def test_a_resumed_run_does_not_need_the_run_it_started_from(finished, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr("secu.train.clock.CHECKPOINT_SECONDS", -1)
    shutil.copytree(finished.path, tmp_path / "first")
    request = request_of(pictures, overrides=merge(SHORT, {"init_from": str(tmp_path / "first")}))
    with pytest.raises(KeyboardInterrupt):
        fit_now(request, tmp_path / "run", listener=Interrupt(6))
    shutil.rmtree(tmp_path / "first")
    assert fit_now(request, tmp_path / "run", resume=True, report=False).results is not None


# The cache, and images that change


def test_images_are_decoded_once(pictures, tmp_path):
    request = request_of(pictures, cache=tmp_path / "cache")
    first = Counter()
    fit_now(request, tmp_path / "first", listener=first, report=False)
    second = Counter()
    fit_now(request, tmp_path / "second", listener=second, report=False)
    assert first.read == [(number, 120) for number in range(1, 121)]
    assert second.read == []
    assert model_bytes(Run.open(tmp_path / "first")) == model_bytes(Run.open(tmp_path / "second"))


def test_a_changed_image_is_decoded_again_and_the_run_is_not_resumed_over_it(pictures, tmp_path):
    folder = few(pictures, tmp_path / "p", 40)
    request = request_of(folder, cache=tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        fit_now(request, tmp_path / "run", listener=Interrupt(5))
    changed = sorted(folder.iterdir())[0]
    Image.new("L", (8, 8), 255).save(changed)
    os.utime(changed, (1, 1))
    counter = Counter()
    what = rf"1 changed \(first {changed.name}\); restore them, or start a new run"
    message = rf"resume: the images changed since .*run began: {what}"
    with pytest.raises(UserError, match=message):
        fit_now(request, tmp_path / "run", resume=True, listener=counter)
    assert len(counter.read) == 40
    Image.new("RGB", (32, 32), "red").save(changed)  # another size, and the first in color
    with pytest.raises(UserError, match=message):
        fit_now(request, tmp_path / "run", resume=True)
    larger = request_of(folder, cache=tmp_path / "cache", overrides=merge(SHORT, {"data": {"image_size": 9}}))
    with pytest.raises(UserError, match=r"was started with data.image_size=8, got data.image_size=9"):
        fit_now(larger, tmp_path / "run", resume=True)


def test_images_that_vanished_are_missed_when_resuming(pictures, tmp_path):
    folder = few(pictures, tmp_path / "p", 40)
    request = request_of(folder, cache=tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        fit_now(request, tmp_path / "run", listener=Interrupt(5))
    for name in sorted(folder.iterdir())[:5]:
        name.unlink()
    (folder / "x.png").write_bytes(sorted(folder.iterdir())[0].read_bytes())
    with pytest.raises(
        UserError, match=r"the images changed since .* began: 5 gone \(first 0.png\), 1 new \(first x.png"
    ):
        fit_now(request, tmp_path / "run", resume=True)


def test_copied_images_are_the_same(pictures, tmp_path):
    """A copy has another time, and the same pixels."""
    folder = few(pictures, tmp_path / "p", 40)
    request = request_of(folder, cache=tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        fit_now(request, tmp_path / "run", listener=Interrupt(5))
    for name in folder.iterdir():
        os.utime(name, (1, 1))
    assert fit_now(request, tmp_path / "run", resume=True, report=False).results is not None


# Plans for real sources


def test_a_plan_looks_at_the_images(pictures, tmp_path):
    prepared = prepare(request_of(pictures, overrides={}))
    config = prepared.plan.config
    assert len(prepared.source) == 120
    assert (config.data.image_size, config.augment.flip_prob, config.heads) == (8, 0, (3, 6))
    color = prepare(request_of(write_folder(tmp_path / "c", 20, color=True), overrides={}))
    assert color.plan.config.augment.flip_prob == 0.5


def test_a_plan_writes_nothing(pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECU_DATA", str(tmp_path / "data"))
    prepare(request_of(pictures, overrides={}))
    assert tree(tmp_path) == []


def test_mean_and_deviation_are_those_of_the_pixels(finished, pictures):
    pixels = np.stack([np.asarray(Image.open(name)) for name in pictures.rglob("*.png")]) / 255
    config = finished.config()
    assert config.data.mean == (pytest.approx(pixels.mean(), abs=6e-5),)
    assert config.data.std == (pytest.approx(pixels.std(), abs=2e-4),)


def test_images_of_one_color_do_not_divide_by_zero(tmp_path):
    np.save(tmp_path / "a.npy", np.full((20, 8, 8), 7, np.uint8))
    run = fitted(tmp_path, tmp_path / "a.npy", 2)
    assert run.config().data.std == (0.01,)
    assert all(np.isfinite(float(row["cosine"])) for row in rows_of(run.path / "assignments.csv"))


def test_a_run_that_lies_among_the_images_is_none_of_them(tmp_path):
    pictures = write_folder(tmp_path / "p", 30)
    before = open_source(pictures).ids
    fitted(pictures, pictures, report=True)
    assert (pictures / "run" / "exemplars.png").is_file()
    assert open_source(pictures).ids == before


@pytest.mark.parametrize(
    ("kind", "asked", "message"),
    [
        ("float", "int 0..255", "holds float 0..1, not int 0..255"),
        ("uint8", "int 0..16", "holds int 0..255, not int 0..16"),
        ("uint8", "int 0..4095", None),
        ("files", "float 0..1", "has no values that can be read in another way, not float 0..1"),
    ],
)
def test_values_can_be_asked_for_only_if_they_can_be_so(tmp_path, kind, asked, message):
    images = digits(20)[0]
    if kind == "files":
        source = write_folder(tmp_path / "p", 20)
    else:
        source = tmp_path / "a.npy"
        np.save(source, images / np.float32(255) if kind == "float" else images)
    request = FitRequest(str(source), 2, overrides={"data": {"values": asked}})
    if message is None:
        assert prepare(request).plan.config.data.values == asked
        return
    with pytest.raises(UserError, match=f"data.values: .* {message}"):
        prepare(request)


# Settings from Python


def test_dotted_settings_are_nested_and_numbers_may_be_numpys():
    settings = {"optim.lr": np.float32(0.5), "optim.epochs": 3, "data": {"mean": [0.5]}, "heads": np.array([3, 6])}
    found = nested(settings)
    assert found == {"optim": {"lr": 0.5, "epochs": 3}, "data": {"mean": [0.5]}, "heads": [3, 6]}
    assert type(found["optim"]["lr"]) is float


def test_settings_that_are_no_dict_are_refused():
    with pytest.raises(UserError, match=r"settings: 'optim.lr=1' must be a dict such as"):
        nested("optim.lr=1")
