"""Images with a stable index: all in memory, or decoded from a folder on the fly.

torch is imported where a tensor is made, not on top: ``secu data`` and ``secu --help`` need none of it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from secu.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

FOLDER_IMAGE_SIZE = 256
SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
CHUNK = 1024  # images copied or resized at a time


class ImageSource(Protocol):
    """What the rest of the package knows of a data set; an image's index never changes."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image."""

    @property
    def targets(self) -> Tensor | None:
        """True labels, int64 (N,), with -1 for an image that has none; None if no image has one."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The name of each target."""

    def __len__(self) -> int: ...

    def fetch(self, index: Tensor) -> Tensor:
        """Return the images at ``index`` (B,) as uint8 (B, C, H, W)."""


@dataclass(frozen=True, eq=False)
class Images:
    """Images in memory.

    Attributes:
        pixels: uint8 (N, C, H, W).
        targets: True labels, int64 (N,), -1 where unknown; None if all are.
        class_names: The name of each target.
    """

    pixels: Tensor
    targets: Tensor | None = None
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        import torch

        if self.pixels.ndim != 4 or self.pixels.dtype != torch.uint8:
            got = f"{self.pixels.dtype} of shape {tuple(self.pixels.shape)}"
            raise UserError(f"pixels: must be torch.uint8 of shape (N, C, H, W), got {got}")
        if self.targets is None:
            return
        if self.targets.shape != self.pixels.shape[:1] or self.targets.dtype != torch.int64:
            got = f"{self.targets.dtype} of shape {tuple(self.targets.shape)}"
            raise UserError(f"targets: must be torch.int64 of shape ({len(self.pixels)},), got {got}")

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image."""
        _, channels, height, width = self.pixels.shape
        return channels, height, width

    def fetch(self, index: Tensor) -> Tensor:
        """Return the images at ``index`` (B,) as uint8 (B, C, H, W)."""
        return self.pixels[index]


@dataclass(frozen=True, eq=False)
class FolderImages:
    """Images in class folders, decoded when fetched: for data sets larger than memory.

    Attributes:
        paths: One file an image; text, as a million Path objects fill several times the memory.
        targets: The number of each image's class folder, int64 (N,).
        class_names: The names of the class folders.
        image_size: Side of the square an image is cropped to.
    """

    paths: tuple[str, ...]
    targets: Tensor
    class_names: tuple[str, ...]
    image_size: int = FOLDER_IMAGE_SIZE

    @classmethod
    def scan(cls, folder: Path, image_size: int = FOLDER_IMAGE_SIZE) -> FolderImages:
        """List ``folder/<class>/<image>``, both sorted by name, so that the index is stable.

        A class folder without images keeps its number, so that splits agree on their targets.
        """
        import torch

        class_names = tuple(sorted(e.name for e in os.scandir(folder) if e.is_dir() and e.name[0] != "."))
        paths: list[str] = []
        targets: list[int] = []
        for target, name in enumerate(class_names):
            files = sorted(e.path for e in os.scandir(folder / name) if _is_image(e.name))
            paths += files
            targets += [target] * len(files)
        if not paths:
            raise UserError(f"{folder}: no images found; they must lie in one folder a class: {folder}/<class>/<image>")
        return cls(tuple(paths), torch.tensor(targets), class_names, image_size)

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image."""
        return 3, self.image_size, self.image_size

    def fetch(self, index: Tensor) -> Tensor:
        """Decode the images at ``index`` (B,) into uint8 (B, 3, S, S), in threads: pillow frees the lock of Python."""
        import torch

        paths = [self.paths[i] for i in index.tolist()]
        pixels = torch.empty((len(paths), *self.shape), dtype=torch.uint8)
        rows = pixels.numpy()

        def decode_row(row: int) -> None:
            rows[row] = decode(paths[row], self.image_size)

        with ThreadPoolExecutor() as pool:
            for _ in pool.map(decode_row, range(len(paths))):
                pass
        return pixels


def decode(path: str | Path, size: int) -> NDArray[np.uint8]:
    """Return an image file as RGB (3, size, size): its shorter side scaled to ``size``, the centre cut out."""
    try:
        with Image.open(path) as file:
            file.draft(None, (size, size))  # lets JPEG decode at a half, a quarter or an eighth, never below this size
            image = ImageOps.exif_transpose(file).convert("RGB")
    except Exception as error:  # pillow's parsers raise whatever a damaged file makes them stumble over
        raise UserError(f"{path}: cannot be read as an image: {error}") from error
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    # Scaling the central square alone is the same as scaling all and cutting; pillow's filter is antialiased.
    square = image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    return np.asarray(square).transpose(2, 0, 1)


def to_tensor(parts: Sequence[NDArray[np.uint8]], size: int | None = None) -> Tensor:
    """Join arrays (N, C, H, W) into one tensor, scaled to squares of ``size`` unless that is None.

    Works chunk by chunk, so that parts which are views of a file (STL-10: 2.7 GB) are in memory only once.
    """
    import torch

    channels, height, width = parts[0].shape[1:]
    wanted = (height, width) if size is None else (size, size)
    pixels = torch.empty((sum(map(len, parts)), channels, *wanted), dtype=torch.uint8)
    done = 0
    for part in parts:
        for first in range(0, len(part), CHUNK):
            chunk = torch.from_numpy(np.array(part[first : first + CHUNK]))  # a copy: the file's memory is read-only
            if wanted != (height, width):
                chunk = torch.nn.functional.interpolate(chunk, wanted, mode="bilinear", antialias=True)
            pixels[done : done + len(chunk)] = chunk
            done += len(chunk)
    return pixels


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")
