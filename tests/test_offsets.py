"""Offsets of clusters: shares against loops, offsets against a general solver, and groups of known sizes."""

import numpy as np
import pytest
import torch
from scipy.optimize import root
from torch import Tensor

from secu.cluster import offsets as module
from secu.cluster.metrics import accuracy
from secu.cluster.offsets import find_offsets, match_shares, shares_among_neighbors
from secu.views.neighbors import find_neighbors

TEMPERATURE = 0.05


def random_case(seed: int, images: int = 60, clusters: int = 4) -> tuple[Tensor, Tensor]:
    """Return cosines, and five neighbors of each image."""
    generator = torch.Generator().manual_seed(seed)
    cosines = 0.2 * torch.randn(images, clusters, generator=generator)
    return cosines, torch.randint(images, (images, 5), generator=generator)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_shares_equal_a_loop_over_images_and_neighbors(seed):
    cosines, neighbors = random_case(seed)
    labels = cosines.argmax(-1)
    counts = [0.0] * 5
    for image, others in enumerate(neighbors.tolist()):
        for seen in (image, *others):
            counts[labels[seen]] += 1
    expected = [count / sum(counts) for count in counts]
    assert shares_among_neighbors(labels, neighbors, 5).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_matched_shares_are_those_of_a_general_solver(seed):
    cosines, _ = random_case(seed, images=300)
    shares = torch.tensor([0.4, 0.3, 0.2, 0.1])

    def difference(free: np.ndarray) -> np.ndarray:
        """Return the differences of the shares, with the mean of the offsets fixed at zero by the last one."""
        logits = (cosines.double().numpy() + np.append(free, -free.sum())) / TEMPERATURE
        powers = np.exp(logits - logits.max(1, keepdims=True))
        return ((powers / powers.sum(1, keepdims=True)).mean(0) - shares.numpy())[:-1]

    solved = root(difference, np.zeros(3), tol=1e-10)
    assert solved.success
    found = match_shares(cosines, shares, torch.zeros(4), TEMPERATURE)
    assert found.tolist() == pytest.approx([*solved.x, -solved.x.sum()], abs=2e-3)
    mean = torch.softmax((cosines + found) / TEMPERATURE, -1).mean(0)
    assert mean.tolist() == pytest.approx(shares.tolist(), abs=3e-3)


def test_an_empty_cluster_gets_a_finite_offset():
    cosines, _ = random_case(0)
    found = match_shares(cosines, torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.zeros(4), TEMPERATURE)
    assert found.isfinite().all()
    assert ((cosines + found).argmax(-1) < 2).all()


def test_the_constants():
    assert (module.ROUNDS, module.SHARPER, module.UPDATES, module.SMALLEST) == (3, 0.5, 20, 1e-6)


def on_a_circle(*sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return unit vectors around two neighboring directions, their groups, and centers that halve the vectors."""
    generator = torch.Generator().manual_seed(0)
    groups = torch.repeat_interleave(torch.arange(2), torch.tensor(sizes))
    angles = 0.9 * groups + 0.2 * torch.randn(len(groups), generator=generator)
    border = angles.median()
    centers = torch.stack([border - 0.45, border + 0.45])
    return torch.stack([angles.cos(), angles.sin()], -1), groups, torch.stack([centers.cos(), centers.sin()], -1)


def labels_of(vectors: Tensor, centers: Tensor, *, shifted: bool) -> Tensor:
    cosines = vectors @ centers.T
    neighbors = find_neighbors(vectors, 10).of(torch.arange(len(vectors)))
    offsets = find_offsets(cosines, neighbors, TEMPERATURE) if shifted else torch.zeros(2)
    assert float(offsets.mean()) == pytest.approx(0, abs=1e-6)
    return (cosines + offsets).argmax(-1)


def test_groups_of_equal_size_stay_as_they_are():
    vectors, groups, centers = on_a_circle(300, 300)
    before = labels_of(vectors, centers, shifted=False)
    after = labels_of(vectors, centers, shifted=True)
    assert accuracy(groups.numpy(), before.numpy()) > 0.97
    assert float((before == after).float().mean()) > 0.99


def test_a_cluster_that_is_seen_more_often_grows():
    """Images of the first cluster are the neighbors of everything, as a large group's are near a border."""
    vectors, _, centers = on_a_circle(300, 300)
    cosines = vectors @ centers.T
    first = (cosines.argmax(-1) == 0).nonzero()[:, 0]
    neighbors = first[torch.arange(600 * 5).view(600, 5) % len(first)]
    offsets = find_offsets(cosines, neighbors, TEMPERATURE)
    assert float(offsets[0]) > 0.01
    assert int(((cosines + offsets).argmax(-1) == 0).sum()) > len(first)
