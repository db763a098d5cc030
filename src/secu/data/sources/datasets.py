"""Named data sets as sources: their splits, shapes, classes and locations, and how to open them."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from secu.base.errors import UserError, nearest
from secu.data.decoding.decode import Raw
from secu.data.sources.base import Shape, Source
from secu.data.sources.downloads import data_root
from secu.data.sources.folders import open_classes
from secu.data.sources.formats import Part, cifar_binary, cifar_pickle, stl10_binary

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
STL10 = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
_FINE = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man
    maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree
    plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper
    snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train
    trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
_COARSE = """
    aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
    household_furniture insects large_carnivores large_man-made_outdoor_things large_natural_outdoor_scenes
    large_omnivores_and_herbivores medium_mammals non-insect_invertebrates people reptiles small_mammals trees
    vehicles_1 vehicles_2
"""
CIFAR100 = tuple(_FINE.split())
CIFAR100_COARSE = tuple(_COARSE.split())


class DataSet(NamedTuple):
    """Description of a data set.

    ``read`` returns the parts of a split under a root; None if the files do not exist. ImageNet has no such function:
    it is decoded on demand, and its classes are its folders.
    """

    splits: tuple[str, ...]
    shape: Shape
    classes: tuple[str, ...]
    read: Callable[[Path, str], list[Part] | None] | None


def find_dataset(name: str) -> DataSet:
    """Return the description of a data set."""
    if name not in DATASETS:
        raise UserError(f"data: unknown data set {name!r}; {nearest(name, DATASETS)}")
    return DATASETS[name]


def open_dataset(name: str, split: str | None = None, root: Path | None = None) -> Source:
    """Return a split of a data set, by default ``train``, stored under ``root``, by default ``data_root()``.

    ``cifar100-20`` is CIFAR-100 with its 20 superclasses as targets. ``digits`` has no official split, so each split is
    the whole data set.
    """
    dataset = find_dataset(name)
    split = split or "train"
    if split not in dataset.splits:
        raise UserError(f"data: {name} has no split {split!r}; {nearest(split, dataset.splits)}")
    root = data_root(root)
    if dataset.read is None:
        return open_classes(f"dataset:{name}", str(_imagenet_folder(root, split)))
    parts = dataset.read(root, split)
    if parts is None:
        raise UserError(f"{name}: not found under {root}; run: secu data {name} --data {root}")
    return PartsSource(f"dataset:{name}", parts, dataset.classes)


class PartsSource(Source):
    """A data set that fits in memory: uint8 (n, C, H, W) for each of its files."""

    has_folders = False

    def __init__(self, name: str, parts: list[Part], class_names: tuple[str, ...]) -> None:
        counts = [len(part.pixels) for part in parts]
        targets = [np.full(len(part.pixels), -1) if part.targets is None else part.targets for part in parts]
        known = np.concatenate(targets) if any(part.targets is not None for part in parts) else None
        super().__init__(name, name, map(str, range(sum(counts))), targets=known, class_names=class_names)
        self.parts = [part.pixels for part in parts]
        self.starts = np.cumsum([0, *counts[:-1]]).tolist()

    def read(self, i: int, values: str | None = None) -> Raw:
        """Return the pixels of image ``i``: uint8 (H, W) or (H, W, 3)."""
        pixels = next(self._slices(i, i + 1))[0]
        return np.ascontiguousarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))

    def ready(self, rows: slice, shape: Shape, values: str | None = None) -> NDArray[np.uint8] | None:
        """Return a batch of images that already have this shape; None if they have another."""
        if self.parts[0].shape[1:] != shape:
            return None
        empty = np.empty((0, *shape), np.uint8)
        return np.concatenate([empty, *self._slices(rows.start, rows.stop)])

    def _slices(self, start: int, stop: int) -> Iterator[NDArray[np.uint8]]:
        for part, first in zip(self.parts, self.starts, strict=True):
            if start < first + len(part) and stop > first:
                yield part[max(0, start - first) : stop - first]


def _cifar10(root: Path, split: str) -> list[Part] | None:
    files = [f"data_batch_{number}" for number in range(1, 6)] if split == "train" else ["test_batch"]
    binary = root / "cifar-10-batches-bin"
    pickled = root / "cifar-10-batches-py"
    if binary.is_dir():
        return [cifar_binary(binary / f"{file}.bin", label_bytes=1, column=0, classes=10) for file in files]
    if pickled.is_dir():
        return [cifar_pickle(pickled / file, "labels", classes=10) for file in files]
    return None


def _cifar100(root: Path, split: str, *, level: str, number: int) -> list[Part] | None:
    binary = root / "cifar-100-binary"
    pickled = root / "cifar-100-python"
    if binary.is_dir():
        column = ("coarse", "fine").index(level)
        return [cifar_binary(binary / f"{split}.bin", label_bytes=2, column=column, classes=number)]
    if pickled.is_dir():
        return [cifar_pickle(pickled / split, f"{level}_labels", classes=number)]
    return None


def _stl10(root: Path, split: str) -> list[Part] | None:
    folder = root / "stl10_binary"
    if not folder.is_dir():
        return None
    parts = []
    for part in split.split("+"):
        labels = None if part == "unlabeled" else folder / f"{part}_y.bin"
        parts.append(stl10_binary(folder / f"{part}_X.bin", labels, classes=10))
    return parts


def _digits(root: Path, split: str) -> list[Part]:
    from sklearn.datasets import load_digits  # slow to import

    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    return [Part(pixels[:, None], digits.target.astype(np.int64))]


def _imagenet_folder(root: Path, split: str) -> Path:
    folders = ("train",) if split == "train" else ("val", "test")
    places = [base / folder for base in (root / "imagenet", root) for folder in folders]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise UserError(f"imagenet: split {split} not found; put its class folders into {places[0]}/<class>/*.JPEG")
    return found


DATASETS = {
    "cifar10": DataSet(("train", "test"), (3, 32, 32), CIFAR10, _cifar10),
    "cifar100": DataSet(("train", "test"), (3, 32, 32), CIFAR100, partial(_cifar100, level="fine", number=100)),
    "cifar100-20": DataSet(
        ("train", "test"), (3, 32, 32), CIFAR100_COARSE, partial(_cifar100, level="coarse", number=20)
    ),
    "stl10": DataSet(("train", "test", "unlabeled", "train+unlabeled"), (3, 96, 96), STL10, _stl10),
    "imagenet": DataSet(("train", "test"), (3, 256, 256), (), None),
    "digits": DataSet(("train", "test", "all"), (1, 8, 8), tuple("0123456789"), _digits),
}
