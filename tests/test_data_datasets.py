"""Named data sets: names, splits, places, shapes, and the same kind of images as from any other source."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from secu.base.errors import UserError
from secu.config import DataConfig
from secu.data import Images, data_root, default_cache, load, load_images, open_source, remember, shape_of, splits_of
from secu.data.sources.datasets import DATASETS, PartsSource
from secu.data.sources.formats import Part


def load_dataset(name, split=None, root=None, **settings):
    return load(DataConfig(source=f"dataset:{name}", **settings), split, root)


def test_unknown_name_and_split_list_the_valid_ones(tmp_path):
    message = r"unknown data set 'cifar-10'; did you mean cifar10\? valid: cifar10, cifar100,"
    for call in (load_dataset, lambda name, *_: splits_of(f"dataset:{name}")):
        with pytest.raises(UserError, match=message):
            call("cifar-10", "train", tmp_path)
    with pytest.raises(UserError, match=r"digits has no split 'tets'; did you mean test\? valid: all, test, train$"):
        load_dataset("digits", "tets", tmp_path)
    with pytest.raises(UserError, match=r"digits has no split 'tets'"):
        load_dataset("digits", train="tets")


def test_a_split_defaults_to_the_one_to_train_on(tmp_path):
    for split, color in (("train", 10), ("test", 20)):
        path = tmp_path / split / "a" / "x.png"
        path.parent.mkdir(parents=True)
        Image.new("L", (8, 8), color).save(path)
    for settings, color in (({}, 10), ({"train": "test"}, 20)):
        images = load_dataset("imagenet", None, tmp_path, image_size=4, **settings)
        assert images.fetch(torch.tensor([0])).unique().tolist() == [color]
    assert list(open_source("dataset:imagenet", root=tmp_path).paths) == [str(tmp_path / "train" / "a" / "x.png")]


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "cifar100-20", "stl10"])
def test_missing_data_set_says_what_to_run(tmp_path, name):
    with pytest.raises(UserError) as caught:
        load_dataset(name, "train", tmp_path)
    assert str(caught.value) == f"{name}: not found under {tmp_path}; run: secu data {name} --data {tmp_path}"


def test_splits_are_known_without_opening_anything():
    assert splits_of("dataset:cifar10") == ("train", "test")
    assert splits_of("dataset:stl10") == ("train", "test", "unlabeled", "train+unlabeled")
    for name in (None, "/some/folder", "*.png", "C:\\pictures", "other:thing"):
        assert splits_of(name) == ()


def test_what_has_no_splits_takes_none(tmp_path):
    Image.new("L", (2, 2)).save(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"split: .* has no splits, got 'test'"):
        open_source(tmp_path, split="test")


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({"source": "dataset:cifar10"}, (3, 32, 32)),
        ({"source": "dataset:digits", "mean": [0.1, 0.2, 0.3]}, (1, 8, 8)),
        ({"source": "dataset:imagenet"}, (3, 256, 256)),
        ({"source": "dataset:imagenet", "image_size": 64}, (3, 64, 64)),
        ({"source": "dataset:stl10", "channels": 1}, (1, 96, 96)),
        ({"source": "/pictures", "image_size": 24, "channels": 3}, (3, 24, 24)),
        ({"image_size": 24, "mean": [0.1]}, (1, 24, 24)),  # an old run did not store data.channels
        ({"image_size": 24, "mean": [0.1, 0.2, 0.3], "std": [1, 1, 1]}, (3, 24, 24)),
    ],
)
def test_the_shape_follows_from_the_settings_alone(settings, shape):
    assert shape_of(DataConfig(**settings)) == shape


def test_a_shape_that_the_settings_do_not_say():
    with pytest.raises(UserError, match=r"data.image_size: must be a number of pixels for data.source=/pictures"):
        shape_of(DataConfig(source="/pictures", channels=3))


def test_images_in_memory_cannot_be_loaded_again():
    with pytest.raises(UserError, match=r"data.source: must be dataset:NAME, a folder or another source, got null"):
        load(DataConfig(image_size=8))


def test_digits_are_all_there_in_every_split(tmp_path):
    official = load_digits()
    for split in splits_of("dataset:digits"):
        images = load_dataset("digits", split, tmp_path)
        assert len(images) == 1797
        assert images.shape == (1, 8, 8) == DATASETS["digits"].shape
        assert images.targets.tolist() == official.target.tolist()
    pixels = images.tensor[:, 0].numpy()
    assert np.array_equal(pixels, np.rint(official.images * (255 / 16)))
    assert images.class_names == tuple("0123456789")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("size", "channels"), [(16, 1), (5, 3), (8, 3)])
def test_another_size_goes_through_the_decoder(size, channels):
    small = load_dataset("digits").tensor
    images = load_dataset("digits", image_size=size, channels=channels)
    assert images.shape == (channels, size, size)
    for i in range(0, 1797, 300):
        square = Image.fromarray(small[i, 0].numpy()).resize((size, size), Image.Resampling.BILINEAR)
        assert np.array_equal(images.tensor[i], np.broadcast_to(np.asarray(square), images.shape))


def test_parts_are_joined_whatever_their_layout():
    random = np.random.default_rng(0)
    one = random.integers(0, 256, (1030, 3, 4, 4), dtype=np.uint8)
    two = random.integers(0, 256, (4, 3, 4, 4), dtype=np.uint8).swapaxes(2, 3)
    two.flags.writeable = False
    source = PartsSource("x", [Part(one, np.arange(1030)), Part(two, None)], ())
    both = np.concatenate([one, two])
    images = load_images(source, (3, 4, 4))
    assert np.array_equal(images.tensor, both)
    assert images.targets.tolist() == [*range(1030), -1, -1, -1, -1]
    for i in (0, 1029, 1030, 1033):
        assert np.array_equal(source.read(i), both[i].transpose(1, 2, 0))
    assert np.array_equal(source.ready(slice(1028, 1032), (3, 4, 4)), both[1028:1032])


def test_a_data_set_and_a_folder_are_the_same_kind_of_images(tmp_path):
    """What is known of an image does not depend on where it comes from."""
    named = load_dataset("digits").select(range(20))
    for i, target in enumerate(named.targets.tolist()):
        folder = tmp_path / "p" / named.class_names[target]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(named.original(i)).save(folder / f"{i}.png")
    source = open_source(tmp_path / "p", labels="folder")
    own = load_images(source, named.shape, cache=tmp_path / "cache")
    assert type(named) is type(own) is Images
    own = own.select(sorted(range(20), key=lambda i: int(Path(own.ids[i]).stem)))
    index = torch.arange(20)
    assert torch.equal(own.fetch(index), named.fetch(index))
    assert torch.equal(own.targets, named.targets)
    assert own.class_names == named.class_names
    assert torch.equal(own.pictures(index, 100), named.pictures(index, 100))
    assert [own.position(i) for i in range(20)] != []
    assert named.ids == tuple(map(str, range(20)))
    assert own.original(3) == tmp_path / "p" / "3" / "3.png"


def test_a_data_set_is_neither_cached_nor_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("SECU_DATA", str(tmp_path))
    reported = []
    images = load(DataConfig(source="dataset:digits"), progress=lambda *a: reported.append(a))
    assert remember(images) == {}
    assert reported == []  # nothing is decoded
    assert list(tmp_path.iterdir()) == []
    assert default_cache() == tmp_path / "images"


# ImageNet


def write(path, level=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (7, 5), (level, level, level)).save(path, "PNG")


@pytest.mark.parametrize("base", ["", "imagenet"])
@pytest.mark.parametrize("test_folder", ["val", "test"])
def test_imagenet_folders(tmp_path, base, test_folder):
    for folder, color in (("train", (200, 0, 0)), (test_folder, (0, 200, 0))):
        path = tmp_path / base / folder / "n01440764" / "x.JPEG"
        path.parent.mkdir(parents=True)
        Image.new("RGB", (300, 280), color).save(path)
    train = load_dataset("imagenet", "train", tmp_path)
    test = load_dataset("imagenet", "test", tmp_path, image_size=32)
    assert train.shape == (3, 256, 256)
    assert test.shape == (3, 32, 32)
    assert train.class_names == ("n01440764",)
    assert train.fetch(torch.tensor([0])).float().mean((0, 2, 3)).tolist() == pytest.approx([200, 0, 0], abs=3)
    assert test.fetch(torch.tensor([0])).float().mean((0, 2, 3)).tolist() == pytest.approx([0, 200, 0], abs=3)


def test_missing_imagenet_says_where_the_folders_go(tmp_path):
    with pytest.raises(UserError, match=r"imagenet: split test not found; put .* into .*imagenet/val/<class>/\*\.JPEG"):
        load_dataset("imagenet", "test", tmp_path)


def test_imagenet_is_sorted_by_class_and_plain_name(tmp_path):
    """As torchvision does, and as runs have always numbered it: 10 comes before 2."""
    names = [
        "b/2.png",
        "b/10.JPEG",
        "a/z.jpg",
        "a/.hidden.png",
        "c/notes.txt",
        ".cache/x.png",
        "top.png",
        "a/b/deep.png",
    ]
    for name in names:
        write(tmp_path / "train" / name)
    images = load_dataset("imagenet", "train", tmp_path, image_size=4)
    assert images.ids == ("a/z.jpg", "b/10.JPEG", "b/2.png")
    assert images.class_names == ("a", "b", "c")  # a class without images keeps its number
    assert images.targets.tolist() == [0, 1, 1]
    assert images.original(1) == tmp_path / "train" / "b" / "10.JPEG"


def test_imagenet_is_decoded_when_it_is_fetched(tmp_path):
    for number in range(40):
        write(tmp_path / "train" / "only" / f"{number:02}.png", number * 6)
    images = load_dataset("imagenet", "train", tmp_path, image_size=3)
    assert images.tensor is None
    assert len(images) == 40
    index = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    batch = images.fetch(index)
    assert batch.dtype == torch.uint8
    assert torch.equal(batch, (index * 6).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 3, 3))
    assert images.select([7, 3]).fetch(torch.tensor([1]))[0, 0, 0, 0] == 18
    assert images.pictures(torch.tensor([2]), 5).shape == (1, 3, 5, 5)  # the originals show more
    assert remember(images) == {}


@pytest.mark.parametrize("content", [b"", b"hello", None])
def test_an_unreadable_file_is_named_when_it_is_fetched(tmp_path, content):
    path = tmp_path / "train" / "cat" / "bad.JPEG"
    for name in ("bad", "good"):
        write(path.with_name(f"{name}.JPEG"))
    path.write_bytes(path.read_bytes()[:36] if content is None else content)
    images = load_dataset("imagenet", "train", tmp_path, image_size=16)
    assert images.fetch(torch.tensor([1])).shape == (1, 3, 16, 16)
    with pytest.raises(UserError, match=r"1 of 2 images .* cannot be read, more than 5%; the last: cat/bad\.JPEG: "):
        images.fetch(torch.tensor([1, 0]))


def test_imagenet_without_class_folders_is_explained(tmp_path):
    write(tmp_path / "train" / "flat.png")
    with pytest.raises(UserError, match=r"no images found in .*train; put them into one folder per class"):
        load_dataset("imagenet", "train", tmp_path)


# Places


def test_data_root_takes_option_then_variable_then_cache(monkeypatch):
    monkeypatch.setenv("SECU_DATA", "/from/variable")
    assert data_root(Path("/from/option")) == Path("/from/option")
    assert data_root(None) == Path("/from/variable")
    monkeypatch.setenv("SECU_DATA", "")
    assert data_root(None).name == "secu"


@pytest.mark.skipif(sys.platform != "linux", reason="platformdirs decides elsewhere")
def test_the_cache_folder_of_linux(monkeypatch):
    monkeypatch.delenv("SECU_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert data_root(None) == Path("/cache/secu")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_root(None) == Path.home() / ".cache" / "secu"


def test_load_reads_from_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("SECU_DATA", str(tmp_path))
    with pytest.raises(UserError, match=f"not found under {tmp_path}"):
        load_dataset("cifar10", "train")


def test_importing_data_leaves_slow_libraries_out():
    code = "import sys, secu.data; print([name for name in ('torch', 'sklearn', 'pyarrow') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_real_cifar10():
    root = Path(os.environ.get("SECU_TEST_DATA") or "/nonexistent")
    if not any((root / folder).is_dir() for folder in ("cifar-10-batches-bin", "cifar-10-batches-py")):
        pytest.skip("set SECU_TEST_DATA to a folder with the real CIFAR-10")
    for split, count in (("train", 50_000), ("test", 10_000)):
        images = load_dataset("cifar10", split, root)
        assert len(images) == count
        assert torch.bincount(images.targets).tolist() == [count // 10] * 10
    assert images.class_names[3] == "cat"
    assert images.targets[:4].tolist() == [3, 8, 8, 0]  # the test split starts with a cat, two ships and a plane
    channels = images.fetch(torch.arange(10_000)).float().mean((0, 2, 3))
    assert channels.tolist() == pytest.approx([126.0, 123.7, 114.9], abs=0.1)
