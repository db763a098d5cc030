"""The model of several GPUs: its arithmetic, what it counts, and the tables in the documentation."""

from pathlib import Path

import pytest
import torch

from secu.methods import build_method
from secu.settings import load_config

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def scale(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import scale

    return scale


def test_one_gpu_takes_the_measured_time(scale):
    step = scale.Step(batch=100, seconds=0.004, group_seconds=0.0)
    moved = scale.Traffic(gradients=10**9, sums=10**6, labels_per_image=8, exchanges=50)
    assert scale.seconds(step, moved, 1, 100, hidden=False) == 0.004


def test_the_parts_of_a_step_add_up(scale, monkeypatch):
    monkeypatch.setattr(scale, "ONE_MACHINE", scale.Links(bytes_per_second=1e9, latency=1e-5))
    step = scale.Step(batch=100, seconds=0.004, group_seconds=0.001)
    moved = scale.Traffic(gradients=4 * 10**6, sums=10**6, labels_per_image=80, exchanges=50)
    computed = 0.002  # for half of the images
    labels = 80 * 50 * 1 / 1e9  # of the other process
    sums = 2 * (1 / 2) * 0.001
    expected = computed + 0.001 + 50 * 1e-5 + labels + sums
    assert scale.seconds(step, moved, 2, 50, hidden=True) == pytest.approx(expected)
    assert scale.seconds(step, moved, 2, 50, hidden=False) == pytest.approx(expected + 2 * (1 / 2) * 0.004)


def test_other_machines_are_farther_away(scale):
    step = scale.Step(batch=8, seconds=0.0, group_seconds=0.0)
    moved = scale.Traffic(gradients=0, sums=0, labels_per_image=0, exchanges=1)
    waits = [scale.seconds(step, moved, gpus, 8, hidden=True) for gpus in (8, 9)]
    assert waits == [scale.ONE_MACHINE.latency, scale.SEVERAL_MACHINES.latency]


def test_what_is_counted(scale):
    config = load_config("cifar10")
    method = build_method(config, 10, (3, 32, 32), torch.device("cpu"))
    moved = scale.traffic("cifar10")
    trained = [weight for weight in method.parameters() if weight.requires_grad]
    assert moved.gradients == 4 * sum(weight.numel() for weight in trained)
    assert moved.labels_per_image == 8 * (1 + 10 + 10)
    assert moved.exchanges == 21 * 2 + 3 + 1  # batch-norms; 46.5 MB of gradients in buckets of at least 16 MB; labels


def test_the_documentation_has_the_tables(scale):
    assert scale.tables() in (ROOT / "docs" / "scale.md").read_text()
