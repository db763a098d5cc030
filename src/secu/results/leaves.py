"""The leaves of a run's tree: the cluster of every image in the finest head.

Shapes: N images, L leaves, D dimensions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from secu.cluster.clustering import Clustering
from secu.cluster.tree import Tree

LEAST_LEAVES = 3  # smaller trees are not worth showing
MOST_LEAVES = 5_000  # of a tree that a page can show
AT_ONCE = 2**24  # cosines that are computed at a time


@dataclass(frozen=True, eq=False)
class Leaves:
    """The finest clusters of N images."""

    tree: Tree
    centers: Tensor  # of the leaves (L, D)
    leaf: Tensor  # of each image, as its position in the tree (N,)
    cosine: Tensor  # of each image to the center of its leaf (N,)

    def column(self, cluster_N: Tensor) -> Tensor | None:
        """Return each image's cluster in the finest head for a table; None if they are the run's own clusters."""
        numbers_N = self.tree.leaves[self.leaf]
        return None if torch.equal(numbers_N, cluster_N) else numbers_N


def find_leaves(clustering: Clustering, embeddings_ND: Tensor) -> Leaves | None:
    """Return the nearest leaf of every image, as ``--level`` assigns it; None if there are hardly any, or too many."""
    grown = clustering.finest or clustering.tree
    count = len(grown.leaves) if grown else max(clustering.heads)
    if not LEAST_LEAVES <= count <= MOST_LEAVES:
        return None
    tree = clustering.finest_tree()
    centers_LD = clustering.leaf_centers(tree).cpu()
    best = [(part_BD @ centers_LD.T).max(-1) for part_BD in embeddings_ND.cpu().split(AT_ONCE // count)]
    return Leaves(tree, centers_LD, torch.cat([b.indices for b in best]), torch.cat([b.values for b in best]))
