"""The cases of choose_k.py: data sets with a known number of groups, all of them or some, even or uneven.

Images are embedded once by the default pretrained network; digits are also given as pixels, and blobs are made up.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from data_sets import cifar10_test, cifar100_test, digits, fashion, uneven_sizes
from numpy.typing import NDArray

from secu.apps.embed import config_for
from secu.apps.images import load_inputs
from secu.data import open_images

READERS = {"cifar10": cifar10_test, "cifar100": cifar100_test, "digits": digits, "fashion": fashion}
PER_CLASS = 300  # most images of a class
BLOB_DIMENSIONS = 32
BLOB_IMAGES = 2_000


class Case(NamedTuple):
    """A data set with a known number of groups.

    Attributes:
        source: The name of embedded images, ``digits-scratch``, or ``blobs``.
        groups: How many of its groups are used.
        uneven: Whether their sizes fall to a tenth.
        seed: Which groups: the first of this permutation.
        distance: Of blobs: the standard deviation of their centers.
    """

    source: str
    groups: int
    uneven: bool = False
    seed: int = 0
    distance: float = 0.0

    @property
    def name(self) -> str:
        """The name in tables and files."""
        far = f"-{self.distance:g}" if self.distance else ""
        return f"{self.source}-{self.groups}{'-uneven' if self.uneven else ''}{far}-{self.seed}"

    @property
    def took_part(self) -> bool:
        """Whether the rule was chosen by this case; decided by the source, before any result was seen."""
        return self.source in ("cifar10", "digits-scratch") or (self.source == "blobs" and self.seed % 2 == 0)


CASES = (
    Case("cifar10", 10),
    Case("cifar10", 3, seed=1),
    Case("cifar10", 5, seed=2),
    Case("cifar10", 7, seed=3),
    Case("cifar10", 10, uneven=True),
    Case("cifar10", 6, uneven=True, seed=4),
    Case("blobs", 4, seed=0, distance=0.5),
    Case("blobs", 8, seed=2, distance=0.7, uneven=True),
    Case("blobs", 16, seed=4, distance=0.6),
    Case("blobs", 28, seed=6, distance=0.8),
    Case("digits-scratch", 10),
    Case("digits-scratch", 5, seed=1),
    Case("digits-scratch", 10, uneven=True),
    Case("fashion", 10),
    Case("fashion", 3, seed=1),
    Case("fashion", 5, seed=2),
    Case("fashion", 7, seed=3),
    Case("fashion", 10, uneven=True),
    Case("fashion", 6, uneven=True, seed=4),
    Case("blobs", 3, seed=1, distance=0.5),
    Case("blobs", 6, seed=3, distance=0.7, uneven=True),
    Case("blobs", 12, seed=5, distance=0.6),
    Case("blobs", 24, seed=7, distance=0.8),
    Case("digits", 10),
    Case("digits", 4, seed=1),
    Case("digits", 7, seed=2, uneven=True),
    Case("cifar100", 20),
    Case("cifar100", 12, seed=1),
    Case("cifar100", 30, seed=2),
    Case("cifar100", 6, seed=3),
    Case("cifar100", 15, seed=4, uneven=True),
)


def embed(name: str, cache: Path, data: Path | None) -> None:
    """Keep the features of a data set under the default pretrained network, at most ``PER_CLASS`` of a class."""
    pictures = READERS[name](data)
    chosen = first_of_each(pictures.targets, np.full(len(pictures.names), PER_CLASS), seed=0)
    source = open_images(np.ascontiguousarray(pictures.pixels[chosen]))
    images = load_inputs(config_for(source, "lite0"), source, device="cpu", allow_bad=False)
    assert images.tensor is not None
    np.savez(cache / f"{name}.npz", features=images.tensor.numpy(), targets=pictures.targets[chosen])


def first_of_each(targets: NDArray[np.int64], sizes: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return the given number of images of each group, in random order."""
    order = np.random.default_rng(seed).permutation(len(targets))
    taken = np.zeros(len(sizes), np.int64)
    chosen = []
    for index in order:
        if taken[targets[index]] < sizes[targets[index]]:
            taken[targets[index]] += 1
            chosen.append(index)
    return np.array(chosen)


def inputs_of(case: Case, cache: Path) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the vectors or the pixels of a case, and the group of each."""
    if case.source == "blobs":
        numbers = np.random.default_rng(case.seed)
        sizes = uneven_sizes(np.full(case.groups, BLOB_IMAGES), BLOB_IMAGES) if case.uneven else None
        even = np.arange(BLOB_IMAGES) % case.groups
        targets = even if sizes is None else np.repeat(np.arange(case.groups), sizes)
        centers = case.distance * numbers.standard_normal((case.groups, BLOB_DIMENSIONS))
        return (centers[targets] + numbers.standard_normal((len(targets), BLOB_DIMENSIONS))).astype(np.float32), targets
    if case.source == "digits-scratch":
        pictures = digits(None)
        inputs, targets = pictures.pixels, pictures.targets
    else:
        with np.load(cache / f"{case.source}.npz") as kept:
            inputs, targets = kept["features"].astype(np.float32), kept["targets"]
    classes = np.random.default_rng(case.seed).permutation(int(targets.max()) + 1)[: case.groups]
    sizes = np.zeros(int(targets.max()) + 1, np.int64)
    available = np.bincount(targets)[classes]
    sizes[classes] = uneven_sizes(available, len(targets)) if case.uneven else available
    chosen = first_of_each(targets, sizes, seed=0)
    return inputs[chosen], np.searchsorted(np.sort(classes), targets[chosen])
