"""The paper's theorems as properties of our code."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from secu.cluster.centers import ClosedFormCenters, KMeansCenters
from secu.cluster.clustering import Clustering
from secu.cluster.constraints import NO_LABEL, EntropyConstraint
from secu.cluster.losses import cross_entropy, log_probabilities, secu_loss
from secu.config import Config

DIM = 6


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def unit(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=-1, keepdim=True)


def log_p_of(x_SBD: Tensor, centers_HKD: Tensor, temperature: float) -> Tensor:
    return log_probabilities(torch.einsum("sbd,hkd->sbhk", x_SBD, centers_HKD), torch.zeros(1, 1), temperature)


# Theorem 1 and its limit


def slope_on_sphere(x_SBD: Tensor, centers_HKD: Tensor, labels_BH: Tensor, temperature: float) -> Tensor:
    """Return the gradient of the SeCu loss without its radial component: its projection onto the sphere."""
    centers = centers_HKD.clone().requires_grad_()
    secu_loss(x_SBD, centers, log_p_of(x_SBD, centers, temperature), labels_BH, temperature).backward()
    radial = (centers.grad * centers_HKD).sum(-1, keepdim=True)
    return centers.grad - radial * centers_HKD


@pytest.mark.parametrize("temperature", [0.2, 1.0])
def test_theorem_1_closed_form_converges_to_a_stationary_point_of_the_loss(float64, temperature):
    clusters = 4
    images = 60
    groups = unit(clusters)
    labels = torch.arange(images)[:, None] % clusters
    x = groups[labels[:, 0]] + 0.5 * unit(2, images, seed=1)
    x = x / x.norm(dim=-1, keepdim=True)
    centers = ClosedFormCenters(1, clusters, DIM)
    for _ in range(300):
        centers.start_epoch()
        before = centers.unit().clone()
        centers.update(x, log_p_of(x, before, temperature), labels)
    torch.testing.assert_close(centers.unit(), before, rtol=0, atol=1e-13)
    assert slope_on_sphere(x, centers.unit(), labels, temperature).abs().max() < 1e-12
    kmeans = KMeansCenters(1, clusters, DIM)
    kmeans.update(x, log_p_of(x, before, temperature), labels)
    assert slope_on_sphere(x, kmeans.unit(), labels, temperature).abs().max() > 1e-4  # the weights make a difference


def test_coke_is_the_limit_of_a_large_center_temperature(float64):
    """For λ_w → ∞, p = 1/K for all and closed-form centers equal k-means centers; for a small λ_w they do not."""
    distances = []
    for temperature in (1e8, 0.1):
        results = []
        for kind in ("closed_form", "kmeans"):
            torch.manual_seed(0)
            config = Config(heads=(4, 7), centers={"kind": kind}, loss={"center_temperature": temperature})
            clustering = Clustering(config, 60, DIM)
            for epoch in range(3):
                clustering.start_epoch()
                for index in torch.arange(60).split(20):
                    clustering.step(unit(2, 20, seed=100 * epoch + int(index[0])), index)
            results.append(clustering.centers.unit())
        distances.append((results[0] - results[1]).norm(dim=-1).max().item())
    assert distances[0] < 1e-7
    assert distances[1] > 1e-2


# Theorem 2


def objective(log_p: list[list[float]], labels: list[int], alpha: float) -> float:
    """Eqn. 10: −Σ log p_{i, y_i} − α·H(y)."""
    shares = [labels.count(j) / len(labels) for j in set(labels)]
    return -sum(row[y] for row, y in zip(log_p, labels, strict=True)) + alpha * sum(s * math.log(s) for s in shares)


def one_by_one(log_p: list[list[float]], labels: list[int], alpha: float) -> list[list[int]]:
    """Apply Eqn. 11 to one image after another by trying every label; return the labels after each image."""
    labels = list(labels)
    history = []
    for i in range(len(labels)):
        tries = [[*labels[:i], j, *labels[i + 1 :]] for j in range(len(log_p[0]))]
        labels = min(tries, key=lambda tried: objective(log_p, tried, alpha))
        history.append(labels)
    return history


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 5), st.integers(2, 12), st.floats(0, 60), st.floats(0.05, 2))
def test_theorem_2_sequential_updates_never_increase_the_objective(seed, clusters, images, alpha, temperature):
    """The sequential form of the paper, and our constraint with batches of a single image."""
    x = unit(1, images, seed=seed).double()
    centers = unit(1, clusters, seed=seed + 1).double()
    log_p_BHK = log_p_of(x, centers, temperature)[0]
    log_p = log_p_BHK[:, 0].tolist()
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, clusters, (images,), generator=generator).tolist()
    constraint = EntropyConstraint(torch.tensor([clusters]), images, alpha).double()
    constraint.update(torch.tensor(labels)[:, None], torch.full((images, 1), NO_LABEL))
    for _ in range(3):
        value = objective(log_p, labels, alpha)
        for oracle in one_by_one(log_p, labels, alpha):
            assert objective(log_p, oracle, alpha) <= value + 1e-9
            value = objective(log_p, oracle, alpha)
        best = value
        value = objective(log_p, labels, alpha)
        for i in range(images):
            previous = torch.tensor([[labels[i]]])
            new = constraint.assign(log_p_BHK[i : i + 1], previous)
            constraint.update(new, previous)
            labels[i] = int(new)
            assert objective(log_p, labels, alpha) <= value + 1e-9
            value = objective(log_p, labels, alpha)
        assert value == pytest.approx(best, abs=1e-6)


def test_larger_batches_may_increase_the_objective():
    """Why the theorem is about sequential updates: images that see the same counts all move to the same cluster."""
    log_p = [[math.log(0.5), math.log(0.5)]] * 6
    scores = torch.tensor(log_p)[:, None]
    constraint = EntropyConstraint(torch.tensor([2]), 6, 10.0)
    labels = torch.tensor([[0], [0], [0], [0], [1], [1]])
    constraint.update(labels, torch.full((6, 1), NO_LABEL))
    new = constraint.assign(scores, labels)
    assert objective(log_p, new[:, 0].tolist(), 10.0) > objective(log_p, labels[:, 0].tolist(), 10.0)


# Cosines instead of log p


@pytest.mark.parametrize("kind", ["none", "size", "entropy"])
def test_log_prob_scores_give_the_labels_of_explicit_log_p(float64, kind):
    """See Clustering.assign: the normalizer of the softmax is the same for all clusters of an image."""
    heads = (3, 5)
    images = 40
    temperature = 0.07
    config = Config(
        heads=heads, constraint={"kind": kind, "score": "log_prob"}, loss={"center_temperature": temperature}
    )
    torch.manual_seed(0)
    clustering = Clustering(config, images, DIM)
    previous = torch.stack([torch.arange(images) ** 2 % k for k in heads], 1)
    unlabeled = torch.full_like(previous, NO_LABEL)
    clustering.constraint.update(previous, unlabeled)
    x = unit(2, images, seed=1)
    centers = clustering.centers.unit().detach()
    labels = clustering.assign(torch.einsum("sbd,hkd->sbhk", x, centers).mean(0), previous)
    for h, clusters in enumerate(heads):
        counts = [int((previous[:, h] == j).sum()) for j in range(clusters)]
        for b in range(images):
            total = []
            for j in range(clusters):
                score = 0.0
                for view in x[:, b]:
                    exponentials = [math.exp(float(view @ w) / temperature) for w in centers[h, :clusters]]
                    score += math.log(exponentials[j] / sum(exponentials)) / 2
                if kind == "size":
                    score += max(0.0, 0.1 * (0.9 / clusters - counts[j] / images))
                if kind == "entropy":
                    moved = list(counts)
                    moved[previous[b, h]] -= 1
                    moved[j] += 1
                    score -= 6 * images / 50 * sum(n / images * math.log(n / images) for n in moved if n > 0)
                total.append(score)
            assert int(labels[b, h]) == total.index(max(total))


# Proposition 1


def test_proposition_1_most_centers_have_no_positive_and_secu_does_not_move_them():
    """A batch of b images has no positive for at least K − b clusters, which cross-entropy moves nonetheless."""
    clusters = 50
    images = 8
    x = unit(2, images)
    centers = unit(1, clusters, seed=1).requires_grad_()
    log_p = log_p_of(x, centers, 0.5)
    labels = log_p.detach().mean(0).argmax(-1)
    secu = torch.autograd.grad(secu_loss(x, centers, log_p, labels, 0.5), centers, retain_graph=True)[0]
    ce = torch.autograd.grad(cross_entropy(log_p, labels), centers)[0]
    untouched = (secu[0] == 0).all(-1)
    assert int(untouched.sum()) >= clusters - images
    assert untouched.tolist() == [j not in labels for j in range(clusters)]
    assert (ce[0].norm(dim=-1) > 0).all()
