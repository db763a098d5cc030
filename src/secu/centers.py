"""Step 7 of the tour: how the cluster centers move.

All centers of all heads lie in one (H, K, D) tensor, padded to the largest head, and are normalised when used.
Shapes: S embeddings an image (its views), B images, H heads, K clusters of the largest head, D dimensions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secu.config import CentersConfig
from secu.losses import at_label


def random_directions(heads: int, clusters: int, dim: int) -> Tensor:
    """Return random unit vectors (H, K, D)."""
    return F.normalize(torch.randn(heads, clusters, dim), dim=-1)


class Centers(nn.Module):
    """Base: centers that stand still."""

    weight: Tensor

    def unit(self) -> Tensor:
        """Return the centers on the sphere (H, K, D)."""
        return F.normalize(self.weight, dim=-1)

    def start_epoch(self) -> None:
        """Forget what belongs to one epoch alone."""

    def update(self, embeddings_SBD: Tensor, log_p_SBHK: Tensor, labels_BH: Tensor) -> None:
        """Move the centers after a batch was assigned."""


class GradientCenters(Centers):
    """Free parameters that the optimiser moves along the gradient of the center loss, at a rate of their own."""

    def __init__(self, heads: int, clusters: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(random_directions(heads, clusters, dim))


class ClosedFormCenters(Centers):
    """Theorem 1, Eqn. 4: w_j = Π(Σ_{i: y_i = j} (1 − p_ij)·x_i), over the images received in the epoch so far.

    Π projects on the unit sphere, which is also why the paper's division by the sum of weights is left out.
    A cluster that no image was assigned to yet keeps its center.
    """

    sums: Tensor

    def __init__(self, heads: int, clusters: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("weight", random_directions(heads, clusters, dim))
        self.register_buffer("sums", torch.zeros(heads, clusters, dim))

    def start_epoch(self) -> None:
        """Begin a new sum."""
        self.sums.zero_()

    @torch.no_grad()
    def update(self, embeddings_SBD: Tensor, log_p_SBHK: Tensor, labels_BH: Tensor) -> None:
        """Add the batch to the sums and project them once."""
        weighted_BHD = torch.einsum("sbh,sbd->bhd", self._weights(at_label(log_p_SBHK, labels_BH)), embeddings_SBD)
        dim = weighted_BHD.shape[-1]
        self.sums.scatter_add_(1, labels_BH.T[..., None].expand(-1, -1, dim), weighted_BHD.transpose(0, 1))
        seen_HK1 = self.sums.norm(dim=-1, keepdim=True) > 0
        self.weight.copy_(torch.where(seen_HK1, F.normalize(self.sums, dim=-1, eps=1e-30), self.weight))

    def _weights(self, log_p_SBH: Tensor) -> Tensor:
        """1 − p: the harder an image, the more it pulls."""
        return -torch.expm1(log_p_SBH)


class KMeansCenters(ClosedFormCenters):
    """Eqn. 5: w_j = Π(Σ_{i: y_i = j} x_i): CoKe's centers, the limit of the closed form for λ_w → ∞."""

    def _weights(self, log_p_SBH: Tensor) -> Tensor:
        """All images pull alike."""
        return torch.ones_like(log_p_SBH)


def build_centers(config: CentersConfig, heads: int, clusters: int, dim: int) -> Centers:
    """Return the centers that the config names."""
    match config.kind:
        case "sgd":
            return GradientCenters(heads, clusters, dim)
        case "closed_form":
            return ClosedFormCenters(heads, clusters, dim)
        case "kmeans":
            return KMeansCenters(heads, clusters, dim)
