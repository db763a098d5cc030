"""Whole epochs of training: their order, their draws, and what the constraints are for."""

import numpy as np
import pytest
import torch
from torch import Tensor

from secu.cluster.constraints import NO_LABEL
from secu.cluster.metrics import accuracy
from secu.data import Images
from secu.methods.base import build_method
from secu.settings import load_config
from secu.train.engine import Engine
from secu.train.optim import learning_rates
from secu.train.step import Step


def quadrants(images: int) -> Images:
    """Return images of four kinds, each with a different bright quadrant, in noise."""
    pixels = torch.randint(0, 60, (images, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for kind in range(4):
        top, left = 4 * (kind // 2), 4 * (kind % 2)
        pixels[kind::4, :, top : top + 4, left : left + 4] += 180
    return Images(pixels)


def make_step(images: Images, epochs: int, *overrides: str) -> Step:
    jitter = ["augment.affine.rotation=0", "augment.affine.shift=0.1"]
    schedule = ["optim.batch_size=16", f"optim.epochs={epochs}", "optim.warmup_epochs=1"]
    config = load_config("digits", ["heads=[4,6]", *jitter, *schedule, *overrides])
    device = torch.device("cpu")
    return Step(build_method(config, len(images), images.shape, device), images, device)


def test_first_epoch_moves_labels_centers_and_statistics_but_no_weight_of_the_encoder():
    step = make_step(quadrants(40), 2)
    encoder = {name: value.clone() for name, value in step.method.encoder.state_dict().items()}
    centers = step.method.clustering.head()
    Engine([step], "eager").epoch(0)
    assert any("running" in name for name in encoder)
    for name, value in step.method.encoder.state_dict().items():
        assert torch.equal(value, encoder[name]) != ("running" in name), name
    assert (step.method.clustering.head() * centers).sum(-1).max() < 0.99
    assert (step.method.clustering.labels != NO_LABEL).all()
    assert step.method.clustering.sizes().sum() == 40
    Engine([step], "eager").epoch(1)
    assert not torch.equal(step.method.encoder.state_dict()["projection.0.weight"], encoder["projection.0.weight"])


def test_epoch_visits_every_image_once_and_keeps_what_belongs_to_it():
    """Every step of two epochs: order, learning rates, the centers learned against, and the mean losses."""
    step = make_step(quadrants(41), 3)
    clustering = step.method.clustering
    seen = []
    take = clustering.step

    def spy(embeddings: Tensor, index: Tensor):
        losses = take(embeddings, index)
        assert torch.equal(clustering.epoch_centers, start)
        assert step.method.encoder.training
        seen.append((index.tolist(), {name: value.item() for name, value in losses.items()}, step.rates.tolist()))
        return losses

    clustering.step = spy
    orders = []
    for number in range(2):
        step.method.encoder.eval()  # as evaluation between epochs might leave it
        start = clustering.centers.unit().detach().clone()
        seen.clear()
        (means,) = Engine([step], "eager").epoch(number)
        batches, losses, rates = zip(*seen, strict=True)
        assert [len(batch) for batch in batches] == [16, 16, 9]
        orders.append([image for batch in batches for image in batch])
        assert sorted(orders[-1]) == list(range(41))
        assert list(means) == ["loss", "center_loss"]
        for name, mean in means.items():
            total = sum(len(batch) * loss[name] for batch, loss in zip(batches, losses, strict=True))
            assert mean == pytest.approx(total / 41, rel=1e-5)
        torch.testing.assert_close(torch.tensor(rates), learning_rates(step.config, number, 3))
        assert not torch.equal(clustering.centers.unit(), start)
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])


def test_every_epoch_and_seed_has_its_own_reproducible_draws():
    numbers = {}
    for seed, epoch, again in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)):
        step = make_step(quadrants(40), 3, f"seed={seed}")
        drawn = []
        render = step.method.views.render

        def spy(inputs: Tensor, draws: dict[str, Tensor], drawn: list = drawn, render=render) -> Tensor:
            drawn.extend(draws.values())
            return render(inputs, draws)

        step.method.views.render = spy
        Engine([step], "eager").epoch(epoch)
        numbers[seed, epoch, again] = torch.cat([value.flatten() for value in drawn])
    assert torch.equal(numbers[0, 0, 0], numbers[0, 0, 1])
    assert len(numbers[0, 0, 0].unique()) > 0.99 * len(numbers[0, 0, 0])  # no batch repeats the draws of another
    for other in ((0, 1, 0), (1, 0, 0)):
        assert (numbers[0, 0, 0] == numbers[other]).float().mean() < 0.01


def test_runs_collapse_without_constraint_and_find_the_kinds_with_one():
    """Check more than sizes: identical embeddings would also be spread over all clusters, batch by batch.

    Of three seeds tried, this one collapses completely without a constraint; the others lose clusters (ACC 0.5, 0.75).
    """
    images = quadrants(240)
    kinds = np.arange(240) % 4
    largest = {}
    smallest = {}
    found = {}
    for constraint in ("none", "size", "entropy"):
        step = make_step(images, 11, f"constraint.kind={constraint}", "seed=1")
        for number in range(12):
            Engine([step], "eager").epoch(number)
        sizes = step.method.clustering.sizes().tolist()
        largest[constraint] = max(sizes)
        smallest[constraint] = min(sizes)
        found[constraint] = accuracy(kinds, step.method.clustering.labels[:, 0].numpy())
    assert largest["none"] > 0.95 * 240
    assert found["none"] < 0.3
    assert min(smallest["size"], smallest["entropy"]) > 0.8 * 60
    assert min(found["size"], found["entropy"]) > 0.8
