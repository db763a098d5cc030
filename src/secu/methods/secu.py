"""SeCu: stable cluster discrimination, the paper's method.

Two random views of every image are encoded, labels are assigned for all heads under a constraint, and the encoder and
the centers are trained on these labels (Algorithm 1).
"""

from torch import Tensor

from secu.cluster.clustering import Clustering
from secu.config import Config
from secu.data import Shape
from secu.methods.base import Method
from secu.nets.encoder import Encoder
from secu.views.augment import Augmentation


class StableClustering(Method):
    """One-stage clustering: representation, centers and labels are learned together."""

    def __init__(self, config: Config, images: int, shape: Shape) -> None:
        super().__init__(config, images, shape)
        channels, height, width = shape
        self.views = Augmentation(config.augment, config.data.mean, config.data.std, channels, (height, width))
        self.encoder = Encoder(config.encoder, channels)
        self.clustering = Clustering(config, images, self.encoder.dim)

    def losses(self, batch: Tensor, index_B: Tensor) -> dict[str, Tensor]:
        """Assign labels to a batch, and return the losses of the representation and of the centers."""
        draws = self.views.draw(len(index_B), self.generator)
        views = self.call(self.views.render, batch, draws)
        with self.autocast():
            embeddings_SBD = self.call(self.encoder, views.flatten(0, 1))
        losses: dict[str, Tensor] = self.call(self.clustering.step, embeddings_SBD, index_B)
        return losses
