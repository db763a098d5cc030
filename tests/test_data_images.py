"""Images of any kind: what they hold, what they refuse, and sources from outside the package."""

import io
import tarfile
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from secu.base.errors import UserError
from secu.config import DataConfig
from secu.data import (
    ArraySource,
    FileSource,
    Images,
    changes,
    load,
    load_images,
    open_images,
    open_source,
    remember,
    splits_of,
)
from secu.registry import SOURCES


def test_images_fetch_in_the_order_of_the_index():
    pixels = torch.arange(5 * 3 * 2 * 4, dtype=torch.uint8).reshape(5, 3, 2, 4)
    images = Images(pixels, torch.tensor([0, 1, 0, 1, -1]), ("a", "b"))
    assert len(images) == 5
    assert images.shape == (3, 2, 4)
    assert images.ids == ("0", "1", "2", "3", "4")
    assert torch.equal(images.fetch(torch.tensor([4, 0, 4])), torch.stack([pixels[4], pixels[0], pixels[4]]))
    assert images.position(3) == 3
    assert np.array_equal(images.original(1), pixels[1].permute(1, 2, 0))
    assert Images(pixels[:, :1]).original(1).shape == (2, 4)


def test_features_can_be_images():
    features = torch.randn(7, 12)
    images = Images(features, torch.arange(7), ids=[f"row {i}" for i in range(7)])
    assert len(images) == 7
    assert images.shape == (12,)
    assert images.fetch(torch.tensor([2, 2])).equal(features[[2, 2]])
    assert images.fetch(torch.tensor([2])).dtype == torch.float32
    chosen = images.select([6, 0])
    assert chosen.tensor.equal(features[[6, 0]])
    assert chosen.ids == ("row 6", "row 0")
    assert chosen.targets.tolist() == [6, 0]
    assert remember(images) == {}


@pytest.mark.parametrize(
    ("tensor", "targets", "message"),
    [
        (torch.zeros(2), None, r"images: must have shape \(N, …\), got \(2,\)"),
        (torch.zeros(2, 3), torch.zeros(3).long(), r"targets: .* shape \(2,\), got .*\(3,\)"),
        (torch.zeros(2, 3), torch.zeros(2), "targets: must be torch.int64 .* got torch.float32"),
    ],
)
def test_images_refuse_wrong_tensors(tensor, targets, message):
    with pytest.raises(UserError, match=message):
        Images(tensor, targets)


def test_images_cannot_be_changed():
    with pytest.raises(AttributeError):
        Images(torch.zeros(2, 3)).ids = ()


def test_select_keeps_the_classes_that_are_left():
    images = Images(
        torch.arange(8).view(4, 2),
        torch.tensor([2, 0, -1, 1]),
        ("a", "b", "c"),
        columns={"price": [10, 20, 30, 40]},
        skipped=[("x", "bad")],
    )
    some = images.select([3, 2, 0])
    assert some.class_names == ("b", "c")
    assert some.targets.tolist() == [0, -1, 1]
    assert some.columns == {"price": [40, 30, 10]}
    assert some.skipped == [("x", "bad")]
    assert some.ids == ("3", "2", "0")
    assert images.targets.tolist() == [2, 0, -1, 1]


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "p"
    folder.mkdir()
    for i in range(40):
        Image.new("L", (4, 4), 5 * i).save(folder / f"{i}.png")
    return folder


def test_features_show_the_pictures_that_they_are_of(files, tmp_path):
    source = open_source(files)
    pixels = load_images(source, (1, 4, 4), cache=tmp_path / "cache")
    features = replace(pixels, tensor=torch.randn(len(pixels), 4))
    assert features.shape == (4,)
    index = torch.tensor([3, 0])
    assert features.pictures(index, 64).equal(pixels.fetch(index))
    (files / "0.png").unlink()
    missing = features.pictures(index, 64)
    assert missing[0].equal(pixels.fetch(index)[0])
    assert (missing[1] == 255).all()
    assert Images(torch.randn(5, 4)).pictures(torch.tensor([1, 2]), 64).shape == (2, 1, 1, 1)


def test_type_of_the_inputs():
    assert Images(torch.randn(5, 4).half()).dtype == torch.float16
    assert Images(None, numbers=range(3), shape=(1, 2, 2)).dtype == torch.uint8


def test_originals_are_files_bytes_or_pixels(files, tmp_path):
    from_files = load_images(open_source(files), (1, 2, 2), cache=tmp_path / "cache")
    assert from_files.original(7) == files / "7.png"
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("2.png", "1.png"):
            tar.add(files / name, name)
    packed = load_images(open_source(tmp_path / "a.tar"), (1, 2, 2), cache=tmp_path / "cache")
    assert packed.ids == ("1.png", "2.png")
    assert packed.original(0) == (files / "1.png").read_bytes()
    assert packed.position(0) > packed.position(1)
    array = np.linspace(0, 1, 3 * 5 * 4 * 3, dtype=np.float32).reshape(3, 5, 4, 3)
    in_memory = load_images(open_images(array), (3, 2, 2)).select([2, 0])
    assert np.array_equal(in_memory.original(0), np.rint(array[2] * 255))
    assert in_memory.original(0).dtype == np.uint8


def test_what_is_in_memory_needs_every_image(files, tmp_path, monkeypatch):
    monkeypatch.setenv("SECU_DATA", str(tmp_path / "data"))
    (files / "3.png").write_bytes(b"spoiled")
    paths = [files / f"{i}.png" for i in range(5)]
    for source, strict in ((open_images(paths), False), (open_source(files), True)):
        with pytest.raises(UserError, match=r"source: .*3.png cannot be read: not an image"):
            load_images(source, (1, 4, 4), strict=strict, allow_bad=True)
    calls = []
    one = load_images(open_images([paths[2]]), (1, 4, 4), progress=lambda *a: calls.append(a))
    assert one.tensor.unique().tolist() == [10]
    assert calls == [(1, 1)]
    assert not (tmp_path / "data").exists()


def test_known_images_are_recognized_by_their_pixels(files, tmp_path):
    (files / "3.png").write_bytes(b"spoiled")
    images = load_images(open_source(files), (1, 4, 4), cache=tmp_path / "cache")
    known = remember(images)
    assert list(known) == [f"{i}.png" for i in range(40)]
    assert known["3.png"] is None
    assert known["7.png"] == zlib.crc32(images.tensor[6].numpy())
    assert changes(known, known) == ""
    Image.new("L", (4, 4), 9).save(files / "8.png")
    (files / "9.png").rename(files / "new.png")
    now = remember(load_images(open_source(files), (1, 4, 4), cache=tmp_path / "cache"))
    told = "1 gone (first 9.png), 1 new (first new.png), 1 changed (first 8.png)"
    assert changes(known, now) == told


# Sources from outside the package


@pytest.fixture
def sources(monkeypatch):
    monkeypatch.setattr(SOURCES, "_parts", dict(SOURCES._parts))
    return SOURCES


def test_a_source_from_outside(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("SECU_DATA", str(tmp_path / "data"))

    @sources.register("stripes")
    def open_stripes(rest, split):
        levels = np.arange(int(rest), dtype=np.uint8)[:, None, None] + (100 if split == "test" else 0)
        targets = np.arange(int(rest)) % 2
        return ArraySource(
            "stripes", np.broadcast_to(levels, (int(rest), 6, 6)), targets=targets, class_names=("a", "b")
        )

    open_stripes.splits = ("train", "test")
    assert splits_of("stripes:30") == ("train", "test")
    source = open_source("stripes:30")
    assert source.place == "stripes:30"  # what a run stores, and opens again
    data = DataConfig(source=source.place, image_size=6, channels=1)
    images = load(data)
    assert images.tensor[:, 0, 0, 0].tolist() == list(range(30))
    assert images.targets.tolist() == [0, 1] * 15
    assert images.class_names == ("a", "b")
    assert load(data, "test").tensor[0, 0, 0, 0] == 100
    assert load(DataConfig(source="stripes:30", image_size=3, channels=3)).shape == (3, 3, 3)
    assert not (tmp_path / "data").exists()  # an array in memory is not cached: nobody knows when it changes


def test_files_from_outside_are_cached_like_any_other(sources, files, tmp_path, monkeypatch):
    monkeypatch.setenv("SECU_DATA", str(tmp_path / "data"))

    @sources.register("shelf")
    def open_shelf(rest, split):
        paths = sorted(files.glob(f"{rest}*.png"))
        return FileSource("shelf", "", [path.stem for path in paths], [str(path) for path in paths])

    images = load(DataConfig(source="shelf:1", image_size=4, channels=1))
    assert images.ids == ("1", "10", "11", "12", "13", "14", "15", "16", "17", "18", "19")
    assert images.original(1) == files / "10.png"
    assert len(remember(images)) == 11
    assert len(list((tmp_path / "data" / "images").glob("*.images"))) == 1


def test_a_kind_that_nobody_knows_is_taken_for_a_path():
    with pytest.raises(UserError, match=r"source: datset:cifar10 does not exist; expected a folder.* or dataset:NAME"):
        open_source("datset:cifar10")


# What Python code has in memory


def test_a_tensor_a_list_and_a_path_are_sources(files):
    expected = np.stack([np.asarray(Image.open(files / f"{i}.png")) for i in range(5)])
    paths = [files / f"{i}.png" for i in range(5)]
    given = [
        expected,
        torch.from_numpy(expected),
        torch.from_numpy(expected.reshape(5, 16)),
        torch.from_numpy(expected / np.float32(255)).requires_grad_(),
        paths,
        np.array([str(path) for path in paths]),
        [Image.open(path) for path in paths],
    ]
    for images in given:
        source = open_images(images)
        assert source.place == ""
        found = load_images(source, (1, 4, 4))
        assert np.array_equal(found.tensor[:, 0], expected)
    assert len(open_images(files)) == 40


def test_pictures_in_memory_are_decoded_like_files(tmp_path):
    turned = Image.new("RGB", (6, 4), (250, 0, 0))
    turned.paste((0, 0, 250), (3, 0, 6, 4))
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    turned.save(buffer, "PNG", exif=exif)
    (tmp_path / "a.png").write_bytes(buffer.getvalue())
    pictures = [Image.open(tmp_path / "a.png"), Image.new("P", (5, 5)), Image.new("LA", (5, 5), (9, 0))]
    for i, picture in enumerate(pictures):
        picture.save(tmp_path / f"{i}.png", exif=picture.getexif())
        in_file = open_source(tmp_path / f"{i}.png").decode(0, 4, 3)
        assert np.array_equal(open_images(pictures).decode(i, 4, 3), in_file)
