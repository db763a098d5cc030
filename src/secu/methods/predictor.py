"""Inference with a trained model: images → embeddings, clusters and confidence.

Shapes: N images, B images of a batch, K clusters, D dimensions.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secu.base import collectives, processes
from secu.data import Images, Shape
from secu.nets.encoder import Encoder
from secu.nets.front import Front
from secu.views.augment import Augmentation
from secu.views.features import FeatureViews

BATCH_VECTORS = 4096  # maximum number of feature vectors per batch
BATCH_IMAGES = {"cpu": 512, "cuda": 2048}  # maximum number of images per batch
# Maximum number of pixels per batch, since activations are proportional to it; at 256 x 256, 8 images and 128.
BATCH_PIXELS = {"cpu": 2**19, "cuda": 2**23}


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
    predictions = best_two(cosines_NK, temperature).to_host()
    if cosines_NK.is_cuda:
        torch.cuda.synchronize()
    return predictions


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
    """Preprocessing, encoder and one clustering: inputs (N, …) → cosines to the clusters (N, K).

    Inputs are images, or the feature vectors that the encoder was trained on; ``front`` computes these from images.

    Args:
        views: Supplies the preprocessing (``plain``).
        encoder: Maps preprocessed inputs to unit embeddings.
        centers_MD: The centers of a head.
        temperature: Temperature of the softmax over cosines.
        groups: The cluster of each center (M,), if clusters are groups of centers (cluster/tree.py); None if every
            center is a cluster.
        offsets: What is added to the cosines of each cluster (K,); None for nothing (cluster/offsets.py).
        front: The frozen part of the model; None if there is none.
    """

    all_centers: Tensor
    members: Tensor
    offsets: Tensor | None

    def __init__(
        self,
        views: Augmentation | FeatureViews,
        encoder: Encoder,
        centers_MD: Tensor,
        temperature: float,
        *,
        groups: Tensor | None = None,
        offsets: Tensor | None = None,
        front: Front | None = None,
    ) -> None:
        super().__init__()
        self.views = views
        self.encoder = encoder
        self.temperature = temperature
        self.front = front.to(centers_MD.device) if front is not None else None
        self.register_buffer("all_centers", centers_MD.clone())  # a part of all heads' would be pickled with the rest
        self.register_buffer("members", None if groups is None else members_of(groups).to(centers_MD.device))

        self.register_buffer("offsets", None if offsets is None else offsets.to(centers_MD.device))

    @property
    def centers(self) -> Tensor:
        """One unit vector per cluster (K, D): its center, or the mean direction of its centers."""
        if self.members is None:
            return self.all_centers
        sums_KD = torch.stack([self.all_centers[row.unique()].sum(0) for row in self.members])
        return F.normalize(sums_KD, dim=-1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the cosine of each image to each cluster, plus the offset of the cluster."""
        return self.compare(self.encode(inputs))

    def encode(self, inputs: Tensor) -> Tensor:
        """Return the unit embeddings of a batch of images or feature vectors (B, D)."""
        if self.front is not None and inputs.ndim == 4:
            inputs = self.front(inputs)
        return self.encoder.embed(self.views.plain(inputs))

    def compare(self, embeddings_ND: Tensor) -> Tensor:
        """Return the cosine of embeddings to each cluster (N, K): to its nearest center, if it has several.

        If clusters have offsets, these are added.
        """
        cosines_NM = embeddings_ND @ self.all_centers.to(embeddings_ND.device).T
        if self.members is None:
            return cosines_NM if self.offsets is None else cosines_NM + self.offsets.to(cosines_NM.device)
        return cosines_NM[:, self.members.to(cosines_NM.device)].amax(-1)

    def embed(self, images: Images, index_N: Tensor | None = None) -> Tensor:
        """Return the unit embeddings of all images, or of some (N, D), without augmentation and in evaluation mode."""
        device = self.all_centers.device
        index_N = torch.arange(len(images)) if index_N is None else index_N
        if not len(index_N):
            return self.all_centers[:0]
        parts = batches_of(index_N, images, device)
        with torch.inference_mode(), evaluation_mode(self.encoder), closing(images.fetch_ahead(parts)) as batches:
            return torch.cat([self.encode(to_device(batch, device)) for batch in batches])

    def embed_together(self, images: Images) -> Tensor:
        """Return the unit embeddings of all images (N, D); if there are several processes, each computes a part.

        All processes must call this. The parts consist of whole batches, so that the numbers do not depend on them.
        """
        batches = batches_of(torch.arange(len(images)), images, self.all_centers.device)
        parts = [batches[part.start : part.stop] for part in processes.parts_of(len(batches))]
        own_N = torch.cat([torch.arange(0), *parts[processes.rank()]])
        embeddings_ND = collectives.gather_rows(self.embed(images, own_N), [sum(map(len, part)) for part in parts])
        if images.broken is not None:
            images.broken.share()
        return embeddings_ND

    def cosines(self, images: Images) -> Tensor:
        """Return the cosine of every image to every cluster, plus offsets (N, K); see ``compare``."""
        return self.compare(self.embed(images))

    def predict(self, images: Images) -> Predictions:
        """Return the two best clusters of every image, in host memory."""
        return self.choose(self.cosines(images))

    def predict_together(self, images: Images) -> Predictions:
        """Return the same as ``predict``; see ``embed_together``."""
        return self.choose(self.compare(self.embed_together(images)))

    def choose(self, cosines_NK: Tensor) -> Predictions:
        """Return the two best clusters for what ``compare`` returned, in host memory."""
        predictions = self.best_two(cosines_NK).to_host()
        if cosines_NK.is_cuda:
            torch.cuda.synchronize()
        return predictions

    def best_two(self, cosines_NK: Tensor) -> Predictions:
        """Return the same on the device of the cosines."""
        predictions = best_two(cosines_NK, self.temperature)
        if self.offsets is None:
            return predictions
        offsets_N = self.offsets.to(cosines_NK.device)[predictions.cluster]
        return replace(predictions, cosine=predictions.cosine - offsets_N)


def members_of(groups_M: Tensor) -> Tensor:
    """Return the centers of each group (K, most), with short rows filled up by repeating a center of the group."""
    rows = [torch.nonzero(groups_M == group)[:, 0] for group in range(int(groups_M.max()) + 1)]
    most = max(map(len, rows))
    return torch.stack([torch.cat([row, row[:1].expand(most - len(row))]) for row in rows])


def batch_size(shape: Shape, device: torch.device) -> int:
    """Return how many inputs of a shape are passed to a model at once."""
    if len(shape) != 3:
        return BATCH_VECTORS
    kind = device.type if device.type in BATCH_PIXELS else "cpu"
    return max(1, min(BATCH_IMAGES[kind], BATCH_PIXELS[kind] // (shape[-1] * shape[-2])))


def batches_of(index_N: Tensor, images: Images, device: torch.device) -> tuple[Tensor, ...]:
    """Split an index into batches that fit in memory."""
    parts: tuple[Tensor, ...] = index_N.split(batch_size(images.shape, device))
    return parts


def to_device(batch: Tensor, device: torch.device) -> Tensor:
    """Copy a batch to the device; to a GPU asynchronously, so that the host can prepare the next one."""
    if device.type != "cuda":
        return batch.to(device)
    return batch.pin_memory().to(device, non_blocking=True)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode inside a with-block, then restore its previous mode."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
