"""Data sets for defaults.py: reading, taking subsets, and writing them to disk as a typical user would have them.

A subset is the same for every seed. Fashion-MNIST is read from the location of Debian's package dataset-fashion-mnist,
CIFAR-10 from that of ``secu data cifar10``, and Caltech-101 from the folder given by --data, which holds one folder per
class.
"""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from secu.base.errors import UserError
from secu.config import DataConfig
from secu.data import load

ORDER = 0  # seed of the permutation that parts of a data set are taken from
FILES_UP_TO = 10_000  # images; more are written as one array
FALL = 10  # ratio of the largest to the smallest group of an uneven set
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle-boot")
VEHICLES = ("airplane", "automobile", "ship", "truck")


CLUTTER = "BACKGROUND_Google"  # in Caltech-101: pictures of anything, which are not a class


class Pictures(NamedTuple):
    """Images uint8 (N, H, W) or (N, H, W, 3), or paths of files (N,), and the true group of each with its name."""

    pixels: NDArray[Any]
    targets: NDArray[np.int64]
    names: tuple[str, ...]

    @property
    def are_files(self) -> bool:
        """Whether there are paths instead of pixels."""
        return self.pixels.ndim == 1


def digits(data: Path | None) -> Pictures:
    """Return scikit-learn's digits."""
    return _named("digits", "all", None)


def cifar10(data: Path | None) -> Pictures:
    """Return the training images of CIFAR-10."""
    return _named("cifar10", "train", data)


def cifar10_test(data: Path | None) -> Pictures:
    """Return the test images of CIFAR-10."""
    return _named("cifar10", "test", data)


def cifar100_test(data: Path | None) -> Pictures:
    """Return the test images of CIFAR-100 in its 100 classes."""
    return _named("cifar100", "test", data)


def caltech101(data: Path | None) -> Pictures:
    """Return the files of Caltech-101, largest class first, without the clutter."""
    if data is None:
        raise UserError(
            "caltech101: --data must name the folder 101_ObjectCategories, which holds one folder per class"
        )
    folders = [folder for folder in sorted(data.iterdir()) if folder.is_dir() and folder.name != CLUTTER]
    files = {folder.name: sorted(folder.glob("*.jpg")) for folder in folders}
    names = sorted(files, key=lambda name: (-len(files[name]), name))
    paths = np.array([str(path) for name in names for path in files[name]])
    return Pictures(paths, np.repeat(np.arange(len(names)), [len(files[name]) for name in names]), tuple(names))


def vehicles(data: Path | None) -> Pictures:
    """Return the training images of CIFAR-10 in two groups."""
    pixels, targets, names = cifar10(data)
    return Pictures(pixels, np.isin(np.array(names)[targets], VEHICLES).astype(np.int64), ("animal", "vehicle"))


def fashion(data: Path | None) -> Pictures:
    """Return the training images of Fashion-MNIST."""
    folder = data or DEBIAN
    images, labels = (read_idx(folder / f"train-{part}-ubyte.gz") for part in ("images-idx3", "labels-idx1"))
    return Pictures(images, labels.astype(np.int64), FASHION)


def _named(name: str, split: str, data: Path | None) -> Pictures:
    images = load(DataConfig(source=f"dataset:{name}"), split, data)
    assert images.targets is not None
    pixels = images.fetch(torch.arange(len(images))).permute(0, 2, 3, 1).numpy()
    return Pictures(pixels[..., 0] if pixels.shape[-1] == 1 else pixels, images.targets.numpy(), images.class_names)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read a gzipped IDX file of bytes: two zeros, the type 8, the number of dimensions, their sizes, the values."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: cannot be read: {error}; --data names the folder of Fashion-MNIST's files") from None
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise UserError(f"{path}: is not an idx file of bytes")
    shape = np.frombuffer(content, ">i4", content[3], 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


class DataSet(NamedTuple):
    """How a data set is read, how many of its images are used, and whether its groups differ in size."""

    read: Callable[[Path | None], Pictures]
    images: int | None = None
    uneven: bool = False


SETS = {
    "digits": DataSet(digits),
    "digits-uneven": DataSet(digits, uneven=True),
    "fashion-5000": DataSet(fashion, 5_000),
    "fashion-60000": DataSet(fashion),
    "fashion-uneven": DataSet(fashion, 5_000, uneven=True),
    "cifar10-test": DataSet(cifar10_test),
    "cifar10-test-uneven": DataSet(cifar10_test, uneven=True),
    "caltech101": DataSet(caltech101),
    "caltech101-uneven": DataSet(caltech101, uneven=True),
    "cifar10-5000": DataSet(cifar10, 5_000),
    "cifar10-50000": DataSet(cifar10),
    "cifar10-vehicles": DataSet(vehicles, 5_000),
}


def take(name: str, data: Path | None, limit: int | None) -> Pictures:
    """Read a data set and return its images, at most ``limit``, in a fixed order."""
    pixels, targets, names = SETS[name].read(data)
    wanted = min(count for count in (SETS[name].images, limit, len(targets)) if count is not None)
    order = np.random.default_rng(ORDER).permutation(len(targets))
    if SETS[name].uneven:
        order = order[_within(targets[order], uneven_sizes(np.bincount(targets), wanted))]
    return Pictures(pixels[order[:wanted]], targets[order[:wanted]], names)


def uneven_sizes(available: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """Return sizes that fall geometrically to a tenth, as large as the groups allow, and at most ``total`` in sum."""
    share = np.geomspace(1, 1 / FALL, len(available))
    largest = min(total / share.sum(), (available / share).min())
    sizes: NDArray[np.int64] = np.maximum(1, np.floor(largest * share)).astype(np.int64)
    return sizes


def _within(targets: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each image whether it is among the first ``sizes[target]`` of its group."""
    rank = np.empty(len(targets), np.int64)
    for group in range(len(sizes)):
        members = np.flatnonzero(targets == group)
        rank[members] = np.arange(len(members))
    return rank < sizes[targets]


def write_images(pictures: Pictures, out: Path) -> tuple[Path, str]:
    """Write the images as a typical user would have them; return the source and the --labels for ``secu fit``."""
    pixels, targets, names = pictures
    if len(pixels) > FILES_UP_TO:
        np.savez(out / "images.npz", images=pixels, group=np.array(names)[targets])
        return out / "images.npz", "group"
    for name in names:
        (out / "images" / name).mkdir(parents=True)
    if pictures.are_files:
        for path, target in zip(pixels, targets, strict=True):
            (out / "images" / names[target] / Path(path).name).symlink_to(Path(path).resolve())
        return out / "images", "folder"
    for number, (image, target) in enumerate(zip(pixels, targets, strict=True)):
        Image.fromarray(image).save(out / "images" / names[target] / f"{number:05d}.png")
    return out / "images", "folder"
