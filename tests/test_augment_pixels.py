"""Every operation of pixels.py against pillow, image by image, with the same parameters.

Tolerances are in levels of 255. Pillow rounds or truncates to whole levels at least once per operation, so a correct
formula agrees to 1 or 2 levels. Where more is allowed, the test says why and there is an exact oracle as well.
"""

import colorsys
from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from scipy.ndimage import gaussian_filter1d
from torch import Tensor

from secu.views import pixels as ops

SIZES = [(32, 32), (20, 36), (8, 8)]
COUNT = 12


def smooth(size: tuple[int, int], channels: int) -> Tensor:
    y = torch.linspace(0, 1, size[0]).view(1, 1, -1, 1)
    x = torch.linspace(0, 1, size[1]).view(1, 1, 1, -1)
    phase = torch.arange(COUNT * channels).view(COUNT, channels, 1, 1)
    return ((torch.sin(4 * x + 3 * y + phase) + 1) * 127.5).round() / 255


def noise(size: tuple[int, int], channels: int) -> Tensor:
    generator = torch.Generator().manual_seed(size[1] + channels)
    return torch.randint(0, 256, (COUNT, channels, *size), generator=generator) / 255


def uniform(low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(COUNT, *shape, generator=torch.Generator().manual_seed(1))


def to_pillow(image: Tensor) -> Image.Image:
    pixels = (image * 255).round().to(torch.uint8)
    return Image.fromarray((pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)).numpy())


def from_pillow(image: Image.Image) -> Tensor:
    pixels = torch.from_numpy(np.array(image)).float() / 255
    return pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1)


def levels(ours: Tensor, theirs: list[Image.Image]) -> Tensor:
    """Return the absolute difference of two batches of images, in levels."""
    expected = torch.stack([from_pillow(image) for image in theirs])
    assert ours.shape == expected.shape
    assert ours.min() >= -1e-5
    assert ours.max() <= 1 + 1e-5
    return (ours - expected).abs() * 255


images_of = pytest.mark.parametrize("images_of", [smooth, noise])
sizes = pytest.mark.parametrize("size", SIZES)
channels = pytest.mark.parametrize("channels", [1, 3])
ImagesOf = Callable[[tuple[int, int], int], Tensor]


def random_boxes(size: tuple[int, int]) -> Tensor:
    corner = torch.floor(uniform(0, 0.6, 2) * torch.tensor(size).flip(0))
    extent = torch.floor(1 + uniform(0, 1, 2).flip(0) * (torch.tensor(size).flip(0) - corner - 1))
    return torch.cat([corner, corner + extent], dim=1)


@images_of
@sizes
@channels
@pytest.mark.parametrize("out", [(32, 32), (12, 12), (9, 30)])
def test_crop(images_of: ImagesOf, size: tuple[int, int], channels: int, out: tuple[int, int]) -> None:
    images = images_of(size, channels)
    boxes = random_boxes(size)
    theirs = [
        to_pillow(image).crop(tuple(box.int().tolist())).resize(out[::-1], Image.Resampling.BILINEAR)
        for image, box in zip(images, boxes, strict=True)
    ]
    assert levels(ops.crop(images, boxes, out), theirs).max() < 1.1  # pillow rounds after each axis


@sizes
def test_crop_with_left_and_right_swapped_mirrors(size: tuple[int, int]) -> None:
    images = noise(size, 3)
    boxes = random_boxes(size)
    mirrored = ops.crop(images, boxes[:, [2, 1, 0, 3]], (16, 16))
    torch.testing.assert_close(mirrored, ops.crop(images, boxes, (16, 16)).flip(-1))


def test_crop_of_the_whole_image_in_its_own_size_changes_nothing() -> None:
    images = noise((20, 36), 3)
    assert torch.equal(ops.crop(images, torch.tensor([[0.0, 0, 36, 20]]).expand(COUNT, 4), (20, 36)), images)


@images_of
@sizes
@channels
def test_affine(images_of: ImagesOf, size: tuple[int, int], channels: int) -> None:
    images = images_of(size, channels)
    height, width = size
    margin = 64
    matrices = ops.affine_matrix(uniform(-0.4, 0.4, 6), size)
    theirs = []
    for image, ((a, b, c), (d, e, f)) in zip(images, matrices.double().tolist(), strict=True):
        # Pillow repeats the edge pixels for half a pixel where we fade to black; with a black margin it fades, too.
        row_x = (a, b * width / height, width / 2 * (1 + c - a - b) + margin)
        row_y = (d * height / width, e, height / 2 * (1 + f - d - e) + margin)
        framed = ImageOps.expand(to_pillow(image), margin)
        theirs.append(
            framed.transform((width, height), Image.Transform.AFFINE, row_x + row_y, Image.Resampling.BILINEAR)
        )
    assert levels(ops.affine(images, matrices), theirs).max() < 1.1


@sizes
def test_affine_matrix_is_the_product_of_its_parts_in_pixels(size: tuple[int, int]) -> None:
    jitter = uniform(-0.5, 0.5, 6)
    to_pixels = np.diag([size[1] / 2, size[0] / 2])
    for ours, (scale, ratio, angle, shear, *shift) in zip(
        ops.affine_matrix(jitter, size), jitter.tolist(), strict=True
    ):
        rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        scaling = np.exp(scale) * np.diag([np.exp(ratio / 2), np.exp(-ratio / 2)])
        in_pixels = rotation @ np.array([[1, shear], [0, 1]]) @ scaling
        np.testing.assert_allclose(ours[:, :2], np.linalg.inv(to_pixels) @ in_pixels @ to_pixels, atol=1e-6)
        np.testing.assert_allclose(ours[:, 2], shift, atol=1e-6)


def test_affine_without_jitter_changes_nothing() -> None:
    images = noise((20, 36), 3)
    torch.testing.assert_close(ops.affine(images, ops.affine_matrix(torch.zeros(COUNT, 6), (20, 36))), images)


ENHANCERS = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "saturation": ImageEnhance.Color,
}


@images_of
@sizes
@channels
@pytest.mark.parametrize("name", ENHANCERS)
def test_brightness_contrast_saturation(images_of: ImagesOf, size: tuple[int, int], channels: int, name: str) -> None:
    images = images_of(size, channels)
    factor = uniform(0.2, 1.8)
    theirs = [ENHANCERS[name](to_pillow(i)).enhance(f) for i, f in zip(images, factor.tolist(), strict=True)]
    # Pillow truncates the result (1 level) and rounds the gray it blends with (half a level, times at most 0.8).
    assert levels(ops.COLOR_OPERATIONS[name](images, factor), theirs).max() < 1.5


@images_of
@sizes
def test_hue_equals_the_standard_librarys(images_of: ImagesOf, size: tuple[int, int]) -> None:
    images = images_of(size, 3)
    shifts = uniform(-0.5, 0.5)
    for image, shift, ours in zip(images, shifts.tolist(), ops.hue(images, shifts), strict=True):
        for pixel, changed in zip(image.flatten(1).T.tolist(), ours.flatten(1).T.tolist(), strict=True):
            turn, strength, value = colorsys.rgb_to_hsv(*pixel)
            assert changed == pytest.approx(colorsys.hsv_to_rgb((turn + shift) % 1, strength, value), abs=1e-5)


@images_of
@sizes
def test_hue(images_of: ImagesOf, size: tuple[int, int]) -> None:
    images = images_of(size, 3)
    shifts = uniform(-0.1, 0.1)
    theirs = []
    for image, shift in zip(images, shifts.tolist(), strict=True):
        turn, strength, value = to_pillow(image).convert("HSV").split()
        turned = np.asarray(turn).astype(int) + round(shift * 255)
        theirs.append(
            Image.merge("HSV", (Image.fromarray((turned % 256).astype(np.uint8)), strength, value)).convert("RGB")
        )
    # Pillow truncates hue and shift to 1/255 of the circle, and a channel covers its whole range within 1/6 of it.
    difference = levels(ops.hue(images, shifts), theirs)
    assert difference.max() < 12
    assert difference.mean() < 2


def test_neutral_color_operations_change_nothing() -> None:
    images = noise((20, 36), 3)
    one = torch.ones(COUNT)
    for name in ENHANCERS:
        assert torch.equal(ops.COLOR_OPERATIONS[name](images, one), images)
    torch.testing.assert_close(ops.hue(images, 0 * one), images)


@images_of
@sizes
def test_gray(images_of: ImagesOf, size: tuple[int, int]) -> None:
    images = images_of(size, 3)
    chosen = torch.arange(COUNT) % 3 == 0
    pillows = [to_pillow(image) for image in images]
    theirs = [ImageOps.grayscale(p).convert("RGB") if c else p for p, c in zip(pillows, chosen, strict=True)]
    assert levels(ops.gray(images, chosen), theirs).max() < 0.6


@images_of
@sizes
@channels
def test_solarize(images_of: ImagesOf, size: tuple[int, int], channels: int) -> None:
    images = images_of(size, channels)
    chosen = torch.arange(COUNT) % 3 == 0
    theirs = [ImageOps.solarize(to_pillow(i), 128) if c else to_pillow(i) for i, c in zip(images, chosen, strict=True)]
    assert levels(ops.solarize(images, chosen), theirs).max() < 0.01


@sizes
@channels
def test_blur_is_a_gaussian_with_extended_edges(size: tuple[int, int], channels: int) -> None:
    images = noise(size, channels)
    sigma = uniform(0.1, 2)
    for image, s, ours in zip(images.double().numpy(), sigma.tolist(), ops.blur(images, sigma, 8), strict=True):
        rows = gaussian_filter1d(image, s, axis=1, mode="nearest", radius=8)
        np.testing.assert_allclose(ours, gaussian_filter1d(rows, s, axis=2, mode="nearest", radius=8), atol=1e-5)


@images_of
@sizes
@channels
def test_blur(images_of: ImagesOf, size: tuple[int, int], channels: int) -> None:
    # Below half a pixel a sampled Gaussian has almost no effect, but pillow's boxes do: the draw starts above that.
    images = images_of(size, channels)
    sigma = uniform(0.5, 2)
    theirs = []
    for image, s in zip(images, sigma.tolist(), strict=True):
        # Pillow repeats the edge before each of its three box filters, we do so once before the Gaussian; with a frame
        # of repeated pixels pillow does the same.
        framed = to_pillow(torch.nn.functional.pad(image.unsqueeze(0), (8, 8, 8, 8), mode="replicate")[0])
        theirs.append(framed.filter(ImageFilter.GaussianBlur(s)).crop((8, 8, 8 + size[1], 8 + size[0])))
    difference = levels(ops.blur(images, sigma, 8), theirs)
    # Three box filters have the Gaussian's variance but not its shape. This matters only in noise, where the blur
    # itself changes pixels by 50 levels on average.
    limit, mean_limit = {smooth: (3.5, 1.0), noise: (18.0, 3.0)}[images_of]
    assert difference.max() < limit
    assert difference.mean() < mean_limit


def test_a_blur_of_zero_is_the_identity_for_that_image_alone() -> None:
    images = noise((20, 36), 3)
    sigma = torch.where(torch.arange(COUNT) % 2 == 0, 0.0, 1.5)
    blurred = ops.blur(images, sigma, 8)
    assert torch.equal(blurred[::2], images[::2])
    assert (blurred[1::2] - images[1::2]).abs().amax(dim=(1, 2, 3)).min() > 0.1


def test_every_image_has_its_own_order_of_color_operations() -> None:
    orders = list(permutations(range(4)))
    images = noise((8, 8), 3)[:1].expand(24, -1, -1, -1)
    names = list(ops.COLOR_OPERATIONS)
    amounts = torch.tensor([[1.5, 0.5, 1.8, 0.2]]) + 0.01 * torch.arange(24).view(-1, 1)
    ours = ops.color_jitter(images, names, amounts, torch.tensor(orders))
    for number, order in enumerate(orders):
        expected = images[:1]
        for k in order:
            expected = ops.COLOR_OPERATIONS[names[k]](expected, amounts[number, k])
        torch.testing.assert_close(ours[number : number + 1], expected)
    distances = torch.cdist(ours.flatten(1), ours.flatten(1)) + torch.eye(24)
    assert distances.min() > 0.01
