"""The frozen part of a model: pixels → feature vectors of a pretrained backbone that is not trained."""

import torch
from torch import Tensor, nn

from secu.config import Config
from secu.nets.backbones import build_backbone
from secu.nets.lite0 import frozen


class Front(nn.Module):
    """Preprocessing and frozen backbone: uint8 images (N, C, H, W) → features (N, D), float32.

    The network is built on first use: a run that was trained on stored features is often used without it.

    Args:
        config: The settings; ``encoder.backbone`` names the network, ``data.mean`` and ``data.std`` normalize.
        channels: Number of channels of the images.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: Config, channels: int) -> None:
        super().__init__()
        self.config = config.encoder
        self.channels = channels
        self.register_buffer("mean", torch.tensor(config.data.mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config.data.std).view(-1, 1, 1), persistent=False)
        self.network: nn.Module | None = None

    def load(self) -> nn.Module:
        """Return the network, building it on first use.

        Raises:
            UserError: Its weights are missing or damaged.
        """
        if self.network is None:
            self.network = frozen(build_backbone(self.config, self.channels)).to(self.mean.device)
        return self.network

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of images."""
        features: Tensor = self.load()((images.float() / 255 - self.mean) / self.std)
        return features.float()


def needs_front(config: Config) -> bool:
    """Return whether a run trains on the features of a frozen backbone instead of on pixels."""
    return config.encoder.trainable == "nothing" and config.encoder.backbone != "none"
