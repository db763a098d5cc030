"""RandAugment's operations on a whole batch, with a separate operation and magnitude for every image.

Images are levels: uint8 of shape (N, C, H, W) with one or three channels. The result equals pillow's, including its
rounding; otherwise, differences would accumulate over several operations.

``operate`` always makes three passes over a batch: every image is moved, toned and blended, with neutral parameters for
the passes that its operation does not need. A move is a gather at pillow's fixed-point coordinates. A tone is a lookup
table of 256 levels for each channel, so its cost hardly depends on the image size.

Everything is plain tensor arithmetic with static shapes on the images' device, so it can be compiled and captured in
a CUDA graph. It does not use float64, which not every device supports; docstrings note where this costs accuracy.
"""

import torch
from torch import Tensor

LEVELS = 256
FIXED_POINT_BITS = 16  # fractional bits of a coordinate

# Name → lowest and highest magnitude: degrees, a level, factors, shares of a side, or bits (truncated: 4 to 8).
OPERATIONS: dict[str, tuple[float, float]] = {
    "identity": (0, 0),
    "autocontrast": (0, 0),
    "equalize": (0, 0),
    "rotate": (-30, 30),
    "solarize": (0, 256),
    "color": (0.05, 0.95),
    "contrast": (0.05, 0.95),
    "brightness": (0.05, 0.95),
    "sharpness": (0.05, 0.95),
    "shear_x": (-0.1, 0.1),
    "shear_y": (-0.1, 0.1),
    "shift_x": (-0.1, 0.1),
    "shift_y": (-0.1, 0.1),
    "posterize": (4, 9),
}
NUMBERS = {name: number for number, name in enumerate(OPERATIONS)}


def operate(levels: Tensor, operation: Tensor, magnitude: Tensor) -> Tensor:
    """Apply one operation to each image.

    Args:
        levels: (N, C, H, W).
        operation: (N,), numbers from ``NUMBERS``.
        magnitude: (N,), within the range of the image's operation.
    """

    def only(name: str, neutral: float) -> Tensor:
        return torch.where(operation == NUMBERS[name], magnitude, neutral)

    shear = torch.stack([only("shear_x", 0), only("shear_y", 0)], dim=-1)
    shift = torch.stack([only("shift_x", 0), only("shift_y", 0)], dim=-1)
    levels = affine(levels, affine_matrix(only("rotate", 0), shear, shift, (levels.shape[-2], levels.shape[-1])))

    table = torch.arange(LEVELS, device=levels.device, dtype=torch.uint8)
    table = torch.where(_each(operation == NUMBERS["autocontrast"]), autocontrast_table(levels), table)
    table = torch.where(_each(operation == NUMBERS["equalize"]), equalize_table(levels), table)
    table = solarize(table, only("solarize", LEVELS))
    table = posterize(table, only("posterize", 8))
    table = blend(mean_gray(levels), table, only("contrast", 1))
    table = blend(torch.zeros_like(table), table, only("brightness", 1))
    levels = look_up(levels, table)

    levels = blend(luminance(levels), levels, only("color", 1))
    return blend(smooth(levels), levels, only("sharpness", 1))


def mirror_and_shift(levels: Tensor, mirrored: Tensor, shift: Tensor) -> Tensor:
    """Flip the ``mirrored`` images left to right, then cut out a window as large as the image.

    Args:
        levels: (N, C, H, W).
        mirrored: (N,), bool.
        shift: (N, 2), offset of the window to the right and down, in whole pixels. Outside the image it is black.
    """
    height, width = levels.shape[-2:]
    x = torch.arange(width, device=levels.device) + shift[:, :1]
    y = torch.arange(height, device=levels.device) + shift[:, 1:]
    x = torch.where(mirrored.view(-1, 1), width - 1 - x, x)
    return _take(levels, y.unsqueeze(2), x.unsqueeze(1))


def affine(levels: Tensor, matrix: Tensor) -> Tensor:
    """Sample each image at ``matrix`` · position, as ``Image.transform(size, AFFINE, matrix, NEAREST)`` does.

    Like pillow, round the matrix to fixed point and continue in integers. Rounding starts from float32 here: a few
    coefficients differ by 2^-16, and one in 100,000 pixels of rotated images is replaced by its neighbor.

    Args:
        levels: (N, C, H, W).
        matrix: (N, 2, 3), in pixels, x before y.
    """
    height, width = levels.shape[-2:]
    center = matrix[..., 2] + (matrix[..., 0] + matrix[..., 1]) / 2  # of the first pixel: its corner is (0, 0)
    fixed = torch.cat([matrix[..., :2], center.unsqueeze(-1)], dim=-1) * 2**FIXED_POINT_BITS
    of_x, of_y, start = (fixed + 0.5).floor().int().view(-1, 2, 3, 1, 1).unbind(2)
    x = torch.arange(width, device=levels.device, dtype=torch.int32)
    y = torch.arange(height, device=levels.device, dtype=torch.int32).view(-1, 1)
    from_x, from_y = ((of_x * x + of_y * y + start) >> FIXED_POINT_BITS).unbind(1)
    return _take(levels, from_y, from_x)


def affine_matrix(angle: Tensor, shear: Tensor, shift: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the matrix of a rotation about the center, a shear or a shift; only one of them may be nonzero.

    Args:
        angle: (N,), in degrees, counterclockwise, as in ``Image.rotate``.
        shear: (N, 2), along x and y, about the upper left corner.
        shift: (N, 2), to the left and upwards, as shares of width and height.
        size: Height and width of the images.
    """
    height, width = size
    radians = torch.deg2rad(angle)
    sin = radians.sin()
    versine = 2 * (radians / 2).sin().square()  # 1 - cos would lose digits
    shear_x, shear_y = shear.unbind(-1)
    # Without interpolation a shift is by whole pixels; rounding in fixed point as well would round it twice.
    shift_x = (shift[:, 0] * width + 0.5).floor()
    shift_y = (shift[:, 1] * height + 0.5).floor()
    row_x = [1 - versine, shear_x - sin, (versine * width + sin * height) / 2 + shift_x]
    row_y = [shear_y + sin, 1 - versine, (versine * height - sin * width) / 2 + shift_y]
    return torch.stack(row_x + row_y, dim=-1).view(-1, 2, 3)


def autocontrast_table(levels: Tensor) -> Tensor:
    """Return the table that stretches each channel's range to all levels: (N, C, 1, 256).

    Equals ``ImageOps.autocontrast`` except where a quotient is a whole number: some of pillow's floats fall short of
    it by a last digit and are truncated to one level less.
    """
    wide = levels.int()  # before amin: torch's compiler gets the minimum of uint8 wrong
    low = wide.amin(dim=(2, 3), keepdim=True)
    high = wide.amax(dim=(2, 3), keepdim=True)
    level = torch.arange(LEVELS, device=levels.device, dtype=torch.int32)
    stretched = (level - low) * (LEVELS - 1) // (high - low).clamp(min=1)
    return torch.where(high > low, stretched.clamp(0, LEVELS - 1), level).to(torch.uint8)


def equalize_table(levels: Tensor) -> Tensor:
    """Return the table that makes the levels of each channel equally frequent: (N, C, 1, 256).

    Equals ``ImageOps.equalize``: channels with fewer than 255 pixels below their highest level are unchanged.
    """
    index = levels.flatten(2).long()
    counts = torch.zeros(*levels.shape[:2], LEVELS, device=levels.device, dtype=torch.int32)
    counts.scatter_add_(2, index, torch.ones_like(index, dtype=torch.int32))
    highest = counts.gather(2, index.amax(dim=2, keepdim=True))
    step = (index.shape[2] - highest) // (LEVELS - 1)
    below = counts.cumsum(2, dtype=torch.int32) - counts
    equal = ((step // 2 + below) // step.clamp(min=1)).clamp(max=LEVELS - 1)
    level = torch.arange(LEVELS, device=levels.device, dtype=torch.int32)
    return torch.where(step > 0, equal, level).to(torch.uint8).unsqueeze(2)


def solarize(levels: Tensor, threshold: Tensor) -> Tensor:
    """Invert the levels at or above ``threshold`` (N,); 256 changes nothing."""
    return torch.where(levels >= _each(threshold), LEVELS - 1 - levels, levels)


def posterize(levels: Tensor, bits: Tensor) -> Tensor:
    """Keep the upper ``bits`` (N,), truncated to an integer, of each level; 8 changes nothing."""
    dropped = _each(8 - bits.int().clamp(0, 8)).to(torch.uint8)
    return (levels >> dropped) << dropped


def blend(other: Tensor, levels: Tensor, factor: Tensor) -> Tensor:
    """Interpolate from ``other`` to the image by ``factor`` (N,), truncating like ``Image.blend``; 1 is the image."""
    start = other.float()
    return (start + _each(factor) * (levels.float() - start)).to(torch.uint8)


def luminance(levels: Tensor) -> Tensor:
    """Return the grayscale image, pillow's mode L: (N, 1, H, W)."""
    if levels.shape[1] == 1:
        return levels
    red, green, blue = levels.int().split(1, dim=1)
    weighted: Tensor = 19595 * red + 38470 * green + 7471 * blue
    return ((weighted + 2**15) >> 16).to(torch.uint8)


def mean_gray(levels: Tensor) -> Tensor:
    """Return the rounded mean of the grayscale image: (N, 1, 1, 1)."""
    pixels = levels.shape[-2] * levels.shape[-1]
    total = luminance(levels).sum(dim=(2, 3), keepdim=True, dtype=torch.int64)
    return ((2 * total + pixels) // (2 * pixels)).to(torch.uint8)


def smooth(levels: Tensor) -> Tensor:
    """Apply ``ImageFilter.SMOOTH``: the mean of 3 x 3 pixels, the middle one counted five times; the border is kept."""
    wide = levels.int()
    rows = wide[..., :-2, :] + wide[..., 1:-1, :] + wide[..., 2:, :]
    boxes = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    smoothed = levels.clone()
    smoothed[..., 1:-1, 1:-1] = ((boxes + 4 * wide[..., 1:-1, 1:-1] + 6) // 13).to(torch.uint8)
    return smoothed


def look_up(levels: Tensor, table: Tensor) -> Tensor:
    """Replace each level by its entry in the table (N, C, 1, 256) of its image and channel."""
    return table.flatten(2).gather(2, levels.flatten(2).long()).view_as(levels)


def cutout(levels: Tensor, box: Tensor) -> Tensor:
    """Fill a box with zeros, black in levels, the mean color in normalized images.

    The box is left, top, right and bottom (N, 4) in whole pixels, the last two exclusive.
    """
    left, top, right, bottom = box.view(-1, 4, 1, 1, 1).unbind(1)
    x = torch.arange(levels.shape[-1], device=levels.device)
    y = torch.arange(levels.shape[-2], device=levels.device).view(-1, 1)
    return levels.masked_fill((x >= left) & (x < right) & (y >= top) & (y < bottom), 0)


def _each(parameter: Tensor) -> Tensor:
    """Reshape one number per image so that it broadcasts over the image."""
    return parameter.view(-1, 1, 1, 1)


def _take(levels: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Return the pixels at rows ``y`` and columns ``x``, which broadcast to (N, H, W); black outside the image."""
    height, width = levels.shape[-2:]
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    place = y.clamp(0, height - 1) * width + x.clamp(0, width - 1)
    taken = levels.flatten(2).gather(2, place.flatten(1).unsqueeze(1).expand(-1, levels.shape[1], -1).long())
    return taken.view_as(levels) * inside.unsqueeze(1)
