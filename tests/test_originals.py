"""Random crops of original pictures: their boxes, the decoder, and how they reach the training step."""

import io
import math
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from secu.base.errors import UserError
from secu.config import AugmentConfig, Config
from secu.data import Images, load_images, open_source
from secu.data.decoding.decode import decode_crops
from secu.data.decoding.image_files import BadImage
from secu.settings import resolve
from secu.train.feed import CropFeed, build_feed
from secu.views.augment import Augmentation
from secu.views.originals import CROP_TRIES, NUMBERS, OriginalCrops, random_box
from small_runs import CPU
from test_augment import torchvision_crop

PAPER = AugmentConfig(crop_min=0.08)
P_VALUE = 1e-3  # draws are seeded: a test that passes once always passes


# Boxes


def named(numbers: np.ndarray) -> dict:
    """Return the random numbers of a box under the names of augment.py."""
    tries = numbers[: 2 * CROP_TRIES]
    return {"area": tries[:CROP_TRIES], "aspect": tries[CROP_TRIES:], "left": numbers[-3], "top": numbers[-2]}


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (40, 300), (300, 40), (1, 1), (7, 1)])
def test_a_box_is_torchvisions(size):
    width, height = size
    for numbers in np.random.default_rng(0).random((300, NUMBERS)):
        left, top, right, bottom = random_box(PAPER, width, height, numbers.tolist())
        expected = torchvision_crop((height, width), PAPER, named(numbers))
        flipped = numbers[-1] < 0.5
        assert (right, top, left, bottom) == expected if flipped else (left, top, right, bottom) == expected
        assert 0 <= min(left, right) < max(left, right) <= width
        assert 0 <= top < bottom <= height


def test_a_box_is_that_of_the_crops_on_the_device():
    """Both rules are written down twice: once for tensors of squares, once for a picture of any size."""
    augmentation = Augmentation(PAPER, (0.5,), (0.5,), 3, (240, 320))
    draws = augmentation.draw(200, torch.Generator().manual_seed(0))
    theirs = augmentation.choose(draws)["box"].flatten(0, 1).tolist()
    names = ("area", "aspect", "left", "top", "flip")
    numbers = torch.cat([draws[name].flatten(0, 1).view(400, -1) for name in names], 1).tolist()
    ours = [list(random_box(PAPER, 320, 240, row)) for row in numbers]
    same = [a == b for a, b in zip(ours, theirs, strict=True)]
    assert sum(same) > 0.99 * len(same)  # float32 may round a side that is halfway between two pixels the other way


@pytest.fixture(scope="module")
def boxes() -> np.ndarray:
    """Boxes of the first view in pictures that are three times as wide as high."""
    crops = OriginalCrops(PAPER.model_copy(update={"flip_prob": 0}), 224)
    return np.array([crops.boxes(1, index, 3000, 1000)[0] for index in range(4000)], float)


def test_boxes_reach_every_part_of_a_wide_picture(boxes):
    left, _, right, _ = boxes.T
    assert left.min() < 30
    assert right.max() > 2970
    assert ((left + right) / 2 < 1000).mean() > 0.2  # the left third, outside of the central square
    assert ((left + right) / 2 > 2000).mean() > 0.2
    central = (left == 833) & (right == 2166)  # where none of the ten tries fits
    assert 0 < central.mean() < 0.1
    assert stats.kstest((left / (3000 - (right - left)))[~central], "uniform").pvalue > P_VALUE


def test_area_and_aspect_ratio_are_those_of_the_original_picture(boxes):
    left, top, right, bottom = boxes.T
    area = (right - left) * (bottom - top) / 3e6
    assert area.min() > 0.079
    assert area.max() < 0.45  # at most as high as the picture, and at most 4/3 as wide
    small = area < 0.24  # these fit whatever their aspect ratio
    assert stats.kstest(area[small], stats.uniform(0.08, 0.16).cdf).pvalue > P_VALUE
    aspect = np.log((right - left) / (bottom - top))[small]
    assert stats.kstest(aspect, stats.uniform(-math.log(4 / 3), 2 * math.log(4 / 3)).cdf).pvalue > P_VALUE


def test_boxes_depend_on_seed_image_and_view_alone():
    crops = OriginalCrops(PAPER, 224)
    one = crops.boxes(5, 7, 500, 375)
    assert crops.boxes(5, 7, 500, 375) == one
    assert one[0] != one[1]
    assert crops.boxes(6, 7, 500, 375) != one
    assert crops.boxes(5, 8, 500, 375) != one
    assert crops.boxes(2**56 - 1, 2**40, 500, 375)  # as large as seeds and indices may be
    flips = [left > right for i in range(400) for left, _, right, _ in crops.boxes(0, i, 500, 375)]
    assert 0.4 < np.mean(flips) < 0.6


# The decoder


def smooth(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Return a picture of slow waves, which looks alike after different kinds of scaling."""
    y, x = np.mgrid[:height, :width] / 20
    waves = [np.sin(x + phase) * np.cos(y - phase) for phase in (0, 1, 2)]
    return Image.fromarray(np.uint8(127 + 127 * np.stack(waves, -1))).convert(mode)


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def expected_crop(image: Image.Image, box, size: int) -> np.ndarray:
    """Cut, then scale, then mirror, with pillow."""
    left, top, right, bottom = box
    part = image.crop((min(left, right), top, max(left, right), bottom)).resize((size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if left > right else part)
    return pixels.reshape(size, size, -1).transpose(2, 0, 1)


BOXES = [(0, 0, 200, 150), (400, 200, 250, 375), (410, 3, 500, 70)]


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1), ("L", 3), ("RGB", 1)])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_parts_are_what_pillow_cuts_out_of_the_whole_picture(mode, channels, kind):
    raw = encoded(smooth(500, 375, mode), kind)
    found = decode_crops(raw, lambda width, height: BOXES, 64, channels)
    original = Image.open(io.BytesIO(raw)).convert(mode)
    for pixels, box in zip(found, BOXES, strict=True):
        expected = expected_crop(original.convert("L" if channels == 1 else "RGB"), box, 64)
        assert np.abs(pixels.astype(int) - expected).max() <= (3 if (mode, channels) == ("RGB", 1) else 0)


def test_arrays_are_cut_like_files():
    image = smooth(500, 375)
    found = decode_crops(np.asarray(image), lambda *_: BOXES, 32, 3)
    assert np.array_equal(found, decode_crops(encoded(image, "PNG"), lambda *_: BOXES, 32, 3))


def test_a_large_jpeg_is_decoded_at_a_fraction_when_that_is_enough(monkeypatch):
    image = smooth(2000, 1500)
    raw = encoded(image, "JPEG", quality=95)
    asked = []
    box = [(200, 100, 1701, 1302), (1900, 10, 300, 1400)]
    from PIL import JpegImagePlugin

    original = JpegImagePlugin.JpegImageFile.draft

    def draft(self, mode, size):
        result = original(self, mode, size)
        asked.append(self.size)
        return result

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "draft", draft)
    found = decode_crops(raw, lambda *_: box, 64, 3)
    assert asked[-1] == (250, 188)  # an eighth: crops of 150 pixels for 64
    for pixels, one in zip(found, box, strict=True):
        assert np.abs(pixels.astype(int) - expected_crop(image, one, 64)).mean() < 3
    decode_crops(raw, lambda *_: [(0, 0, 100, 100)], 64, 3)
    assert asked[-1] == (2000, 1500)


def test_the_picture_is_rotated_after_it_is_cut():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be rotated clockwise
    found = decode_crops(encoded(smooth(300, 100), "PNG", exif=exif), lambda w, h: [(0, 0, w // 2, h)], 32, 3)[0]
    plain = decode_crops(encoded(smooth(300, 100), "PNG"), lambda w, h: [(0, 0, w // 2, h)], 32, 3)[0]
    assert np.array_equal(found, np.rot90(plain, -1, axes=(1, 2)))


def test_transparent_parts_are_white_and_16_bits_are_reduced():
    clear = Image.new("RGBA", (20, 10), (255, 0, 0, 0))
    assert (decode_crops(encoded(clear, "PNG"), lambda *_: [(3, 0, 9, 5)], 4, 3) == 255).all()
    deep = Image.fromarray(np.full((10, 400), 512 * 64, np.uint16))
    assert (decode_crops(encoded(deep, "PNG"), lambda *_: [(390, 0, 400, 10)], 4, 1) == 128).all()


def test_what_is_no_image_is_bad():
    with pytest.raises(BadImage, match="not an image"):
        decode_crops(b"nothing", lambda *_: [(0, 0, 1, 1)], 4, 3)


# The feed


@pytest.fixture
def images(tmp_path) -> Images:
    for number in range(7):
        smooth(60 + 10 * number, 50).save(tmp_path / f"{number}.png")
    return load_images(open_source(tmp_path), (3, 32, 32), cache=tmp_path / "cache")


def test_a_batch_holds_both_crops_of_each_original(images, tmp_path):
    crops = OriginalCrops(PAPER, 24)
    feed = build_feed(images, 4, CPU, crops)
    assert isinstance(feed, CropFeed)
    for seed in (3, 4):
        batches = torch.tensor([6, 2, 0, 5, 1, 3, 4]).split(4)
        feed.start(batches, seed)
        for index in batches:
            feed.next()
            inputs = feed.inputs(index)
            assert inputs.shape == (2, len(index), 3, 24, 24)
            for row, i in enumerate(index.tolist()):
                picture = Image.open(tmp_path / f"{i}.png")
                for view, box in enumerate(crops.boxes(seed, i, *picture.size)):
                    assert np.array_equal(inputs[view, row].numpy(), expected_crop(picture, box, 24))


def test_views_of_crops_get_everything_but_crop_and_flip(images):
    """Without colors and blur, a view is the crop, normalized; evaluation still sees the center of the square."""
    config = AugmentConfig(size=24, jitter_prob=0, gray_prob=0, blur_prob=(0, 0), solarize_prob=(0, 0))
    views = Augmentation(config, (0.5,), (0.25,), 3, (32, 32), cropped=True)
    pairs = torch.randint(0, 256, (2, 5, 3, 24, 24), dtype=torch.uint8)
    torch.testing.assert_close(views.render(pairs, views.draw(5)), (pairs / 255 - 0.5) / 0.25)
    usual = Augmentation(config, (0.5,), (0.25,), 3, (32, 32))
    squares = images.fetch(torch.arange(5))
    assert torch.equal(views.plain(squares), usual.plain(squares))


def test_images_in_memory_have_no_originals():
    crops = OriginalCrops(PAPER, 24)
    with pytest.raises(UserError, match=r"augment.crop_from: original needs one file per image"):
        build_feed(Images(torch.zeros(4, 3, 8, 8, dtype=torch.uint8)), 4, CPU, crops)


def test_an_image_that_cannot_be_read_is_named(images, tmp_path):
    (tmp_path / "3.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"1 of 7 images .* cannot be read, more than 5%; the last: 3\.png: empty file"):
        images.crops(torch.tensor([3]), [partial(OriginalCrops(PAPER, 24).boxes, 0, 3)], 24)


def test_neighbors_need_squares():
    with pytest.raises(UserError, match=r"neighbors.count: 5 needs augment.crop_from=square, got original"):
        resolve({"augment": {"crop_from": "original"}, "neighbors": {"count": 5}})
    assert Config().augment.crop_from == "square"
