"""Offsets of clusters: a bonus for each cluster of a trained head that lets clusters differ in size.

A head holds its clusters near an equal size, so it assigns the border of a large group to small clusters nearby. The
neighbors of the images know better: an image in the wrong cluster still has neighbors in the right one. The offsets
are those at which every cluster has the share of the images that it has among the neighbors of all images.
Shapes: N images, k neighbors, K clusters.
"""

import torch
from torch import Tensor

ROUNDS = 3  # each moves the shares further from those of the head (docs/lab/features.md)
SHARPER = 0.5  # temperature at which shares are compared, relative to that of the run
UPDATES = 20  # of the offsets in a round; after these, shares differ little
SMALLEST = 1e-6  # share of an empty cluster


def find_offsets(cosines_NK: Tensor, neighbors_Nk: Tensor, temperature: float) -> Tensor:
    """Return an offset to add to the cosines of each cluster (K,); their mean is zero.

    Args:
        cosines_NK: Cosines of the images to the centers.
        neighbors_Nk: Indices of the neighbors of each image.
        temperature: Temperature of the run.
    """
    offsets_K = torch.zeros(cosines_NK.shape[1])
    for _ in range(ROUNDS):
        labels_N = (cosines_NK + offsets_K).argmax(-1)
        shares_K = shares_among_neighbors(labels_N, neighbors_Nk, len(offsets_K))
        offsets_K = match_shares(cosines_NK, shares_K, offsets_K, SHARPER * temperature)
    return offsets_K


def shares_among_neighbors(labels_N: Tensor, neighbors_Nk: Tensor, clusters: int) -> Tensor:
    """Return the share of each cluster among all images and all their neighbors (K,)."""
    seen = torch.cat([labels_N, labels_N[neighbors_Nk].flatten()])
    return torch.bincount(seen, minlength=clusters) / len(seen)


def match_shares(cosines_NK: Tensor, shares_K: Tensor, offsets_K: Tensor, temperature: float) -> Tensor:
    """Return offsets at which the mean probability of each cluster is nearly its given share, starting from others."""
    wanted_K = shares_K.clamp(min=SMALLEST).log()
    for _ in range(UPDATES):
        mean_K = torch.softmax((cosines_NK + offsets_K) / temperature, -1).mean(0)
        offsets_K = offsets_K + temperature * (wanted_K - mean_K.clamp(min=SMALLEST).log())
        offsets_K = offsets_K - offsets_K.mean()
    return offsets_K
