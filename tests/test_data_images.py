"""Images in memory and in folders."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from secu.data import FolderImages, Images, load
from secu.data.images import CHUNK, decode, to_tensor
from secu.errors import UserError


def save(path, array, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)


def halves(height, width):
    """Left half red, right half blue, and green rising downwards: every flip and turn shows."""
    image = np.zeros((height, width, 3), np.uint8)
    image[:, : width // 2, 0] = 255
    image[:, width // 2 :, 2] = 255
    image[:, :, 1] = np.linspace(0, 250, height).astype(np.uint8)[:, None]
    return image


def test_images_fetch_in_the_order_of_the_index():
    pixels = torch.arange(5 * 3 * 2 * 4, dtype=torch.uint8).reshape(5, 3, 2, 4)
    images = Images(pixels, torch.tensor([0, 1, 0, 1, -1]), ("a", "b"))
    assert len(images) == 5
    assert images.shape == (3, 2, 4)
    assert torch.equal(images.fetch(torch.tensor([4, 0, 4])), torch.stack([pixels[4], pixels[0], pixels[4]]))


@pytest.mark.parametrize(
    ("pixels", "targets", "message"),
    [
        (torch.zeros(2, 3, 4, 4), None, "pixels: must be torch.uint8 .* got torch.float32"),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), None, r"pixels: .* got torch.uint8 of shape \(2, 4, 4\)"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(3).long(), r"targets: .* shape \(2,\), got .*\(3,\)"),
        (
            torch.zeros(2, 3, 4, 4, dtype=torch.uint8),
            torch.zeros(2),
            "targets: must be torch.int64 .* got torch.float32",
        ),
    ],
)
def test_images_refuse_wrong_tensors(pixels, targets, message):
    with pytest.raises(UserError, match=message):
        Images(pixels, targets)


def test_to_tensor_joins_strided_and_read_only_parts():
    one = np.random.default_rng(0).integers(0, 256, (CHUNK + 3, 1, 2, 3), dtype=np.uint8)
    two = np.random.default_rng(1).integers(0, 256, (4, 1, 3, 2), dtype=np.uint8).swapaxes(2, 3)
    two.flags.writeable = False
    assert np.array_equal(to_tensor([one, two]).numpy(), np.concatenate([one, two]))


@pytest.mark.parametrize(("side", "size"), [(32, 16), (32, 48), (96, 64)])
def test_resized_images_match_pillow(side, size):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, side, side), dtype=np.uint8)
    expected = [Image.fromarray(image.transpose(1, 2, 0)).resize((size, size), Image.BILINEAR) for image in pixels]
    got = to_tensor([pixels], size).numpy().transpose(0, 2, 3, 1)
    assert np.abs(got.astype(int) - np.stack([np.asarray(image) for image in expected])).max() <= 1


def test_folder_index_is_sorted_by_class_and_name(tmp_path):
    for name in ("b/2.png", "b/10.JPEG", "a/z.jpg", "a/.hidden.png", "c/notes.txt", ".cache/x.png"):
        save(tmp_path / name, halves(8, 8), format="PNG")
    images = FolderImages.scan(tmp_path, image_size=4)
    assert [os.path.relpath(path, tmp_path) for path in images.paths] == ["a/z.jpg", "b/10.JPEG", "b/2.png"]
    assert images.class_names == ("a", "b", "c")
    assert images.targets.tolist() == [0, 1, 1]
    assert images.targets.dtype == torch.int64
    assert images.shape == (3, 4, 4)


def test_folder_fetch_returns_rows_in_the_order_of_the_index(tmp_path):
    for number in range(40):
        save(tmp_path / "only" / f"{number:02}.png", np.full((5, 7, 3), number * 6, np.uint8))
    images = FolderImages.scan(tmp_path, image_size=3)
    index = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    batch = images.fetch(index)
    assert batch.shape == (40, 3, 3, 3)
    assert batch.dtype == torch.uint8
    assert torch.equal(batch, (index * 6).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 3, 3))


@pytest.mark.parametrize(("height", "width"), [(40, 100), (100, 40), (64, 64), (16, 20)])
def test_decode_scales_the_shorter_side_and_cuts_the_centre(tmp_path, height, width):
    array = np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    image = Image.fromarray(array).resize((width, height), Image.BICUBIC)
    image.save(tmp_path / "x.png")
    scale = 32 / min(width, height)
    whole = np.asarray(image.resize((round(width * scale), round(height * scale)), Image.BILINEAR)).astype(int)
    top, left = (whole.shape[0] - 32) // 2, (whole.shape[1] - 32) // 2
    expected = whole[top : top + 32, left : left + 32].transpose(2, 0, 1)
    assert np.abs(decode(tmp_path / "x.png", 32).astype(int) - expected).mean() < 3  # half a pixel apart at most


def test_decode_of_a_large_jpeg_stays_close_to_a_full_decode(tmp_path):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8))
    image = image.resize((800, 600), Image.BICUBIC)
    image.save(tmp_path / "x.jpg", quality=95)
    exact = np.asarray(image.crop((100, 0, 700, 600)).resize((100, 100), Image.BILINEAR)).transpose(2, 0, 1)
    difference = np.abs(decode(tmp_path / "x.jpg", 100).astype(int) - exact).mean()
    assert difference < 8, difference


@pytest.mark.parametrize("orientation", range(1, 9))
def test_decode_turns_photos_upright(tmp_path, orientation):
    upright = Image.fromarray(halves(48, 48))
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,  # stored turned to the left, to be shown turned back to the right
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(undo[orientation]) if orientation in undo else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "x.jpg", quality=100, subsampling=0, exif=exif)
    got = decode(tmp_path / "x.jpg", 48).astype(int)
    assert np.abs(got - np.asarray(upright).transpose(2, 0, 1)).mean() < 5


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGBA", "P", "1"])
def test_decode_makes_rgb_of_every_mode(tmp_path, mode):
    path = tmp_path / ("x.jpg" if mode == "CMYK" else "x.png")
    Image.new("RGB", (9, 9), (255, 255, 255)).convert(mode).save(path)
    got = decode(path, 4)
    assert got.shape == (3, 4, 4)
    assert got.min() > 250


@pytest.mark.parametrize("kind", ["empty", "text", "cut", "folder"])
def test_unreadable_file_is_named(tmp_path, kind):
    path = tmp_path / "train" / "cat" / "bad.JPEG"
    save(path, halves(64, 64), format="JPEG")
    save(path.with_name("good.JPEG"), halves(64, 64), format="JPEG")
    if kind == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"empty": b"", "text": b"hello", "cut": path.read_bytes()[:700]}[kind])
    images = load("imagenet", "train", tmp_path, image_size=16)
    assert images.fetch(torch.tensor([1])).shape == (1, 3, 16, 16)
    with pytest.raises(UserError, match=r"bad\.JPEG: cannot be read as an image"):
        images.fetch(torch.tensor([1, 0]))


def test_folder_without_class_folders_is_explained(tmp_path):
    save(tmp_path / "flat.png", halves(4, 4))
    with pytest.raises(UserError, match=r"no images found; they must lie in one folder a class"):
        FolderImages.scan(tmp_path)
