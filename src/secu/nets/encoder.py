"""Images, or feature vectors, → unit embeddings, through backbone, projection and (optional) prediction.

Shapes: V views, B images, S embeddings per image (V of the projection; with a prediction MLP, V more), D dimensions.
"""

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secu.base.errors import UserError
from secu.config import EncoderConfig
from secu.nets.backbones import Vectors, build_backbone
from secu.nets.norm import VIEWS, ViewNorm


class Encoder(nn.Module):
    """The paper's f: maps images to the unit sphere of embeddings and centers.

    ``vectors`` is the length of the inputs if they are feature vectors, which need no backbone; 0 for images.
    """

    def __init__(self, config: EncoderConfig, channels: int, vectors: int = 0) -> None:
        super().__init__()
        self.backbone = Vectors(vectors) if vectors else build_backbone(config, channels)
        self.fixed = [] if vectors else fixed_parts(self.backbone, config)
        for part in self.fixed:
            part.requires_grad_(False)
        features = self.backbone.features
        self.dim = config.dim if config.projection_layers else features
        hidden = config.hidden_dim or features
        self.projection = projection(features, hidden, self.dim, config.projection_layers)
        self.prediction = prediction(self.dim, config.prediction_dim) if config.prediction_layers else None

    def forward(self, views_NCHW: Tensor) -> Tensor:
        """Embed a training batch, first views before second views: (V·B, C, H, W) → (S, B, D), float32."""
        projected = self.projection(self.backbone(views_NCHW))
        outputs = [projected] if self.prediction is None else [projected, self.prediction(projected)]
        stacked = torch.cat(outputs).unflatten(0, (VIEWS * len(outputs), -1))
        return F.normalize(stacked.float(), dim=-1)

    def train(self, mode: bool = True) -> Self:
        """Set training mode, except for the parts of the backbone that are not trained."""
        super().train(mode)
        for part in self.fixed:
            part.eval()
        return self

    def embed(self, images_NCHW: Tensor) -> Tensor:
        """Embed single images with the projection: (N, C, H, W) → (N, D), float32."""
        return F.normalize(self.projection(self.backbone(images_NCHW)).float(), dim=-1)

    def expect_views(self, number: int) -> None:
        """Set the number of views in a training batch."""
        for module in self.modules():
            if isinstance(module, ViewNorm):
                module.views = number


def fixed_parts(backbone: Any, config: EncoderConfig) -> list[nn.Module]:
    """Return the parts of a backbone that ``encoder.trainable`` excludes from training."""
    if config.trainable == "all":
        return []
    if config.trainable == "nothing":
        return [backbone]
    if not hasattr(backbone, "stages"):
        raise UserError(f"encoder.trainable: last needs a backbone with stages, which {config.backbone} does not have")
    parts: list[nn.Module] = backbone.stages()[:-1]
    return parts


def projection(features: int, hidden: int, dim: int, layers: int) -> nn.Module:
    """Return an MLP of 0 to 3 layers; only the 3-layer MLP (ImageNet) has a norm after its last layer."""
    if layers == 0:
        return nn.Identity()
    if layers == 1:
        return nn.Linear(features, dim)
    first = [nn.Linear(features, hidden), ViewNorm(hidden), nn.ReLU()]
    if layers == 2:
        return nn.Sequential(*first, nn.Linear(hidden, dim))
    second = [nn.Linear(hidden, hidden), ViewNorm(hidden), nn.ReLU()]
    return nn.Sequential(*first, *second, nn.Linear(hidden, dim), ViewNorm(dim))


def prediction(dim: int, hidden: int) -> nn.Module:
    """Return the 2-layer MLP that follows the projection (BYOL's predictor)."""
    return nn.Sequential(nn.Linear(dim, hidden), ViewNorm(hidden), nn.ReLU(), nn.Linear(hidden, dim))
