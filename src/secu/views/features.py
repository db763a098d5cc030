"""Views of feature vectors: those of an image, or of a neighbor, standardized, with some components set to zero."""

import torch
from torch import Generator, Tensor, nn

from secu.base.collectives import own_part, whole
from secu.config import FeaturesConfig

PART = 2**14  # vectors whose statistics are computed at a time
CONSTANT = 1e-6  # standard deviation, relative to the mean, below which a feature counts as constant


class FeatureViews(nn.Module):
    """Two views of feature vectors by dropout; the counterpart of ``Augmentation`` for inputs that are not pixels.

    Every feature is standardized; long vectors are then reduced to their principal components, which loses little and
    makes training several times as fast. Mean, deviation and components are learned from the training vectors.
    """

    mean: Tensor
    std: Tensor
    basis: Tensor | None

    def __init__(self, features: int, config: FeaturesConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.outputs = min(features, config.components)
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("std", torch.ones(features))
        reduced = self.outputs < features
        self.register_buffer("basis", torch.eye(features, self.outputs) if reduced else None)

    def learn(self, vectors_ND: Tensor) -> None:
        """Take the statistics of the training vectors; a feature that never changes is only shifted."""
        count = len(vectors_ND)
        mean = sum(part.double().sum(0) for part in vectors_ND.split(PART)) / count
        variance = sum((part.double() - mean).square().sum(0) for part in vectors_ND.split(PART)) / count
        std = variance.sqrt()
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std > CONSTANT * (1 + mean.abs()), std, 1.0))
        if self.basis is not None:
            self.basis.copy_(self._principal_components(vectors_ND))

    def _principal_components(self, vectors_ND: Tensor) -> Tensor:
        """Return the directions of largest variance of the standardized vectors, largest first (D, C)."""
        mean = self.mean.cpu()
        std = self.std.cpu()
        covariance = torch.zeros(len(mean), len(mean), dtype=torch.float64)
        for part in vectors_ND.split(PART):
            standard = (part.float() - mean) / std
            covariance += (standard.T @ standard).double() / len(vectors_ND)
        vectors = torch.linalg.eigh(covariance).eigenvectors[:, -self.outputs :].flip(1)
        largest = vectors.abs().argmax(0, keepdim=True)
        basis: Tensor = vectors * vectors.gather(0, largest).sign()  # an eigenvector's sign is arbitrary
        return basis

    def draw(self, batch_size: int, generator: Generator) -> dict[str, Tensor]:
        """Return all random numbers for two views of a batch: uniform in [0, 1), (2, B, C)."""
        if not self.dropout:
            return {}
        shape = (2, whole(batch_size), self.outputs)
        return {"keep": own_part(torch.rand(shape, device=self.mean.device, generator=generator), 1)}

    def render(self, inputs: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """Return two views of plain vectors (B, C), or of pairs of them (2, B, C): float32 (2, B, C)."""
        pairs = inputs if inputs.ndim == 3 else inputs.expand(2, *inputs.shape)
        return pairs * (draws["keep"] >= self.dropout) / (1 - self.dropout) if draws else pairs

    def plain(self, inputs: Tensor) -> Tensor:
        """Return the standardized and reduced vectors: float32."""
        standard = (inputs.float() - self.mean) / self.std
        return standard if self.basis is None else standard @ self.basis
