"""Add a constraint: Sinkhorn's balanced assignment, as in SwAV, on the digits.

    python examples/constraint.py [RUN] [KEY=VALUE ...]

A constraint turns scores into labels. SeCu's own learns one number per cluster from batch to batch; this one balances
every batch by itself. With optim.epochs=30 it takes half a minute and gets nine of ten digits right.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

from secu.apps import pipeline
from secu.cluster.constraints import Constraint
from secu.data import load
from secu.registry import CONSTRAINTS
from secu.settings import load_config


@CONSTRAINTS.register("sinkhorn")
class Sinkhorn(Constraint):
    """Gives all clusters the same share of a batch, and all images the same weight, in turns."""

    temperature = 0.05
    rounds = 3

    def assign(self, scores_BHK: Tensor, previous_BH: Tensor) -> Tensor:
        """Return a label for each of B images and H heads; clusters that pad a small head up to K get nothing."""
        shares_BHK = torch.softmax(scores_BHK / self.temperature, -1)
        for _ in range(self.rounds):
            shares_BHK = shares_BHK / shares_BHK.sum(0).clamp(min=1e-9)
            shares_BHK = shares_BHK / shares_BHK.sum(-1, keepdim=True)
        return shares_BHK.argmax(-1)


def main(out: str = "runs/sinkhorn", *overrides: str) -> None:
    """Train the recipe ``digits`` with our constraint, and print the scores."""
    config = load_config("digits", ["constraint.kind=sinkhorn", *overrides])
    images = load(config.data)
    results = pipeline.run(config, images, Path(out), test=images).results
    print(f"{out}: ACC {results.scores.acc:.3f}, NMI {results.scores.nmi:.3f}, ARI {results.scores.ari:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
