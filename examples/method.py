"""Add a method: contrastive learning of the encoder (SimCLR, Chen et al., 2020), with clustering on top.

    python examples/method.py [RUN] [KEY=VALUE ...]

Each image is a class of its own: its two random views should be more similar to each other than to any view of another
image of the batch. Centers and labels are SeCu's, but the encoder does not learn from them. With optim.epochs=30 it
takes half a minute and gets more than eight of ten digits right.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from secu.apps import pipeline
from secu.cluster.clustering import Clustering
from secu.config import Config
from secu.data import Shape, load
from secu.methods import Method
from secu.nets.encoder import Encoder
from secu.registry import METHODS
from secu.settings import load_config
from secu.views.augment import Augmentation


@METHODS.register("contrastive")
class Contrastive(Method):
    """Instance discrimination for the encoder, and SeCu's clustering of what it finds."""

    def __init__(self, config: Config, images: int, shape: Shape) -> None:
        super().__init__(config, images, shape)
        self.views = Augmentation(config.augment, config.data.mean, config.data.std, shape[0], shape[1:])
        self.encoder = Encoder(config.encoder, shape[0])
        self.clustering = Clustering(config, images, self.encoder.dim)

    def losses(self, batch: Tensor, index_B: Tensor) -> dict[str, Tensor]:
        """Return what is minimized; the mean of each loss is recorded in metrics.jsonl under its name."""
        views = self.views.render(batch, self.views.draw(len(batch), self.generator))
        embeddings_SBD = self.encoder(views.flatten(0, 1))
        clusters = self.clustering.step(embeddings_SBD.detach(), index_B)
        loss = contrast(embeddings_SBD.flatten(0, 1), self.config.loss.temperature)
        return {"loss": loss, "center_loss": clusters["center_loss"]}


def contrast(embeddings_ND: Tensor, temperature: float) -> Tensor:
    """Return the cross-entropy of finding the other view of each image among all N views of a batch."""
    cosines_NN = embeddings_ND @ embeddings_ND.T
    cosines_NN.fill_diagonal_(-1)
    other_N = torch.arange(len(cosines_NN), device=cosines_NN.device).roll(len(cosines_NN) // 2)
    return F.cross_entropy(cosines_NN / temperature, other_N)


def main(out: str = "runs/contrastive", *overrides: str) -> None:
    """Train the recipe ``digits`` with our method, and print the scores."""
    config = load_config("digits", ["method=contrastive", "heads=[10]", "loss.temperature=0.2", *overrides])
    images = load(config.data)
    results = pipeline.run(config, images, Path(out), test=images).results
    print(f"{out}: ACC {results.scores.acc:.3f}, NMI {results.scores.nmi:.3f}, ARI {results.scores.ari:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
