"""Add a backbone: three convolutions with global max pooling, on the digits.

    python examples/backbone.py [RUN] [KEY=VALUE ...]

A backbone is a function of the encoder's settings and the number of channels. It returns a module that maps images to
feature vectors, with their length in its attribute ``features``. Projection and centers are added on top. Any network
can be used, for example one from timm. With optim.epochs=30 this takes half a minute and gets almost eight of ten
digits right.
"""

import sys
from pathlib import Path

from torch import nn

from secu.apps import pipeline
from secu.config import EncoderConfig
from secu.data import load
from secu.registry import BACKBONES
from secu.settings import load_config


class Strongest(nn.Sequential):
    """Images (N, C, H, W) → features (N, 128)."""

    features = 128

    def __init__(self, channels: int) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs, size, stride in ((channels, 64, 5, 1), (64, 64, 3, 2), (64, self.features, 3, 2)):
            convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2)
            layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten())


@BACKBONES.register("strongest")
def strongest(config: EncoderConfig, channels: int) -> nn.Module:
    """Return the network with random weights; ``config`` holds the settings that start with encoder."""
    return Strongest(channels)


def main(out: str = "runs/strongest", *overrides: str) -> None:
    """Train the recipe ``digits`` with our backbone, and print the scores."""
    config = load_config("digits", ["encoder.backbone=strongest", *overrides])
    images = load(config.data)
    results = pipeline.run(config, images, Path(out), test=images).results
    print(f"{out}: ACC {results.scores.acc:.3f}, NMI {results.scores.nmi:.3f}, ARI {results.scores.ari:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
