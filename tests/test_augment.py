"""Draws, their distributions, and whole views of augment.py."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from scipy import stats
from torch import Generator, Tensor

from secu.base.errors import UserError
from secu.config import AffineConfig, AugmentConfig
from secu.views.augment import CROP_TRIES, Augmentation

MANY = 20_000
P_VALUE = 1e-3  # draws are seeded: a test that passes once always passes

OFF = AugmentConfig(
    crop_min=1, jitter_prob=0, gray_prob=0, blur_prob=(0, 0), solarize_prob=(0, 0), flip_prob=0, affine=None
)
DIGITS = AugmentConfig(
    **OFF.model_dump(exclude={"affine", "jitter_prob", "brightness", "contrast"}),
    affine=AffineConfig(),
    jitter_prob=1,
    brightness=0.3,
    contrast=0,
)


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def build(config: AugmentConfig, size: tuple[int, int] = (32, 32), channels: int = 3) -> Augmentation:
    return Augmentation(config, (0.5,), (0.25,), channels, size)


def random_pixels(count: int, size: tuple[int, int] = (32, 32), channels: int = 3) -> Tensor:
    return torch.randint(0, 256, (count, channels, *size), dtype=torch.uint8, generator=seeded())


def choose(config: AugmentConfig, size: tuple[int, int] = (32, 32), count: int = MANY) -> dict[str, Tensor]:
    augmentation = build(config, size)
    return augmentation.choose(augmentation.draw(count, seeded()))


def assert_uniform(values: Tensor, low: float, high: float) -> None:
    assert stats.kstest(values.flatten().double().numpy(), stats.uniform(low, high - low).cdf).pvalue > P_VALUE


def assert_share(chosen: Tensor, probability: float) -> None:
    assert stats.binomtest(int(chosen.sum()), chosen.numel(), probability).pvalue > P_VALUE


# Crops


def torchvision_crop(size: tuple[int, int], config: AugmentConfig, numbers: dict[str, np.ndarray]) -> tuple[int, ...]:
    """Return left, top, right and bottom as torchvision's RandomResizedCrop.get_params does, for given numbers."""
    height, width = size
    limit = math.log(config.crop_aspect)
    for area, aspect in zip(numbers["area"], numbers["aspect"], strict=True):
        target = height * width * (config.crop_min + (1 - config.crop_min) * area)
        ratio = math.exp(-limit + 2 * limit * aspect)
        w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(numbers["top"] * (height - h + 1)), int(numbers["left"] * (width - w + 1))
            return left, top, left + w, top + h
    w, h = width, height
    if width / height < 1 / config.crop_aspect:
        h = round(w * config.crop_aspect)
    elif width / height > config.crop_aspect:
        w = round(h * config.crop_aspect)
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


@pytest.mark.parametrize("size", [(32, 32), (8, 8), (20, 45), (60, 17)])
@pytest.mark.parametrize("crop_min", [0.08, 0.3, 0.7])
def test_crop_is_torchvisions(size: tuple[int, int], crop_min: float) -> None:
    config = AugmentConfig(crop_min=crop_min, flip_prob=0)
    augmentation = build(config, size)
    draws = augmentation.draw(500, seeded())
    ours = augmentation.choose(draws)["box"].flatten(0, 1).numpy()
    numbers = {name: draws[name].flatten(0, 1).double().numpy() for name in ("area", "aspect", "top", "left")}
    theirs = [torchvision_crop(size, config, {k: v[i] for k, v in numbers.items()}) for i in range(1000)]
    # Not all: float32 may round a side that is halfway between two whole pixels the other way.
    assert (ours == np.array(theirs)).all(axis=1).mean() > 0.995


@pytest.mark.parametrize("size", [(32, 32), (20, 45)])
def test_crop_has_torchvisions_distribution(size: tuple[int, int]) -> None:
    config = AugmentConfig(crop_min=0.3, flip_prob=0)
    ours = choose(config, size)["box"].flatten(0, 1).numpy()
    random = np.random.default_rng(0)
    many = [{name: random.random(n) for name, n in (("area", 10), ("aspect", 10))} for _ in range(MANY)]
    theirs = np.array(
        [torchvision_crop(size, config, one | {"top": random.random(), "left": random.random()}) for one in many]
    )
    for axis in range(4):
        assert stats.ks_2samp(ours[:, axis], theirs[:, axis]).pvalue > P_VALUE


def test_crop_area_is_uniform() -> None:
    # Squares always fit, and at this size rounding to whole pixels is negligible.
    left, top, right, bottom = choose(AugmentConfig(crop_min=0.2, crop_aspect=1, flip_prob=0), (5000, 5000))[
        "box"
    ].unbind(-1)
    assert_uniform((right - left) * (bottom - top) / 5000**2, 0.2, 1)


def test_crop_aspect_is_log_uniform() -> None:
    left, top, right, bottom = choose(AugmentConfig(crop_min=0.1, flip_prob=0), (5000, 5000))["box"].unbind(-1)
    small = (right - left) * (bottom - top) < 0.5 * 5000**2  # all of these fit at the first try
    assert_uniform(((right - left) / (bottom - top)).log()[small], -math.log(4 / 3), math.log(4 / 3))


def test_crop_position_is_uniform() -> None:
    left, top, right, bottom = choose(AugmentConfig(crop_min=0.1, flip_prob=0), (5000, 5000))["box"].unbind(-1)
    for start, end in ((left, right), (top, bottom)):
        space = 5000 - (end - start)
        assert_uniform((start / space)[space > 2500], 0, 1)


def test_crop_falls_back_to_the_center() -> None:
    # No try fits: 900 pixels are at least 26 high.
    augmentation = build(AugmentConfig(crop_min=0.9, flip_prob=0), (10, 100))
    assert (augmentation.choose(augmentation.draw(50, seeded()))["box"] == torch.tensor([43.0, 0, 56, 10])).all()


def test_crop_takes_the_first_try_that_fits() -> None:
    augmentation = build(AugmentConfig(crop_min=0.25, crop_aspect=4, flip_prob=0), (32, 32))
    draws = {name: value.clone() for name, value in augmentation.draw(1, seeded()).items()}
    # A box with the area of the image, four times as high as wide, does not fit.
    draws["area"][:] = 1 - 1e-6
    draws["aspect"][:] = 0.0
    draws["left"][:] = 0
    draws["top"][:] = 0
    # A square of 16 pixels fits.
    draws["area"][0, 0, 3] = 0
    draws["aspect"][0, 0, 3] = 0.5
    draws["area"][0, 0, 5] = 0.2
    draws["aspect"][0, 0, 5] = 0.5
    draws["area"][1, 0, CROP_TRIES - 1] = 0
    draws["aspect"][1, 0, CROP_TRIES - 1] = 0.5
    assert augmentation.choose(draws)["box"][:, 0].tolist() == [[0, 0, 16, 16], [0, 0, 16, 16]]


# Other draws


def test_jitter_factors() -> None:
    chosen = choose(AugmentConfig())
    assert build(AugmentConfig()).colors == ("brightness", "contrast", "saturation", "hue")
    neutral = chosen["colors"] == torch.tensor([1.0, 1, 1, 0])
    untouched = neutral.all(-1)
    for view in (0, 1):
        assert_share(~untouched[view], 0.8)
    jittered = chosen["colors"][~untouched]
    for number, (low, high) in enumerate([(0.6, 1.4), (0.6, 1.4), (0.8, 1.2), (-0.1, 0.1)]):
        assert_uniform(jittered[:, number], low, high)


def test_order_is_uniform_over_all_24() -> None:
    order = choose(AugmentConfig())["order"].flatten(0, 1)
    assert (order.sort(-1).values == torch.arange(4)).all()
    counts = np.unique(order.numpy(), axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > P_VALUE


def test_probabilities_of_each_view() -> None:
    chosen = choose(AugmentConfig(blur_prob=(0.7, 0.1), solarize_prob=(0.05, 0.2), gray_prob=0.2, flip_prob=0.5))
    flipped = chosen["box"][..., 0] > chosen["box"][..., 2]
    for view in (0, 1):
        assert_share(chosen["gray"][view], 0.2)
        assert_share(flipped[view], 0.5)
        assert_share(chosen["sigma"][view] > 0, (0.7, 0.1)[view])
        assert_share(chosen["solarize"][view], (0.05, 0.2)[view])
        assert_uniform(chosen["sigma"][view][chosen["sigma"][view] > 0], 0.1, 2)


def test_views_of_the_paper() -> None:
    chosen = choose(AugmentConfig())
    assert (chosen["sigma"][0] >= 0.1).all()
    assert not chosen["solarize"][0].any()


def test_affine_jitter() -> None:
    a, b, c, d, e, f = choose(DIGITS)["affine"].flatten(-2).unbind(-1)
    rotation = torch.atan2(d, a)
    scale_x = (a**2 + d**2).sqrt()
    scale_y = (a * e - b * d) / scale_x  # the determinant is the product of the scales
    shear = (a * b + d * e) / (scale_x * scale_y)
    assert_uniform(rotation, -0.25, 0.25)
    assert_uniform((scale_x * scale_y).log() / 2, -0.2, 0.2)
    assert_uniform((scale_x / scale_y).log(), -0.2, 0.2)
    assert_uniform(shear, -0.2, 0.2)
    assert_uniform(c, -0.2, 0.2)
    assert_uniform(f, -0.2, 0.2)


def test_draws_are_independent_between_images_views_and_purposes() -> None:
    augmentation = build(AugmentConfig(affine=AffineConfig()))
    draws = augmentation.draw(MANY, seeded())
    numbers = torch.cat([v if v.ndim == 3 else v.unsqueeze(-1) for v in draws.values()], dim=-1)
    both_views = torch.cat([numbers[0], numbers[1]], dim=-1)
    neighbors = torch.cat([numbers[0, :-1], numbers[0, 1:]], dim=-1)
    for table in (both_views, neighbors):
        correlation = torch.corrcoef(table.T) - torch.eye(table.shape[1])
        assert correlation.abs().max() < 5 / math.sqrt(MANY)  # 5 standard deviations
    assert_uniform(numbers, 0, 1)


def test_no_two_views_of_equal_images_are_equal() -> None:
    pixels = random_pixels(1).expand(32, -1, -1, -1)
    views = build(AugmentConfig())(pixels, seeded()).flatten(0, 1).flatten(1)
    assert (torch.cdist(views, views) + 1e6 * torch.eye(64)).min() > 1


# Views


def pillow_view(pixels: Tensor, chosen: dict[str, Tensor], size: tuple[int, int]) -> Tensor:
    """Return the view that pillow makes with one image's parameters, flipped last: (C, height, width) in levels."""
    left, top, right, bottom = chosen["box"].tolist()
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    image = image.resize(size[::-1], Image.Resampling.BILINEAR, box=(min(left, right), top, max(left, right), bottom))
    for k in chosen["order"].tolist():
        amount = chosen["colors"][k].item()
        if k == 3:
            turn, strength, value = image.convert("HSV").split()
            turned = (np.asarray(turn).astype(int) + round(amount * 255)) % 256
            image = Image.merge("HSV", (Image.fromarray(turned.astype(np.uint8)), strength, value)).convert("RGB")
        else:
            image = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[k](image).enhance(amount)
    if chosen["gray"]:
        image = ImageOps.grayscale(image).convert("RGB")
    if chosen["sigma"]:
        image = image.filter(ImageFilter.GaussianBlur(chosen["sigma"].item()))
    if chosen["solarize"]:
        image = ImageOps.solarize(image, 128)
    if left > right:
        image = ImageOps.mirror(image)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float()


@pytest.mark.parametrize(("size", "view"), [((32, 32), None), ((30, 44), None), ((40, 52), 32)])
def test_views_are_what_pillow_makes(size: tuple[int, int], view: int | None) -> None:
    low = torch.nn.functional.interpolate(random_pixels(40, (6, 6)).float(), size=size, mode="bicubic")
    pixels = low.clamp(0, 255).to(torch.uint8)  # as smooth as photographs
    augmentation = build(AugmentConfig(size=view), size)
    draws = augmentation.draw(40, seeded())
    ours = (augmentation.render(pixels, draws) * 0.25 + 0.5) * 255
    chosen = augmentation.choose(draws)
    assert ours.shape == (2, 40, 3, *((view, view) if view else size))
    for v in (0, 1):
        for i in range(40):
            parameters = {name: value[v, i] for name, value in chosen.items()}
            difference = (ours[v, i] - pillow_view(pixels[i], parameters, augmentation.view_size)).abs()
            # Pillow rounds twice per operation, hue most coarsely. Single pixels differ more, mostly at blurred edges.
            assert difference.mean() < 4, (v, i, parameters)
            assert difference.quantile(0.9) < 10, (v, i, parameters)


def test_the_same_seed_or_draws_give_the_same_views() -> None:
    augmentation = build(AugmentConfig())
    pixels = random_pixels(8)
    draws = augmentation.draw(8, seeded(3))
    views = augmentation.render(pixels, draws)
    assert torch.equal(views, augmentation(pixels, seeded(3)))
    assert torch.equal(views, augmentation.render(pixels, draws))
    assert not torch.equal(views, augmentation(pixels, seeded(4)))
    assert views.dtype == torch.float32
    assert views.is_contiguous()


def test_an_image_does_not_depend_on_the_rest_of_its_batch() -> None:
    augmentation = build(AugmentConfig())
    pixels = random_pixels(8)
    draws = augmentation.draw(8, seeded())
    alone = augmentation.render(pixels[5:6], {name: value[:, 5:6] for name, value in draws.items()})
    torch.testing.assert_close(alone, augmentation.render(pixels, draws)[:, 5:6], atol=1e-4, rtol=0)


def test_without_augmentation_nothing_is_drawn() -> None:
    augmentation = build(OFF)
    pixels = random_pixels(4)
    assert augmentation.draw(4, seeded()) == {}
    assert torch.equal(augmentation(pixels), augmentation.plain(pixels).expand(2, -1, -1, -1, -1))


def test_flip_alone() -> None:
    augmentation = build(OFF.model_copy(update={"flip_prob": 1.0}), (20, 36))
    pixels = random_pixels(4, (20, 36))
    assert torch.equal(augmentation(pixels)[1], augmentation.plain(pixels.flip(-1)))


@pytest.mark.parametrize("size", [(8, 8), (12, 20)])
def test_gray_images_skip_operations_that_need_color(size: tuple[int, int]) -> None:
    augmentation = build(AugmentConfig(gray_prob=1, saturation=1, hue=0.5), size, channels=1)
    assert augmentation.colors == ("brightness", "contrast")
    assert "gray" not in augmentation.draw(2)
    views = augmentation(random_pixels(16, size, channels=1), seeded())
    assert views.shape == (2, 16, 1, *size)
    assert views.isfinite().all()


def test_digits() -> None:
    augmentation = build(DIGITS, (8, 8), channels=1)
    pixels = random_pixels(32, (8, 8), channels=1)
    draws = augmentation.draw(32, seeded())
    assert set(draws) == {"affine", "jitter", "colors", "order"}
    views = augmentation.render(pixels, draws) * 0.25 + 0.5
    assert views.shape == (2, 32, 1, 8, 8)
    assert views.min() >= -1e-6
    assert views.max() <= 1 + 1e-6


def test_plain_images_are_normalized_by_mean_and_std_of_each_channel() -> None:
    mean = (0.1, 0.2, 0.3)
    std = (0.5, 0.25, 0.2)
    pixels = random_pixels(2)
    augmentation = Augmentation(OFF, mean, std, 3, (32, 32))
    expected = (pixels / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(augmentation.plain(pixels), expected)
    torch.testing.assert_close(augmentation(pixels)[0], expected)


def test_plain_images_are_center_cropped_to_the_size_of_a_view() -> None:
    pixels = random_pixels(2, (41, 50))
    views = build(AugmentConfig(size=32), (41, 50)).plain(pixels)
    assert torch.equal(views, build(OFF).plain(pixels[..., 4:36, 9:41]))


def test_plain_images_smaller_than_a_view_are_enlarged() -> None:
    pixels = random_pixels(2, (8, 8))
    views = build(OFF.model_copy(update={"size": 16}), (8, 8)).plain(pixels) * 0.25 + 0.5
    theirs = Image.fromarray(pixels[0].permute(1, 2, 0).numpy()).resize((16, 16), Image.Resampling.BILINEAR)
    assert (views[0] * 255 - torch.from_numpy(np.array(theirs)).permute(2, 0, 1)).abs().max() < 1.1


def test_plain_images_may_stay_whole() -> None:
    pixels = random_pixels(2, (41, 50))
    config = AugmentConfig(size=32, plain="whole")
    augmentation = build(config, (41, 50))
    assert torch.equal(augmentation.plain(pixels), build(OFF, (41, 50)).plain(pixels))
    assert augmentation(pixels).shape == (2, 2, 3, 32, 32)


def test_wrong_channels_are_reported() -> None:
    with pytest.raises(UserError, match=r"data\.std: 3 values, but the images have 1 channels; give one value"):
        Augmentation(OFF, (0.5,), (0.2, 0.2, 0.2), 1, (8, 8))
    with pytest.raises(UserError, match="1 or 3 channels, got 4"):
        build(OFF, channels=4)


@pytest.mark.parametrize("config", [AugmentConfig(affine=AffineConfig()), AugmentConfig(size=24), OFF])
def test_render_compiles_without_a_graph_break(config: AugmentConfig) -> None:
    augmentation = build(config)
    pixels = random_pixels(4)
    draws = augmentation.draw(4, seeded())
    compiled = torch.compile(augmentation.render, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(pixels, draws), augmentation.render(pixels, draws), atol=1e-4, rtol=0)
