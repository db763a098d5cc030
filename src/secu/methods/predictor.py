"""Inference with a trained model: images → embeddings, clusters and confidence.

Shapes: N images, B images of a batch, K clusters, D dimensions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from secu.data import Images
from secu.nets.encoder import Encoder
from secu.views.augment import Augmentation

BATCH = 512  # maximum number of images per batch
BATCH_PIXELS = 2**19  # maximum number of pixels per batch: 512 images of up to 32 x 32, 56 of 96 x 96, 10 of 224 x 224


@dataclass(frozen=True)
class Predictions:
    """The two best clusters of N images, their probabilities, and the cosine to the best one's center."""

    cluster: Tensor
    confidence: Tensor
    second: Tensor
    second_confidence: Tensor
    cosine: Tensor

    def to_host(self) -> "Predictions":
        """Return a copy in host memory; from CUDA the copy is asynchronous, and the caller must synchronize."""
        columns = (self.cluster, self.confidence, self.second, self.second_confidence, self.cosine)
        return Predictions(*(column.to("cpu", non_blocking=column.is_cuda) for column in columns))


def best_two(cosines_NK: Tensor, temperature: float) -> Predictions:
    """Return the two best clusters, on the device of the cosines."""
    best_N2, clusters_N2 = cosines_NK.topk(2)
    probability_N2 = torch.softmax(cosines_NK / temperature, -1).gather(-1, clusters_N2)
    return Predictions(
        cluster=clusters_N2[:, 0],
        confidence=probability_N2[:, 0],
        second=clusters_N2[:, 1],
        second_confidence=probability_N2[:, 1],
        cosine=best_N2[:, 0],
    )


def choose(cosines_NK: Tensor, temperature: float) -> Predictions:
    """Return the two best clusters, in host memory."""
    found = best_two(cosines_NK, temperature).to_host()
    if cosines_NK.is_cuda:
        torch.cuda.synchronize()
    return found


def outlier_limits(predictions: Predictions, clusters: int) -> Tensor:
    """Return the cosine below which an image is an outlier of each cluster: median − 3 robust deviations (K,).

    The robust deviation is 1.4826 times the median absolute deviation. It equals the standard deviation for normally
    distributed cosines and is insensitive to the outliers themselves. The limit of an empty cluster is −1.
    """
    limits = torch.full((clusters,), -1.0)
    for cluster in range(clusters):
        cosines = predictions.cosine[predictions.cluster == cluster]
        if len(cosines):
            middle = cosines.median()
            limits[cluster] = middle - 3 * 1.4826 * (cosines - middle).abs().median()
    return limits


class Predictor(nn.Module):
    """Preprocessing, encoder and one head: inputs (N, C, H, W) → cosines to the centers (N, K).

    Args:
        views: Supplies the preprocessing (``plain``).
        encoder: Maps preprocessed inputs to unit embeddings.
        centers_KD: The centers of the main head.
        temperature: Temperature of the softmax over cosines.
    """

    centers: Tensor

    def __init__(self, views: Augmentation, encoder: Encoder, centers_KD: Tensor, temperature: float) -> None:
        super().__init__()
        self.views = views
        self.encoder = encoder
        self.temperature = temperature
        self.register_buffer("centers", centers_KD)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the cosine of each image to each center."""
        return self.encoder.embed(self.views.plain(inputs)) @ self.centers.T

    def embed(self, images: Images) -> Tensor:
        """Return the unit embeddings of all images (N, D), without augmentation and in evaluation mode."""
        device = self.centers.device
        with torch.inference_mode(), evaluation_mode(self.encoder):
            batches = [
                self.encoder.embed(self.views.plain(images.fetch(index_B).to(device)))
                for index_B in batches_of(torch.arange(len(images)), images)
            ]
        return torch.cat(batches)

    def cosines(self, images: Images) -> Tensor:
        """Return the cosine of every image to every center (N, K)."""
        return self.embed(images) @ self.centers.T

    def predict(self, images: Images) -> Predictions:
        """Return the two best clusters of every image, in host memory."""
        return self.choose(self.cosines(images))

    def choose(self, cosines_NK: Tensor) -> Predictions:
        """Return the two best clusters for given cosines, in host memory."""
        return choose(cosines_NK, self.temperature)


def batches_of(index_N: Tensor, images: Images) -> tuple[Tensor, ...]:
    """Split an index into batches that fit in memory."""
    pixels = images.shape[-1] * images.shape[-2] if len(images.shape) == 3 else 1
    parts: tuple[Tensor, ...] = index_N.split(max(1, min(BATCH, BATCH_PIXELS // pixels)))
    return parts


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode inside a with-block, then restore its previous mode."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
