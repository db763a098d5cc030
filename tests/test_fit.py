"""From what a person names to a finished run: any kind of source, interruptions, mistakes, labels that only score."""

import csv
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from own_images import SHORT, digits, fitted, request_of, rows_of, tree, write_folder, write_manifest, write_zip
from secu.data import load
from secu.data.own import open_source
from secu.errors import UserError
from secu.fit import Request, fit, images_of, plan_for
from secu.metrics import score
from secu.run import Run
from secu.selflabel import self_label
from secu.settings import merge
from secu.training import Listener

FILES = [
    *("assignments.csv", "assignments.parquet", "clusters.csv", "config.yaml", "exemplars.png", "images.json"),
    *("metrics.jsonl", "model.safetensors", "report.html", "run.json", "skipped.csv", "state.pt"),
]
COLUMNS = ["id", "cluster", "confidence", "second", "second_confidence", "cosine", "outlier"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("pictures") / "digits")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, pictures) -> Run:
    """Return a run on the folder, scored with the names of its folders."""
    return fitted(tmp_path_factory.mktemp("finished"), pictures, labels="folder")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SECU_DATA", str(tmp_path_factory.getbasetemp() / "shared-cache"))


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


class Silent(Listener):
    """Counts what it is told."""

    def __init__(self) -> None:
        self.epochs = 0

    def epoch_ended(self, record) -> None:
        self.epochs += 1


# What comes out


def test_a_fit_leaves_a_whole_run_folder(finished, pictures):
    assert tree(finished.path) == FILES
    config = finished.config()
    assert (config.data.name, config.data.source, config.data.labels) == ("own", str(pictures), "folder")
    assert (config.data.image_size, config.heads[0], config.optim.epochs) == (8, 3, 2)
    assert config.data.channels == len(config.data.mean) == len(config.data.std) == 1


def test_assignments_hold_a_row_an_image(finished, pictures):
    rows = rows_of(finished.path / "assignments.csv")
    assert list(rows[0]) == [*COLUMNS, "label"]
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
    rows, clusters = (rows_of(finished.path / f"{name}.csv") for name in ("assignments", "clusters"))
    for number, cluster in enumerate(clusters):
        members = [row for row in rows if row["cluster"] == str(number)]
        assert cluster["cluster"] == str(number)
        assert int(cluster["size"]) == len(members)
        cosines = [float(row["cosine"]) for row in members]
        assert float(cluster["cohesion"]) == pytest.approx(np.mean(cosines) if cosines else 0, abs=2e-6)
        for row in members:
            assert (row["outlier"] == "True") == (float(row["cosine"]) < float(cluster["outlier_below"]))


def test_nothing_was_skipped_and_the_table_says_so(finished):
    assert (finished.path / "skipped.csv").read_text().splitlines() == ["id,reason"]


def test_twins_are_no_outliers(tmp_path):
    """Of equal images none is an outlier, however small the deviation of their cosines is."""
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


def test_labels_do_not_change_the_model(finished, pictures, tmp_path):
    run = fitted(tmp_path, pictures)
    assert "acc" not in run.metrics()[-1]
    assert run.config().data.labels is None
    assert model_bytes(run) == model_bytes(finished)
    plain, scored = (rows_of(r.path / "assignments.csv") for r in (run, finished))
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
        fit(request_of(pictures, labels="species"), tmp_path / "run")
    assert tree(tmp_path) == []


# Every kind of source


def test_an_array_of_the_same_pixels_gives_the_same_clusters(finished, pictures, tmp_path):
    files = [pictures / row["id"] for row in rows_of(finished.path / "assignments.csv")]
    np.save(tmp_path / "a.npy", np.stack([np.asarray(Image.open(name)) for name in files]))
    run = fitted(tmp_path, tmp_path / "a.npy")
    assert model_bytes(run) == model_bytes(finished)
    assert [row["id"] for row in rows_of(run.path / "assignments.csv")] == [str(i) for i in range(200)]


def test_an_archive_of_the_same_files_gives_the_same_clusters(finished, pictures, tmp_path):
    run = fitted(tmp_path, write_zip(tmp_path / "a.zip", pictures), labels="folder")
    assert model_bytes(run) == model_bytes(finished)
    assert (run.path / "assignments.csv").read_bytes() == (finished.path / "assignments.csv").read_bytes()


def test_a_pattern_names_the_same_files(finished, pictures, tmp_path):
    run = fitted(tmp_path, f"{pictures}/*/*.png")
    assert model_bytes(run) == model_bytes(finished)


def test_a_manifest_carries_its_columns_even_those_of_another_alphabet(pictures, tmp_path):
    """Excel writes Latin-1 where it can: bytes that are not UTF-8 must not end a run that took hours."""
    shutil.copytree(pictures, tmp_path / "p")
    extra = {"cluster": ["mine"], "St\udce4dte": ["K\udcf6ln", "Bonn, am\nRhein"], "note": ["<b>&", ""]}
    run = fitted(tmp_path, write_manifest(tmp_path / "table.csv", tmp_path / "p", **extra))
    rows = rows_of(run.path / "assignments.csv")
    assert list(rows[0]) == [*COLUMNS, "digit", "source_cluster", "St\\udce4dte", "note"]
    assert {row["source_cluster"] for row in rows} == {"mine"}
    assert {row["St\\udce4dte"] for row in rows} == {"K\\udcf6ln", "Bonn, am\nRhein"}
    assert all(row["digit"] == row["id"].split("/")[1] for row in rows)
    assert pq.read_table(run.path / "assignments.parquet").to_pylist()[0]["note"] == "<b>&"


def test_colour_images_are_trained_in_colour(tmp_path):
    run = fitted(tmp_path, write_folder(tmp_path / "colour", 60, colour=True))
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
    assert bad["id"] == "0/bad\\n<name>.png"
    assert bad["reason"]
    assert len(rows_of(run.path / "assignments.csv")) == 200


def test_many_bad_files_stop_the_run_unless_allowed(pictures, tmp_path):
    folder = few(pictures, tmp_path / "p", 20)
    for number in range(2):
        (folder / f"bad{number}.png").write_text("x")
    with pytest.raises(UserError, match=r"2 of 22 images .* more than 5%.* --allow-bad"):
        fit(request_of(folder, cache=tmp_path / "cache"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert len(rows_of(fitted(tmp_path, folder, allow_bad=True).path / "skipped.csv")) == 2


# Mistakes


def mistake(tmp_path, source, message, **more):
    """Check that a fit fails with this message and leaves no run folder."""
    with pytest.raises(UserError, match=message):
        fit(request_of(source, cache=tmp_path / "cache", **more), tmp_path / "run")
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
    mistake(tmp_path, pictures, "201 clusters need at least 201 images, got 200", clusters=201)
    mistake(tmp_path, pictures, "balance: 2 must be from 0", balance=2)
    mistake(tmp_path, pictures, "device: 'gpu' is not available", device="gpu")
    mistake(tmp_path, pictures, "optim.epoch: unknown", overrides={"optim": {"epoch": 3}})
    mistake(tmp_path, pictures, "engine", overrides=merge(SHORT, {"engine": "graph"}))


def test_only_readable_images_count_for_the_number_of_clusters(pictures, tmp_path):
    folder = few(pictures, tmp_path / "p", 3)
    (folder / "bad.png").write_text("x")
    mistake(
        tmp_path, folder, "clusters: 4 clusters need as many images, got 3 that can be read", clusters=4, allow_bad=True
    )


def test_not_a_number_in_an_array_is_named(tmp_path):
    array = np.ones((10, 8, 8), np.float32)
    array[3, 2, 1] = np.nan
    np.save(tmp_path / "a.npy", array)
    mistake(tmp_path, tmp_path / "a.npy", "(?i)nan|finite")


def test_a_loss_that_is_not_finite_says_what_to_do(pictures, tmp_path):
    asked = merge(SHORT, {"optim": {"lr": 1e30}})
    with pytest.raises(UserError, match=r"loss: .* is not finite; lower optim.lr"):
        fit(request_of(pictures, overrides=asked, cache=tmp_path / "cache"), tmp_path / "run")


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
    before = {name: (tmp_path / "run" / name).read_bytes() for name in FILES}
    request = request_of(pictures, labels="folder", cache=finished.path.parent / "cache")
    with pytest.raises(UserError, match="exists; choose another folder, --resume it or replace it with --force"):
        fit(request, tmp_path / "run")
    with pytest.raises(UserError, match="--resume and --force contradict"):
        fit(request, tmp_path / "run", resume=True, force=True)
    with pytest.raises(UserError, match="clusters: 1"):
        fit(request_of(pictures, 1), tmp_path / "run", force=True)
    with pytest.raises(UserError, match=r"was started with heads=\[3.*got heads=\[4"):
        fit(request_of(pictures, 4, labels="folder"), tmp_path / "run", resume=True)
    assert {name: (tmp_path / "run" / name).read_bytes() for name in FILES} == before


def test_force_replaces_a_run(finished, pictures, tmp_path):
    shutil.copytree(finished.path, tmp_path / "run")
    run, _, _ = fit(request_of(pictures, 4), tmp_path / "run", force=True)
    assert run.config().heads[0] == 4
    assert len(rows_of(run.path / "clusters.csv")) == 4
    assert tree(run.path) == FILES


def test_force_does_not_cost_the_old_run_what_the_new_one_cannot_do(finished, pictures, tmp_path):
    """Whatever can be known before the first step is known before the old run is gone."""
    shutil.copytree(finished.path, tmp_path / "run")
    Run.create(tmp_path / "empty", finished.config())
    before = {name: (tmp_path / "run" / name).read_bytes() for name in FILES}
    folder = few(pictures, tmp_path / "p", 5)
    (folder / "bad.png").write_text("x")

    def refused(message, source=pictures, clusters=3, **asked):
        more = {"cache": tmp_path / "cache", "allow_bad": True, "overrides": merge(SHORT, asked)}
        with pytest.raises(UserError, match=message):
            fit(request_of(source, clusters, **more), tmp_path / "run", force=True)
        assert {name: (tmp_path / "run" / name).read_bytes() for name in FILES} == before

    refused("6 clusters need as many images, got 5", folder, 6)
    refused("nowhere is not a run folder", init_from=str(tmp_path / "nowhere"))
    refused("empty has no model yet", init_from=str(tmp_path / "empty"))
    refused("has no head of 4 clusters", clusters=4, init_from=str(finished.path))
    refused("holds another encoder", encoder={"dim": 16}, init_from=str(finished.path))
    refused("is the run that force would replace", init_from=str(tmp_path / "run"))
    refused("data.mean: 3 values", data={"mean": [0.5, 0.5, 0.5]})
    refused("data.name: 'digits' cannot be a setting here", data={"name": "digits"})
    refused("there are no labels to start from", heads=[3], selflabel={"confidence": 0.9})


# Interruptions


@pytest.mark.parametrize("steps", [1, 3, 10, 20])
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(finished, pictures, tmp_path, monkeypatch, steps):
    """7 steps an epoch, and a checkpoint after each."""
    monkeypatch.setattr("secu.train.CHECKPOINT_SECONDS", -1)
    request = request_of(pictures, labels="folder", cache=finished.path.parent / "cache")
    with pytest.raises(KeyboardInterrupt):
        fit(request, tmp_path / "run", listener=Interrupt(steps))
    assert not (tmp_path / "run" / "assignments.csv").exists()
    heard = Silent()
    run, model, results = fit(request, tmp_path / "run", resume=True, listener=heard)
    assert model.finished
    assert results is not None
    assert heard.epochs == 3 - (steps - 1) // 7
    assert tree(run.path) == FILES
    for name in ("model.safetensors", "assignments.csv", "clusters.csv", "config.yaml", "exemplars.png"):
        assert (run.path / name).read_bytes() == (finished.path / name).read_bytes(), name


def test_an_interruption_while_decoding_leaves_nothing_and_costs_nothing(finished, pictures, tmp_path):
    def stop(done, total):
        if done == 50:
            raise KeyboardInterrupt

    request = request_of(pictures, labels="folder", cache=tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        fit(request, tmp_path / "run", progress=stop)
    assert tree(tmp_path) == ["cache"]
    run, _, _ = fit(request, tmp_path / "run", resume=True)
    assert model_bytes(run) == model_bytes(finished)


def test_an_interruption_while_writing_the_report_can_be_resumed(finished, pictures, tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    request = request_of(pictures, labels="folder", cache=finished.path.parent / "cache")
    with monkeypatch.context() as patch:
        patch.setattr("secu.results.write_report", stop)
        with pytest.raises(KeyboardInterrupt):
            fit(request, tmp_path / "run")
    assert not (tmp_path / "run" / "report.html").exists()
    heard = Silent()
    fit(request, tmp_path / "run", resume=True, listener=heard)
    assert heard.epochs == 0
    assert tree(tmp_path / "run") == FILES
    assert (tmp_path / "run" / "assignments.csv").read_bytes() == (finished.path / "assignments.csv").read_bytes()


def test_the_time_limit_stops_with_a_checkpoint_and_without_results(finished, pictures, tmp_path):
    request = request_of(pictures, labels="folder", cache=finished.path.parent / "cache")
    run, model, results = fit(request, tmp_path / "run", time_limit=1e-9)
    assert (model.finished, model.epochs_done, results) == (False, 1, None)
    assert tree(run.path) == [
        "config.yaml",
        "images.json",
        "metrics.jsonl",
        "model.safetensors",
        "run.json",
        "state.pt",
    ]
    run, model, results = fit(request, tmp_path / "run", resume=True)
    assert model.finished
    assert model_bytes(run) == model_bytes(finished)


def test_a_resumed_run_does_not_need_the_run_it_started_from(finished, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr("secu.train.CHECKPOINT_SECONDS", -1)
    shutil.copytree(finished.path, tmp_path / "first")
    request = request_of(pictures, overrides=merge(SHORT, {"init_from": str(tmp_path / "first")}))
    with pytest.raises(KeyboardInterrupt):
        fit(request, tmp_path / "run", listener=Interrupt(10))
    shutil.rmtree(tmp_path / "first")
    assert fit(request, tmp_path / "run", resume=True)[1].finished


# The cache, and images that change


def test_images_are_decoded_once(pictures, tmp_path):
    calls = []
    request = request_of(pictures, cache=tmp_path / "cache")
    for name in ("first", "second"):
        fit(request, tmp_path / name, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(number, 200) for number in range(1, 201)]
    assert model_bytes(Run.open(tmp_path / "first")) == model_bytes(Run.open(tmp_path / "second"))


def test_a_changed_image_is_decoded_again_and_the_run_is_not_resumed_over_it(pictures, tmp_path):
    folder = few(pictures, tmp_path / "p", 40)
    request = request_of(folder, cache=tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        fit(request, tmp_path / "run", listener=Interrupt(1))
    changed = sorted(folder.iterdir())[0]
    Image.new("L", (8, 8), 255).save(changed)
    os.utime(changed, (1, 1))
    calls = []
    message = (
        rf"resume: the images changed since .*run began: 1 changed \(first {changed.name}\); restore them, or begin"
    )
    with pytest.raises(UserError, match=message):
        fit(request, tmp_path / "run", resume=True, progress=lambda done, total: calls.append(done))
    assert len(calls) == 40
    Image.new("RGB", (32, 32), "red").save(changed)  # another size, and the first in colour
    with pytest.raises(UserError, match=message):
        fit(request, tmp_path / "run", resume=True)
    larger = request_of(folder, cache=tmp_path / "cache", overrides=merge(SHORT, {"data": {"image_size": 9}}))
    with pytest.raises(UserError, match=r"was started with data.image_size=8, got data.image_size=9"):
        fit(larger, tmp_path / "run", resume=True)


def test_images_that_vanished_are_missed_when_resuming(pictures, tmp_path):
    folder = few(pictures, tmp_path / "p", 40)
    request = request_of(folder, cache=tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        fit(request, tmp_path / "run", listener=Interrupt(1))
    for name in sorted(folder.iterdir())[:5]:
        name.unlink()
    (folder / "x.png").write_bytes(sorted(folder.iterdir())[0].read_bytes())
    with pytest.raises(
        UserError, match=r"the images changed since .* began: 5 gone \(first 0.png\), 1 new \(first x.png"
    ):
        fit(request, tmp_path / "run", resume=True)


def test_copied_images_are_the_same(pictures, tmp_path):
    """A copy has another time, and the same pixels."""
    folder = few(pictures, tmp_path / "p", 40)
    request = request_of(folder, cache=tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        fit(request, tmp_path / "run", listener=Interrupt(1))
    for name in folder.iterdir():
        os.utime(name, (1, 1))
    assert fit(request, tmp_path / "run", resume=True)[1].finished


# Back from a run to its images


def test_the_images_of_a_run_are_found_again(finished, pictures):
    images = images_of(finished)
    assert len(images) == 200
    assert images.targets is not None
    assert list(images.ids) == [row["id"] for row in rows_of(finished.path / "assignments.csv")]


def found_again(run):
    """Return the images of a run, and what was told of them."""
    told = []
    return images_of(run, tell=told.append), told


@pytest.mark.parametrize("kind", ["folder", "table", "archive", "array"])
def test_images_that_came_later_are_none_of_the_runs(pictures, tmp_path, kind):
    folder = few(pictures, tmp_path / "p", 30)
    (folder / "bad.png").write_text("x")

    def source():
        if kind == "array":
            pixels = np.stack([np.asarray(Image.open(name).convert("L").resize((8, 8))) for name in good()])
            np.save(tmp_path / "a.npy", pixels)
            return tmp_path / "a.npy"
        make = {"folder": lambda: folder, "table": lambda: write_manifest(tmp_path / "t.csv", folder)}
        return make.get(kind, lambda: write_zip(tmp_path / "a.zip", folder))()

    def good():
        names = sorted(name for name in folder.iterdir() if name.name != "bad.png")
        return sorted(names, key=lambda name: name.name.startswith("z"))  # an array can only grow at its end

    run = fitted(tmp_path, source(), allow_bad=True)
    expected = images_of(run)
    Image.new("RGB", (50, 50), "red").save(folder / "z1.png")  # the run is grey
    Image.new("RGB", (50, 50), "red").save(folder / ("0.5.png" if kind != "array" else "z2.png"))
    shutil.copy(good()[0], folder / "bad.png")  # it can be read at last, but was not trained on
    source()
    images, told = found_again(run)
    assert (images.ids, told) == (expected.ids, [])
    assert torch.equal(images.pixels, expected.pixels)
    assert (images.paths != ()) == (kind in ("folder", "table"))


def test_the_cache_of_a_run_is_found_again_beside_new_images(pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("SECU_DATA", str(tmp_path))
    folder = few(pictures, tmp_path / "p", 30)
    (folder / "bad.png").write_text("x")
    run, _, _ = fit(request_of(folder), tmp_path / "run", report=False)
    shutil.copy(folder / "0.png", folder / "00.png")
    assert len(images_of(run)) == 30  # decodes all that is there now, for whoever comes next
    monkeypatch.setattr("secu.data.own.build", lambda *parts: pytest.fail("decoded again"))
    assert len(images_of(run)) == 30
    other, _, _ = fit(request_of(folder), tmp_path / "other", report=False)
    assert (len(images_of(other)), len(images_of(run))) == (31, 30)


def test_an_array_of_which_a_row_changed_is_found_again_by_both_runs(tmp_path, monkeypatch):
    """Also where the rows that are left are not its beginning."""
    monkeypatch.setenv("SECU_DATA", str(tmp_path))
    array = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8)
    np.save(tmp_path / "a.npy", array)
    run, _, _ = fit(request_of(tmp_path / "a.npy"), tmp_path / "run", report=False)
    array[5] = 0
    np.save(tmp_path / "a.npy", array)
    left = [str(i) for i in range(40) if i != 5]
    assert list(images_of(run).ids) == left
    second, _, _ = self_label(run, tmp_path / "second", {"optim": {"epochs": 1}}, device="cpu", report=False)
    assert list(images_of(second).ids) == left


def test_images_that_are_gone_or_changed_are_left_out_and_told(pictures, tmp_path):
    folder = few(pictures, tmp_path / "p", 30)
    run = fitted(tmp_path, folder, labels=None)
    names = [row["id"] for row in rows_of(run.path / "assignments.csv")]
    for name in names[3:5]:
        (folder / name).unlink()
    Image.new("L", (8, 8), 200).save(folder / names[7])
    (folder / names[9]).write_text("x")
    images, told = found_again(run)
    assert list(images.ids) == [name for i, name in enumerate(names) if i not in (3, 4, 7, 9)]
    assert [Path(path).name for path in images.paths] == list(images.ids)
    gone, changed = f"2 gone (first {names[3]})", f"2 changed (first {names[7]})"
    assert told == [f"4 of 30 images of the run are left out: {gone}, {changed}"]
    for name in folder.iterdir():
        Image.new("L", (8, 8), 200).save(name)
    with pytest.raises(UserError, match=r"none of the images that .*run was trained on is in .*p as it was"):
        images_of(run)
    for name in folder.iterdir():
        name.rename(folder / f"x{name.name}")
    with pytest.raises(UserError, match=r"none of the images that .*run was trained on is in .*p as it was"):
        images_of(run)


def test_names_that_are_not_utf8_are_found_again(pictures, tmp_path):
    folder = few(pictures, tmp_path / "p", 12)
    (folder / "0.png").rename(folder / os.fsdecode(b"a\xff\n.png"))
    run = fitted(tmp_path, folder)
    images, told = found_again(run)
    assert (len(images), told) == (12, [])


def test_labels_are_those_of_the_runs_images(pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "p")
    run = fitted(tmp_path, tmp_path / "p", labels="folder")
    (tmp_path / "p" / "00").mkdir()
    shutil.copy(tmp_path / "p" / "0" / "0.png", tmp_path / "p" / "00")
    images = images_of(run)
    assert images.class_names == ("0", "1", "4")
    assert [images.class_names[t] for t in images.targets.tolist()] == [name.split("/")[0] for name in images.ids]


def test_a_run_of_before_takes_what_lies_there(finished, tmp_path):
    """It has neither a list of its images nor data.channels."""
    shutil.copytree(finished.path, tmp_path / "run")
    run = Run.open(tmp_path / "run")
    (run.path / "images.json").unlink()
    text = (run.path / "config.yaml").read_text()
    (run.path / "config.yaml").write_text(text.replace("  channels: 1\n", "").replace("  values: null\n", ""))
    assert (run.config().data.channels, run.config().data.shape) == (None, (1, 8, 8))
    assert torch.equal(images_of(run).pixels, images_of(finished).pixels)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_damaged_list_of_images_is_named(finished, tmp_path, text):
    shutil.copytree(finished.path, tmp_path / "run")
    (tmp_path / "run" / "images.json").write_text(text)
    with pytest.raises(UserError, match=r"images.json is not a list of images"):
        images_of(Run.open(tmp_path / "run"))


def test_the_scale_of_an_array_is_noted(tmp_path):
    np.save(tmp_path / "a.npy", digits(30)[0].astype(np.float32))
    run = fitted(tmp_path, tmp_path / "a.npy")
    assert run.config().data.values == "float 0..255"
    np.save(tmp_path / "b.npy", digits(30)[0].astype(np.uint16) * 256)
    deep, _, _ = fit(request_of(tmp_path / "b.npy"), tmp_path / "b", report=False)
    assert deep.config().data.values == "int 0..65535"
    asked = merge(SHORT, {"data": {"values": "int 0..65535"}})
    np.save(tmp_path / "c.npy", digits(30)[0].astype(np.uint16))
    dark, _, _ = fit(request_of(tmp_path / "c.npy", overrides=asked), tmp_path / "c", report=False)
    assert images_of(dark).pixels.max() == 0


def test_grey_can_be_asked_for(tmp_path):
    asked = merge(SHORT, {"data": {"channels": 1}})
    run = fitted(tmp_path, write_folder(tmp_path / "colour", 30, colour=True), overrides=asked)
    assert run.config().data.shape == (1, 8, 8)
    assert images_of(run).shape == (1, 8, 8)


def test_the_images_of_an_experiment_are_found_again(tmp_path):
    from secu.settings import load_config

    run = Run.create(tmp_path / "run", load_config("digits"))
    assert torch.equal(images_of(run, "all").fetch(torch.arange(5)), load("digits", "all").fetch(torch.arange(5)))


def test_images_that_are_gone_are_one_line(finished, tmp_path):
    shutil.copytree(finished.path, tmp_path / "run")
    text = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(text.replace(str(finished.config().data.source), "/gone/pictures"))
    with pytest.raises(UserError, match="/gone/pictures does not exist"):
        images_of(Run.open(tmp_path / "run"))


# Plans for real sources


def test_a_plan_looks_at_the_images(pictures, tmp_path):
    source, plan = plan_for(request_of(pictures, overrides={}))
    assert len(source) == 200
    assert (plan.config.data.image_size, plan.config.augment.flip_prob, plan.config.heads) == (8, 0, (3, 6, 9))
    _, colour = plan_for(request_of(write_folder(tmp_path / "c", 20, colour=True), overrides={}))
    assert colour.config.augment.flip_prob == 0.5


def test_a_plan_writes_nothing(pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECU_DATA", str(tmp_path / "data"))
    plan_for(request_of(pictures, overrides={}))
    assert tree(tmp_path) == []


def test_mean_and_deviation_are_those_of_the_pixels(finished, pictures):
    pixels = np.stack([np.asarray(Image.open(name)) for name in pictures.rglob("*.png")]) / 255
    config = finished.config()
    assert config.data.mean == (pytest.approx(pixels.mean(), abs=6e-5),)
    assert config.data.std == (pytest.approx(pixels.std(), abs=2e-4),)


def test_images_of_one_colour_do_not_divide_by_zero(tmp_path):
    np.save(tmp_path / "a.npy", np.full((20, 8, 8), 7, np.uint8))
    run = fitted(tmp_path, tmp_path / "a.npy", 2)
    assert run.config().data.std == (0.01,)
    with (run.path / "assignments.csv").open() as file:
        assert all(np.isfinite(float(row["cosine"])) for row in csv.DictReader(file))


def test_a_run_that_lies_among_the_images_is_none_of_them(tmp_path):
    pictures = write_folder(tmp_path / "p", 30)
    before = open_source(pictures).ids
    fitted(pictures, pictures)
    assert (pictures / "run" / "exemplars.png").is_file()
    assert open_source(pictures).ids == before


@pytest.mark.parametrize(
    ("kind", "asked", "told"),
    [
        ("float", "int 0..255", "holds float 0..1, not int 0..255"),
        ("uint8", "int 0..16", "holds int 0..255, not int 0..16"),
        ("uint8", "int 0..4095", None),
        ("files", "float 0..1", "has no values to be taken in another way, not float 0..1"),
    ],
)
def test_values_can_be_asked_for_only_if_they_can_be_so(tmp_path, kind, asked, told):
    images = digits(20)[0]
    if kind == "files":
        source = write_folder(tmp_path / "p", 20)
    else:
        source = tmp_path / "a.npy"
        np.save(source, images / np.float32(255) if kind == "float" else images)
    request = Request(str(source), 2, overrides={"data": {"values": asked}})
    if told is None:
        assert plan_for(request)[1].config.data.values == asked
        return
    with pytest.raises(UserError, match=f"data.values: .* {told}"):
        plan_for(request)
