"""Nearest neighbors as views: the partner of an image is a random one of its nearest neighbors.

The search is exact and works in blocks. On a CPU, faiss is 47 times as fast for a million vectors, if it is installed.

Shapes: N images, B of a block, D dimensions, U distinct vectors, k neighbors.
"""

from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Generator, Tensor

from secu.base import processes

BLOCK = 2**26  # cosines that are computed at a time: 256 MB
HASHED = 10_000  # vectors that are hashed at a time
MANY = 500_000  # vectors from which on faiss is used on a CPU
PROBES = 16  # of its lists that are searched: 99% of the neighbors are found
TRAINING = 40  # vectors for each list that it learns the lists from


class Neighbors(NamedTuple):
    """The nearest neighbors of N images."""

    table: Tensor  # indices of the neighbors, nearest first, of each distinct vector (U, k)
    row_of: Tensor  # the row of each image in the table (N,)

    def of(self, index: Tensor) -> Tensor:
        """Return all neighbors of some images (B, k)."""
        return self.table[self.row_of[index]].long()

    def draw(self, index: Tensor, generator: Generator) -> Tensor:
        """Return a random neighbor of each image, in host memory."""
        columns = torch.randint(self.table.shape[1], (len(index),), generator=generator)
        return self.table[self.row_of[index], columns].long()


def find_neighbors(vectors_ND: Tensor, count: int, originals: Tensor | None = None) -> Neighbors:
    """Return the ``count`` nearest neighbors of every vector by cosine, or all of them if there are fewer.

    The search works in blocks on the device of the vectors, and is exact unless faiss is used. Copies of a vector share
    one row: the neighbors of an image are other images, however often it is repeated. Copies are better recognized in
    ``originals``, which the vectors were computed from: the same vector may be rounded differently in another batch.
    """
    first_U, row_of_N = distinct(vectors_ND if originals is None else originals)
    unit_UD = F.normalize(vectors_ND[first_U.to(vectors_ND.device)].float(), dim=-1)
    distinct_count = len(unit_UD)
    count = min(count, distinct_count - 1)
    search = _search_lists if uses_faiss(distinct_count, unit_UD.device.type) else _search_all
    return Neighbors(first_U[search(unit_UD, count)].int(), row_of_N)


def uses_faiss(vectors: int, device: str) -> bool:
    """Return whether neighbors are searched with faiss; several processes would not all get the same ones."""
    return device == "cpu" and vectors >= MANY and processes.world() == 1 and find_spec("faiss") is not None


def _search_all(unit_UD: Tensor, count: int) -> Tensor:
    """Return the nearest other vectors of each vector, in host memory."""
    nearest = []
    start = 0
    for block_BD in unit_UD.split(max(1, BLOCK // len(unit_UD))):
        own_B = torch.arange(start, start + len(block_BD), device=unit_UD.device)
        nearest.append(_nearest(block_BD, own_B, unit_UD, count))
        start += len(block_BD)
    return torch.cat(nearest)


def _nearest(block_BD: Tensor, own_B: Tensor, unit_UD: Tensor, count: int) -> Tensor:
    """Return the vectors nearest to those of a block, which stand in some rows themselves."""
    cosines_BU = block_BD @ unit_UD.T
    cosines_BU.scatter_(1, own_B[:, None], -2.0)  # below every cosine: no vector is its own neighbor
    return cosines_BU.topk(count).indices.cpu()


def _search_lists(unit_UD: Tensor, count: int) -> Tensor:
    """Return almost the same with an index of faiss, which searches only the nearest of many lists."""
    import faiss

    vectors = unit_UD.numpy()
    number, dim = vectors.shape
    lists = int(4 * number**0.5)
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
    examples = np.random.default_rng(0).choice(number, min(number, TRAINING * lists), replace=False)
    index.train(vectors[examples])
    index.add(vectors)
    index.nprobe = PROBES
    found = torch.from_numpy(index.search(vectors, count + 1)[1])
    own = found == torch.arange(number)[:, None]
    own[~own.any(1), -1] = True  # where the vector itself is missing, the last one is dropped
    nearest = found[~own].view(number, count)
    few = (nearest < 0).any(1).nonzero()[:, 0]  # the lists did not have enough
    for block in few.split(max(1, BLOCK // number)):
        nearest[block] = _nearest(unit_UD[block], block, unit_UD, count)
    return nearest


def distinct(vectors_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the first copy of each distinct vector (U,), and the number of each vector in it (N,)."""
    rows = vectors_ND.cpu().numpy()
    bits = np.ascontiguousarray(rows).view(f"u{rows.itemsize}")
    factors = np.random.default_rng(0).integers(2**64, size=rows.shape[1], dtype=np.uint64)
    # Hashes of 64 bits: for a million vectors, the chance that any two of them collide is one in thirty million.
    parts = np.array_split(bits, max(1, len(bits) // HASHED))
    hashes = np.concatenate([_mixed(part) @ factors for part in parts])
    _, first, number = np.unique(hashes, return_index=True, return_inverse=True)
    order = np.argsort(first)  # np.unique sorts by hash; keep the order of the vectors
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return torch.from_numpy(first[order]), torch.from_numpy(rank[number])


def _mixed(bits: NDArray[Any]) -> NDArray[np.uint64]:
    """Return numbers that differ in their lower bits too; those of 0.0, 1.0 and 2.0 differ only in their upper bits."""
    mixed = bits.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # odd, so that no two become the same
    mixed ^= mixed >> np.uint64(32)
    return mixed
