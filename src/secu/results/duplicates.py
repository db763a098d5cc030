"""Near-duplicates: images that are the same picture, even if one was resized, recompressed, cropped or mirrored.

Exact copies have the same input. Others are found among images with similar vectors, and confirmed by perceptual
hashes (hashes.py). Shapes: N images, U of them without exact copies, M in a cell, D dimensions, P pairs, H hashed
pictures.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from secu.data import Images
from secu.data.decoding.image_files import opened
from secu.results.hashes import SIDE, Hashes, Ints, differing_bits, hash_pictures
from secu.results.pictures import to_tile

NEIGHBORS = 16  # similar images that each image is compared with
LEAST_COSINE = 0.6  # minimum cosine of a pair that is compared
MOST_BITS = 13  # of 143 that differ between two hashes of the same picture; see benchmarks/results/duplicates.txt
LEAST_SIDE = 32  # pixels; smaller pictures of similar things look the same, so only exact copies count
FLATTEST = 1.0  # standard deviation of gray values from 0 to 255; a blank picture has no hash
MOST_IMAGES = 200_000  # in larger sets, only exact copies are found
EXACT = 5_000  # images up to which all are compared with each other
CELLS_EACH = 3  # cells that an image is in, if there are more
BLOCK = 512  # images that are processed at a time
PAIRS = 4096  # pairs of pictures that are compared at a time


def is_searched(images: Images) -> bool:
    """Return whether near-duplicates are searched for: not in named data sets or in images decoded on demand."""
    is_named = images.source is not None and images.source.name.startswith("dataset:")
    return not is_named and not (images.tensor is None and images.rows is None)


def kept_images(images: Images, embeddings_ND: Tensor) -> Ints:
    """Return the image to keep for every image (N,): itself, or the largest one that is the same picture.

    The embeddings are compared, or the inputs if these are feature vectors.
    """
    first_N = _first_copies(images)
    return _choose(images, first_N, _find_pairs(images, embeddings_ND, np.unique(first_N)))


def _first_copies(images: Images) -> Ints:
    """Return the index of the first image with the same input (N,)."""
    first: dict[bytes, int] = {}
    first_N = np.empty(len(images), np.int64)
    for part in torch.arange(len(images)).split(BLOCK):
        for i, row in zip(part.tolist(), images.fetch(part).numpy(), strict=True):
            first_N[i] = first.setdefault(hashlib.blake2b(row, digest_size=16).digest(), i)
    return first_N


def _find_pairs(images: Images, embeddings_ND: Tensor, index_U: Ints) -> Ints:
    """Return the pairs of images (P, 2) that are the same picture, of those that have no exact copy before them."""
    has_features = len(images.shape) == 1
    side = max(images.original_side, 0 if has_features else images.shape[-1])
    if side < LEAST_SIDE or len(index_U) > MOST_IMAGES:
        return np.empty((0, 2), np.int64)
    index = torch.from_numpy(index_U)
    pairs_P2 = index_U[similar_pairs(images.fetch(index) if has_features else embeddings_ND[index])]
    return pairs_P2[compare_pictures(images, pairs_P2) <= MOST_BITS]


def similar_pairs(vectors_UD: Tensor) -> Ints:
    """Return the pairs of vectors (P, 2) that are near each other, the smaller index first.

    Many vectors are divided into cells around random ones, and compared with those that share a cell.
    """
    cells = round(len(vectors_UD) ** 0.5) if len(vectors_UD) > EXACT else 1
    chosen = np.random.default_rng(0).choice(len(vectors_UD), cells, replace=False)
    centers_CD = F.normalize(vectors_UD[chosen].float(), dim=-1)
    nearest = [(part.float() @ centers_CD.T).topk(min(CELLS_EACH, cells)).indices for part in vectors_UD.split(BLOCK)]
    cells_UA = torch.cat(nearest)
    found = [np.empty((0, 2), np.int64)]
    for cell in range(cells):
        members = (cells_UA == cell).any(-1).nonzero()[:, 0]
        found.append(members[_near(vectors_UD[members])].numpy())
    pairs_P2 = np.sort(np.concatenate(found), -1)
    return np.unique(pairs_P2[pairs_P2[:, 0] < pairs_P2[:, 1]], axis=0)


def _near(vectors_MD: Tensor) -> Tensor:
    """Return the pairs of every vector and its nearest ones (P, 2); it may be one of them."""
    unit_MD = F.normalize(vectors_MD.float(), dim=-1)
    found = [torch.empty(0, 2, dtype=torch.int64)]
    for start in range(0, len(unit_MD), BLOCK):
        cosines, nearest = (unit_MD[start : start + BLOCK] @ unit_MD.T).topk(min(NEIGHBORS + 1, len(unit_MD)))
        row, place = (cosines >= LEAST_COSINE).nonzero(as_tuple=True)
        found.append(torch.stack([start + row, nearest[row, place]], -1))
    return torch.cat(found)


def compare_pictures(images: Images, pairs_P2: Ints) -> Ints:
    """Return in how many bits the hashes of each pair differ (P,); more than possible if a picture has no hash."""
    bits_P = np.full(len(pairs_P2), np.iinfo(np.int64).max)
    index_H, hashes = _hash_images(images, np.unique(pairs_P2))
    row_N = np.full(len(images), -1)
    row_N[index_H] = np.arange(len(index_H))
    (hashed_P,) = np.nonzero((row_N[pairs_P2] >= 0).all(-1))
    for part in np.array_split(hashed_P, len(hashed_P) // PAIRS + 1):
        bits_P[part] = differing_bits(hashes, *row_N[pairs_P2[part]].T)
    return bits_P


def _hash_images(images: Images, index: Ints) -> tuple[Ints, Hashes]:
    """Return the indices of those images that have a hash (H,), and the hashes."""
    found: list[int] = []
    parts: list[Hashes] = []
    block = [np.empty((0, SIDE, SIDE), np.float32)]
    for i, pixels_CHW in images.iter_pictures(dict.fromkeys(index.tolist(), SIDE)):
        gray_SS = np.asarray(_gray(pixels_CHW), np.float32)
        if gray_SS.std() > FLATTEST:
            found.append(i)
            block.append(gray_SS[None])
        if len(block) > BLOCK:
            parts.append(hash_pictures(np.concatenate(block)))
            block = block[:1]
    parts.append(hash_pictures(np.concatenate(block)))
    return np.array(found, np.int64), np.concatenate(parts)


def _gray(pixels_CHW: NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(to_tile(pixels_CHW)).convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR)


def _choose(images: Images, first_N: Ints, pairs_P2: Ints) -> Ints:
    """Return the image to keep for every image (N,), given their first exact copies, and pairs of these.

    The largest picture, in pixels and then in bytes, is kept for all pictures that are the same; then the largest of
    the others, and so on. So no image is left out because of a chain of pictures, each of which is similar to the next.
    """
    same = defaultdict(list)
    for one, other in pairs_P2.tolist():
        same[one].append(other)
        same[other].append(one)
    (copies,) = np.nonzero(np.bincount(first_N)[first_N] > 1)
    sizes = _sizes(images, {*same, *copies.tolist()})
    largest: dict[int, int] = {}  # the largest of exact copies, by the first of them; largest pictures first
    for i in sorted(sorted(sizes), key=sizes.__getitem__, reverse=True):  # the first of equally large ones
        largest.setdefault(int(first_N[i]), i)
    kept: dict[int, int] = {}
    for first in largest:
        if kept.setdefault(first, first) == first:
            for other in same[first]:
                kept.setdefault(other, first)
    kept_N = np.arange(len(images))
    for i in sizes:
        kept_N[i] = largest[kept[int(first_N[i])]]
    return kept_N


def _sizes(images: Images, index: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Return the pixels and bytes of the originals of some images; 0 if one cannot be read."""
    sizes = {}
    for i in sorted(index, key=images.position):  # the fastest order to read
        sizes[i] = (0, 0)
        with suppress(Exception):  # of a damaged archive, any
            original = images.original(i)
            if isinstance(original, np.ndarray):
                sizes[i] = (original.shape[0] * original.shape[1], original.nbytes)
                continue
            with opened(str(original) if isinstance(original, Path) else original) as image:
                bytes_ = original.stat().st_size if isinstance(original, Path) else len(original)
                sizes[i] = (image.width * image.height, bytes_)
    return sizes
