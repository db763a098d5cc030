"""Parts of a decoded image, scaled to squares (bilinear, antialiased): its center, or given boxes."""

from collections.abc import Callable, Sequence
from math import ceil, floor

from PIL import Image

Box = tuple[int, int, int, int]  # left, top, right and bottom, in pixels; mirrored if left is greater than right
Choose = Callable[[int, int], Sequence[Box]]  # width and height of an image → boxes


def center(image: Image.Image) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of the central square."""
    side = min(image.size)
    left = (image.width - side) / 2
    top = (image.height - side) / 2
    return left, top, left + side, top + side


def enough(boxes: Sequence[Box] | None, stored: tuple[int, int], size: int) -> tuple[int, int]:
    """Return the size at which an image still has as many pixels as its squares."""
    if boxes is None:
        return size, size
    across = min(abs(right - left) for left, _, right, _ in boxes)
    down = min(bottom - top for _, top, _, bottom in boxes)
    return ceil(stored[0] * size / across), ceil(stored[1] * size / down)


def squares(image: Image.Image, boxes: Sequence[Box] | None, stored: tuple[int, int], size: int) -> list[Image.Image]:
    """Return the central square of an image, or the content of boxes, on a white background.

    Args:
        image: An image in mode L, RGB, RGBA, I or F. A JPEG may have been decoded at a fraction of its stored size.
        boxes: Boxes in the coordinates of the stored size; None for the central square.
        stored: Width and height of the stored image.
        size: Side of the squares.
    """
    if boxes is None:
        return [_on_white(image.resize((size, size), Image.Resampling.BILINEAR, box=center(image)))]
    shrink = (ceil(stored[0] / image.width), ceil(stored[1] / image.height))  # 1, 2, 4 or 8
    return [_on_white(_cut(image, box, shrink, size)) for box in boxes]


def _cut(image: Image.Image, box: Box, shrink: tuple[int, int], size: int) -> Image.Image:
    """Crop and then scale, so that the filter reads nothing outside of the box."""
    left, right = (x / shrink[0] for x in sorted((box[0], box[2])))
    top, bottom = (y / shrink[1] for y in (box[1], box[3]))
    x = floor(left)
    y = floor(top)
    part = image.crop((x, y, ceil(right), ceil(bottom)))
    inside = (left - x, top - y, right - x, bottom - y)
    square = part.resize((size, size), Image.Resampling.BILINEAR, box=inside)
    return square.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if box[0] > box[2] else square


def _on_white(square: Image.Image) -> Image.Image:
    if square.mode != "RGBA":
        return square
    return Image.alpha_composite(Image.new("RGBA", square.size, "white"), square).convert("RGB")
