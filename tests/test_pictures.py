"""Tiles and sprite sheets: every picture is decoded once, found in its cell, and within the budget."""

import io
import tarfile
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from PIL import Image

from secu.data import Images, load_images, open_source
from secu.data import images as images_module
from secu.results.pictures import LARGE, SMALL, Pictures, shrink, to_tile
from secu.results.report import thumbnails


@dataclass(frozen=True, eq=False)
class Counting(Images):
    """Counts how often each picture is decoded, and at which side; it is read fastest from the last to the first."""

    decoded: Counter = field(default_factory=Counter, kw_only=True)
    batches: list = field(default_factory=list, kw_only=True)

    def iter_pictures(self, sides):
        self.decoded.update(sides.items())
        return super().iter_pictures(sides)

    def fetch(self, index):
        self.batches.append(index.tolist())
        return super().fetch(index)

    def position(self, i):
        return -i


def gray(*values, side=8):
    return torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, side, side)


def test_every_picture_is_decoded_once_and_large_ones_are_not_decoded_again():
    images = Counting(gray(*range(100)))
    shown = Pictures(images, large=[5, 7, 5, 9], small=[9, 3, 7, 3, 1])
    assert images.decoded == {(5, LARGE): 1, (7, LARGE): 1, (9, LARGE): 1, (3, SMALL): 1, (1, SMALL): 1}
    assert [int(shown[i][0, 0]) for i in (1, 3, 5, 7, 9)] == [1, 3, 5, 7, 9]
    with pytest.raises(KeyError):
        shown[2]


def test_pictures_are_read_in_the_order_of_the_source_and_in_batches(monkeypatch):
    monkeypatch.setattr(images_module, "CHUNK", 4)
    images = Counting(gray(*range(100)))
    Pictures(images, large=[3, 50, 20, 4, 99, 7], small=[1, 2])
    assert images.batches == [[99, 50, 20, 7], [4, 3, 2, 1]]


def test_nothing_is_decoded_for_nothing():
    images = Counting(gray(1, 2))
    assert Pictures(images, []).tiles([], 96) == []
    assert images.batches == []


@pytest.mark.parametrize(
    ("shape", "tile"), [((1, 4, 5), (4, 5)), ((2, 4, 5), (4, 5)), ((3, 4, 5), (4, 5, 3)), ((4, 4, 5), (4, 5, 3))]
)
def test_a_tile_is_gray_or_color(shape, tile):
    pixels = torch.arange(np.prod(shape), dtype=torch.uint8).view(shape)
    found = to_tile(pixels.numpy())
    assert found.shape == tile
    first = found if found.ndim == 2 else found[..., 0]
    assert (first == pixels[0].numpy()).all()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((100, 400, 3), (24, 96, 3)), ((400, 100), (96, 24)), ((8, 8), (8, 8)), ((1, 900), (1, 96)), ((96, 96), (96, 96))],
)
def test_tiles_keep_their_aspect_and_are_never_enlarged(shape, expected):
    assert shrink(np.zeros(shape, np.uint8), 96).shape == expected


def test_small_pictures_of_large_images_are_small():
    shown = Pictures(Images(torch.zeros(2, 3, 300, 300, dtype=torch.uint8)), large=[0], small=[1])
    assert shown[0].shape == (LARGE, LARGE, 3)
    assert shown[1].shape == (SMALL, SMALL, 3)
    assert [tile.shape for tile in shown.tiles([1, 0, 1], 32)] == [(32, 32, 3)] * 3


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_a_compressed_tar_is_unpacked_once_for_all_pictures(tmp_path, mode):
    """Large and small ones, in archive order: going back would unpack it from the start."""
    path = tmp_path / f"a.tar.{mode[2:]}"
    with tarfile.open(path, mode) as tar:
        for level in np.random.default_rng(0).permutation(200).tolist():
            content = io.BytesIO()
            Image.new("L", (70, 70), level).save(content, "PNG")
            info = tarfile.TarInfo(f"{level}.png")
            info.size = content.tell()
            content.seek(0)
            tar.addfile(info, content)
    source = open_source(path)
    images = load_images(source, (1, 8, 8), cache=tmp_path / "cache")
    assert images.pictures(torch.tensor([0]), 70).shape == (1, 1, 70, 70)  # its size is known from now on
    file = source.file
    back = []
    reached = file.tell()

    class Watched:
        def seek(self, place, *rest):
            nonlocal reached
            back.append(place) if place < reached else None
            reached = place
            return file.seek(place, *rest)

        def read(self, size=-1):
            nonlocal reached
            content = file.read(size)
            reached = file.tell()
            return content

        def __getattr__(self, name):
            return getattr(file, name)

    source.archive.fileobj.file = Watched()
    shown = Pictures(images, large=range(0, 200, 2), small=range(200))
    assert [int(shown[i].mean()) for i in range(200)] == list(range(200))
    assert {shown[i].shape for i in range(0, 200, 2)} == {(70, 70)}
    assert {shown[i].shape for i in range(1, 200, 2)} == {(SMALL, SMALL)}
    assert len(back) == 1


# Sprite sheets


def cell(sheets, number):
    """Cut a thumbnail out of its sheet, as the script does."""
    per_sheet = sheets.columns * sheets.rows
    image = np.asarray(Image.open(io.BytesIO(sheets.jpegs[number // per_sheet])))
    left = number % per_sheet % sheets.columns * sheets.pitch[0]
    top = number % per_sheet // sheets.columns * sheets.pitch[1]
    return image[top : top + sheets.height, left : left + sheets.width]


@pytest.mark.parametrize(
    ("shape", "count"), [((1, 8, 8), 300), ((3, 28, 28), 1200), ((3, 60, 90), 150), ((1, 1, 1), 3)]
)
def test_every_thumbnail_is_found_in_its_cell_and_shows_its_image(shape, count):
    flat = torch.randint(0, 256, (count, shape[0], 1, 1), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    shown = Pictures(Images(flat.expand(count, *shape).contiguous()), range(count))
    sheets, _, level = thumbnails.make_sheets(shown, range(count), [], 10**8)
    assert level == thumbnails.LEVELS[0]
    for number in (0, 1, count // 2, count - 1):
        wanted = flat[number, :, 0, 0].numpy().astype(int)
        got = cell(sheets, number).astype(int).reshape(shape[1] * shape[2], -1)
        assert np.abs(got - wanted).max() <= 6, number
    assert all(max(Image.open(io.BytesIO(jpeg)).size) <= thumbnails.SHEET for jpeg in sheets.jpegs)


def test_detail_is_reduced_until_the_budget_is_kept():
    shown = Pictures(Images(torch.randint(0, 256, (80, 3, 96, 96), dtype=torch.uint8)), range(40), range(40, 80))
    parts = (shown, range(40), range(40, 80))
    rich = thumbnails.make_sheets(*parts, 10**8)
    poor = thumbnails.make_sheets(*parts, 40_000)
    assert poor[0].size + poor[1].size <= 40_000 < rich[0].size
    assert thumbnails.make_sheets(*parts, 0)[2] == thumbnails.LEVELS[-1]
    assert thumbnails.make_sheets(shown, [], [], 0)[0].jpegs == ()


def test_levels_lose_detail_step_by_step():
    """No level may ask for more than was decoded, or the pictures would not be there."""
    assert thumbnails.LEVELS[0] == (192, 64, 86, 0) == (LARGE, SMALL, 86, 0)
    for finer, coarser in zip(thumbnails.LEVELS, thumbnails.LEVELS[1:], strict=False):
        assert coarser.card < finer.card
        assert coarser.point <= finer.point
        assert coarser.quality <= finer.quality
        assert coarser.subsampling >= finer.subsampling
