"""Image operations on a whole batch, with separate parameters for every image.

Each function takes float images in [0, 1] of shape (N, C, H, W) and tensors whose first dimension is N, and does to
image i what pillow does with the i-th parameter. It deliberately differs from pillow in two ways: values, including
hues, are never rounded to 256 levels, and the blur is a true Gaussian instead of three box filters in a row.

Everything is plain tensor arithmetic with static shapes on the images' device, so it can be compiled and captured in
a CUDA graph. Resizing and blurring are separable and linear: an image X becomes R_y · X · R_xᵀ, where R_y and R_x are
small matrices computed for that image.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

SOLARIZE_THRESHOLD = 128 / 255


def crop(images: Tensor, box: Tensor, size: tuple[int, int]) -> Tensor:
    """Cut a box out of each image and resize it, as ``Image.crop(box).resize(size, BILINEAR)`` does.

    As in pillow, the filter is widened where the image shrinks (antialiasing) and reads nothing outside the box.

    Args:
        images: (N, C, H, W).
        box: (N, 4), left, top, right and bottom in pixels. The image is mirrored where left is greater than right.
        size: Height and width of the result.
    """
    left, top, right, bottom = box.unbind(-1)
    rows = _resize_matrix(top, bottom, images.shape[-2], size[0])
    columns = _resize_matrix(left, right, images.shape[-1], size[1])
    return _rows_and_columns(images, rows, columns)


def affine(images: Tensor, matrix: Tensor) -> Tensor:
    """Sample each image at ``matrix`` · position for every position of the result; outside the image it is black.

    Args:
        images: (N, C, H, W).
        matrix: (N, 2, 3), in coordinates from -1 to 1 along each axis: see ``affine_matrix``.
    """
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def affine_matrix(jitter: Tensor, size: tuple[int, int]) -> Tensor:
    """Return rotation · shear · scaling, followed by the shift, in the form ``affine`` takes: (…, 2, 3).

    Args:
        jitter: (…, 6): log of the common scale, log of the ratio of the axes, rotation in radians, shear, and the
            shifts along x and y as shares of half the image's width and height.
        size: Height and width of the images; angles are preserved for non-square images, too.
    """
    scale, ratio, rotation, shear, shift_x, shift_y = jitter.unbind(-1)
    scale_x = (scale + ratio / 2).exp()
    scale_y = (scale - ratio / 2).exp()
    cos = rotation.cos()
    sin = rotation.sin()
    tall = size[0] / size[1]
    row_x = [cos * scale_x, (cos * shear - sin) * scale_y * tall, shift_x]
    row_y = [sin * scale_x / tall, (sin * shear + cos) * scale_y, shift_y]
    return torch.stack(row_x + row_y, dim=-1).view(*scale.shape, 2, 3)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with black: 0 gives black, 1 the image."""
    return (images * _each(factor)).clamp(0, 1)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image's mean gray: 0 gives uniform gray, 1 the image."""
    return _blend(luminance(images).mean(dim=(1, 2, 3), keepdim=True), images, factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the grayscale image: 0 gives grayscale, 1 the image."""
    return _blend(luminance(images), images, factor)


def hue(images: Tensor, shift: Tensor) -> Tensor:
    """Rotate the hue of HSV by ``shift`` of a full circle.

    HSV is never formed: with the hue in sixths of the circle, channel n of (5, 3, 1) equals the value minus the chroma
    times the clamped distance of (n + hue) mod 6 from its plateau.
    """
    red, green, blue = images.unbind(1)
    value = images.amax(1)
    chroma = value - images.amin(1)
    divisor = torch.where(chroma > 0, chroma, 1.0)  # gray pixels: all differences are 0, so the hue is, too
    sixths = torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor)
    sixths = torch.where(value == red, (green - blue) / divisor, sixths)
    channel = torch.arange(5, 0, -2, device=images.device).view(1, 3, 1, 1)
    turn = (channel + (sixths.unsqueeze(1) + 6 * _each(shift))) % 6
    return value.unsqueeze(1) - chroma.unsqueeze(1) * torch.minimum(turn, 4 - turn).clamp(0, 1)


COLOR_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": brightness,
    "contrast": contrast,
    "saturation": saturation,
    "hue": hue,
}


def color_jitter(images: Tensor, names: Sequence[str], amounts: Tensor, order: Tensor) -> Tensor:
    """Apply several color operations to each image, in a separate order for each.

    Each round computes all operations and selects one per image. This is redundant work, but it is pointwise and keeps
    shapes static.

    Args:
        images: (N, C, H, W).
        names: n keys of ``COLOR_OPERATIONS``.
        amounts: (N, n), the parameter of each operation.
        order: (N, n), the position in ``names`` of the operation to apply first, second, …
    """
    first, *others = [COLOR_OPERATIONS[name] for name in names]
    for turn in order.unbind(-1):
        changed = first(images, amounts[:, 0])
        for number, operation in enumerate(others, start=1):
            changed = torch.where(_each(turn == number), operation(images, amounts[:, number]), changed)
        images = changed
    return images


def gray(images: Tensor, chosen: Tensor) -> Tensor:
    """Convert the ``chosen`` images (N, bool) to grayscale, keeping the number of channels."""
    return torch.where(_each(chosen), luminance(images), images)


def luminance(images: Tensor) -> Tensor:
    """Return the grayscale image, pillow's mode L: (N, 1, H, W)."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    return (0.299 * red + 0.587 * green + 0.114 * blue).unsqueeze(1)


def blur(images: Tensor, sigma: Tensor, reach: int) -> Tensor:
    """Apply a Gaussian blur; a ``sigma`` of 0 leaves an image unchanged.

    Edge pixels are repeated outwards. Pillow repeats them before each of its three box filters, which blurs its edges
    slightly more.

    Args:
        images: (N, C, H, W).
        sigma: (N,), in pixels.
        reach: Where the Gaussian is truncated, in pixels; 4 times the largest sigma omits 0.01% of it.
    """
    height, width = images.shape[-2:]
    rows = _blur_matrix(sigma, height, reach)
    columns = rows if width == height else _blur_matrix(sigma, width, reach)
    return _rows_and_columns(images, rows, columns)


def solarize(images: Tensor, chosen: Tensor) -> Tensor:
    """Invert the pixels at or above 128/255 in the ``chosen`` images (N, bool)."""
    return torch.where(_each(chosen) & (images >= SOLARIZE_THRESHOLD), 1 - images, images)


def _each(parameter: Tensor) -> Tensor:
    """Reshape one number per image so that it broadcasts over the image."""
    return parameter.view(-1, 1, 1, 1)


def _blend(other: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(other, images, _each(factor)).clamp(0, 1)


def _resize_matrix(start: Tensor, end: Tensor, length: int, out: int) -> Tensor:
    """Return pillow's triangle filter from ``length`` pixels to ``out`` that show [start, end): (N, out, length)."""
    scale = ((end - start) / out).view(-1, 1, 1)
    center = start.view(-1, 1, 1) + scale * (torch.arange(out, device=start.device).view(-1, 1) + 0.5)
    place = torch.arange(length, device=start.device) + 0.5
    weights = (1 - ((place - center) / scale.abs().clamp(min=1)).abs()).clamp(min=0)
    inside = (place > torch.minimum(start, end).view(-1, 1, 1)) & (place < torch.maximum(start, end).view(-1, 1, 1))
    weights = weights * inside
    return weights / weights.sum(-1, keepdim=True)


def _blur_matrix(sigma: Tensor, length: int, reach: int) -> Tensor:
    """Return the Gaussian along an axis, with everything outside folded onto the edge pixels: (N, length, length)."""
    inside = torch.arange(length, device=sigma.device)
    extended = torch.arange(-reach, length + reach, device=sigma.device)
    steps = (extended - inside.view(-1, 1)) / sigma.clamp(min=1e-3).view(-1, 1, 1)  # 1e-3: exp(-5e5) is 0, so identity
    weights = torch.exp(-0.5 * steps.square())
    fold = (extended.clamp(0, length - 1).view(-1, 1) == inside).to(weights.dtype)
    return (weights / weights.sum(-1, keepdim=True)) @ fold


def _rows_and_columns(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return rows · X · columnsᵀ for every channel X of every image.

    Channels are between height and width in memory, so that each side is one product per image, without copies.
    """
    count, channels, height, width = images.shape
    lines = rows @ images.transpose(1, 2).reshape(count, height, channels * width)
    lines = lines.view(count, -1, width) @ columns.transpose(1, 2)
    return lines.view(count, rows.shape[1], channels, columns.shape[1]).transpose(1, 2)
