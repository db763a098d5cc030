"""A tree of clusters: those of a finer head, merged step by step, so that groups may be of any size.

Every head holds its clusters near an equal size, so a large group fills several clusters of a finer head, and a small
group one. Merging these clusters bottom-up and cutting the tree at K gives K groups of any size.
Shapes: N images, M clusters of a head, L of them with images, D dimensions, K groups.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster import hierarchy
from torch import Tensor


class Tree(NamedTuple):
    """Merges of the clusters of one head."""

    linkage: Tensor  # the merges in scipy's format, float64 (L − 1, 4)
    leaves: Tensor  # the clusters that are merged: those with images (L,)
    head: Tensor  # the position of the head, without dimensions

    def cut(self, groups: int) -> Tensor:
        """Return the group of each leaf (L,), numbered by the first leaf of each, after all but the last merges."""
        group_of = hierarchy.cut_tree(self.linkage.numpy(), n_clusters=groups)[:, 0]
        return torch.from_numpy(_renumbered(group_of))

    def is_valid(self, heads: Sequence[int]) -> bool:
        """Return whether the tensors, which may come from a file, form a tree over the clusters of one of the heads."""
        count = self.leaves.numel()
        shapes = (self.linkage.shape, self.leaves.shape, self.head.shape) == ((count - 1, 4), (count,), ())
        types = (self.linkage.dtype, self.leaves.dtype, self.head.dtype) == (torch.float64, torch.int64, torch.int64)
        if not (count > 1 and shapes and types and 0 <= int(self.head) < len(heads)):
            return False
        inside = bool(((self.leaves >= 0) & (self.leaves < heads[int(self.head)])).all())
        return inside and bool(hierarchy.is_valid_linkage(self.linkage.numpy()))


def grow_tree(embeddings_ND: Tensor, labels_N: Tensor, head: int) -> Tree:
    """Merge the clusters of a head by the cosine of their mean embeddings, with average linkage.

    Every cluster has the same weight, whatever its size.
    """
    leaves, numbers = labels_N.unique(return_inverse=True)
    sums_LD = torch.zeros(len(leaves), embeddings_ND.shape[1], dtype=torch.float64)
    sums_LD.index_add_(0, numbers, embeddings_ND.double())
    linkage = hierarchy.linkage(sums_LD.numpy(), "average", metric="cosine")
    return Tree(torch.from_numpy(linkage), leaves, torch.tensor(head))


def _renumbered(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number labels in the order of their first appearance."""
    _, first, number = np.unique(labels, return_index=True, return_inverse=True)
    rank: NDArray[np.int64] = np.argsort(np.argsort(first))
    return rank[number]
