"""Each official format, written here byte by byte and read back through ``load``."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from secu.base.errors import UserError
from secu.config import DataConfig
from secu.data import load
from secu.data.sources import datasets as names


def load_dataset(name, split, root=None, size=None):
    return load(DataConfig(source=f"dataset:{name}", image_size=size), split, root)


def make_pixels(count: int, side: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3, side, side), dtype=np.uint8)


def write_cifar10_binary(folder: Path, pixels: np.ndarray, labels: list[int], name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    records = [bytes([label]) + image.tobytes() for image, label in zip(pixels, labels, strict=True)]
    (folder / name).write_bytes(b"".join(records))


class Python2Pickler(pickle._Pickler):
    """Writes what Python 2 wrote: bytes and text as its ``str``, numpy under its old module's name."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_old_str(self, value):
        data = value.encode() if isinstance(value, str) else value
        self.write(pickle.BINSTRING + len(data).to_bytes(4, "little") + data)
        self.memoize(value)

    dispatch[bytes] = save_old_str
    dispatch[str] = save_old_str

    def save_global(self, obj, name=None):
        if getattr(obj, "__name__", "") == "_reconstruct":
            self.write(b"cnumpy.core.multiarray\n_reconstruct\n")
            self.memoize(obj)
        else:
            super().save_global(obj, name)

    dispatch[type] = save_global


def dump_python2(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        Python2Pickler(file, protocol=2).dump(content)


def write_cifar10_pickles(root: Path, pixels: np.ndarray, labels: list[int]) -> None:
    folder = root / "cifar-10-batches-py"
    dump_python2(
        folder / "test_batch",
        {b"batch_label": b"testing batch 1 of 1", b"data": pixels.reshape(-1, 3072), b"labels": labels},
    )


def write_stl10(folder: Path, split: str, pixels: np.ndarray, labels: list[int] | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # One byte at a time, in the order the data set's page describes: channel, column, row.
    data = bytearray()
    for image in pixels:
        for channel in range(3):
            for column in range(96):
                data += bytes(image[channel, :, column].tolist())
    (folder / f"{split}_X.bin").write_bytes(data)
    if labels is not None:
        (folder / f"{split}_y.bin").write_bytes(bytes(labels))


def test_cifar10_binary_keeps_pixels_targets_and_the_order_of_files(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    pixels = make_pixels(15, 32)
    labels = [n % 10 for n in range(15)]
    for batch in range(5):
        here = slice(batch * 3, batch * 3 + 3)
        write_cifar10_binary(folder, pixels[here], labels[here], f"data_batch_{batch + 1}.bin")
    write_cifar10_binary(folder, pixels[:2], [9, 0], "test_batch.bin")

    train, test = load_dataset("cifar10", "train", tmp_path), load_dataset("cifar10", "test", tmp_path)

    assert train.shape == (3, 32, 32)
    assert train.class_names == names.CIFAR10
    assert np.array_equal(train.fetch(torch.arange(15)).numpy(), pixels)
    assert train.targets.dtype == torch.int64
    assert train.targets.tolist() == labels
    assert len(test) == 2
    assert test.targets.tolist() == [9, 0]


def test_cifar10_python_2_pickles(tmp_path):
    pixels = make_pixels(4, 32)
    write_cifar10_pickles(tmp_path, pixels, [3, 1, 4, 1])
    images = load_dataset("cifar10", "test", tmp_path)
    assert np.array_equal(images.fetch(torch.arange(4)).numpy(), pixels)
    assert images.targets.tolist() == [3, 1, 4, 1]
    assert images.class_names == names.CIFAR10


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_cifar10_pickles_written_by_python_3(tmp_path, protocol):
    pixels = make_pixels(2, 32)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    content = {"data": pixels.reshape(-1, 3072), b"labels": [1, 2], "filenames": [b"a.png", b"b.png"]}
    (folder / "test_batch").write_bytes(pickle.dumps(content, protocol))
    assert np.array_equal(load_dataset("cifar10", "test", tmp_path).fetch(torch.arange(2)).numpy(), pixels)


def test_binary_layout_wins_over_pickles(tmp_path):
    write_cifar10_pickles(tmp_path, make_pixels(4, 32), [1, 1, 1, 1])
    write_cifar10_binary(tmp_path / "cifar-10-batches-bin", make_pixels(1, 32), [7], "test_batch.bin")
    assert load_dataset("cifar10", "test", tmp_path).targets.tolist() == [7]


@pytest.mark.parametrize("layout", ["binary", "python"])
def test_cifar100_has_fine_and_coarse_targets(tmp_path, layout):
    pixels, coarse, fine = make_pixels(3, 32), [4, 19, 0], [0, 99, 4]
    if layout == "binary":
        folder = tmp_path / "cifar-100-binary"
        folder.mkdir()
        rows = [bytes([c, f]) + image.tobytes() for image, c, f in zip(pixels, coarse, fine, strict=True)]
        (folder / "train.bin").write_bytes(b"".join(rows))
    else:
        folder = tmp_path / "cifar-100-python"
        content = {b"data": pixels.reshape(-1, 3072), b"fine_labels": fine, b"coarse_labels": coarse}
        dump_python2(folder / "train", content)

    classes, groups = load_dataset("cifar100", "train", tmp_path), load_dataset("cifar100-20", "train", tmp_path)

    assert classes.targets.tolist() == fine
    assert groups.targets.tolist() == coarse
    assert [classes.class_names[n] for n in fine] == ["apple", "worm", "beaver"]
    assert [groups.class_names[n] for n in coarse] == ["fruit_and_vegetables", "vehicles_2", "aquatic_mammals"]
    for images in (classes, groups):
        assert np.array_equal(images.fetch(torch.arange(3)).numpy(), pixels)


def test_stl10_splits(tmp_path):
    folder = tmp_path / "stl10_binary"
    labeled, unlabeled = make_pixels(2, 96), make_pixels(3, 96, seed=1)
    write_stl10(folder, "train", labeled, [1, 10])
    write_stl10(folder, "unlabeled", unlabeled, None)

    train, rest = load_dataset("stl10", "train", tmp_path), load_dataset("stl10", "unlabeled", tmp_path)
    both = load_dataset("stl10", "train+unlabeled", tmp_path)

    assert np.array_equal(train.fetch(torch.arange(2)).numpy(), labeled)
    assert train.targets.tolist() == [0, 9]
    assert np.array_equal(rest.fetch(torch.arange(3)).numpy(), unlabeled)
    assert rest.targets is None
    assert np.array_equal(both.fetch(torch.arange(5)).numpy(), np.concatenate([labeled, unlabeled]))
    assert both.targets.tolist() == [0, 9, -1, -1, -1]
    assert train.class_names == names.STL10


def test_stl10_needs_a_label_for_each_image(tmp_path):
    write_stl10(tmp_path / "stl10_binary", "test", make_pixels(1, 96), [1, 2])
    with pytest.raises(UserError, match=r"test_y.bin: must hold 1 labels, as many as test_X.bin has images, got 2"):
        load_dataset("stl10", "test", tmp_path)


@pytest.mark.parametrize("label", [0, 11])
def test_stl10_labels_are_1_to_10(tmp_path, label):
    write_stl10(tmp_path / "stl10_binary", "test", make_pixels(2, 96), [1, label])
    with pytest.raises(UserError, match=f"image 1 has label {label}, valid: 1 to 10"):
        load_dataset("stl10", "test", tmp_path)


def test_class_names_are_the_official_ones(tmp_path):
    write_cifar10_binary(tmp_path / "cifar-10-batches-bin", make_pixels(1, 32), [0], "test_batch.bin")
    assert load_dataset("cifar10", "test", tmp_path).class_names[0] == "airplane"
    assert len(set(names.CIFAR10)) == len(set(names.STL10)) == 10
    assert len(set(names.CIFAR100)) == 100
    assert len(set(names.CIFAR100_COARSE)) == 20
    assert list(names.CIFAR100) == sorted(names.CIFAR100)


@pytest.mark.parametrize("size", [0, 1, 3072, 3074])
def test_partial_record_names_file_and_sizes(tmp_path, size):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "test_batch.bin").write_bytes(bytes(size))
    with pytest.raises(UserError, match=rf"test_batch.bin: {size} bytes .* records of 3073 bytes"):
        load_dataset("cifar10", "test", tmp_path)


def test_missing_file_in_a_folder_that_is_there(tmp_path):
    (tmp_path / "cifar-10-batches-bin").mkdir()
    with pytest.raises(UserError, match=r"data_batch_1.bin: cannot be read: No such file"):
        load_dataset("cifar10", "train", tmp_path)


def test_label_out_of_range(tmp_path):
    write_cifar10_binary(tmp_path / "cifar-10-batches-bin", make_pixels(2, 32), [9, 10], "test_batch.bin")
    with pytest.raises(UserError, match=r"test_batch.bin: image 1 has label 10, valid: 0 to 9"):
        load_dataset("cifar10", "test", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({b"labels": [1, 2, 3]}, "got 2 and 3"),
        ({b"labels": [1, -1]}, "image 1 has label -1, valid: 0 to 9"),
        ({b"labels": [1, 2**70]}, f"image 1 has label {2**70}, valid: 0 to 9"),
        ({b"labels": [1, 2.0]}, "labels must be a list of whole numbers, got list"),
        ({b"labels": b"12"}, "labels must be a list of whole numbers, got bytes"),
        ({b"data": None}, "data must be an array .* got nothing"),
        ({b"data": np.zeros((2, 3072))}, r"data must be an array .* got float64 of shape \(2, 3072\)"),
        ({b"data": np.zeros((2, 3000), np.uint8)}, r"got uint8 of shape \(2, 3000\)"),
        ({b"data": np.zeros((0, 3072), np.uint8), b"labels": []}, "one or more images"),
    ],
)
def test_pickles_with_wrong_contents(tmp_path, change, message):
    content = {b"data": make_pixels(2, 32).reshape(-1, 3072), b"labels": [0, 1]} | change
    dump_python2(tmp_path / "cifar-10-batches-py" / "test_batch", content)
    with pytest.raises(UserError, match=message):
        load_dataset("cifar10", "test", tmp_path)


def test_pickle_must_hold_a_mapping(tmp_path):
    dump_python2(tmp_path / "cifar-10-batches-py" / "test_batch", [1, 2])
    with pytest.raises(UserError, match="must hold a mapping, got list"):
        load_dataset("cifar10", "test", tmp_path)


class Bomb:
    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self):
        return os.mkdir, (str(self.flag),)


def test_hostile_pickle_runs_nothing(tmp_path):
    folder, flag = tmp_path / "cifar-10-batches-py", tmp_path / "ran"
    folder.mkdir()
    (folder / "test_batch").write_bytes(pickle.dumps({b"data": Bomb(flag)}, 2))
    with pytest.raises(UserError, match=r"test_batch: refused: its pickle requires posix\.mkdir|nt\.mkdir"):
        load_dataset("cifar10", "test", tmp_path)
    assert not flag.exists()


@pytest.mark.parametrize("module", ["builtins eval", "numpy.testing assert_equal", "numpy.core.multiarray fromfile"])
def test_pickle_globals_outside_the_list_are_refused(tmp_path, module):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "test_batch").write_bytes(b"\x80\x02c" + module.replace(" ", "\n").encode() + b"\n.")
    with pytest.raises(UserError, match="refused: its pickle requires " + module.replace(" ", ".")):
        load_dataset("cifar10", "test", tmp_path)


def test_damaged_pickles(tmp_path):
    write_cifar10_pickles(tmp_path, make_pixels(1, 32), [0])
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    whole = path.read_bytes()
    for damaged in (b"", whole[:5], whole[:-20], whole[: len(whole) // 2], b"no pickle at all"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"test_batch: is not a valid pickle"):
            load_dataset("cifar10", "test", tmp_path)
