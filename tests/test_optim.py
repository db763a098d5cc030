"""SGD and LARS against loops over tensors, and the learning rates of a run."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secu.cluster.centers import ClosedFormCenters, GradientCenters
from secu.config import Config, OptimConfig
from secu.train.optim import LARS, build_optimizer, learning_rates

MOMENTUM = 0.9
DECAY = 0.03
RATES = [(0.0, 0.5), (0.1, 0.5), (0.3, 0.4), (0.2, 0.0), (0.0, 0.1)]  # encoder's and centers', step by step


def make_encoder() -> nn.Module:
    """A convolution, a linear layer with bias, a norm, and a matrix that starts at zero."""
    torch.manual_seed(0)
    encoder = nn.ModuleDict(
        {"conv": nn.Conv2d(2, 3, 3, bias=False), "linear": nn.Linear(4, 3), "norm": nn.BatchNorm1d(3)}
    )
    encoder["zero"] = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(encoder["zero"].weight)
    return encoder


def gradients(weights: list[Tensor], step: int) -> list[Tensor]:
    """Reproducible gradients; that of the last weight is zero in step 2."""
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.randn(weight.shape, generator=generator) for weight in weights]
    if step == 2:
        drawn[-1].zero_()
    return drawn


def build(config: OptimConfig, encoder: nn.Module, centers: nn.Module, *rates: Tensor) -> torch.optim.Optimizer:
    return build_optimizer(config, list(encoder.parameters()), list(centers.parameters()), *rates)


def run(name: str, encoder: nn.Module, centers: nn.Module) -> list[np.ndarray]:
    """Take the steps of RATES with one optimizer, whose learning rates change in place."""
    rates = torch.zeros(2)
    config = OptimConfig(name=name, momentum=MOMENTUM, weight_decay=DECAY)
    optimizer = build(config, encoder, centers, rates[0], rates[1])
    weights = [*encoder.parameters(), *centers.parameters()]
    for step, rate in enumerate(RATES):
        rates.copy_(torch.tensor(rate))
        for weight, gradient in zip(weights, gradients(weights, step), strict=True):
            weight.grad = gradient
        optimizer.step()
    return [weight.detach().double().numpy() for weight in weights]


def oracle(name: str, encoder: nn.Module, centers: nn.Module, trust: float = 1e-3) -> list[np.ndarray]:
    """Repeat v ← m·v + direction, w ← w − lr·v; LARS scales and decays only matrices, and only the encoder's."""
    tensors = [*encoder.parameters(), *centers.parameters()]
    in_encoder = len(list(encoder.parameters()))
    weights = [weight.detach().double().numpy().copy() for weight in tensors]
    velocity = [np.zeros_like(weight) for weight in weights]
    for step, rates in enumerate(RATES):
        for number, gradient in enumerate(gradients(tensors, step)):
            w = weights[number]
            g = gradient.double().numpy()
            is_center = number >= in_encoder
            if name == "sgd" or is_center:
                direction = g + DECAY * w
            elif w.ndim == 1:
                direction = g
            else:
                direction = g + DECAY * w
                size = math.sqrt((w**2).sum())
                slope = math.sqrt((direction**2).sum())
                if size > 0 and slope > 0:
                    direction = trust * size / slope * direction
            velocity[number] = MOMENTUM * velocity[number] + direction
            weights[number] = w - rates[is_center] * velocity[number]
    return weights


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_optimizer_equals_a_loop_over_tensors(name):
    """Learning rates are read anew at each step; norms and centers are decayed by SGD, norms are not by LARS."""
    encoder = make_encoder()
    centers = GradientCenters(2, 3, 4)
    expected = oracle(name, encoder, centers)
    start = [weight.detach().clone() for weight in [*encoder.parameters(), *centers.parameters()]]
    for got, wanted, before in zip(run(name, encoder, centers), expected, start, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
        assert not np.allclose(wanted, before.numpy(), atol=1e-5)


def test_lars_without_a_norm_to_scale_by_is_sgd():
    """Zero weights have none, zero gradients leave none to divide by: neither becomes NaN, nor stands still forever."""
    for weight, gradient, expected in (
        (torch.zeros(2, 2), torch.ones(2, 2), -0.5),
        (torch.ones(2, 2), torch.zeros(2, 2), 1.0),
    ):
        parameter = nn.Parameter(weight.clone())
        optimizer = LARS([{"params": [parameter], "lr": torch.tensor(0.5)}], 0.9, 0.0)
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros(2, 2)
        parameter.grad = gradient
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), torch.full((2, 2), expected))


def test_lars_without_adaptation_is_sgd_for_every_shape():
    for shape in ((3,), (2, 3), (2, 3, 4)):
        ours = nn.Parameter(torch.ones(shape))
        theirs = nn.Parameter(torch.ones(shape))
        lars = LARS([{"params": [ours], "lr": torch.tensor(0.5), "adapt": False}], MOMENTUM, DECAY)
        lars.state[ours]["momentum_buffer"] = torch.zeros(shape)
        sgd = torch.optim.SGD([theirs], 0.5, MOMENTUM, weight_decay=DECAY)
        for step in range(3):
            ours.grad, theirs.grad = (gradients([ours], step)[0] + 1 for _ in range(2))
            lars.step()
            sgd.step()
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_weights_without_gradient_stay(name):
    encoder = make_encoder()
    before = encoder["conv"].weight.detach().clone()
    optimizer = build(OptimConfig(name=name), encoder, nn.Module(), torch.tensor(1.0), torch.tensor(1.0))
    encoder["linear"].weight.grad = torch.ones(3, 4)
    optimizer.step()
    assert torch.equal(encoder["conv"].weight, before)
    assert not torch.equal(encoder["linear"].weight, make_encoder()["linear"].weight)


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_centers_that_are_no_parameters_need_no_group(name):
    encoder = make_encoder()
    centers = ClosedFormCenters(2, 3, 4)
    before = centers.weight.clone()
    expected = oracle(name, encoder, centers)
    for got, wanted in zip(run(name, encoder, centers), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(centers.weight, before)


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_momentum_is_there_from_the_start(name):
    encoder = make_encoder()
    centers = GradientCenters(1, 2, 4)
    optimizer = build(OptimConfig(name=name), encoder, centers, torch.tensor(0.1), torch.tensor(0.1))
    for weight in [*encoder.parameters(), *centers.parameters()]:
        assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.zeros_like(weight))


# Centers under LARS


def lars_centers(heads: tuple[int, ...], centers: nn.Module, rates: list[float], grads: list[Tensor]) -> Tensor:
    """Take one step per rate, with given gradients, and return the centers."""
    rate = torch.zeros(())
    config = OptimConfig(name="lars", momentum=MOMENTUM, weight_decay=DECAY)
    optimizer = build_optimizer(config, [], list(centers.parameters()), torch.tensor(0.0), rate, heads=heads)
    for value, gradient in zip(rates, grads, strict=True):
        rate.fill_(value)
        centers.weight.grad = gradient
        optimizer.step()
    return centers.weight.detach()


def head_by_head(
    heads: tuple[int, ...], weight_HKD: Tensor, rates: list[float], grads: list[Tensor]
) -> list[list[list[float]]]:
    """Do the same in plain Python, with a list of rows for each head, which has no padding."""
    rows_of = [weight_HKD[h, :clusters].tolist() for h, clusters in enumerate(heads)]
    for h, rows in enumerate(rows_of):
        speed = [[0.0] * len(row) for row in rows]
        for rate, gradient in zip(rates, grads, strict=True):
            slopes = gradient[h].tolist()
            pull = [[slopes[k][d] + DECAY * value for d, value in enumerate(row)] for k, row in enumerate(rows)]
            size = math.sqrt(sum(value**2 for row in rows for value in row))
            slope = math.sqrt(sum(value**2 for row in pull for value in row))
            scale = 1e-3 * size / slope
            for k, row in enumerate(rows):
                for d in range(len(row)):
                    speed[k][d] = MOMENTUM * speed[k][d] + scale * pull[k][d]
                    row[d] -= rate * speed[k][d]
    return rows_of


def test_lars_scales_the_centers_of_each_head_by_its_own_norm_without_padding():
    heads = (2, 5, 3)
    centers = GradientCenters(3, 5, 4)
    with torch.no_grad():
        centers.weight.mul_(torch.tensor([1.0, 7.0, 0.2]).view(3, 1, 1))
        centers.weight[0, 2:] = 100  # padding, which must not count
        centers.weight[2, 3:] = -100
    start = centers.weight.detach().clone()
    rates = [4.2, 1.0, 0.0, 20.0]
    grads = [torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(step)) for step in range(4)]
    expected = head_by_head(heads, start, rates, grads)
    found = lars_centers(heads, centers, rates, grads)
    for h, clusters in enumerate(heads):
        torch.testing.assert_close(found[h, :clusters], torch.tensor(expected[h]), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(found[h, :clusters], start[h, :clusters], atol=1e-3)


@pytest.mark.parametrize(("name", "lowest", "highest"), [("lars", 0.97, 1.0), ("sgd", 0.0, 0.5)])
def test_centers_that_see_few_images_reach_them_only_by_lars(name, lowest, highest):
    """As on ImageNet: 1,024 images for 10,000 clusters, p = 0.9, ten heads, center rate 4.2; here 300 steps.

    Plain SGD at that rate leaves random centers near where they began: 1 − p is small, and a center gets an image only
    once in ten steps.
    """
    numbers = torch.Generator().manual_seed(0)
    clusters, batch, dim = 10_000, 1024, 16
    true_KD = F.normalize(torch.randn(clusters, dim, generator=numbers), dim=-1)
    start_KD = F.normalize(torch.randn(clusters, dim, generator=numbers), dim=-1)
    centers = nn.Module()
    centers.weight = nn.Parameter(start_KD[None].clone())
    config = OptimConfig(name="lars", weight_decay=1e-6)
    heads = (clusters,) if name == "lars" else None
    optimizer = build_optimizer(config, [], [centers.weight], torch.tensor(0.0), torch.tensor(4.2), heads=heads)
    for _ in range(300):
        labels_B = torch.randint(clusters, (batch,), generator=numbers)
        unit_KD = F.normalize(centers.weight[0], dim=-1)
        cosines_B = (true_KD[labels_B] * unit_KD[labels_B]).sum(-1)
        optimizer.zero_grad()
        (-(1 - 0.9) * cosines_B.mean() / 0.05 / 10).backward()
        optimizer.step()
    reached = (F.normalize(centers.weight[0].detach(), dim=-1) * true_KD).sum(-1).mean().item()
    assert lowest < reached < highest


# Learning rates


def rates_of(steps: int = 4, schedule: str = "constant", **optim: float) -> Tensor:
    """Return the learning rates of every step of a run, one row each."""
    config = Config(optim=optim, centers={"lr": 5.6, "schedule": schedule})
    return torch.cat([learning_rates(config, epoch, steps) for epoch in range(config.optim.total_epochs)])


def test_encoder_stands_still_then_warms_up_then_falls_along_a_cosine():
    """One initial epoch, 10 of warm-up, 40 in all: every single step, four per epoch."""
    encoder = rates_of(lr=0.2, epochs=40, warmup_epochs=10)[:, 0].tolist()
    assert len(encoder) == 41 * 4
    for step, rate in enumerate(encoder):
        trained = step - 4
        if trained < 0:
            expected = 0.0
        elif trained < 40:
            expected = 0.2 * trained / 40
        else:
            expected = 0.2 * 0.5 * (1 + math.cos(math.pi * (trained - 40) / 120))
        assert rate == pytest.approx(expected, abs=1e-7)
    assert encoder[44] == pytest.approx(0.2)
    assert 0 < encoder[-1] < 1e-3


def test_more_initial_epochs_shift_the_schedule():
    """The encoder sees the same rates, two epochs later; without any it starts at once."""
    plain = rates_of(lr=0.2, epochs=12, warmup_epochs=3, initial_epochs=0)[:, 0]
    later = rates_of(lr=0.2, epochs=12, warmup_epochs=3, initial_epochs=2)[:, 0]
    assert later[:8].tolist() == [0] * 8
    torch.testing.assert_close(later[8:], plain)
    assert plain[1] > 0


def test_runs_shorter_than_their_warm_up_only_rise():
    encoder = rates_of(lr=0.2, epochs=3, warmup_epochs=10)[4:, 0]
    torch.testing.assert_close(encoder, torch.arange(12) * 0.2 / 40)


def test_run_without_warm_up_starts_at_the_full_rate():
    encoder = rates_of(lr=0.2, epochs=5, warmup_epochs=0)[:, 0]
    assert encoder[3] == 0
    assert encoder[4].item() == pytest.approx(0.2)
    assert (encoder[4:].diff() < 0).all()


def test_constant_rate_stays_after_the_warm_up():
    config = Config(optim={"lr": 0.2, "epochs": 5, "warmup_epochs": 2, "schedule": "constant"})
    rates = torch.cat([learning_rates(config, epoch, 4) for epoch in range(6)])[:, 0]
    assert rates.tolist() == pytest.approx([0] * 4 + [0.2 * step / 8 for step in range(8)] + [0.2] * 12)


def test_centers_have_a_constant_rate_or_one_that_rises_by_the_negative_cosine():
    assert rates_of(epochs=9)[:, 1].tolist() == pytest.approx([5.6] * 40)
    rising = rates_of(epochs=9, schedule="rising")[:, 1]
    expected = [5.6 * (1 - math.cos(math.pi * step / 40)) / 2 for step in range(40)]
    assert rising.tolist() == pytest.approx(expected, abs=1e-6)
    assert rising[0] == 0
    assert rising[20].item() == pytest.approx(2.8)
    assert rising[-1] > 0.99 * 5.6


def test_a_settling_rate_of_the_centers_is_constant_and_falls_to_0_in_the_last_tenth():
    settling = rates_of(epochs=39, schedule="settling")[:, 1]
    falling = [5.6 * (1 + math.cos(math.pi * step / 16)) / 2 for step in range(16)]  # the last 4 of 40 epochs
    assert settling.tolist() == pytest.approx([5.6] * 144 + falling, abs=1e-6)
    assert settling[144] == settling[0]
    assert 0 < settling[-1] < 0.01 * 5.6
