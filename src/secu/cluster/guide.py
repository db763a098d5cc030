"""The user's hints during training: groups of images that are held in one cluster each.

At the start of an epoch every group is placed in a cluster; during the epoch, this is the label of its images. Groups
with names are placed one-to-one so that their mean embeddings are closest to the centers; the others follow one by
one, each in the nearest cluster that no group has from which it is kept apart. Only heads with the requested number of
clusters are guided: in a finer one, the images of a name may fill several clusters.
Shapes: N images, B of a batch, G groups, H heads, K clusters, S views, D dimensions.
"""

from collections.abc import Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from secu.cluster.constraints import NO_LABEL
from secu.cluster.losses import at_label

MOST_WEIGHT = 20.0  # of the loss of an image: a few images with very large weights would make the steps erratic
MOST_SHARE = 0.5  # of the weight of all images, for all groups together


class Guide(nn.Module):
    """Groups of images, and the cluster of each.

    The clusters are not part of a checkpoint between epochs, since they follow from the weights and from the groups,
    which are given again when a run is resumed.

    Args:
        group_N: The group of each image, or −1, on the device of the method.
        names: Number of groups with names, which come first.
        apart: Pairs of groups that must be in different clusters.
        heads: Number of clusters of each head.
        clusters: Heads of this many clusters are guided.
        weight: A group has the weight of this many images, however many it has.

    Attributes:
        guided: The positions of the guided heads.
        rows: The images with a group (M,), and ``group_M`` the group of each, in host memory.
    """

    cluster: Tensor

    def __init__(
        self,
        group_N: Tensor,
        names: int,
        apart: Sequence[tuple[int, int]],
        heads: Sequence[int],
        clusters: int,
        weight: float,
    ) -> None:
        super().__init__()
        self.names = names
        self.apart = apart
        self.guided = [number for number, size in enumerate(heads) if size == clusters]
        self.rows = torch.nonzero(group_N.cpu() >= 0)[:, 0]
        self.group_M = group_N.cpu()[self.rows]
        weight_G = group_weights(self.group_M.bincount(), names, weight, MOST_SHARE * len(group_N))
        groups = len(weight_G)
        # The last entry of the following is that of the images without a group.
        self.group_N = torch.where(group_N < 0, groups, group_N)
        self.weight = torch.cat([weight_G, torch.zeros(1)]).to(group_N.device)
        cluster = torch.full((groups + 1, len(heads)), NO_LABEL, device=group_N.device)
        self.register_buffer("cluster", cluster, persistent=False)

    def place(self, embeddings_MD: Tensor, centers: Sequence[Tensor]) -> None:
        """Place the groups, given the embeddings of the images in ``rows`` and the centers of each head (K, D)."""
        sizes_G = self.group_M.bincount()
        sums_GD = torch.zeros(len(sizes_G), embeddings_MD.shape[1]).index_add_(0, self.group_M, embeddings_MD.cpu())
        means_GD = sums_GD / sizes_G[:, None]
        for head in self.guided:
            found_G = place_groups(means_GD @ centers[head].cpu().T, self.names, self.apart)
            self.cluster[:-1, head] = found_G.to(self.cluster.device)

    def labels(self, index_B: Tensor, labels_BH: Tensor) -> Tensor:
        """Return the labels of a batch, with those of hinted images replaced."""
        fixed_BH = self.cluster[self.group_N[index_B]]
        return torch.where(fixed_BH == NO_LABEL, labels_BH, fixed_BH)

    def loss(self, index_B: Tensor, log_p_SBHK: Tensor) -> Tensor:
        """Return the weighted cross-entropy of hinted images: a mean over views, batch and heads."""
        group_B = self.group_N[index_B]
        fixed_BH = self.cluster[group_B]
        weight_BH = self.weight[group_B][:, None] * (fixed_BH != NO_LABEL)
        return -(weight_BH * at_label(log_p_SBHK, fixed_BH.clamp(min=0))).mean()

    def followed(self, head: int, cosines_MK: Tensor) -> int:
        """Return how many of the images in ``rows`` are nearest to the center of their group's cluster."""
        return int((self.cluster.cpu()[self.group_M, head] == cosines_MK.argmax(-1).cpu()).sum())


def group_weights(sizes_G: Tensor, names: int, weight: float, most: float) -> Tensor:
    """Return the weight of each image of a group (G,): a group has ``weight``, and all together at most ``most``.

    The weight is 0 for an image without a name that is only kept apart from others, since its cluster is unknown.
    """
    known_G = (sizes_G > 1) | (torch.arange(len(sizes_G)) < names)
    weight = min(weight, most / max(1, int(known_G.sum())))
    return known_G * (weight / sizes_G).clamp(max=MOST_WEIGHT)


def place_groups(cosines_GK: Tensor, names: int, apart: Sequence[tuple[int, int]]) -> Tensor:
    """Return a cluster for each group (G,): the first ``names`` groups one-to-one, the others one by one.

    If other groups from which a group is kept apart occupy all clusters, it gets the nearest one.
    """
    found_G = cosines_GK.argmax(-1)
    rows, columns = linear_sum_assignment(cosines_GK[:names].numpy(), maximize=True)
    found_G[torch.from_numpy(rows)] = torch.from_numpy(columns)
    others: dict[int, list[int]] = {}
    for one, other in apart:
        others.setdefault(other, []).append(one)
        others.setdefault(one, []).append(other)
    for group in range(names, len(cosines_GK)):
        taken = found_G[[other for other in others.get(group, ()) if other < group]].unique()
        if len(taken) < cosines_GK.shape[1]:
            found_G[group] = cosines_GK[group].index_fill(0, taken, -torch.inf).argmax()
    return found_G
