"""Nearest neighbors as views: the partner of an image is a random one of its nearest neighbors.

Shapes: N images, B of a block, D dimensions, U distinct vectors, k neighbors.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Generator, Tensor

BLOCK = 2**26  # cosines that are computed at a time: 256 MB
HASHED = 10_000  # vectors that are hashed at a time


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

    The search is exact and works in blocks on the device of the vectors. Copies of the same vector share one row: the
    neighbors of an image are other images, however often it is repeated. Copies are better recognized in ``originals``,
    which the vectors were computed from: the same vector may be rounded differently in another batch.
    """
    first_U, row_of_N = distinct(vectors_ND if originals is None else originals)
    unit_UD = F.normalize(vectors_ND[first_U.to(vectors_ND.device)].float(), dim=-1)
    distinct_count = len(unit_UD)
    count = min(count, distinct_count - 1)
    nearest = []
    start = 0
    for block_BD in unit_UD.split(max(1, BLOCK // distinct_count)):
        cosines_BU = block_BD @ unit_UD.T
        own = torch.arange(start, start + len(block_BD), device=unit_UD.device)
        cosines_BU.scatter_(1, own[:, None], -2.0)  # below every cosine: no vector is its own neighbor
        nearest.append(cosines_BU.topk(count).indices.cpu())
        start += len(block_BD)
    return Neighbors(first_U[torch.cat(nearest)].int(), row_of_N)


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
