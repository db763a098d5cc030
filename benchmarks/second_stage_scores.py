"""Scores of a second stage on trial, with true labels and without, for second_stage.py.

Shapes: N training images, D dimensions, k neighbors, K clusters.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secu.apps.images import images_of, images_to_score
from secu.cluster.metrics import calibration_error, matched, mutual_information, score
from secu.config import SelfLabelConfig
from secu.data import Images
from secu.methods.outcome import consistency
from secu.methods.predictor import Predictions, choose
from secu.methods.selflabel import SelfLabeling
from secu.train.checkpoint import load_method
from secu.train.listener import Listener
from secu.train.run import Run
from secu.views.neighbors import find_neighbors
from secu.views.strong import StrongAugmentation

Record = dict[str, Any]

NEIGHBORS = 20  # per image, in the embeddings of the first run
SEEN = 5_000  # images whose random views are compared
SILHOUETTE_IMAGES = 2_000


@dataclass(frozen=True)
class Start:
    """What all variants start from."""

    run: Run
    images: Images
    test: Images | None
    device: torch.device
    strong_views: StrongAugmentation  # the same for all variants
    embeddings_ND: Tensor  # of the first run
    neighbors_Nk: Tensor
    found: Predictions  # by the first run


def begin(run: Run, data: Path | None, device: torch.device) -> Start:
    """Load the images, and what the first run finds in them."""
    images = images_of(run, Listener(), root=data)
    predictor = load_method(run, device).predictor()
    embeddings_ND = predictor.embed(images)
    neighbors_Nk = find_neighbors(embeddings_ND, NEIGHBORS).of(torch.arange(len(images)))
    found = predictor.choose(predictor.compare(embeddings_ND))
    test = images_to_score(run.config(), images, data)
    config = run.config()
    channels, height, width = images.shape
    strong_views = StrongAugmentation(
        config.augment, SelfLabelConfig(), config.data.mean, config.data.std, channels, (height, width)
    ).to(device)
    return Start(run, images, test, device, strong_views, embeddings_ND, neighbors_Nk, found)


def evaluate(method: SelfLabeling, start: Start) -> Record:
    """Return scores with and without true labels."""
    predictor = method.predictor()
    embeddings_ND = predictor.embed(start.images)
    found = choose(predictor.compare(embeddings_ND), method.config.loss.temperature)
    scores: Record = {}
    if (known := known_in(start.test)).any():
        assert start.test is not None
        tested = predictor.predict(start.test)
        acc, nmi, ari = score(start.test.targets.numpy(), tested.cluster.numpy())
        scores |= {"acc": acc, "nmi": nmi, "ari": ari}
        right = right_in(start.test, tested.cluster, known)
        scores["calibration_error"] = calibration_error(tested.confidence[known].numpy(), right.numpy())
    if (known := known_in(start.images)).any():
        scores["acc_train"] = float(right_in(start.images, found.cluster, known).float().mean())
        trusted = method.clustering.kept.cpu()[known]
        if trusted.any():
            scores["acc_trusted"] = float(right_in(start.images, start.found.cluster, known)[trusted].float().mean())
    statistics = {name: value for name, value in method.clustering.record().items() if name != "moved"}
    return rounded(scores | without_labels(method, start, embeddings_ND, found) | statistics)


def known_in(images: Images | None) -> Tensor:
    """Return the mask of the images whose true class is known."""
    if images is None or images.targets is None:
        return torch.zeros(0, dtype=torch.bool)
    return images.targets >= 0


def right_in(images: Images, clusters_N: Tensor, known: Tensor) -> Tensor:
    """Return which of the images of known class are right, under the best matching of clusters to classes."""
    assert images.targets is not None
    return torch.from_numpy(matched(images.targets[known].numpy(), clusters_N[known].numpy()))


def without_labels(method: SelfLabeling, start: Start, embeddings_ND: Tensor, found: Predictions) -> Record:
    """Return scores of a model that need no true labels, from what it finds in the training images."""
    predictor = method.predictor()
    index_N = torch.arange(0, len(start.images), -(-len(start.images) // SEEN))
    usual = consistency(predictor, method.lesson.views, start.images, index_N)
    strong = consistency(predictor, start.strong_views, start.images, index_N, numbers=(1,))
    labels_N = found.cluster
    clusters = method.config.clusters
    pairs = labels_N[:, None] * clusters + labels_N[start.neighbors_Nk]
    table_KK = pairs.flatten().bincount(minlength=clusters**2).view(clusters, clusters)
    sizes = labels_N.bincount(minlength=clusters)
    confidence = float(found.confidence.mean())
    return {
        "information": (usual.information + strong.information) / 2,
        "information_usual": usual.information,
        "information_strong": strong.information,
        "agreement_usual": usual.agreement,
        "agreement_strong": strong.agreement,
        "neighbor_agreement": float(table_KK.trace() / table_KK.sum()),
        "neighbor_information": mutual_information(table_KK),
        "confidence": confidence,
        "confidence_minus_agreement": confidence - usual.agreement,
        "silhouette": silhouette(embeddings_ND, labels_N),
        "silhouette_first": silhouette(start.embeddings_ND, labels_N),
        "moved": float((labels_N != start.found.cluster).float().mean()),
        "model_largest": int(sizes.max()),
        "model_smallest": int(sizes.min()),
    }


def silhouette(embeddings_ND: Tensor, labels_N: Tensor) -> float | None:
    """Return the mean silhouette by cosine of evenly spaced images; None if all are in one cluster."""
    from sklearn.metrics import silhouette_score

    chosen = slice(None, None, -(-len(labels_N) // SILHOUETTE_IMAGES))
    labels = labels_N[chosen].numpy()
    if len(set(labels.tolist())) < 2:
        return None
    return float(silhouette_score(embeddings_ND[chosen].cpu().numpy(), labels, metric="cosine"))


def rounded(values: Record) -> Record:
    """Return a record with four digits after the point."""
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}
