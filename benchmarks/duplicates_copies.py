"""Copies of photos for duplicates.py: the same picture resized, recompressed, cropped, mirrored, and all of it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageOps

Change = Callable[[Image.Image, Generator], Image.Image]
CROPPED = 0.95  # share of width and height that is left
GOOD = 95  # JPEG quality


def resized(image: Image.Image, random: Generator) -> Image.Image:
    """Return a picture of half the width and height."""
    return image.resize((max(1, image.width // 2), max(1, image.height // 2)), Image.Resampling.LANCZOS)


def unchanged(image: Image.Image, random: Generator) -> Image.Image:
    """Return the picture."""
    return image


def cropped(image: Image.Image, random: Generator) -> Image.Image:
    """Return a picture without 5% of its width and height, cut out at a random place."""
    width = round(CROPPED * image.width)
    height = round(CROPPED * image.height)
    left = int(random.integers(image.width - width + 1))
    top = int(random.integers(image.height - height + 1))
    return image.crop((left, top, left + width, top + height))


def mirrored(image: Image.Image, random: Generator) -> Image.Image:
    """Return a picture with left and right exchanged."""
    return ImageOps.mirror(image)


def combined(image: Image.Image, random: Generator) -> Image.Image:
    """Return a picture that is mirrored, cropped and resized."""
    return resized(cropped(mirrored(image, random), random), random)


KINDS: dict[str, tuple[Change, int]] = {  # and the quality of the JPEG
    "resized to half": (resized, GOOD),
    "JPEG 50": (unchanged, 50),
    "cropped by 5%": (cropped, GOOD),
    "mirrored": (mirrored, GOOD),
    "combined": (combined, 50),
}


def write_images(files: Sequence[Path], copied: int, folder: Path, seed: int) -> None:
    """Link to all files as ``originals/CLASS/NAME``, and write copies of some of them as ``KIND/CLASS/NAME``."""
    random = np.random.default_rng(seed)
    for file in files:
        link = folder / "originals" / file.parent.name / file.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.resolve())
    for number in sorted(random.choice(len(files), min(copied, len(files)), replace=False)):
        file = files[number]
        with Image.open(file) as opened:
            original = opened.convert("RGB")
        for kind, (change, quality) in KINDS.items():
            path = folder / kind / file.parent.name / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            change(original, random).save(path, quality=quality)
