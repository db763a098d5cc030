"""Step 9 of the tour: images → embeddings, clusters and confidence, and scores where the truth is known.

True labels (``targets``) are read here and by what is shown at the end; no loss, label or stopping rule sees them.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from secu.augment import Augmentation
from secu.data import ImageSource
from secu.metrics import Scores, calibration_error, matched, score
from secu.model import Encoder

BATCH, BATCH_PIXELS = 512, 2**19  # images evaluated at once: 512 up to 32 pixels, 56 of 96, 10 of 224


@dataclass(frozen=True)
class Predictions:
    """What a head says of N images: the two best clusters, how likely they are, and the best's cosine."""

    cluster: Tensor
    confidence: Tensor
    second: Tensor
    second_confidence: Tensor
    cosine: Tensor

    def to_host(self) -> "Predictions":
        """Return the same in the host's memory; on CUDA the copies are only begun (elsewhere nobody would wait)."""
        columns = (self.cluster, self.confidence, self.second, self.second_confidence, self.cosine)
        return Predictions(*(column.to("cpu", non_blocking=column.is_cuda) for column in columns))


def batches_of(index_N: Tensor, source: ImageSource) -> tuple[Tensor, ...]:
    """Return parts of an index, as many images each as may be held at once."""
    _, height, width = source.shape
    parts: tuple[Tensor, ...] = index_N.split(max(1, min(BATCH, BATCH_PIXELS // (height * width))))
    return parts


def embed(encoder: Encoder, augmentation: Augmentation, source: ImageSource) -> Tensor:
    """Return the unit embeddings of all images (N, D), un-augmented and with the running statistics of batch-norm."""
    device = next(encoder.parameters()).device
    with torch.inference_mode(), evaluation_mode(encoder):
        batches = [
            encoder.embed(augmentation.normalize(source.fetch(index_B).to(device)))
            for index_B in batches_of(torch.arange(len(source)), source)
        ]
    return torch.cat(batches)


def predict(embeddings_ND: Tensor, centers_KD: Tensor, temperature: float) -> Predictions:
    """Return each image's nearest center and the next, and how sure that is."""
    return choose(embeddings_ND @ centers_KD.T, temperature)


def choose(cosines_NK: Tensor, temperature: float) -> Predictions:
    """Return the two best clusters, given the cosines to all centers, in the host's memory."""
    found = best_two(cosines_NK, temperature).to_host()
    if cosines_NK.is_cuda:
        torch.cuda.synchronize()
    return found


def best_two(cosines_NK: Tensor, temperature: float) -> Predictions:
    """Return the two best clusters, on the device of the cosines."""
    best_N2, clusters_N2 = cosines_NK.topk(2)
    chances_N2 = torch.softmax(cosines_NK / temperature, -1).gather(-1, clusters_N2)
    return Predictions(clusters_N2[:, 0], chances_N2[:, 0], clusters_N2[:, 1], chances_N2[:, 1], best_N2[:, 0])


class Consistency(NamedTuple):
    """How well a model's labels stand up to random changes of the images; no true label is needed to know."""

    agreement: float  # share of random views with the label of their image
    information: float  # what a view's label tells of the image's, 0 to 1: falls, too, as clusters vanish


def consistency(
    encoder: Encoder,
    augmentation: Augmentation,
    centers_KD: Tensor,
    source: ImageSource,
    index_N: Tensor,
    views: Sequence[int] = (0, 1),
) -> Consistency:
    """Compare the labels of images with those of random views of each; the views are the same every time."""
    device, clusters = centers_KD.device, len(centers_KD)
    generator = torch.Generator(device).manual_seed(0)
    counts = torch.zeros(clusters**2, dtype=torch.int64)
    with torch.inference_mode(), evaluation_mode(encoder):
        for index_B in batches_of(index_N, source):
            pixels = source.fetch(index_B).to(device)
            changed = augmentation.apply(pixels, augmentation.draw(len(index_B), generator))
            seen = (augmentation.normalize(pixels), *(changed[view] for view in views))  # maybe of another size
            plain_B, *view_labels = ((encoder.embed(batch) @ centers_KD.T).argmax(-1) for batch in seen)
            for label_B in view_labels:
                counts += torch.bincount(plain_B * clusters + label_B, minlength=clusters**2).cpu()
    table_KK = counts.view(clusters, clusters)
    return Consistency(float(table_KK.trace() / counts.sum()), mutual_information(table_KK))


def mutual_information(table_KK: Tensor) -> float:
    """Return the mutual information of two labels from their counts, as a share of log K."""
    joint = table_KK.double() / table_KK.sum().clamp(min=1)

    def entropy(chances: Tensor) -> Tensor:
        return -torch.xlogy(chances, chances).sum()

    information = entropy(joint.sum(0)) + entropy(joint.sum(1)) - entropy(joint)
    return float(information) / math.log(len(table_KK))


def find_temperature(cosines_NK: Tensor, wanted: float) -> float:
    """Return the temperature, from 0.003 to 1, at which the mean confidence is as wanted; it is found by halving."""
    low, high = math.log(0.003), 0.0
    for _ in range(40):
        middle = (low + high) / 2
        confidence_N = torch.softmax(cosines_NK / math.exp(middle), -1).amax(-1)
        low, high = (middle, high) if confidence_N.mean() > wanted else (low, middle)
    return math.exp((low + high) / 2)


class Predictor(nn.Module):
    """Preprocessing, encoder and head in one: uint8 images (N, C, H, W) → cosines to the centers (N, K)."""

    centers: Tensor

    def __init__(self, augmentation: Augmentation, encoder: Encoder, centers_KD: Tensor) -> None:
        super().__init__()
        self.augmentation, self.encoder = augmentation, encoder
        self.register_buffer("centers", centers_KD)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the cosine of each image to each center."""
        return self.encoder.embed(self.augmentation.normalize(pixels)) @ self.centers.T


def outlier_limits(predictions: Predictions, clusters: int) -> Tensor:
    """Return for each cluster the cosine under which an image does not belong: median − 3 robust deviations (K,).

    The deviation is 1.4826 times the median distance from the median, which is the standard deviation where cosines are
    normally distributed and is not moved by the outliers themselves. An empty cluster has none: −1.
    """
    limits = torch.full((clusters,), -1.0)
    for cluster in range(clusters):
        cosines = predictions.cosine[predictions.cluster == cluster]
        if len(cosines):
            middle = cosines.median()
            limits[cluster] = middle - 3 * 1.4826 * (cosines - middle).abs().median()
    return limits


def score_clusters(source: ImageSource, cluster_N: Tensor) -> Scores | None:
    """Return ACC, NMI and ARI, or None where no true label is known."""
    if source.targets is None or not bool((source.targets >= 0).any()):
        return None
    return score(source.targets.numpy(), cluster_N.numpy())


def calibration(source: ImageSource, predictions: Predictions) -> float | None:
    """Return the expected calibration error, or None where no true label is known."""
    if source.targets is None or not bool((source.targets >= 0).any()):
        return None
    known = source.targets >= 0
    right = matched(source.targets[known].numpy(), predictions.cluster[known].numpy())
    return calibration_error(predictions.confidence[known].numpy(), right)


@contextmanager
def evaluation_mode(encoder: Encoder) -> Iterator[None]:
    """Switch to evaluation inside a with-block, and back to what it was."""
    training = encoder.training
    encoder.eval()
    try:
        yield
    finally:
        encoder.train(training)
