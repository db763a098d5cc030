"""From a run back to its images: those that are still there unchanged, and nothing else."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from own_images import SHORT, digits, fit_now, fitted, request_of, rows_of, write_folder, write_manifest, write_zip
from secu.apps.images import images_of, images_to_score
from secu.apps.selflabel import self_label
from secu.base.errors import UserError
from secu.config import DataConfig
from secu.data import Images, load, shape_of
from secu.settings import load_config, merge
from secu.train.listener import Listener
from secu.train.run import Run
from small_runs import new_run

pytestmark = pytest.mark.usefixtures("own_cache")


class Notes(Listener):
    """Collects remarks."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text) -> None:
        self.texts.append(text)


def found(run: Run, split: str | None = None) -> Images:
    """Return the images of a run, all of which must be there."""
    notes = Notes()
    images = images_of(run, notes, split)
    assert notes.texts == []
    return images


def few(pictures: Path, folder: Path, count: int) -> Path:
    """Copy a few of the pictures."""
    folder.mkdir(parents=True)
    for name in sorted(pictures.rglob("*.png"))[:count]:
        shutil.copy(name, folder)
    return folder


def test_the_images_of_a_run_are_found_again(tiny_fit):
    images = found(tiny_fit)
    assert len(images) == 120
    assert images.targets is not None
    assert list(images.ids) == [row["id"] for row in rows_of(tiny_fit.path / "assignments.csv")]


@pytest.mark.parametrize("kind", ["folder", "table", "archive", "array"])
def test_images_that_were_added_later_are_left_out(tiny_pictures, tmp_path, kind):
    folder = few(tiny_pictures, tmp_path / "p", 30)
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
    expected = found(run)
    Image.new("RGB", (50, 50), "red").save(folder / "z1.png")  # the run is gray
    Image.new("RGB", (50, 50), "red").save(folder / ("0.5.png" if kind != "array" else "z2.png"))
    shutil.copy(good()[0], folder / "bad.png")  # it can be read at last, but was not trained on
    source()
    images = found(run)
    assert images.ids == expected.ids
    assert torch.equal(images.tensor, expected.tensor)
    assert isinstance(images.original(0), Path) == (kind in ("folder", "table"))


def test_the_cache_of_a_run_is_found_again_beside_new_images(tiny_pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("SECU_DATA", str(tmp_path))
    folder = few(tiny_pictures, tmp_path / "p", 30)
    (folder / "bad.png").write_text("x")
    run = fit_now(request_of(folder), tmp_path / "run", report=False).run
    shutil.copy(folder / "0.png", folder / "00.png")
    assert len(found(run)) == 30  # decodes everything that is there now, for whoever comes next
    monkeypatch.setattr("secu.data.cache._build", lambda *parts: pytest.fail("decoded again"))
    assert len(found(run)) == 30
    other = fit_now(request_of(folder), tmp_path / "other", report=False).run
    assert (len(found(other)), len(found(run))) == (31, 30)


def test_an_array_of_which_a_row_changed_is_found_again_by_both_runs(tmp_path, monkeypatch):
    """The rows that are left are not its beginning."""
    monkeypatch.setenv("SECU_DATA", str(tmp_path))
    array = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8)
    np.save(tmp_path / "a.npy", array)
    run = fit_now(request_of(tmp_path / "a.npy"), tmp_path / "run", report=False).run
    array[5] = 0
    np.save(tmp_path / "a.npy", array)
    left = [str(i) for i in range(40) if i != 5]
    notes = Notes()
    assert list(images_of(run, notes).ids) == left
    assert notes.texts == ["1 of 40 images of the run are left out: 1 changed (first 5)"]
    second = self_label(run, tmp_path / "second", {"optim": {"epochs": 1}}, device="cpu", report=False).run
    assert list(found(second).ids) == left


def test_images_that_are_gone_or_changed_are_left_out_and_reported(tiny_pictures, tmp_path):
    folder = few(tiny_pictures, tmp_path / "p", 30)
    run = fitted(tmp_path, folder, labels=None)
    names = [row["id"] for row in rows_of(run.path / "assignments.csv")]
    for name in names[3:5]:
        (folder / name).unlink()
    Image.new("L", (8, 8), 200).save(folder / names[7])
    (folder / names[9]).write_text("x")
    notes = Notes()
    images = images_of(run, notes)
    assert list(images.ids) == [name for i, name in enumerate(names) if i not in (3, 4, 7, 9)]
    assert [images.original(i).name for i in range(len(images))] == list(images.ids)
    gone = f"2 gone (first {names[3]})"
    changed = f"2 changed (first {names[7]})"
    assert notes.texts == [f"4 of 30 images of the run are left out: {gone}, {changed}"]


@pytest.mark.parametrize("kind", ["changed", "renamed"])
def test_a_run_none_of_whose_images_is_left_cannot_find_them(tiny_pictures, tmp_path, kind):
    folder = few(tiny_pictures, tmp_path / "p", 6)
    run = fitted(tmp_path, folder)
    for name in list(folder.iterdir()):
        if kind == "changed":
            Image.new("L", (8, 8), 200).save(name)
        else:
            name.rename(folder / f"x{name.name}")
    with pytest.raises(UserError, match=r"all training images of .*run are missing or have changed"):
        images_of(run, Listener())


def test_names_that_are_not_utf8_are_found_again(tiny_pictures, tmp_path):
    folder = few(tiny_pictures, tmp_path / "p", 12)
    (folder / "0.png").rename(folder / os.fsdecode(b"a\xff\n.png"))
    run = fitted(tmp_path, folder)
    assert len(found(run)) == 12


def test_labels_are_those_of_the_runs_images(tiny_pictures, tmp_path):
    shutil.copytree(tiny_pictures, tmp_path / "p")
    run = fitted(tmp_path, tmp_path / "p", labels="folder")
    (tmp_path / "p" / "00").mkdir()
    shutil.copy(tmp_path / "p" / "0" / "0.png", tmp_path / "p" / "00")
    images = found(run)
    assert images.class_names == ("0", "1", "4")
    assert [images.class_names[t] for t in images.targets.tolist()] == [name.split("/")[0] for name in images.ids]


def test_a_run_that_recorded_no_images_takes_what_is_there(tiny_fit, tmp_path):
    """Runs of early versions have neither images.json nor data.channels."""
    shutil.copytree(tiny_fit.path, tmp_path / "run")
    run = Run.open(tmp_path / "run")
    (run.path / "images.json").unlink()
    text = (run.path / "config.yaml").read_text()
    (run.path / "config.yaml").write_text(text.replace("  channels: 1\n", "").replace("  values: null\n", ""))
    assert (run.config().data.channels, shape_of(run.config().data)) == (None, (1, 8, 8))
    assert torch.equal(found(run).tensor, found(tiny_fit).tensor)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_damaged_list_of_images_is_named(tiny_fit, tmp_path, text):
    shutil.copytree(tiny_fit.path, tmp_path / "run")
    (tmp_path / "run" / "images.json").write_text(text)
    with pytest.raises(UserError, match=r"images.json is damaged: it is not a JSON object"):
        images_of(Run.open(tmp_path / "run"), Listener())


def test_the_range_of_an_array_is_recorded(tmp_path):
    np.save(tmp_path / "a.npy", digits(30)[0].astype(np.float32))
    run = fitted(tmp_path, tmp_path / "a.npy")
    assert run.config().data.values == "float 0..255"
    np.save(tmp_path / "b.npy", digits(30)[0].astype(np.uint16) * 256)
    deep = fit_now(request_of(tmp_path / "b.npy"), tmp_path / "b", report=False).run
    assert deep.config().data.values == "int 0..65535"
    asked = merge(SHORT, {"data": {"values": "int 0..65535"}})
    np.save(tmp_path / "c.npy", digits(30)[0].astype(np.uint16))
    dark = fit_now(request_of(tmp_path / "c.npy", overrides=asked), tmp_path / "c", report=False).run
    assert found(dark).tensor.max() == 0


def test_gray_can_be_asked_for(tmp_path):
    asked = merge(SHORT, {"data": {"channels": 1}})
    run = fitted(tmp_path, write_folder(tmp_path / "color", 30, color=True), overrides=asked)
    assert shape_of(run.config().data) == (1, 8, 8)
    assert found(run).shape == (1, 8, 8)


def test_the_images_of_a_recipe_are_found_again(tiny_digits):
    expected = load(DataConfig(source="dataset:digits"))
    for split in (None, "train", "test", "all"):
        images = found(tiny_digits, split)
        assert torch.equal(images.tensor, expected.tensor)
        assert torch.equal(images.targets, expected.targets)


def test_an_unknown_split_is_reported_as_it_is(tiny_digits):
    with pytest.raises(UserError, match=r"^data: digits has no split 'valid'; .*valid: all, test, train"):
        images_of(tiny_digits, Listener(), "valid")


def test_images_that_are_gone_are_one_line(tiny_fit, tmp_path):
    shutil.copytree(tiny_fit.path, tmp_path / "run")
    text = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(text.replace(str(tiny_fit.config().data.source), "/gone/pictures"))
    message = (
        r"run: its images cannot be found: source: /gone/pictures does not exist.*; "
        r"restore them, or set data.source in .*config.yaml to their new location"
    )
    with pytest.raises(UserError, match=message):
        images_of(Run.open(tmp_path / "run"), Listener())


def test_images_in_memory_cannot_be_found_again(tmp_path):
    run = new_run(tmp_path / "run", load_config("digits", ["data.source=null"]))
    with pytest.raises(UserError, match=r"run: .*run was trained on images in memory, which cannot be reloaded"):
        images_of(run, Listener())


def test_a_run_is_scored_on_the_test_split_or_on_labeled_images(tiny_fit, tiny_digits):
    images = found(tiny_fit)
    assert images_to_score(tiny_fit.config(), images) is images
    assert images_to_score(tiny_fit.config(), Images(images.tensor)) is None
    digits = found(tiny_digits)
    test = images_to_score(tiny_digits.config(), digits)
    assert test is not digits
    assert torch.equal(test.tensor, digits.tensor)
