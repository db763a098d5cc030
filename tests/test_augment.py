"""Draws, their distributions, and whole views of augment.py."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from scipy import stats
from torch import Generator, Tensor

from secu.augment import CROP_TRIES, Augmentation
from secu.config import AffineConfig, AugmentConfig
from secu.errors import UserError

MANY = 20_000
SURE = 1e-3  # draws are seeded: a test whose p-value lies above this today does so tomorrow

OFF = AugmentConfig(
    crop_min=1, jitter_prob=0, grey_prob=0, blur_prob=(0, 0), solarize_prob=(0, 0), flip_prob=0, affine=None
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
    assert stats.kstest(values.flatten().double().numpy(), stats.uniform(low, high - low).cdf).pvalue > SURE


def assert_share(chosen: Tensor, probability: float) -> None:
    assert stats.binomtest(int(chosen.sum()), chosen.numel(), probability).pvalue > SURE


# Crops


def torchvision_crop(size: tuple[int, int], config: AugmentConfig, numbers: dict[str, np.ndarray]) -> tuple[int, ...]:
    """Return left, top, right, bottom as torchvision's RandomResizedCrop.get_params does, from given numbers."""
    (height, width), limit = size, math.log(config.crop_aspect)
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
    # Not all: where a side is half a pixel more than a whole number, float32 may round to the other side.
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
        assert stats.ks_2samp(ours[:, axis], theirs[:, axis]).pvalue > SURE


def test_crop_area_is_uniform() -> None:
    # Squares always fit, and at this size whole pixels are too fine to be seen.
    left, top, right, bottom = choose(AugmentConfig(crop_min=0.2, crop_aspect=1, flip_prob=0), (5000, 5000))[
        "box"
    ].unbind(-1)
    assert_uniform((right - left) * (bottom - top) / 5000**2, 0.2, 1)


def test_crop_aspect_is_log_uniform() -> None:
    left, top, right, bottom = choose(AugmentConfig(crop_min=0.1, flip_prob=0), (5000, 5000))["box"].unbind(-1)
    small = (right - left) * (bottom - top) < 0.5 * 5000**2  # of these, all fit at the first try
    assert_uniform(((right - left) / (bottom - top)).log()[small], -math.log(4 / 3), math.log(4 / 3))


def test_crop_position_is_uniform() -> None:
    left, top, right, bottom = choose(AugmentConfig(crop_min=0.1, flip_prob=0), (5000, 5000))["box"].unbind(-1)
    for start, end in ((left, right), (top, bottom)):
        space = 5000 - (end - start)
        assert_uniform((start / space)[space > 2500], 0, 1)


def test_crop_falls_back_to_the_centre() -> None:
    augmentation = build(AugmentConfig(crop_min=0.9, flip_prob=0), (10, 100))  # 900 pixels: at least 26 high
    assert (augmentation.choose(augmentation.draw(50, seeded()))["box"] == torch.tensor([43.0, 0, 56, 10])).all()


def test_crop_takes_the_first_try_that_fits() -> None:
    augmentation = build(AugmentConfig(crop_min=0.25, crop_aspect=4, flip_prob=0), (32, 32))
    draws = {name: value.clone() for name, value in augmentation.draw(1, seeded()).items()}
    draws["area"][:], draws["aspect"][:] = 1 - 1e-6, 0.0  # whole area, a quarter as wide as high: does not fit
    draws["left"][:], draws["top"][:] = 0, 0
    draws["area"][0, 0, 3], draws["aspect"][0, 0, 3] = 0, 0.5  # a square of 16
    draws["area"][0, 0, 5], draws["aspect"][0, 0, 5] = 0.2, 0.5
    draws["area"][1, 0, CROP_TRIES - 1], draws["aspect"][1, 0, CROP_TRIES - 1] = 0, 0.5
    assert augmentation.choose(draws)["box"][:, 0].tolist() == [[0, 0, 16, 16], [0, 0, 16, 16]]


# Everything else that is drawn


def test_jitter_factors() -> None:
    chosen = choose(AugmentConfig())
    assert build(AugmentConfig()).colours == ("brightness", "contrast", "saturation", "hue")
    neutral = chosen["colours"] == torch.tensor([1.0, 1, 1, 0])
    untouched = neutral.all(-1)
    for view in (0, 1):
        assert_share(~untouched[view], 0.8)
    jittered = chosen["colours"][~untouched]
    for number, (low, high) in enumerate([(0.6, 1.4), (0.6, 1.4), (0.8, 1.2), (-0.1, 0.1)]):
        assert_uniform(jittered[:, number], low, high)


def test_order_is_uniform_over_all_24() -> None:
    order = choose(AugmentConfig())["order"].flatten(0, 1)
    assert (order.sort(-1).values == torch.arange(4)).all()
    counts = np.unique(order.numpy(), axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > SURE


def test_probabilities_of_each_view() -> None:
    chosen = choose(AugmentConfig(blur_prob=(0.7, 0.1), solarize_prob=(0.05, 0.2), grey_prob=0.2, flip_prob=0.5))
    flipped = chosen["box"][..., 0] > chosen["box"][..., 2]
    for view in (0, 1):
        assert_share(chosen["grey"][view], 0.2)
        assert_share(flipped[view], 0.5)
        assert_share(chosen["sigma"][view] > 0, (0.7, 0.1)[view])
        assert_share(chosen["solarize"][view], (0.05, 0.2)[view])
        assert_uniform(chosen["sigma"][view][chosen["sigma"][view] > 0], 0.1, 2)


def test_the_papers_views() -> None:
    chosen = choose(AugmentConfig())
    assert (chosen["sigma"][0] >= 0.1).all()
    assert not chosen["solarize"][0].any()


def test_affine_jitter() -> None:
    a, b, c, d, e, f = choose(DIGITS)["affine"].flatten(-2).unbind(-1)
    rotation, scale_x = torch.atan2(d, a), (a**2 + d**2).sqrt()
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
    neighbours = torch.cat([numbers[0, :-1], numbers[0, 1:]], dim=-1)
    for table in (both_views, neighbours):
        correlation = torch.corrcoef(table.T) - torch.eye(table.shape[1])
        assert correlation.abs().max() < 5 / math.sqrt(MANY)  # 5 standard deviations
    assert_uniform(numbers, 0, 1)


def test_no_two_views_of_equal_images_are_equal() -> None:
    pixels = random_pixels(1).expand(32, -1, -1, -1)
    views = build(AugmentConfig())(pixels, seeded()).flatten(0, 1).flatten(1)
    assert (torch.cdist(views, views) + 1e6 * torch.eye(64)).min() > 1


# Views


def pillow_view(pixels: Tensor, chosen: dict[str, Tensor], size: tuple[int, int]) -> Tensor:
    """Return the view pillow makes with one image's parameters, the flip last: (C, height, width) in levels."""
    left, top, right, bottom = chosen["box"].tolist()
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    image = image.resize(size[::-1], Image.Resampling.BILINEAR, box=(min(left, right), top, max(left, right), bottom))
    for k in chosen["order"].tolist():
        amount = chosen["colours"][k].item()
        if k == 3:
            turn, strength, value = image.convert("HSV").split()
            turned = (np.asarray(turn).astype(int) + round(amount * 255)) % 256
            image = Image.merge("HSV", (Image.fromarray(turned.astype(np.uint8)), strength, value)).convert("RGB")
        else:
            image = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[k](image).enhance(amount)
    if chosen["grey"]:
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
    ours = (augmentation.apply(pixels, draws) * 0.25 + 0.5) * 255
    chosen = augmentation.choose(draws)
    assert ours.shape == (2, 40, 3, *((view, view) if view else size))
    for v in (0, 1):
        for i in range(40):
            parameters = {name: value[v, i] for name, value in chosen.items()}
            difference = (ours[v, i] - pillow_view(pixels[i], parameters, augmentation.view_size)).abs()
            # Two roundings an operation, hue's the coarsest; single pixels differ more, at the blurred edges above all.
            assert difference.mean() < 4, (v, i, parameters)
            assert difference.quantile(0.9) < 10, (v, i, parameters)


def test_same_seed_same_views_and_replay() -> None:
    augmentation, pixels = build(AugmentConfig()), random_pixels(8)
    draws = augmentation.draw(8, seeded(3))
    views = augmentation.apply(pixels, draws)
    assert torch.equal(views, augmentation(pixels, seeded(3)))
    assert torch.equal(views, augmentation.apply(pixels, draws))
    assert not torch.equal(views, augmentation(pixels, seeded(4)))
    assert views.dtype == torch.float32
    assert views.is_contiguous()


def test_an_image_does_not_depend_on_the_others_of_its_batch() -> None:
    augmentation, pixels = build(AugmentConfig()), random_pixels(8)
    draws = augmentation.draw(8, seeded())
    alone = augmentation.apply(pixels[5:6], {name: value[:, 5:6] for name, value in draws.items()})
    torch.testing.assert_close(alone, augmentation.apply(pixels, draws)[:, 5:6], atol=1e-4, rtol=0)


def test_without_augmentation_nothing_is_drawn() -> None:
    augmentation, pixels = build(OFF), random_pixels(4)
    assert augmentation.draw(4, seeded()) == {}
    assert torch.equal(augmentation(pixels), augmentation.normalize(pixels).expand(2, -1, -1, -1, -1))


def test_only_the_flip() -> None:
    augmentation, pixels = build(OFF.model_copy(update={"flip_prob": 1.0}), (20, 36)), random_pixels(4, (20, 36))
    assert torch.equal(augmentation(pixels)[1], augmentation.normalize(pixels.flip(-1)))


@pytest.mark.parametrize("size", [(8, 8), (12, 20)])
def test_grey_images_skip_what_needs_colour(size: tuple[int, int]) -> None:
    augmentation = build(AugmentConfig(grey_prob=1, saturation=1, hue=0.5), size, channels=1)
    assert augmentation.colours == ("brightness", "contrast")
    assert "grey" not in augmentation.draw(2)
    views = augmentation(random_pixels(16, size, channels=1), seeded())
    assert views.shape == (2, 16, 1, *size)
    assert views.isfinite().all()


def test_digits() -> None:
    augmentation, pixels = build(DIGITS, (8, 8), channels=1), random_pixels(32, (8, 8), channels=1)
    draws = augmentation.draw(32, seeded())
    assert set(draws) == {"affine", "jitter", "colours", "order"}
    views = augmentation.apply(pixels, draws) * 0.25 + 0.5
    assert views.shape == (2, 32, 1, 8, 8)
    assert views.min() >= -1e-6
    assert views.max() <= 1 + 1e-6


def test_normalize_subtracts_mean_and_divides_by_std_of_each_channel() -> None:
    mean, std, pixels = (0.1, 0.2, 0.3), (0.5, 0.25, 0.2), random_pixels(2)
    augmentation = Augmentation(OFF, mean, std, 3, (32, 32))
    expected = (pixels / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(augmentation.normalize(pixels), expected)
    torch.testing.assert_close(augmentation(pixels)[0], expected)


def test_normalize_takes_the_centre_of_larger_images() -> None:
    pixels = random_pixels(2, (41, 50))
    views = build(AugmentConfig(size=32), (41, 50)).normalize(pixels)
    assert torch.equal(views, build(OFF).normalize(pixels[..., 4:36, 9:41]))


def test_normalize_enlarges_smaller_images() -> None:
    pixels = random_pixels(2, (8, 8))
    views = build(OFF.model_copy(update={"size": 16}), (8, 8)).normalize(pixels) * 0.25 + 0.5
    theirs = Image.fromarray(pixels[0].permute(1, 2, 0).numpy()).resize((16, 16), Image.Resampling.BILINEAR)
    assert (views[0] * 255 - torch.from_numpy(np.array(theirs)).permute(2, 0, 1)).abs().max() < 1.1


def test_normalize_may_keep_the_whole_image() -> None:
    pixels, config = random_pixels(2, (41, 50)), AugmentConfig(size=32, plain="whole")
    augmentation = build(config, (41, 50))
    assert torch.equal(augmentation.normalize(pixels), build(OFF, (41, 50)).normalize(pixels))
    assert augmentation(pixels).shape == (2, 2, 3, 32, 32)


def test_wrong_channels_are_named() -> None:
    with pytest.raises(UserError, match=r"data\.std: 3 values, but the images have 1 channels"):
        Augmentation(OFF, (0.5,), (0.2, 0.2, 0.2), 1, (8, 8))
    with pytest.raises(UserError, match="1 or 3 channels, got 4"):
        build(OFF, channels=4)


@pytest.mark.parametrize("config", [AugmentConfig(affine=AffineConfig()), AugmentConfig(size=24), OFF])
def test_apply_compiles_without_a_graph_break(config: AugmentConfig) -> None:
    augmentation, pixels = build(config), random_pixels(4)
    draws = augmentation.draw(4, seeded())
    compiled = torch.compile(augmentation.apply, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(pixels, draws), augmentation.apply(pixels, draws), atol=1e-4, rtol=0)
