"""Draws, their distributions, and whole views of strong.py."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ImageOps
from scipy import stats
from torch import Generator, Tensor

from secu.base.errors import UserError
from secu.config import AugmentConfig, SelfLabelConfig
from secu.views import strong_pixels as ops
from secu.views.augment import Augmentation
from secu.views.strong import StrongAugmentation
from test_strong_pixels import PILLOW, from_pillow, to_pillow

MANY = 20_000
P_VALUE = 1e-3  # draws are seeded: a test that passes once always passes
NAMES = list(ops.OPERATIONS)
LARGEST = 1 - 2**-24  # number that torch.rand returns


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def build(size: tuple[int, int] = (32, 32), channels: int = 3, **settings: Any) -> StrongAugmentation:
    return StrongAugmentation(AugmentConfig(), SelfLabelConfig(**settings), (0.5,), (0.25,), channels, size)


def random_pixels(count: int, size: tuple[int, int] = (32, 32), channels: int = 3, low: int = 0) -> Tensor:
    return torch.randint(low, 256, (count, channels, *size), dtype=torch.uint8, generator=seeded())


def smooth_pixels(count: int, size: tuple[int, int] = (32, 32), channels: int = 3) -> Tensor:
    low = torch.nn.functional.interpolate(random_pixels(count, (6, 6), channels).float(), size=size, mode="bicubic")
    return low.clamp(0, 255).to(torch.uint8)


def choose(size: tuple[int, int] = (32, 32), **settings: Any) -> dict[str, Tensor]:
    augmentation = build(size, **settings)
    return augmentation.choose(augmentation.draw(MANY, seeded()))


def to_levels(views: Tensor) -> Tensor:
    """Undo the normalization of ``build``, and check that the result consists of whole levels."""
    levels = (views * 0.25 + 0.5) * 255
    assert (levels - levels.round()).abs().max() < 1e-3
    return levels.round().to(torch.uint8)


def assert_uniform(values: Tensor, low: float, high: float) -> None:
    assert stats.kstest(values.flatten().double().numpy(), stats.uniform(low, high - low).cdf).pvalue > P_VALUE


def assert_equally_often(values: Tensor, expected: range) -> None:
    found, counts = np.unique(values.numpy(), return_counts=True)
    assert found.tolist() == list(expected)
    assert len(expected) == 1 or stats.chisquare(counts).pvalue > P_VALUE


# Draws


def test_all_operations_are_equally_frequent_at_every_turn() -> None:
    operation = choose()["operation"]
    assert operation.shape == (MANY, 4)
    for turn in operation.unbind(1):
        assert_equally_often(turn, range(14))


def test_operations_are_drawn_with_replacement() -> None:
    first, second, *_ = choose()["operation"].unbind(1)
    assert_equally_often(first * 14 + second, range(14 * 14))


@pytest.mark.parametrize("name", NAMES)
def test_magnitudes_cover_their_range(name: str) -> None:
    chosen = choose()
    low, high = ops.OPERATIONS[name]
    for turn in range(4):
        magnitude = chosen["magnitude"][:, turn][chosen["operation"][:, turn] == NAMES.index(name)]
        if low == high:
            assert (magnitude == low).all()
        else:
            assert_uniform(magnitude, low, high)


def test_posterize_keeps_four_to_eight_bits() -> None:
    chosen = choose()
    bits = chosen["magnitude"][chosen["operation"] == NAMES.index("posterize")].int()
    assert_equally_often(bits, range(4, 9))


def test_posterize_of_scan_keeps_four_to_seven_bits() -> None:
    chosen = choose(strong_style="scan")
    bits = chosen["magnitude"][chosen["operation"] == NAMES.index("posterize")].int()
    assert_equally_often(bits, range(4, 8))
    others = chosen["operation"] != NAMES.index("posterize")
    assert torch.equal(chosen["magnitude"][others], choose()["magnitude"][others])


def test_weak_views_may_be_unflipped() -> None:
    flip = choose(weak_flip=False)["flip"]
    assert not flip[:, 0].any()
    assert torch.equal(flip[:, 1], choose()["flip"][:, 1])
    pixels = random_pixels(20)
    augmentation = build(weak_flip=False)
    assert torch.equal(augmentation(pixels, seeded())[0], augmentation.plain(pixels))


def test_flips_of_the_views_are_independent() -> None:
    weak, strong = choose()["flip"].unbind(1)
    assert_equally_often(2 * weak.int() + strong.int(), range(4))


@pytest.mark.parametrize(("share", "reach"), [(0.125, (4, 8)), (0.25, (8, 16)), (0.03, (0, 1)), (0, (0, 0))])
def test_crops(share: float, reach: tuple[int, int]) -> None:
    shift_x, shift_y = choose((32, 64), crop_padding=share)["shift"].unbind(1)
    assert_equally_often(shift_x, range(-reach[1], reach[1] + 1))
    assert_equally_often(shift_y, range(-reach[0], reach[0] + 1))


@pytest.mark.parametrize(("size", "largest"), [((32, 32), 16), ((96, 64), 32), ((9, 9), 4)])
def test_cutout_sides(size: tuple[int, int], largest: int) -> None:
    left, top, right, bottom = choose(size)["box"].unbind(1)
    assert torch.equal(right - left, bottom - top)
    assert_equally_often(right - left, range(largest + 1))


@pytest.mark.parametrize(("size", "largest"), [((32, 32), 16), ((18, 32), 9)])
def test_cutouts_of_scan_are_those_of_a_loop_over_whole_numbers(size: tuple[int, int], largest: int) -> None:
    """A length from 1 to the largest, a center that is a pixel, and half of the length to either side."""
    augmentation = build(size, strong_style="scan")
    box = augmentation.choose(augmentation.draw(MANY, seeded()))["box"]
    numbers = augmentation.draw(MANY, seeded())["cutout"].double().tolist()
    expected = []
    for of_side, of_x, of_y in numbers:
        half = (1 + int(of_side * largest)) // 2
        x = int(of_x * size[1])
        y = int(of_y * size[0])
        expected.append([x - half, y - half, x + half, y + half])
    assert box.tolist() == expected
    assert set((box[:, 2] - box[:, 0]).tolist()) == set(range(0, largest + 1, 2))


def test_cutout_is_uniform_over_the_image() -> None:
    # At this size rounding to whole pixels is negligible.
    left, top, right, bottom = choose((5000, 8000))["box"].float().unbind(1)
    assert_uniform((left + right) / 2, 0, 8000)
    assert_uniform((top + bottom) / 2, 0, 5000)
    for one, other in ((right - left, left + right), (right - left, top + bottom), (left + right, top + bottom)):
        assert abs(stats.pearsonr(one, other).statistic) < 5 / math.sqrt(MANY)


def test_cutout_reaches_every_pixel_and_over_every_edge() -> None:
    left, top, right, bottom = choose((8, 8))["box"].unbind(1)
    assert (left.min(), top.min(), right.max(), bottom.max()) == (-2, -2, 10, 10)
    black = ops.cutout(torch.ones(MANY, 1, 8, 8, dtype=torch.uint8), choose((8, 8))["box"]) == 0
    share = black.float().mean(0)[0]
    assert torch.allclose(share, share.flip(-1), atol=0.02)
    assert torch.allclose(share, share.T, atol=0.02)
    assert share[0, 0] < share[4, 4]  # clipped at the edge, not moved inside


def test_draws_are_independent_between_images_and_purposes() -> None:
    numbers = torch.cat(list(build().draw(MANY, seeded()).values()), dim=1)
    assert numbers.shape == (MANY, 15)
    neighbors = torch.cat([numbers[:-1], numbers[1:]], dim=1)
    correlation = torch.corrcoef(neighbors.T) - torch.eye(30)
    assert correlation.abs().max() < 5 / math.sqrt(MANY)  # 5 standard deviations
    assert_uniform(numbers, 0, 1)


@pytest.mark.parametrize("number", [0.0, LARGEST])
def test_the_smallest_and_largest_draws(number: float) -> None:
    augmentation = build()
    pixels = random_pixels(14)
    draws = {name: torch.full_like(value, number) for name, value in augmentation.draw(14).items()}
    for turn in range(4):
        draws["operation"][:, turn] = (torch.arange(14) + 0.5) / 14
    chosen = augmentation.choose(draws)
    assert torch.equal(chosen["operation"][:, 0], torch.arange(14))
    assert chosen["shift"].abs().max() == 4
    assert chosen["box"][0].tolist() == ([0, 0, 0, 0] if number == 0 else [24, 24, 40, 40])
    to_levels(augmentation.render(pixels, draws))
    draws["operation"][:] = number
    assert (augmentation.choose(draws)["operation"] == (0 if number == 0 else 13)).all()


# Views


def pillow_strong(pixels: Tensor, chosen: dict[str, Tensor]) -> Tensor:
    """Return the strong view that pillow makes with one image's parameters: (C, H, W) in levels."""
    image = to_pillow(pixels)
    if chosen["flip"][1]:
        image = ImageOps.mirror(image)
    x, y = chosen["shift"].tolist()
    image = image.crop((x, y, x + image.width, y + image.height))
    for number, magnitude in zip(chosen["operation"].tolist(), chosen["magnitude"].tolist(), strict=True):
        image = PILLOW[NAMES[number]](image, magnitude)
    left, top, right, bottom = chosen["box"].tolist()
    if left < right:
        image.paste(0 if image.mode == "L" else (0, 0, 0), (left, top, right, bottom))
    return from_pillow(image)


@pytest.mark.parametrize("size", [(32, 32), (30, 44)])
@pytest.mark.parametrize("channels", [1, 3])
def test_views_are_what_pillow_makes(size: tuple[int, int], channels: int) -> None:
    pixels = smooth_pixels(300, size, channels)
    augmentation = build(size, channels)
    draws = augmentation.draw(300, seeded())
    weak, strong = to_levels(augmentation.render(pixels, draws))
    chosen = augmentation.choose(draws)
    equal = 0
    for i in range(300):
        parameters = {name: value[i] for name, value in chosen.items()}
        assert torch.equal(weak[i], pixels[i].flip(-1) if parameters["flip"][0] else pixels[i])
        same = torch.equal(strong[i], pillow_strong(pixels[i], parameters))
        done = {NAMES[number] for number in parameters["operation"].tolist()}
        assert same or done & {"autocontrast", "rotate"}, parameters  # see test_strong_pixels.py
        equal += same
    assert equal > 0.95 * 300


def test_same_draws_same_views() -> None:
    augmentation = build()
    pixels = random_pixels(16)
    draws = augmentation.draw(16, seeded(3))
    before = {name: value.clone() for name, value in draws.items()}, pixels.clone()
    views = augmentation.render(pixels, draws)
    assert torch.equal(views, augmentation(pixels, seeded(3)))
    assert torch.equal(views, augmentation.render(pixels, draws))
    assert not torch.equal(views, augmentation(pixels, seeded(4)))
    assert all(torch.equal(draws[name], value) for name, value in before[0].items())
    assert torch.equal(pixels, before[1])
    assert views.dtype == torch.float32
    assert views.is_contiguous()


def test_an_image_does_not_depend_on_the_rest_of_its_batch() -> None:
    augmentation = build()
    pixels = random_pixels(64)
    draws = augmentation.draw(64, seeded())
    views = augmentation.render(pixels, draws)
    for i in range(0, 64, 7):
        alone = augmentation.render(pixels[i : i + 1], {name: value[i : i + 1] for name, value in draws.items()})
        assert torch.equal(alone, views[:, i : i + 1])


def test_no_two_strong_views_of_equal_images_are_equal() -> None:
    pixels = smooth_pixels(1).expand(64, -1, -1, -1)
    strong = build()(pixels, seeded())[1].flatten(1)
    assert (torch.cdist(strong, strong) + 1e6 * torch.eye(64)).min() > 1


def test_with_all_settings_at_zero_only_flips_remain() -> None:
    augmentation = build(crop_padding=0, operations=0, cutout=0)
    pixels = random_pixels(32)
    draws = augmentation.draw(32, seeded())
    views = augmentation.render(pixels, draws)
    for view, flip in zip(views, augmentation.choose(draws)["flip"].unbind(1), strict=True):
        expected = torch.where(flip.view(-1, 1, 1, 1), pixels.flip(-1), pixels)
        assert torch.equal(view, augmentation.plain(expected))


def test_crop_and_cutout_are_black() -> None:
    augmentation = build(operations=0)
    pixels = random_pixels(200, low=1)
    draws = augmentation.draw(200, seeded())
    chosen = augmentation.choose(draws)
    black = to_levels(augmentation.render(pixels, draws)[1]) == 0
    for one, (x, y), (left, top, right, bottom) in zip(
        black, chosen["shift"].tolist(), chosen["box"].tolist(), strict=True
    ):
        expected = torch.ones(3, 32, 32, dtype=torch.bool)
        expected[:, max(-y, 0) : 32 - max(y, 0), max(-x, 0) : 32 - max(x, 0)] = False
        expected[:, max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] = True
        assert torch.equal(one, expected)


@pytest.mark.parametrize("channels", [1, 3])
def test_cutouts_of_scan_have_the_mean_color(channels: int) -> None:
    """Pixel by pixel: zero after normalizing inside of the box, and outside of it the view of the other style."""
    style = {"crop_padding": 0, "operations": 0}
    pixels = random_pixels(30, channels=channels)
    augmentation = build(channels=channels, strong_style="scan", **style)
    draws = augmentation.draw(30, seeded())
    chosen = augmentation.choose(draws)
    weak, strong = augmentation.render(pixels, draws)
    whole = build(channels=channels, cutout=0, **style).render(pixels, draws)
    assert torch.equal(weak, whole[0])
    for i, (left, top, right, bottom) in enumerate(chosen["box"].tolist()):
        for y in range(32):
            for x in range(32):
                inside = left <= x < right and top <= y < bottom
                expected = torch.zeros(channels) if inside else whole[1, i, :, y, x]
                assert torch.equal(strong[i, :, y, x], expected)
    assert (strong == 0).any()


@pytest.mark.parametrize(("size", "view"), [((12, 12), 8), ((16, 10), 8), ((9, 12), 6), ((6, 6), 9), ((20, 10), 14)])
@pytest.mark.parametrize("channels", [1, 3])
def test_views_of_another_size_are_framed_as_for_evaluation(size: tuple[int, int], view: int, channels: int) -> None:
    """The weak view is what evaluation sees, except for the flip and for pixels rounded to whole levels."""
    config = AugmentConfig(size=view)
    strong = SelfLabelConfig(operations=0, crop_padding=0, cutout=0)
    augmentation = StrongAugmentation(config, strong, (0.5,), (0.25,), channels, size)
    plain = Augmentation(config, (0.5,), (0.25,), channels, size)
    pixels = smooth_pixels(40, size, channels)
    draws = augmentation.draw(40, seeded())
    views = augmentation.render(pixels, draws)
    assert views.shape == (2, 40, channels, view, view)
    assert torch.equal(augmentation.plain(pixels), plain.plain(pixels))
    framed = plain.plain(pixels)
    flips = draws["flip"] < 0.5
    exact = view <= min(size)  # no pixel is interpolated
    for shown, flip in zip(views, flips.unbind(1), strict=True):
        expected = torch.where(flip.view(-1, 1, 1, 1), framed.flip(-1), framed)
        assert (shown - expected).abs().max() <= (1e-5 if exact else 0.51 / 255 / 0.25)
    assert flips.any(0).all()
    assert not flips.all(0).any()


def test_views_are_whole_if_evaluation_sees_whole_images() -> None:
    config = AugmentConfig(size=8, plain="whole")
    size = (12, 16)
    views, as_they_are = (
        StrongAugmentation(one, SelfLabelConfig(), (0.5,), (0.25,), 3, size)(random_pixels(4, size), seeded())
        for one in (config, AugmentConfig())
    )
    assert views.shape == (2, 4, 3, *size)
    assert torch.equal(views, as_they_are)


def test_crops_and_cutouts_are_relative_to_the_view() -> None:
    config = AugmentConfig(size=16)
    augmentation = StrongAugmentation(config, SelfLabelConfig(), (0.5,), (0.25,), 3, (64, 64))
    chosen = augmentation.choose(augmentation.draw(MANY, seeded()))
    assert (chosen["shift"].min(), chosen["shift"].max()) == (-2, 2)
    left, _, right, _ = chosen["box"].unbind(1)
    assert_equally_often(right - left, range(9))


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_flip_probabilities_of_zero_and_one(probability: float) -> None:
    config = AugmentConfig(flip_prob=probability)
    strong = SelfLabelConfig(operations=0, crop_padding=0, cutout=0)
    augmentation = StrongAugmentation(config, strong, (0.5,), (0.25,), 3, (32, 32))
    pixels = random_pixels(200)
    expected = augmentation.plain(pixels.flip(-1) if probability else pixels)
    for shown in augmentation(pixels, seeded()):
        assert torch.equal(shown, expected)
    draws = {name: torch.zeros_like(value) for name, value in augmentation.draw(4).items()}
    assert (augmentation.choose(draws)["flip"] == bool(probability)).all()


@pytest.mark.parametrize("size", [(96, 96), (224, 224), (20, 45), (1, 1)])
@pytest.mark.parametrize("channels", [1, 3])
def test_other_sizes(size: tuple[int, int], channels: int) -> None:
    pixels = random_pixels(8, size, channels)
    views = build(size, channels)(pixels, seeded())
    assert views.shape == (2, 8, channels, *size)
    to_levels(views)


def test_mean_and_std_of_each_channel() -> None:
    mean = (0.1, 0.2, 0.3)
    std = (0.5, 0.25, 0.2)
    pixels = random_pixels(2)
    augmentation = StrongAugmentation(AugmentConfig(), SelfLabelConfig(), mean, std, 3, (32, 32))
    draws = augmentation.draw(2) | {"flip": torch.ones(2, 2)}
    expected = (pixels / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(augmentation.render(pixels, draws)[0], expected)


def test_wrong_channels_are_reported() -> None:
    with pytest.raises(UserError, match=r"data\.std: 3 values, but the images have 1 channels"):
        StrongAugmentation(AugmentConfig(), SelfLabelConfig(), (0.5,), (0.2, 0.2, 0.2), 1, (8, 8))
    with pytest.raises(UserError, match="1 or 3 channels, got 4"):
        build(channels=4)


# Devices and compilers


def test_everything_stays_on_the_device() -> None:
    """Meta tensors have no values and do not mix with other devices: nothing is read back or copied from the host."""
    augmentation = build().to("meta")
    views = augmentation(random_pixels(4).to("meta"))
    assert views.device.type == "meta"
    assert views.shape == (2, 4, 3, 32, 32)


@pytest.mark.parametrize(("channels", "style"), [(1, "secu"), (3, "secu"), (3, "scan")])
def test_render_compiles_without_a_graph_break(channels: int, style: str) -> None:
    augmentation = build((20, 36), channels, strong_style=style, weak_flip=style == "secu")
    pixels = random_pixels(28, (20, 36), channels)
    draws = augmentation.draw(28, seeded())
    compiled = torch.compile(augmentation.render, backend="aot_eager", fullgraph=True, dynamic=False)
    assert torch.equal(compiled(pixels, draws), augmentation.render(pixels, draws))


def test_compiled_code_makes_the_same_views() -> None:
    """One turn instead of four, which repeat the same code: most of the time is spent in the C++ compiler."""
    augmentation = build(operations=1)
    pixels = smooth_pixels(56)
    draws = augmentation.draw(56, seeded()) | {"operation": ((torch.arange(56) % 14 + 0.5) / 14).unsqueeze(1)}
    compiled = torch.compile(augmentation.render, fullgraph=True, dynamic=False)
    assert torch.equal(compiled(pixels, draws), augmentation.render(pixels, draws))
