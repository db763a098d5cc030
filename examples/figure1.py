"""Reproduce the paper's Figure 1: centers by k-means and by SeCu's closed form, on two Gaussians.

    python examples/figure1.py [figure1.png]

Ten points of a narrow Gaussian and ten of a wide one are projected onto the unit circle, like embeddings. k-means puts
each center in the middle of its points, so the border is halfway between the centers and cuts into the wide group. SeCu
weights a point by its difficulty, 1 − p, so the wide group's center moves toward the border. Gap, width and temperature
are one of twelve combinations tried, chosen to make the difference visible (in most others both methods are nearly
perfect). The sample shown is one of those with the largest difference; the footer gives the mean over many samples.
"""

import sys

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from torch import Tensor

from secu.cluster.centers import ClosedFormCenters, KMeansCenters
from secu.cluster.losses import log_probabilities
from secu.cluster.metrics import accuracy

TEMPERATURE = 0.1
DRAWS = 200
SHOWN = 136


def two_gaussians(seed: int) -> tuple[Tensor, Tensor]:
    """Return 20 points on the circle, and the Gaussian that each is from."""
    noise = torch.randn(2, 10, 2, generator=torch.Generator().manual_seed(seed))
    tight = torch.tensor([1.0, 0.0]) + noise[0] * torch.tensor([0.05, 0.10])
    wide = torch.tensor([0.62, 0.78]) + noise[1] * 0.3
    return F.normalize(torch.cat([tight, wide]), dim=-1), torch.arange(2).repeat_interleave(10)


def cluster(centers: ClosedFormCenters, points: Tensor) -> tuple[Tensor, Tensor]:
    """Alternate between labels and centers, from one point of each group, until nothing moves."""
    centers.weight[0] = points[[0, -1]]
    for _ in range(100):
        before = centers.unit()
        cosines = (points @ centers.unit()[0].T)[None, :, None]
        log_p = log_probabilities(cosines, torch.zeros(1, 2), TEMPERATURE)
        centers.start_epoch()
        centers.update(points[None], log_p, cosines[0].argmax(-1))
        if torch.equal(centers.unit(), before):
            break
    return centers.unit()[0], (points @ centers.unit()[0].T).argmax(-1)


def draw(axes: Axes, points: Tensor, truth: Tensor, centers: Tensor, found: Tensor, title: str) -> None:
    """Draw one panel: color is the true group, a star is a mistake, a square is a center, a line is the border."""
    border = F.normalize(centers.sum(0), dim=0)
    axes.plot([0, 1.15 * border[0]], [0, 1.15 * border[1]], color="0.7", linestyle="--", zorder=0)
    for group, color in enumerate(("#2a6f97", "#e07a1f")):
        wrong = (truth == group) & (found != group)
        right = (truth == group) & ~wrong
        axes.scatter(*points[right].T, color=color, alpha=0.75)
        axes.scatter(*points[wrong].T, color=color, marker="*", s=180, edgecolor="black", linewidth=0.6)
        axes.scatter(*centers[group], color=color, marker="s", s=110, edgecolor="black")
    axes.set(title=f"{title}: acc = {accuracy(truth.numpy(), found.numpy()):.2f}", aspect="equal")
    axes.set(xlim=(-0.1, 1.2), ylim=(-0.35, 1.15))


def main(path: str = "figure1.png") -> None:
    """Cluster many draws both ways and draw one of them."""
    methods = {"k-means (CoKe)": KMeansCenters, "SeCu, closed form": ClosedFormCenters}
    figure, panels = plt.subplots(1, 2, figsize=(9, 4.9), layout="constrained")
    means = []
    for axes, (title, kind) in zip(panels, methods.items(), strict=True):
        scores = []
        for seed in range(DRAWS):
            points, truth = two_gaussians(seed)
            centers, found = cluster(kind(1, 2, 2), points)
            scores.append(accuracy(truth.numpy(), found.numpy()))
            if seed == SHOWN:
                draw(axes, points, truth, centers, found, title)
        means.append(f"{title} {sum(scores) / DRAWS:.3f}")
    figure.supxlabel(f"mean accuracy over {DRAWS} draws: {', '.join(means)}", fontsize=10)
    figure.savefig(path, dpi=120)
    print(f"{path}: mean accuracy {', '.join(means)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
