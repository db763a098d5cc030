"""Step 9 of the tour: images → embeddings, clusters and confidence, and scores where the truth is known.

True labels (``targets``) are read here and nowhere else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from secu.augment import Augmentation
from secu.data import ImageSource
from secu.metrics import Scores, score
from secu.model import Encoder

BATCH = 512


@dataclass(frozen=True)
class Predictions:
    """What a head says of N images: the best cluster, its probability (softmax at λ_x) and its cosine."""

    cluster: Tensor
    confidence: Tensor
    cosine: Tensor


def embed(encoder: Encoder, augmentation: Augmentation, source: ImageSource) -> Tensor:
    """Return the unit embeddings of all images (N, D), un-augmented and with the running statistics of batch-norm."""
    device = next(encoder.parameters()).device
    with torch.inference_mode(), evaluation_mode(encoder):
        batches = [
            encoder.embed(augmentation.normalize(source.fetch(index_B).to(device)))
            for index_B in torch.arange(len(source)).split(BATCH)
        ]
    return torch.cat(batches)


def predict(embeddings_ND: Tensor, centers_KD: Tensor, temperature: float) -> Predictions:
    """Return each image's nearest center and how sure that is."""
    cosines_NK = embeddings_ND @ centers_KD.T
    cosine_N, cluster_N = cosines_NK.max(-1)
    confidence_N = torch.softmax(cosines_NK / temperature, -1).amax(-1)
    return Predictions(cluster_N.cpu(), confidence_N.cpu(), cosine_N.cpu())


def score_clusters(source: ImageSource, cluster_N: Tensor) -> Scores | None:
    """Return ACC, NMI and ARI, or None where no true label is known."""
    if source.targets is None or not bool((source.targets >= 0).any()):
        return None
    return score(source.targets.numpy(), cluster_N.numpy())


@contextmanager
def evaluation_mode(encoder: Encoder) -> Iterator[None]:
    """Switch to evaluation inside a with-block, and back to what it was."""
    training = encoder.training
    encoder.eval()
    try:
        yield
    finally:
        encoder.train(training)
