"""The losses against the paper's formulas, written as loops over images, views, heads and clusters in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from secu.cluster.losses import (
    PADDING,
    at_label,
    balanced_cross_entropy,
    cross_entropy,
    log_probabilities,
    secu_loss,
    soft_label_loss,
)

HEADS = (3, 5, 2)  # the second is the largest; the others are padded to it
DIM = 4


def unit(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=-1, keepdim=True)


def make_mask(heads: tuple[int, ...] = HEADS) -> Tensor:
    return torch.tensor([[0.0 if k < clusters else -PADDING for k in range(max(heads))] for clusters in heads])


def make_labels(images: int, heads: tuple[int, ...] = HEADS, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(0, k, (images,), generator=generator) for k in heads], dim=1)


def log_p_loop(x: Tensor, centers: Tensor, clusters: int, temperature: float) -> list[Tensor]:
    """Eqn. 2 for one embedding and one head, over the clusters of this head only."""
    logits = [sum(x[d] * centers[k, d] for d in range(len(x))) / temperature for k in range(clusters)]
    total = sum(torch.exp(logit) for logit in logits)
    return [logit - torch.log(total) for logit in logits]


def ours(x_SBD: Tensor, centers_HKD: Tensor, temperature: float, heads: tuple[int, ...] = HEADS) -> Tensor:
    cosines_SBHK = torch.einsum("sbd,hkd->sbhk", x_SBD, centers_HKD)
    return log_probabilities(cosines_SBHK, make_mask(heads).to(x_SBD.dtype), temperature)


# Log-probabilities


def test_log_probabilities_are_those_of_each_head_alone():
    x = unit(2, 6, DIM)
    centers = unit(len(HEADS), max(HEADS), DIM, seed=1)
    log_p = ours(x, centers, 0.1)
    for s in range(2):
        for b in range(6):
            for h, clusters in enumerate(HEADS):
                expected = log_p_loop(x[s, b], centers[h], clusters, 0.1)
                assert log_p[s, b, h, :clusters].tolist() == pytest.approx([float(v) for v in expected], abs=1e-12)


@settings(deadline=None)
@given(
    st.lists(st.integers(2, 7), min_size=1, max_size=4).map(tuple),
    st.floats(0.01, 10),
    st.lists(st.floats(-1, 1, width=32), min_size=28, max_size=28),
)
def test_padded_clusters_have_exactly_zero_probability(heads, temperature, values):
    """For any cosines in float32: zero for padding, never NaN, and a sum of one over the head's own clusters."""
    cosines = torch.tensor(values, dtype=torch.float32).view(4, 7)[: len(heads), : max(heads)][None, None]
    log_p = log_probabilities(cosines, make_mask(heads), temperature)
    assert log_p.isfinite().all()
    for h, clusters in enumerate(heads):
        assert (log_p[0, 0, h, clusters:].exp() == 0).all()
        assert float(log_p[0, 0, h, :clusters].exp().sum()) == pytest.approx(1, abs=1e-5)


def test_at_label_picks_the_value_of_each_image_and_head():
    values = torch.randn(2, 6, len(HEADS), max(HEADS))
    labels = make_labels(6)
    picked = at_label(values, labels)
    for s in range(2):
        for b in range(6):
            for h in range(len(HEADS)):
                assert picked[s, b, h] == values[s, b, h, labels[b, h]]


# SeCu loss


def secu_oracle(x_SBD: Tensor, free_HKD: Tensor, labels_BH: Tensor, temperature: float) -> Tensor:
    """Eqn. 3 with an explicit stop-gradient, for centers normalized from free vectors; the mean over all."""
    losses = []
    for view in x_SBD:
        for x, labels in zip(view, labels_BH, strict=True):
            for h, clusters in enumerate(HEADS):
                y = int(labels[h])
                centers = [w / torch.sqrt((w * w).sum()) for w in free_HKD[h, :clusters]]
                logits = [x @ (w if k == y else w.detach()) / temperature for k, w in enumerate(centers)]
                losses.append(-torch.log(torch.exp(logits[y]) / sum(torch.exp(logit) for logit in logits)))
    return sum(losses) / len(losses)


def secu_ours(x_SBD: Tensor, free_HKD: Tensor, labels_BH: Tensor, temperature: float) -> Tensor:
    centers_HKD = torch.nn.functional.normalize(free_HKD, dim=-1)
    return secu_loss(x_SBD, centers_HKD, ours(x_SBD, centers_HKD, temperature), labels_BH, temperature)


@pytest.mark.parametrize("embeddings", [1, 2, 4])
@pytest.mark.parametrize("temperature", [0.05, 1.0])
@pytest.mark.parametrize(("dtype", "accuracy"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_secu_loss_and_gradient_equal_eqn_3_with_stop_gradient(embeddings, temperature, dtype, accuracy):
    x = unit(embeddings, 7, DIM)
    labels = make_labels(7)
    scale = 0.5 + torch.rand(len(HEADS), max(HEADS), 1, dtype=torch.float64)  # centers do not keep norm 1
    start = unit(len(HEADS), max(HEADS), DIM, seed=2) * scale
    oracle = start.clone().requires_grad_()
    mine = start.to(dtype).requires_grad_()
    expected = secu_oracle(x, oracle, labels, temperature)
    got = secu_ours(x.to(dtype), mine, labels, temperature)
    expected.backward()
    got.backward()
    torch.testing.assert_close(got.double(), expected, rtol=accuracy, atol=accuracy)
    torch.testing.assert_close(mine.grad.double(), oracle.grad, rtol=10 * accuracy, atol=10 * accuracy)


def test_secu_gradient_of_one_image_is_the_papers():
    """(p − 1)·x/λ for the assigned center, exactly zero for all others, and none for the embedding."""
    x = unit(1, 1, DIM).requires_grad_()
    centers = unit(1, 5, DIM, seed=1).requires_grad_()
    log_p = ours(x, centers, 0.3, (5,))
    secu_loss(x, centers, log_p, torch.tensor([[2]]), 0.3).backward()
    p = float(log_p_loop(x[0, 0].detach(), centers[0].detach(), 5, 0.3)[2].exp())
    torch.testing.assert_close(centers.grad[0, 2], (p - 1) / 0.3 * x[0, 0].detach())
    assert (centers.grad[0, [0, 1, 3, 4]] == 0).all()
    assert x.grad is None


def test_secu_gradient_is_finite_for_images_equal_to_their_center():
    """There p is 1 in float32 and nothing is left to learn; the loss is negative by rounding at most."""
    free = torch.eye(DIM)[None, :2].clone().requires_grad_()
    x = torch.eye(DIM)[None, :2]
    centers = torch.nn.functional.normalize(free, dim=-1)
    loss = secu_loss(x, centers, ours(x, centers, 0.01, (2,)), torch.tensor([[0], [1]]), 0.01)
    loss.backward()
    assert abs(loss.item()) < 1e-6
    assert free.grad.abs().max() < 1e-4


# Cross-entropy


def test_cross_entropy_gradient_is_the_papers_with_negatives():
    """∇w_j = (Σ_{y_i = j} (p_ij − 1)·x_i + Σ_{y_k ≠ j} p_kj·x_k)/λ, divided by the number of terms in the mean."""
    x = unit(2, 6, DIM)
    labels = make_labels(6)
    temperature = 0.2
    centers = unit(len(HEADS), max(HEADS), DIM, seed=1).requires_grad_()
    loss = cross_entropy(ours(x, centers, temperature), labels)
    loss.backward()
    value = 0.0
    slope = torch.zeros_like(centers)
    terms = 2 * 6 * len(HEADS)
    for s in range(2):
        for b in range(6):
            for h, clusters in enumerate(HEADS):
                log_p = log_p_loop(x[s, b], centers[h].detach(), clusters, temperature)
                value -= float(log_p[labels[b, h]]) / terms
                for j in range(clusters):
                    pull = 1.0 if int(labels[b, h]) == j else 0.0
                    slope[h, j] += (math.exp(log_p[j]) - pull) * x[s, b] / temperature / terms
    assert loss.item() == pytest.approx(value, abs=1e-12)
    torch.testing.assert_close(centers.grad, slope)
    assert (slope[0, 3:] == 0).all()  # a padded cluster is not a negative


def test_secu_and_cross_entropy_have_the_same_value():
    x = unit(2, 6, DIM)
    labels = make_labels(6)
    centers = unit(len(HEADS), max(HEADS), DIM, seed=1)
    log_p = ours(x, centers, 0.1)
    assert float(secu_loss(x, centers, log_p, labels, 0.1)) == pytest.approx(float(cross_entropy(log_p, labels)))


# Soft labels


def soft_label_oracle(x_SBD: Tensor, centers_HKD: Tensor, labels_BH: Tensor, temperature: float, tau: float) -> Tensor:
    """Eqn. 7: y^1 = τ·y + (1 − τ)·p^2 and vice versa. Outputs 3 and 4, the prediction's, have the same teachers."""
    losses = []
    teacher_of = [1, 0, 1, 0]
    for b, labels in enumerate(labels_BH):
        for h, clusters in enumerate(HEADS):
            log_p = [log_p_loop(view[b], centers_HKD[h], clusters, temperature) for view in x_SBD]
            for s in range(len(x_SBD)):
                teacher = [math.exp(value.item()) for value in log_p[teacher_of[s]]]  # a number carries no gradient
                for k in range(clusters):
                    soft = tau * (k == int(labels[h])) + (1 - tau) * teacher[k]
                    losses.append(-soft * log_p[s][k])
    return sum(losses) / (len(x_SBD) * len(labels_BH) * len(HEADS))


@pytest.mark.parametrize("embeddings", [2, 4])
@pytest.mark.parametrize("tau", [0.0, 0.2, 1.0])
def test_soft_label_loss_and_gradient_equal_eqn_7(embeddings, tau):
    start = unit(embeddings, 5, DIM)
    labels = make_labels(5)
    centers = unit(len(HEADS), max(HEADS), DIM, seed=1)
    oracle = start.clone().requires_grad_()
    mine = start.clone().requires_grad_()
    expected = soft_label_oracle(oracle, centers, labels, 0.2, tau)
    got = soft_label_loss(ours(mine, centers, 0.2), labels, tau)
    expected.backward()
    got.backward()
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(mine.grad, oracle.grad)
    assert mine.grad.abs().max() > 0


def test_soft_label_loss_of_float32_and_padding_has_no_nan():
    """Heads of 2 and 500 clusters, at the lowest temperature in use, with embeddings equal to centers."""
    heads = (2, 500)
    centers = torch.nn.functional.normalize(torch.randn(2, 500, 8), dim=-1)
    x = centers[0, torch.tensor([[0, 1], [1, 1]])].requires_grad_()
    loss = soft_label_loss(ours(x, centers, 0.05, heads), torch.tensor([[0, 0], [1, 499]]), 0.2)
    loss.backward()
    assert loss.isfinite()
    assert x.grad.isfinite().all()


# Self-labeling


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("classes", [(0, 1, 2, 3, 4), (1, 4), (2,)])
def test_balanced_cross_entropy_is_torchs_with_weights_of_inverse_frequency(share, classes):
    """Only over the images that are taught, for any set of labels."""
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(40, 5, dtype=torch.float64, generator=generator)).requires_grad_()
    often = torch.tensor([6.0, 3, 2, 1, 1][: len(classes)])
    labels = torch.tensor(classes)[torch.multinomial(often, 40, replacement=True, generator=generator)]
    taught = torch.rand(40, generator=generator) < share
    counts = [int((labels[taught] == k).sum()) for k in range(5)]
    weights = torch.tensor([len(counts) / count if count else 0.0 for count in counts], dtype=torch.float64)
    expected = F.cross_entropy(logits[taught], labels[taught], weights)
    loss = balanced_cross_entropy(logits, F.one_hot(labels, 5) * taught[:, None])
    torch.testing.assert_close(loss, expected)
    slopes = [torch.autograd.grad(value, logits)[0] for value in (loss, expected)]
    torch.testing.assert_close(*slopes)
    assert (slopes[0][~taught] == 0).all()
    assert (slopes[0][taught].abs().sum(-1) > 0).all()


def test_balanced_cross_entropy_without_taught_images_is_zero_with_zero_gradient():
    logits = torch.randn(6, 3, requires_grad=True)
    loss = balanced_cross_entropy(logits, torch.zeros(6, 3))
    loss.backward()
    assert loss.item() == 0
    assert (logits.grad == 0).all()


def test_all_labels_have_the_same_weight_however_many_images_have_them():
    """Nine images with one label and one with another: the two means have equal weight."""
    logits = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0] * 9 + [2])
    each = F.cross_entropy(logits, labels, reduction="none")
    expected = (each[:9].mean() + each[9]) / 2
    torch.testing.assert_close(balanced_cross_entropy(logits, F.one_hot(labels, 3)), expected)


def test_balanced_cross_entropy_with_probabilities_as_targets_in_a_loop():
    """Targets of every kind: a label, probabilities, nothing; the last cluster has less than one image in total."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, 4, dtype=torch.float64, generator=generator)
    targets = torch.softmax(torch.randn(7, 4, dtype=torch.float64, generator=generator), -1)
    targets[:, 3] *= 0.05
    targets /= targets.sum(1, keepdim=True)
    targets[0] = torch.tensor([0, 1, 0, 0])
    targets[1] = 0
    counts = [sum(float(row[k]) for row in targets) for k in range(4)]
    assert counts[3] < 1 < min(counts[:3])
    total = 0.0
    for row, target in zip(logits, targets, strict=True):
        log_sum = math.log(sum(math.exp(float(value)) for value in row))
        for k in range(4):
            total += float(target[k]) / max(counts[k], 1) * (log_sum - float(row[k]))
    assert balanced_cross_entropy(logits, targets).item() == pytest.approx(total / (3 + counts[3]), rel=1e-12)
