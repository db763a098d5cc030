"""How centers move, against plain loops over all images of the epoch so far."""

import math

import pytest
import torch
from torch import Tensor

from secu.cluster.centers import (
    Centers,
    ClosedFormCenters,
    GradientCenters,
    KMeansCenters,
    build_centers,
    random_directions,
)
from secu.cluster.losses import PADDING, log_probabilities
from secu.config import CentersConfig
from secu.registry import CENTERS

HEADS = (3, 6)
WIDEST = max(HEADS)
DIM = 5
TEMPERATURE = 0.3


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def embeddings(views: int, images: int, seed: int) -> Tensor:
    x = torch.randn(views, images, DIM, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=-1, keepdim=True)


def draw_labels(images: int, seed: int) -> Tensor:
    """Return labels that leave the last cluster of each head empty."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(0, k - 1, (images,), generator=generator) for k in HEADS], 1)


def log_p(x_SBD: Tensor, centers_HKD: Tensor) -> Tensor:
    mask = torch.tensor([[0.0 if k < clusters else -PADDING for k in range(WIDEST)] for clusters in HEADS])
    return log_probabilities(torch.einsum("sbd,hkd->sbhk", x_SBD, centers_HKD), mask, TEMPERATURE)


class Oracle:
    """Eqn. 4 and 5 over the images of the epoch so far, each weighted by the centers at the time of its batch."""

    def __init__(self, centers_HKD: Tensor, hard: bool) -> None:
        self.centers = centers_HKD.tolist()
        self.hard = hard
        self.start_epoch()

    def start_epoch(self) -> None:
        self.received: list[list[list[tuple[float, list[float]]]]] = [[[] for _ in range(k)] for k in HEADS]

    def batch(self, x_SBD: Tensor, labels_BH: Tensor) -> None:
        for view in x_SBD.tolist():
            for x, labels in zip(view, labels_BH.tolist(), strict=True):
                for h, y in enumerate(labels):
                    self.received[h][y].append((self.weight(x, h, y), x))
        for h, clusters in enumerate(HEADS):
            for j in range(clusters):
                pulls = self.received[h][j]
                if pulls:
                    total = sum(weight for weight, _ in pulls)
                    mean = [sum(weight * x[d] for weight, x in pulls) / total for d in range(DIM)]
                    norm = math.sqrt(sum(value * value for value in mean))
                    self.centers[h][j] = [value / norm for value in mean]

    def weight(self, x: list[float], h: int, y: int) -> float:
        if not self.hard:
            return 1.0
        logits = [sum(a * b for a, b in zip(x, w, strict=True)) / TEMPERATURE for w in self.centers[h][: HEADS[h]]]
        return 1 - math.exp(logits[y]) / sum(math.exp(logit) for logit in logits)


@pytest.mark.parametrize(("kind", "hard"), [(ClosedFormCenters, True), (KMeansCenters, False)])
@pytest.mark.parametrize("views", [2, 4])
def test_centers_are_projected_sums_over_the_epoch(float64, kind, hard, views):
    """Three epochs of four batches: one projection per batch, a new sum in each epoch, all views count."""
    torch.manual_seed(0)
    centers = kind(len(HEADS), WIDEST, DIM)
    oracle = Oracle(centers.unit(), hard)
    for epoch in range(3):
        centers.start_epoch()
        oracle.start_epoch()
        for batch in range(4):
            seed = 10 * epoch + batch
            x = embeddings(views, 3 + batch, seed)
            labels = draw_labels(3 + batch, seed)
            centers.update(x, log_p(x, centers.unit()), labels)
            oracle.batch(x, labels)
            for h, clusters in enumerate(HEADS):
                expected = torch.tensor(oracle.centers[h][:clusters])
                torch.testing.assert_close(centers.unit()[h, :clusters], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [ClosedFormCenters, KMeansCenters])
def test_empty_and_padded_clusters_keep_their_center(kind):
    centers = kind(len(HEADS), WIDEST, DIM)
    before = centers.weight.clone()
    centers.start_epoch()
    x = embeddings(2, 40, 0)
    labels = draw_labels(40, 0)
    centers.update(x, log_p(x, centers.unit()), labels)
    for h, clusters in enumerate(HEADS):
        used = set(labels[:, h].tolist())
        assert used == set(range(clusters - 1))
        for k in range(WIDEST):
            assert torch.equal(centers.weight[h, k], before[h, k]) == (k not in used)


def test_centers_are_kept_in_a_new_epoch_until_their_first_image():
    """Only the sum is reset; otherwise, the first image of the new epoch would not determine the center alone."""
    centers = KMeansCenters(1, 2, DIM)
    centers.start_epoch()
    x = embeddings(1, 8, 0)
    centers.update(x, torch.zeros(1, 8, 1, 2), torch.arange(8)[:, None] % 2)
    before = centers.unit().clone()
    centers.start_epoch()
    assert torch.equal(centers.unit(), before)
    new = embeddings(1, 1, 1)
    centers.update(new, torch.zeros(1, 1, 1, 2), torch.tensor([[1]]))
    torch.testing.assert_close(centers.unit()[0, 1], new[0, 0])
    assert torch.equal(centers.unit()[0, 0], before[0, 0])


def test_images_of_zero_weight_leave_the_center_unchanged():
    """If p = 1 in float32 for all images of a cluster, their weights are zero."""
    centers = ClosedFormCenters(1, 2, DIM)
    before = centers.unit().clone()
    centers.start_epoch()
    centers.update(embeddings(2, 3, 0), torch.zeros(2, 3, 1, 2), torch.zeros(3, 1, dtype=torch.int64))
    assert torch.equal(centers.unit(), before)


def test_tiny_weights_still_give_a_unit_center():
    """1 − p of about 1e-13 cancels in the projection."""
    centers = ClosedFormCenters(1, 2, DIM)
    centers.start_epoch()
    x = embeddings(1, 1, 0)
    centers.update(x, torch.full((1, 1, 1, 2), -1e-13), torch.zeros(1, 1, dtype=torch.int64))
    torch.testing.assert_close(centers.weight[0, 0], x[0, 0])


def test_initial_centers_are_random_unit_vectors():
    torch.manual_seed(0)
    start = random_directions(4, 500, 64)
    torch.testing.assert_close(start.norm(dim=-1), torch.ones(4, 500))
    assert start.mean((0, 1)).abs().max() < 0.02  # no preferred direction: σ of a mean is 1/√(64·2000) = 0.003
    cosines = start[0] @ start[0].T - torch.eye(500)
    assert cosines.abs().max() < 0.8
    assert float(cosines.square().sum() / (500 * 499)) == pytest.approx(1 / 64, rel=0.05)


def test_gradient_centers_are_normalized_when_used_and_moved_by_the_optimizer_alone():
    centers = GradientCenters(len(HEADS), WIDEST, DIM)
    with torch.no_grad():
        centers.weight.mul_(torch.linspace(0.1, 3, WIDEST)[:, None])
    before = centers.weight.detach().clone()
    torch.testing.assert_close(centers.unit().norm(dim=-1), torch.ones(len(HEADS), WIDEST))
    centers.start_epoch()
    x = embeddings(2, 5, 0)
    centers.update(x, log_p(x, centers.unit().detach()), draw_labels(5, 0))
    assert torch.equal(centers.weight, before)
    assert [name for name, _ in centers.named_parameters()] == ["weight"]


@pytest.mark.parametrize(
    ("kind", "expected"), [("sgd", GradientCenters), ("closed_form", ClosedFormCenters), ("kmeans", KMeansCenters)]
)
def test_build_centers_reads_its_config(kind, expected):
    centers = build_centers(CentersConfig(kind=kind), 2, 7, DIM)
    assert type(centers) is expected
    assert centers.unit().shape == (2, 7, DIM)
    assert len(list(centers.parameters())) == (1 if kind == "sgd" else 0)
    assert ("sums" in centers.state_dict()) == (kind != "sgd")  # the sums of an epoch are checkpointed


def test_centers_from_outside_are_chosen_by_name(monkeypatch):
    monkeypatch.setattr(CENTERS, "_parts", dict(CENTERS._parts))

    @CENTERS.register("fixed")
    class Fixed(Centers):
        def __init__(self, heads: int, clusters: int, dim: int) -> None:
            super().__init__()
            self.register_buffer("weight", torch.eye(dim)[:clusters].expand(heads, -1, -1))

    assert type(build_centers(CentersConfig(kind="fixed"), 2, 4, DIM)) is Fixed
