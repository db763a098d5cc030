"""Images → feature vectors: ResNets for photographs, and a small network for small images on a CPU.

A ResNet's stem depends on the image size. Both views pass through the network in one batch, and batch-norm normalizes
each view with its own statistics; in self-labeling a batch counts as one view.

A backbone is a function of ``EncoderConfig`` and the number of channels that returns a module with an attribute
``features``, the length of its output. To add one, register it in ``secu.registry.BACKBONES``. It initializes its own
weights.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secu.base.errors import UserError
from secu.config import EncoderConfig
from secu.nets.norm import ViewNorm
from secu.registry import BACKBONES


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution that keeps the image's size (at stride 1), without a bias, which a norm would cancel."""
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(inputs, width, 3, stride)
        self.norm1 = ViewNorm(width)
        self.conv2 = conv(width, width, 3)
        self.norm2 = ViewNorm(width)
        self.shortcut = shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Add the residual to the (resized) input."""
        residual = F.relu(self.norm1(self.conv1(x)))
        residual = self.norm2(self.conv2(residual))
        return F.relu(residual + self.shortcut(x))


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 convolutions that narrow and widen, with a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(inputs, width, 1)
        self.norm1 = ViewNorm(width)
        self.conv2 = conv(width, width, 3, stride)
        self.norm2 = ViewNorm(width)
        self.conv3 = conv(width, width * 4, 1)
        self.norm3 = ViewNorm(width * 4)
        self.shortcut = shortcut(inputs, width * 4, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Add the residual to the (resized) input."""
        residual = F.relu(self.norm1(self.conv1(x)))
        residual = F.relu(self.norm2(self.conv2(residual)))
        residual = self.norm3(self.conv3(residual))
        return F.relu(residual + self.shortcut(x))


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return the identity, or a 1x1 convolution where the shape changes."""
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(conv(inputs, outputs, 1, stride), ViewNorm(outputs))


def stem(kind: str, channels: int, width: int) -> nn.Sequential:
    """Return the first layers of a ResNet; for larger images, they reduce the resolution earlier."""
    if kind == "imagenet":
        return nn.Sequential(conv(channels, width, 7, 2), ViewNorm(width), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
    layers = [conv(channels, width, 3), ViewNorm(width), nn.ReLU()]
    if kind == "stl":
        layers.append(nn.MaxPool2d(2, 2, padding=1))
    return nn.Sequential(*layers)


class Backbone(nn.Module):
    """Base class of the built-in backbones: (N, C, H, W) → (N, features)."""

    features: int


class Vectors(Backbone):
    """In place of a network, for inputs that are feature vectors already: (N, features), unchanged."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        """Return the vectors."""
        return x


class ResNet(Backbone):
    """A residual network without its classifier."""

    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], depths: Sequence[int], stem_kind: str, channels: int
    ) -> None:
        super().__init__()
        self.depths = depths
        width = inputs = 64
        self.stem = stem(stem_kind, channels, width)
        blocks: list[nn.Module] = []
        for stage, depth in enumerate(depths):
            for position in range(depth):
                stride = 2 if stage > 0 and position == 0 else 1
                blocks.append(block(inputs, width << stage, stride))
                inputs = (width << stage) * block.expansion
        self.blocks = nn.Sequential(*blocks)
        self.features = inputs
        initialize_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last feature map averaged over the image."""
        return torch.mean(self.blocks(self.stem(x)), dim=(2, 3))

    def stages(self) -> list[nn.Module]:
        """Return the parts of the network in order, one for each resolution; the stem belongs to the first."""
        ends = list(accumulate(self.depths))
        stages = [self.blocks[end - depth : end] for depth, end in zip(self.depths, ends, strict=True)]
        return [nn.Sequential(self.stem, stages[0]), *stages[1:]]


class SmallNet(Backbone):
    """Four 3x3 convolutions for images of 8 to 32 pixels; trains in two minutes on two CPU cores."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = channels
        for width, stride in ((24, 1), (48, 1), (48, 2), (96, 1)):
            layers += [conv(inputs, width, 3, stride), ViewNorm(width), nn.ReLU()]
            inputs = width
        self.layers = nn.Sequential(*layers)
        self.features = inputs
        initialize_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last feature map averaged over the image."""
        return torch.mean(self.layers(x), dim=(2, 3))


def initialize_convolutions(net: nn.Module) -> None:
    """Initialize the weights of all convolutions with Kaiming-normal (fan-out)."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def small(config: EncoderConfig, channels: int) -> SmallNet:
    """Return the small network."""
    return SmallNet(channels)


def resnet18(config: EncoderConfig, channels: int) -> ResNet:
    """Return ResNet-18."""
    return ResNet(BasicBlock, (2, 2, 2, 2), config.stem, channels)


def resnet34(config: EncoderConfig, channels: int) -> ResNet:
    """Return ResNet-34."""
    return ResNet(BasicBlock, (3, 4, 6, 3), config.stem, channels)


def resnet50(config: EncoderConfig, channels: int) -> ResNet:
    """Return ResNet-50."""
    return ResNet(Bottleneck, (3, 4, 6, 3), config.stem, channels)


def build_backbone(config: EncoderConfig, channels: int) -> Backbone:
    """Return the backbone that the config names."""
    backbone: Backbone = BACKBONES[config.backbone](config, channels)
    return backbone


def no_backbone(config: EncoderConfig, channels: int) -> Backbone:
    """Raise: feature vectors need no backbone, and images cannot do without one."""
    valid = ", ".join(name for name in BACKBONES.names() if name != "none")
    raise UserError(f"encoder.backbone: none is for feature vectors only; valid for images: {valid}")
