"""Data sets of the Hugging Face hub, from local folders; nothing is downloaded."""

import importlib.util

import numpy as np
import pytest

from secu.base.errors import UserError
from secu.data import load_images, open_source
from shard_files import NAMES, pictures, write_files, write_parquet

SHAPE = (3, 12, 12)
installed = importlib.util.find_spec("datasets") is not None
needs_datasets = pytest.mark.skipif(not installed, reason="the package datasets (extra hub) is not installed")


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("SECU_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if installed:
        import datasets

        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))


@pytest.mark.skipif(installed, reason="the package datasets is installed")
def test_without_the_package():
    with pytest.raises(UserError, match=r'hf://cifar10 needs the package datasets; .* pip install "secu\[hub\]"'):
        open_source("hf://cifar10")


@needs_datasets
@pytest.mark.parametrize("kind", ["parquet", "saved", "saved splits", "files"])
def test_local_folders(tmp_path, kind):
    import datasets

    images = pictures()
    folder = write_files(tmp_path / "files", images)
    plain = load_images(open_source(folder, "folder"), SHAPE)
    if kind == "parquet":
        folder = write_parquet(tmp_path / "p", images)
    elif kind != "files":
        rows = {"image": [{"bytes": image, "path": None} for image in images], "label": [i % 3 for i in range(24)]}
        features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=list(NAMES)))
        data = datasets.Dataset.from_dict(rows, features)
        folder = tmp_path / "saved"
        (datasets.DatasetDict(train=data) if kind == "saved splits" else data).save_to_disk(folder)
    source = open_source(f"hf://{folder}")
    assert source.place == f"hf://{folder}"
    assert source.class_names == NAMES
    assert source.cacheable
    loaded = load_images(source, SHAPE)
    ours, theirs = (
        sorted(zip(some.targets.tolist(), map(bytes, some.tensor.numpy()), strict=True)) for some in (loaded, plain)
    )
    assert ours == theirs
    assert np.array_equal(open_source(f"hf://{folder}#train").targets, source.targets)
    with pytest.raises(UserError, match=r"has no split 'test'; valid: train"):
        open_source(f"hf://{folder}#test")


@needs_datasets
def test_a_name_without_a_connection():
    with pytest.raises(UserError, match=r"hf://nobody/nothing cannot be loaded: .*local folder: hf://FOLDER") as error:
        open_source("hf://nobody/nothing")
    assert "\n" not in str(error.value)


@needs_datasets
def test_data_without_images(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.csv").write_text("text\nhello\n")
    with pytest.raises(UserError, match=r"hf://.*/d has no column of images; it has text"):
        open_source(f"hf://{tmp_path / 'd'}")
