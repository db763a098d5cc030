"""Runs on sources in many files, and runs that decode images in every epoch: fit, predict, sort and report."""

import shutil
from pathlib import Path

import pytest

from own_images import SHORT, fit_now, request_of, rows_of
from secu.apps.images import images_of
from secu.apps.plan import Facts, make_plan
from secu.apps.predict import predict_source
from secu.apps.reading import room_for
from secu.apps.sort import sort_run
from secu.base.errors import UserError
from secu.data import open_source
from secu.results.results import find_results, write_report
from secu.settings import merge
from secu.train.checkpoint import load_predictor
from secu.train.listener import Listener
from shard_files import NAMES, pictures, write_files, write_parquet, write_shards
from small_runs import CPU

pytestmark = pytest.mark.usefixtures("quick_map")
TINY = merge(SHORT, {"heads": [3], "data": {"image_size": 8}, "optim": {"batch_size": 8}})
ON_DEMAND = merge(TINY, {"data": {"on_demand": True}})


@pytest.fixture(autouse=True)
def own_data(tmp_path, monkeypatch):
    monkeypatch.setenv("SECU_DATA", str(tmp_path / "data"))


def write(kind: str, folder: Path) -> str:
    images = pictures()
    if kind == "files":
        return str(write_files(folder, images))
    return write_shards(folder, images) if kind == "tar" else str(write_parquet(folder, images, paths=False))


def fitted(source, out: Path, overrides=ON_DEMAND, **more):
    finished = fit_now(request_of(source, overrides=overrides, encoder="scratch", **more), out)
    assert finished.results is not None
    return finished.run


@pytest.mark.parametrize("kind", ["files", "tar", "parquet"])
def test_every_kind_of_source_is_fitted_predicted_sorted_and_reported(tmp_path, kind):
    source = write(kind, tmp_path / "p")
    run = fitted(source, tmp_path / "run", labels="folder" if kind == "files" else None)
    rows = rows_of(run.path / "assignments.csv")
    assert len(rows) == 24
    assert sorted({row["label"] for row in rows}) == (["0", "1", "2"] if kind == "tar" else sorted(NAMES))
    assert run.config().data.on_demand
    predict_source(run, open_source(source), str(tmp_path / "new.csv"), "cpu")
    again = {row["id"]: row["cluster"] for row in rows_of(tmp_path / "new.csv")}
    assert again == {row["id"]: row["cluster"] for row in rows}
    assert sort_run(run, tmp_path / "sorted", copy=True, device="cpu") == 24
    files = [path for path in (tmp_path / "sorted").rglob("*") if path.is_file()]
    assert sorted(path.read_bytes() for path in files) == sorted(pictures())
    assert {path.suffix for path in files} <= {".png", ".jpg", ".jpeg"}
    (run.path / "report.html").unlink()
    images = images_of(run, Listener(), device="cpu")
    assert write_report(run, find_results(run, load_predictor(run, CPU), images)).is_file()


def test_the_same_images_give_the_same_run_whether_cached_or_decoded_on_demand(tmp_path):
    source = write("files", tmp_path / "p")
    cached = fitted(source, tmp_path / "cached", TINY)
    on_demand = fitted(source, tmp_path / "on-demand")
    assert (cached.path / "model.safetensors").read_bytes() == (on_demand.path / "model.safetensors").read_bytes()
    assert cached.config().data.on_demand is None


def test_a_broken_image_is_left_out_of_the_results(tmp_path):
    source = Path(write("files", tmp_path / "p"))
    (source / "dog" / "001.jpg").write_bytes(b"no image")
    run = fitted(source, tmp_path / "run")
    ids = [row["id"] for row in rows_of(run.path / "assignments.csv")]
    assert len(ids) == 23
    assert "dog/001.jpg" not in ids
    assert [row["id"] for row in rows_of(run.path / "skipped.csv")] == ["dog/001.jpg"]
    assert "1 of 24 images (4.17%) could not be read" in run.warnings()[0]
    assert sort_run(run, tmp_path / "sorted", copy=False, device="cpu") == 23
    with pytest.raises(UserError, match=r"dog/001.jpg cannot be read: not an image"):
        fitted(source, tmp_path / "strict", merge(ON_DEMAND, {"data": {"strict": True}}))
    with pytest.raises(UserError, match=r"dog/001.jpg cannot be read: not an image .*\(data.strict\)"):
        fitted(source, tmp_path / "strict", merge(TINY, {"data": {"strict": True}}))
    assert not (tmp_path / "strict" / "model.safetensors").exists()


def test_views_are_cut_out_of_the_originals_in_shards(tmp_path):
    whole = merge(ON_DEMAND, {"augment": {"crop_from": "original"}})
    runs = [fitted(write(kind, tmp_path / kind), tmp_path / f"run-{kind}", whole) for kind in ("tar", "files")]
    assert all(run.config().augment.crop_from == "original" for run in runs)
    with pytest.raises(UserError, match="needs one file per image, or tar shards"):
        fitted(write("parquet", tmp_path / "parquet"), tmp_path / "run", whole)


# The rule


def plan(images: int, room: int | None, **data):
    return make_plan(Facts(images, 500, 3, "cuda", room=room), 10, None, {"data": data})


def test_images_are_decoded_in_every_epoch_if_the_cache_would_fill_the_disk():
    size = 1000 * 3 * 128 * 128
    fits = plan(1000, 2 * size)
    assert fits.config.data.on_demand is None
    assert "decoding: once, into a cache of 49.2 MB; 98.3 MB are free" in fits.reasons
    assert "decoding: once, into a cache of 983.0 kB; 80.0 GB are free" in plan(20, 80 * 10**9).reasons
    too_large = plan(1000, 2 * size - 1)
    assert too_large.config.data.on_demand is True
    assert any(text.startswith("data.on_demand=true: a cache of decoded images would") for text in too_large.reasons)
    assert "decoding: in every epoch, as requested" in plan(1000, 2 * size, on_demand=True).reasons
    assert plan(1000, 0, on_demand=False).config.data.on_demand is False
    assert plan(1000, None).config.data.on_demand is None
    assert too_large.seconds >= fits.seconds


def test_the_room_for_a_cache(tmp_path, monkeypatch):
    folder = write("files", tmp_path / "p")
    source = open_source(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**9, 0, 10**6))
    cache = tmp_path / "cache" / "images"
    assert room_for(source, cache) == 10**6
    fitted(folder, tmp_path / "run", TINY, cache=cache)
    assert room_for(source, cache) > 10**6  # the cache of these images is replaced, or used again
    assert room_for(open_source("dataset:digits"), cache) is None
    assert room_for(source.replaced(random_order=False), cache) is None


def test_a_resumed_run_decodes_as_before(tmp_path, monkeypatch):
    source = write("files", tmp_path / "p")
    monkeypatch.setattr("secu.apps.reading.CACHE_SHARE", 0)
    run = fitted(source, tmp_path / "run", TINY)
    assert run.config().data.on_demand is True
    monkeypatch.setattr("secu.apps.reading.CACHE_SHARE", 1)
    again = fit_now(request_of(source, overrides=TINY, encoder="scratch"), tmp_path / "run", resume=True)
    assert again.run.config().data.on_demand is True
    assert again.results.embeddings.isfinite().all()
