"""Names, splits and places of data sets."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from secu.data import SPLITS, data_root, load
from secu.errors import UserError


def test_unknown_name_and_split_list_the_valid_ones(tmp_path):
    with pytest.raises(
        UserError, match=r"unknown data set 'cifar-10'; did you mean cifar10\? valid: cifar10, cifar100,"
    ):
        load("cifar-10", "train", tmp_path)
    with pytest.raises(UserError, match=r"digits has no split 'tets'; did you mean test\? valid: all, test, train$"):
        load("digits", "tets", tmp_path)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "cifar100-20", "stl10"])
def test_missing_data_set_says_what_to_run(tmp_path, name):
    with pytest.raises(UserError) as caught:
        load(name, "train", tmp_path)
    assert str(caught.value) == f"{name}: not found under {tmp_path}; run: secu data {name} --data {tmp_path}"


def test_image_size_must_be_positive(tmp_path):
    with pytest.raises(UserError, match="image_size: 0 must be at least 1"):
        load("digits", "all", tmp_path, image_size=0)


def test_digits_are_all_there_in_every_split(tmp_path):
    official = load_digits()
    for split in SPLITS["digits"]:
        images = load("digits", split, tmp_path)
        assert len(images) == 1797
        assert images.shape == (1, 8, 8)
        assert images.targets.tolist() == official.target.tolist()
    pixels = images.fetch(torch.arange(1797))[:, 0].numpy()
    assert pixels.min() == 0
    assert pixels.max() == 255
    assert np.abs(pixels * (16 / 255) - official.images).max() < 0.04
    assert images.class_names == tuple("0123456789")


def test_digits_resized(tmp_path):
    images = load("digits", "all", tmp_path, image_size=16)
    assert images.shape == (1, 16, 16)
    large, small = images.fetch(torch.arange(1797)), load("digits", "all", tmp_path).fetch(torch.arange(1797))
    means = large.float().mean((1, 2, 3)), small.float().mean((1, 2, 3))
    assert torch.corrcoef(torch.stack(means))[0, 1] > 0.99  # each image is still itself
    assert large.float().mean().item() == pytest.approx(small.float().mean().item(), rel=0.02)


@pytest.mark.parametrize("base", ["", "imagenet"])
@pytest.mark.parametrize("test_folder", ["val", "test"])
def test_imagenet_folders(tmp_path, base, test_folder):
    for folder, colour in (("train", (200, 0, 0)), (test_folder, (0, 200, 0))):
        path = tmp_path / base / folder / "n01440764" / "x.JPEG"
        path.parent.mkdir(parents=True)
        Image.new("RGB", (300, 280), colour).save(path)
    train, test = load("imagenet", "train", tmp_path), load("imagenet", "test", tmp_path, image_size=32)
    assert train.shape == (3, 256, 256)
    assert test.shape == (3, 32, 32)
    assert train.class_names == ("n01440764",)
    assert train.fetch(torch.tensor([0])).float().mean((0, 2, 3)).tolist() == pytest.approx([200, 0, 0], abs=3)
    assert test.fetch(torch.tensor([0])).float().mean((0, 2, 3)).tolist() == pytest.approx([0, 200, 0], abs=3)


def test_missing_imagenet_says_where_the_folders_go(tmp_path):
    with pytest.raises(UserError, match=r"imagenet: split test not found; put .* into .*imagenet/val/<class>/\*\.JPEG"):
        load("imagenet", "test", tmp_path)


def test_data_root_takes_option_then_variable_then_cache(monkeypatch):
    monkeypatch.setenv("SECU_DATA", "/from/variable")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.setattr(sys, "platform", "linux")
    assert data_root(Path("/from/option")) == Path("/from/option")
    assert data_root(None) == Path("/from/variable")
    monkeypatch.setenv("SECU_DATA", "")
    assert data_root(None) == Path("/cache/secu")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_root(None) == Path.home() / ".cache" / "secu"


def test_data_root_on_other_systems(monkeypatch):
    monkeypatch.delenv("SECU_DATA", raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert data_root(None) == Path.home() / "Library" / "Caches" / "secu"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    assert data_root(None) == Path("/local/secu")


def test_load_reads_from_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("SECU_DATA", str(tmp_path))
    with pytest.raises(UserError, match=f"not found under {tmp_path}"):
        load("cifar10", "train")


def test_importing_data_leaves_torch_out():
    code = (
        "import sys, secu; before = 'torch' in sys.modules; import secu.data; print(before == ('torch' in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "True"


def test_real_cifar10():
    root = Path(os.environ.get("SECU_TEST_DATA") or "/nonexistent")
    if not any((root / folder).is_dir() for folder in ("cifar-10-batches-bin", "cifar-10-batches-py")):
        pytest.skip("set SECU_TEST_DATA to a folder with the real CIFAR-10")
    for split, count in (("train", 50_000), ("test", 10_000)):
        images = load("cifar10", split, root)
        assert len(images) == count
        assert torch.bincount(images.targets).tolist() == [count // 10] * 10
    assert images.class_names[3] == "cat"
    assert images.targets[:4].tolist() == [3, 8, 8, 0]  # the test split starts with a cat, two ships and a plane
    channels = images.fetch(torch.arange(10_000)).float().mean((0, 2, 3))
    assert channels.tolist() == pytest.approx([126.0, 123.7, 114.9], abs=0.1)
