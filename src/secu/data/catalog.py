"""The data sets by name: their splits, where their files lie under the root, and how to load them."""

from pathlib import Path

import numpy as np

from secu.data import names
from secu.data.download import data_root
from secu.data.formats import Part, cifar_binary, cifar_pickle, names_file, names_pickle, stl10_binary
from secu.data.images import FOLDER_IMAGE_SIZE, FolderImages, Images, ImageSource, to_tensor
from secu.errors import UserError, nearest

SPLITS = {
    "cifar10": ("train", "test"),
    "cifar100": ("train", "test"),
    "cifar100-20": ("train", "test"),
    "stl10": ("train", "test", "unlabeled", "train+unlabeled"),
    "imagenet": ("train", "test"),
    "digits": ("train", "test", "all"),
}

Found = tuple[list[Part], tuple[str, ...]]  # the parts of a split, in order, and the class names


def load(name: str, split: str, root: Path | None = None, image_size: int | None = None) -> ImageSource:
    """Return a split of a data set that lies under ``root``.

    Args:
        name: A key of ``SPLITS``; ``cifar100-20`` is CIFAR-100 with its 20 superclasses as targets.
        split: One of ``SPLITS[name]``. ``digits`` has no official split: each of its splits is all of it.
        root: The folder of all data sets; None: see ``data_root``.
        image_size: Scale images to squares of this side; None: as stored, and 256 for ImageNet.

    Raises:
        UserError: The name or split is unknown, or the files are missing or damaged.
    """
    if name not in SPLITS:
        raise UserError(f"data: unknown data set {name!r}; {nearest(name, SPLITS)}")
    if split not in SPLITS[name]:
        raise UserError(f"data: {name} has no split {split!r}; {nearest(split, SPLITS[name])}")
    if image_size is not None and image_size < 1:
        raise UserError(f"image_size: {image_size} must be at least 1")
    root = data_root(root)
    if name == "imagenet":
        return FolderImages.scan(_imagenet_folder(root, split), image_size or FOLDER_IMAGE_SIZE)
    found = _find(name, root, split)
    if found is None:
        raise UserError(f"{name}: not found under {root}; run: secu data {name} --data {root}")
    return _in_memory(*found, image_size)


def _find(name: str, root: Path, split: str) -> Found | None:
    """Read a data set that fits in memory; None if its folder is not there."""
    match name:
        case "cifar10":
            return _cifar10(root, split)
        case "cifar100":
            return _cifar100(root, split, "fine", names.CIFAR100)
        case "cifar100-20":
            return _cifar100(root, split, "coarse", names.CIFAR100_COARSE)
        case "stl10":
            return _stl10(root, split)
        case _:
            return _digits()


def _cifar10(root: Path, split: str) -> Found | None:
    files = [f"data_batch_{number}" for number in range(1, 6)] if split == "train" else ["test_batch"]
    binary, pickled = root / "cifar-10-batches-bin", root / "cifar-10-batches-py"
    if binary.is_dir():
        parts = [cifar_binary(binary / f"{file}.bin", label_bytes=1, column=0, classes=10) for file in files]
        return parts, names_file(binary / "batches.meta.txt", names.CIFAR10)
    if pickled.is_dir():
        parts = [cifar_pickle(pickled / file, "labels", classes=10) for file in files]
        return parts, names_pickle(pickled / "batches.meta", "label_names", names.CIFAR10)
    return None


def _cifar100(root: Path, split: str, level: str, known: tuple[str, ...]) -> Found | None:
    binary, pickled = root / "cifar-100-binary", root / "cifar-100-python"
    if binary.is_dir():
        column = ("coarse", "fine").index(level)
        part = cifar_binary(binary / f"{split}.bin", label_bytes=2, column=column, classes=len(known))
        return [part], names_file(binary / f"{level}_label_names.txt", known)
    if pickled.is_dir():
        part = cifar_pickle(pickled / split, f"{level}_labels", classes=len(known))
        return [part], names_pickle(pickled / "meta", f"{level}_label_names", known)
    return None


def _stl10(root: Path, split: str) -> Found | None:
    folder = root / "stl10_binary"
    if not folder.is_dir():
        return None
    parts = []
    for part in split.split("+"):
        labels = None if part == "unlabeled" else folder / f"{part}_y.bin"
        parts.append(stl10_binary(folder / f"{part}_X.bin", labels, classes=10))
    return parts, names_file(folder / "class_names.txt", names.STL10)


def _digits() -> Found:
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    return [Part(pixels[:, None], digits.target.astype(np.int64))], names.DIGITS


def _imagenet_folder(root: Path, split: str) -> Path:
    folders = ("train",) if split == "train" else ("val", "test")
    places = [base / folder for base in (root / "imagenet", root) for folder in folders]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise UserError(f"imagenet: split {split} not found; put its class folders into {places[0]}/<class>/*.JPEG")
    return found


def _in_memory(parts: list[Part], class_names: tuple[str, ...], image_size: int | None) -> Images:
    import torch

    pixels = to_tensor([part.pixels for part in parts], image_size)
    if all(part.targets is None for part in parts):
        return Images(pixels, None, class_names)
    targets = [np.full(len(part.pixels), -1) if part.targets is None else part.targets for part in parts]
    return Images(pixels, torch.from_numpy(np.concatenate(targets)), class_names)
