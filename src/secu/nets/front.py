"""The frozen part of a model: pixels → feature vectors of a pretrained backbone that is not trained."""

from typing import Any

import torch
from torch import Tensor, nn

from secu.base.errors import UserError
from secu.config import Config
from secu.nets.backbones import build_backbone
from secu.nets.lite0 import frozen
from secu.nets.pretrained import weights_id


class Front(nn.Module):
    """Preprocessing and frozen backbone: uint8 images (N, C, H, W) → features (N, D), float32.

    The network is built on first use: a run that was trained on stored features is often used without it. ``digest`` is
    the SHA-256 of the weights that the rest of the model was trained with (32,); None or zeros if it is not known.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: Config, channels: int, digest: Tensor | None = None) -> None:
        super().__init__()
        self.config = config.encoder
        self.channels = channels
        self.register_buffer("mean", torch.tensor(config.data.mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config.data.std).view(-1, 1, 1), persistent=False)
        self.digest = digest
        self.network: nn.Module | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the network out of a pickle: it is built again on first use."""
        return self.__dict__ | {"network": None, "_modules": self._modules | {"network": None}}

    def load(self) -> nn.Module:
        """Return the network, building it on first use.

        Raises:
            UserError: Its weights are missing, damaged, or not those that the model was trained with.
        """
        if self.network is None:
            name = self.config.backbone
            digest = self.digest
            if digest is not None and digest.any() and not torch.equal(weights_digest(name), digest.cpu()):
                raise UserError(f"encoder.backbone: the weights of {name} are not those that the run was trained with")
            self.network = frozen(build_backbone(self.config, self.channels)).to(self.mean.device)
        return self.network

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of images."""
        features: Tensor = self.load()((images.float() / 255 - self.mean) / self.std)
        return features.float()


def weights_digest(backbone: str) -> Tensor:
    """Return the SHA-256 that identifies the weights of a pretrained backbone, uint8 (32,)."""
    return torch.tensor(list(bytes.fromhex(weights_id(backbone))), dtype=torch.uint8)


def needs_front(config: Config) -> bool:
    """Return whether a run trains on the features of a frozen backbone instead of on pixels."""
    return config.encoder.trainable == "nothing" and config.encoder.backbone != "none"
