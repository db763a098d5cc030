"""Updates of the cluster centers.

The centers of all heads are one (H, K, D) tensor, padded to the largest head, and are normalized when used. To add a
kind, subclass ``Centers`` and register it in ``secu.registry.CENTERS``.
Shapes: S embeddings per image (its views), B images, H heads, K clusters of the largest head, D dimensions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secu.base import collectives
from secu.cluster.losses import at_label
from secu.config import CentersConfig
from secu.registry import CENTERS


def random_directions(heads: int, clusters: int, dim: int) -> Tensor:
    """Return random unit vectors (H, K, D)."""
    return F.normalize(torch.randn(heads, clusters, dim), dim=-1)


class Centers(nn.Module):
    """Base class of all centers; used directly, the centers stay fixed."""

    weight: Tensor

    def unit(self) -> Tensor:
        """Return the centers on the unit sphere (H, K, D)."""
        return F.normalize(self.weight, dim=-1)

    def start_epoch(self) -> None:
        """Discard the state that belongs to a single epoch."""

    def update(self, embeddings_SBD: Tensor, log_p_SBHK: Tensor, labels_BH: Tensor) -> None:
        """Move the centers after a batch, or this process's part of it, has been assigned."""


class GradientCenters(Centers):
    """Parameters trained on the center loss by the optimizer, with their own learning rate."""

    def __init__(self, heads: int, clusters: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(random_directions(heads, clusters, dim))


class ClosedFormCenters(Centers):
    """Theorem 1, Eqn. 4: w_j = Π(Σ_{i: y_i = j} (1 − p_ij)·x_i), over the images of the epoch so far.

    Π projects onto the unit sphere, so the paper's division by the sum of the weights is omitted.
    A cluster keeps its center until an image is assigned to it.
    """

    sums: Tensor

    def __init__(self, heads: int, clusters: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("weight", random_directions(heads, clusters, dim))
        self.register_buffer("sums", torch.zeros(heads, clusters, dim))

    def start_epoch(self) -> None:
        """Reset the sums."""
        self.sums.zero_()

    @torch.no_grad()
    def update(self, embeddings_SBD: Tensor, log_p_SBHK: Tensor, labels_BH: Tensor) -> None:
        """Add the batch to the sums and project them onto the sphere."""
        weighted_BHD = torch.einsum("sbh,sbd->bhd", self._weights(at_label(log_p_SBHK, labels_BH)), embeddings_SBD)
        dim = weighted_BHD.shape[-1]
        sums_HKD = torch.zeros_like(self.sums) if collectives.divided() else self.sums
        sums_HKD.scatter_add_(1, labels_BH.T[..., None].expand(-1, -1, dim), weighted_BHD.transpose(0, 1))
        if collectives.divided():
            self.sums.add_(collectives.add_up(sums_HKD))
        seen_HK1 = self.sums.norm(dim=-1, keepdim=True) > 0
        self.weight.copy_(torch.where(seen_HK1, F.normalize(self.sums, dim=-1, eps=1e-30), self.weight))

    def _weights(self, log_p_SBH: Tensor) -> Tensor:
        """Return 1 − p: the harder an image, the greater its weight."""
        return -torch.expm1(log_p_SBH)


class KMeansCenters(ClosedFormCenters):
    """Eqn. 5: w_j = Π(Σ_{i: y_i = j} x_i): CoKe's centers, the limit of the closed form for λ_w → ∞."""

    def _weights(self, log_p_SBH: Tensor) -> Tensor:
        """Return equal weights."""
        return torch.ones_like(log_p_SBH)


def build_centers(config: CentersConfig, heads: int, clusters: int, dim: int) -> Centers:
    """Return the centers selected in the config."""
    centers: Centers = CENTERS[config.kind](heads, clusters, dim)
    return centers
