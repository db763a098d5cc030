"""Step 3 of the tour: images → feature vectors.

ResNets for photographs, with a stem for each size of image, and a small network for small images on small
machines. Every batch-norm normalises each view of a training batch by its own statistics, so that both views
pass through the network at once; in self-labeling a batch counts as one view.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secu.config import EncoderConfig

VIEWS = 2  # a training batch holds all first views, then all second views


class ViewNorm(nn.Module):
    """Batch-norm over (N, C, …) whose training statistics are those of one view, of ``views`` in a batch."""

    running_mean: Tensor
    running_var: Tensor
    views = VIEWS  # in a training batch

    def __init__(self, features: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise; in training view by view, which moves the running statistics by view 1, then by view 2."""
        if not self.training:
            return self._library(x)
        if torch.compiler.is_compiling():
            return self._fused(x)
        return torch.cat([self._library(view) for view in x.chunk(self.views)])

    def _library(self, x: Tensor) -> Tensor:
        statistics = (self.running_mean, self.running_var)
        return F.batch_norm(x, *statistics, self.weight, self.bias, self.training, self.momentum, self.eps)

    def _fused(self, x: Tensor) -> Tensor:
        """Normalise all views at once, in the form that a compiler makes the fewest passes of.

        Forward it is two sums and one multiply-add, and so is its derivative.
        """
        views = x.unflatten(0, (self.views, -1)).float()
        others = (1, *range(3, views.ndim))  # all but view and channel
        mean = views.mean(others, keepdim=True)
        variance = (views.square().mean(others, keepdim=True) - mean.square()).clamp(min=0)
        shape = mean.shape[1:]
        scale = torch.rsqrt(variance + self.eps) * self.weight.view(shape)
        y: Tensor = views * scale + (self.bias.view(shape) - mean * scale)
        with torch.no_grad():
            count = views[0, :, 0].numel()
            for view in range(self.views):
                self.running_mean.lerp_(mean[view].flatten(), self.momentum)
                self.running_var.lerp_(variance[view].flatten() * (count / (count - 1)), self.momentum)
        return y.to(x.dtype).flatten(0, 1)


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution that keeps the image's size (at stride 1), without the bias a norm would undo."""
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(inputs, width, 3, stride), ViewNorm(width)
        self.conv2, self.norm2 = conv(width, width, 3), ViewNorm(width)
        self.shortcut = shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's change to its (resized) input."""
        change = F.relu(self.norm1(self.conv1(x)))
        change = self.norm2(self.conv2(change))
        return F.relu(change + self.shortcut(x))


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 that narrow and widen, beside a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(inputs, width, 1), ViewNorm(width)
        self.conv2, self.norm2 = conv(width, width, 3, stride), ViewNorm(width)
        self.conv3, self.norm3 = conv(width, width * 4, 1), ViewNorm(width * 4)
        self.shortcut = shortcut(inputs, width * 4, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's change to its (resized) input."""
        change = F.relu(self.norm1(self.conv1(x)))
        change = F.relu(self.norm2(self.conv2(change)))
        change = self.norm3(self.conv3(change))
        return F.relu(change + self.shortcut(x))


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return the identity, or a 1x1 convolution where the shape changes."""
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(conv(inputs, outputs, 1, stride), ViewNorm(outputs))


def stem(kind: str, channels: int, width: int) -> nn.Sequential:
    """Return a ResNet's first layers: how soon it gives up resolution depends on the size of the images."""
    if kind == "imagenet":
        return nn.Sequential(conv(channels, width, 7, 2), ViewNorm(width), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
    layers = [conv(channels, width, 3), ViewNorm(width), nn.ReLU()]
    if kind == "stl":
        layers.append(nn.MaxPool2d(2, 2, padding=1))
    return nn.Sequential(*layers)


class ResNet(nn.Module):
    """A residual network without its classifier: (N, C, H, W) → (N, features)."""

    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], depths: Sequence[int], stem_kind: str, channels: int
    ) -> None:
        super().__init__()
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

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the last feature map over the image."""
        return torch.mean(self.blocks(self.stem(x)), dim=(2, 3))


class SmallNet(nn.Module):
    """Four 3x3 convolutions for images of 8 to 32 pixels: what two CPU cores can train in two minutes."""

    def __init__(self, channels: int, widths: Sequence[int] = (24, 48, 48, 96), halve: int = 2) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = channels
        for position, width in enumerate(widths):
            layers += [conv(inputs, width, 3, 2 if position == halve else 1), ViewNorm(width), nn.ReLU()]
            inputs = width
        self.layers = nn.Sequential(*layers)
        self.features = inputs

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the last feature map over the image."""
        return torch.mean(self.layers(x), dim=(2, 3))


def build_backbone(config: EncoderConfig, channels: int) -> ResNet | SmallNet:
    """Return the backbone that the config names, convolutions drawn Kaiming-normal (fan-out)."""
    net: ResNet | SmallNet
    match config.backbone:
        case "small":
            net = SmallNet(channels)
        case "resnet18":
            net = ResNet(BasicBlock, (2, 2, 2, 2), config.stem, channels)
        case "resnet34":
            net = ResNet(BasicBlock, (3, 4, 6, 3), config.stem, channels)
        case "resnet50":
            net = ResNet(Bottleneck, (3, 4, 6, 3), config.stem, channels)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net
