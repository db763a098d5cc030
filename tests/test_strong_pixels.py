"""Every operation of strong_pixels.py against pillow, image by image, with the same magnitudes.

All but two agree level for level. Single pixels of rotated images are replaced by a neighbor, since our coordinates
start from float32, and autocontrast does not reproduce a rounding error of pillow's that makes some levels one too low.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor

from secu.views import strong_pixels as ops

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SIZES = [(32, 32), (20, 36), (36, 20), (20, 20), (8, 8), (3, 3), (2, 6), (1, 1)]
MAGNITUDES = 24  # from one end of the range to the other; with this many, no shift is by exactly half a pixel
NEIGHBORS = 1e-4  # share of pixels of rotated images that may come from a neighbor of the right one

PILLOW: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "identity": lambda image, _: image,
    "autocontrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
    "rotate": lambda image, m: image.rotate(m),
    "solarize": lambda image, m: ImageOps.solarize(image, m),  # type: ignore[arg-type]
    "color": lambda image, m: ImageEnhance.Color(image).enhance(m),
    "contrast": lambda image, m: ImageEnhance.Contrast(image).enhance(m),
    "brightness": lambda image, m: ImageEnhance.Brightness(image).enhance(m),
    "sharpness": lambda image, m: ImageEnhance.Sharpness(image).enhance(m),
    "shear_x": lambda image, m: transform(image, (1, m, 0, 0, 1, 0)),
    "shear_y": lambda image, m: transform(image, (1, 0, 0, m, 1, 0)),
    "shift_x": lambda image, m: transform(image, (1, 0, m * image.width, 0, 1, 0)),
    "shift_y": lambda image, m: transform(image, (1, 0, 0, 0, 1, m * image.height)),
    "posterize": lambda image, m: ImageOps.posterize(image, min(int(m), 8)),
}


def transform(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


def to_pillow(levels: Tensor) -> Image.Image:
    return Image.fromarray((levels[0] if len(levels) == 1 else levels.permute(1, 2, 0)).contiguous().numpy())


def from_pillow(image: Image.Image) -> Tensor:
    levels = torch.from_numpy(np.array(image))
    return levels.unsqueeze(0) if levels.ndim == 2 else levels.permute(2, 0, 1)


def each_by_pillow(levels: Tensor, operation: Callable[..., Image.Image], *parameters: list) -> Tensor:
    return torch.stack(
        [from_pillow(operation(to_pillow(one), *values)) for one, *values in zip(levels, *parameters, strict=True)]
    )


def random_levels(count: int, size: tuple[int, int], channels: int, low: int = 0, high: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(size[0] + 10 * channels + low)
    return torch.randint(low, high, (count, channels, *size), dtype=torch.uint8, generator=generator)


def all_kinds(size: tuple[int, int], channels: int, count: int = MAGNITUDES) -> Tensor:
    """Return ``count`` images of each of six kinds, one kind after another."""
    coarse = random_levels(count, (4, 4), channels).float()
    natural = torch.nn.functional.interpolate(coarse, size=size, mode="bicubic").clamp(0, 255).to(torch.uint8)
    saturated = ((natural.float() - 80) * 2).clamp(0, 255).to(torch.uint8)
    constant = random_levels(count, (1, 1), channels).expand(-1, -1, *size)
    one_channel_constant = random_levels(count, size, channels)
    one_channel_constant[:, 0] = 77
    noise = random_levels(count, size, channels)
    narrow = random_levels(count, size, channels, 60, 67)  # for equalize: many pixels per level
    return torch.cat([noise, narrow, natural, saturated, constant, one_channel_constant])


def magnitudes_of(name: str, count: int = MAGNITUDES) -> Tensor:
    low, high = ops.OPERATIONS[name]
    return torch.linspace(low, high, count)


def operate(name: str, levels: Tensor, magnitude: Tensor) -> Tensor:
    return ops.operate(levels, torch.full((len(levels),), ops.NUMBERS[name]), magnitude)


sizes = pytest.mark.parametrize("size", SIZES)
channels = pytest.mark.parametrize("channels", [1, 3])


def test_there_are_fourteen_operations() -> None:
    assert len(ops.OPERATIONS) == 14
    assert set(PILLOW) == set(ops.OPERATIONS)
    assert list(ops.NUMBERS.values()) == list(range(14))


@sizes
@channels
@pytest.mark.parametrize("name", [name for name in PILLOW if name not in ("rotate", "autocontrast")])
def test_operation_is_pillows(name: str, size: tuple[int, int], channels: int) -> None:
    levels = all_kinds(size, channels)
    magnitude = magnitudes_of(name).repeat(6)
    ours = operate(name, levels, magnitude)
    assert ours.dtype == torch.uint8
    assert torch.equal(ours, each_by_pillow(levels, PILLOW[name], magnitude.tolist()))


@channels
@pytest.mark.parametrize("size", [*SIZES, (96, 96), (224, 224)])
def test_rotation_is_pillows(size: tuple[int, int], channels: int) -> None:
    levels = all_kinds(size, channels)
    magnitude = magnitudes_of("rotate").repeat(6)
    theirs = each_by_pillow(levels, PILLOW["rotate"], magnitude.tolist())
    assert (operate("rotate", levels, magnitude) != theirs).float().mean() < NEIGHBORS


@sizes
@channels
def test_autocontrast_is_pillows_except_for_whole_quotients(size: tuple[int, int], channels: int) -> None:
    levels = all_kinds(size, channels)
    ours = operate("autocontrast", levels, torch.zeros(len(levels)))
    theirs = each_by_pillow(levels, ImageOps.autocontrast)
    low, high = levels.amin((2, 3), keepdim=True).int(), levels.amax((2, 3), keepdim=True).int()
    one_less = ours.int() - theirs.int()
    whole = (levels - low) * 255 % (high - low).clamp(min=1) == 0
    assert one_less[~whole].abs().sum() == 0
    assert set(one_less.unique().tolist()) <= {0, 1}
    assert (ours.amax((2, 3)) == torch.where(high > low, 255, high)[..., 0, 0]).all()  # pillow's may be 254


def test_autocontrast_differs_from_pillow_in_few_levels() -> None:
    """All levels of all ranges that start at black, which crops and shifts make the most frequent."""
    ramp = torch.arange(256, dtype=torch.uint8).expand(255, 1, 1, 256)
    levels = torch.minimum(ramp, torch.arange(1, 256, dtype=torch.uint8).view(-1, 1, 1, 1))
    theirs = each_by_pillow(levels, ImageOps.autocontrast)
    differs = operate("autocontrast", levels, torch.zeros(255)) != theirs
    within = ramp == levels
    assert differs[within].float().mean() < 0.005


@channels
def test_constant_channels_are_unchanged(channels: int) -> None:
    levels = random_levels(5, (1, 1), channels).expand(-1, -1, 24, 24).clone()
    levels[3:, -1] = random_levels(2, (24, 24), 1)[:, 0]
    for name in ("autocontrast", "equalize"):
        changed = operate(name, levels, torch.zeros(5))
        assert torch.equal(changed[:3], levels[:3])
        assert torch.equal(changed[3:, :-1], levels[3:, :-1])
        assert not torch.equal(changed[3:, -1], levels[3:, -1])


@channels
def test_equalize_needs_255_pixels_below_the_highest_level(channels: int) -> None:
    for below in (254, 255, 256, 509, 510):
        levels = torch.full((1, channels, 1, 600), 200, dtype=torch.uint8)
        levels[..., :below] = 100 + torch.arange(below) % 50
        ours = operate("equalize", levels, torch.zeros(1))
        assert torch.equal(ours, each_by_pillow(levels, ImageOps.equalize))
        assert torch.equal(ours, levels) == (below < 255)


@sizes
def test_sharpness_keeps_the_border(size: tuple[int, int]) -> None:
    levels = random_levels(4, size, 3)
    blurred = operate("sharpness", levels, torch.zeros(4))
    border = torch.ones(size, dtype=torch.bool)
    border[1:-1, 1:-1] = False
    assert torch.equal(blurred[..., border], levels[..., border])
    assert torch.equal(blurred, each_by_pillow(levels, lambda image: image.filter(ImageFilter.SMOOTH)))
    if min(size) > 3:
        assert (blurred[..., ~border] != levels[..., ~border]).any()


@sizes
def test_color_leaves_gray_images_unchanged(size: tuple[int, int]) -> None:
    levels = random_levels(MAGNITUDES, size, 1)
    assert torch.equal(operate("color", levels, magnitudes_of("color")), levels)


@channels
@pytest.mark.parametrize("name", ["color", "contrast", "brightness", "sharpness"])
def test_factors_of_zero_and_one(name: str, channels: int) -> None:
    levels = all_kinds((20, 36), channels, 4)
    nothing = torch.zeros(24)
    assert torch.equal(operate(name, levels, nothing), each_by_pillow(levels, PILLOW[name], nothing.tolist()))
    assert torch.equal(operate(name, levels, nothing + 1), levels)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0, 127.5, 128.0, 254.9, 255.0, 255.5, 256.0])
def test_solarize_thresholds(threshold: float) -> None:
    levels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    ours = operate("solarize", levels, torch.tensor([threshold]))
    assert torch.equal(ours, each_by_pillow(levels, PILLOW["solarize"], [threshold]))
    assert torch.equal(ours, levels) == (threshold > 255)


@pytest.mark.parametrize("bits", range(4, 9))
def test_posterize_truncates_bits(bits: int) -> None:
    levels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(3, -1, -1, -1)
    for ours in operate("posterize", levels, bits + torch.tensor([0, 0.5, 0.999])):
        assert torch.equal(ours, from_pillow(ImageOps.posterize(to_pillow(levels[0]), bits)))


@channels
def test_any_affine_matrix(channels: int) -> None:
    levels = random_levels(200, (20, 36), channels)
    matrix = torch.randn(200, 2, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1, 1, 10.0])
    theirs = each_by_pillow(levels, transform, [tuple(m.flatten().tolist()) for m in matrix])
    assert (theirs > 0).float().mean() > 0.1
    assert (ops.affine(levels, matrix) != theirs).float().mean() < NEIGHBORS


@pytest.mark.parametrize("name", ["rotate", "shear_x", "shear_y", "shift_x", "shift_y"])
def test_moves_uncover_black(name: str) -> None:
    levels = random_levels(2, (32, 32), 3, 1, 256)
    moved = operate(name, levels, torch.tensor(ops.OPERATIONS[name]))
    assert 0.02 < (moved == 0).float().mean() < 0.3
    assert torch.equal(operate(name, levels, torch.zeros(2)), levels)


def test_every_image_has_its_own_operation_and_magnitude() -> None:
    """Two images per operation in one batch, against the operations one by one."""
    levels = all_kinds((20, 36), 3, 5)[:28]
    operation = torch.randperm(28, generator=torch.Generator().manual_seed(0)) % 14
    names = [list(ops.OPERATIONS)[number] for number in operation.tolist()]
    share = torch.linspace(0.1, 0.9, 28)
    ends = torch.tensor([ops.OPERATIONS[name] for name in names])
    magnitude = ends[:, 0] + share * (ends[:, 1] - ends[:, 0])
    ours = ops.operate(levels, operation, magnitude)
    for i, name in enumerate(names):
        assert torch.equal(ours[i : i + 1], operate(name, levels[i : i + 1], magnitude[i : i + 1])), name
        if name not in ("rotate", "autocontrast"):
            assert torch.equal(ours[i], from_pillow(PILLOW[name](to_pillow(levels[i]), magnitude[i].item()))), name


@sizes
@channels
def test_mirror_and_shift(size: tuple[int, int], channels: int) -> None:
    height, width = size
    levels = random_levels(50, size, channels)
    generator = torch.Generator().manual_seed(0)
    mirrored = torch.rand(50, generator=generator) < 0.5
    shift = torch.randint(-6, 7, (50, 2), generator=generator)

    def by_pillow(image: Image.Image, mirror: bool, x: int, y: int) -> Image.Image:
        return (ImageOps.mirror(image) if mirror else image).crop((x, y, x + width, y + height))

    theirs = each_by_pillow(levels, by_pillow, mirrored.tolist(), shift[:, 0].tolist(), shift[:, 1].tolist())
    assert torch.equal(ops.mirror_and_shift(levels, mirrored, shift), theirs)


@sizes
@channels
def test_cutout(size: tuple[int, int], channels: int) -> None:
    levels = random_levels(50, size, channels, 1, 256)
    corner = torch.randint(-4, 30, (50, 2), generator=torch.Generator().manual_seed(0))
    side = torch.arange(50).view(-1, 1) % 17

    def by_pillow(image: Image.Image, box: list[int]) -> Image.Image:
        if box[0] < box[2]:
            image.paste(0 if image.mode == "L" else (0, 0, 0), tuple(box))
        return image

    box = torch.cat([corner, corner + side], dim=1)
    ours = ops.cutout(levels, box)
    assert torch.equal(ours, each_by_pillow(levels, by_pillow, box.tolist()))
    assert torch.equal(ours[::17], levels[::17])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_compiled_operations_agree_with_eager_ones_level_for_level(device):
    """The compiler of torch 2.13 took the minimum of uint8 levels to be 0."""
    operation = torch.arange(5 * len(ops.OPERATIONS)) % len(ops.OPERATIONS)
    lowest, highest = torch.tensor(list(ops.OPERATIONS.values()))[operation].unbind(1)
    magnitude = lowest + (highest - lowest) * torch.linspace(0, 1, len(operation))
    inputs = [part.to(device) for part in (random_levels(len(operation), (32, 32), 3, 30, 200), operation, magnitude)]
    compiled = torch.compile(ops.operate, fullgraph=True, dynamic=False)
    assert torch.equal(compiled(*inputs), ops.operate(*inputs))
