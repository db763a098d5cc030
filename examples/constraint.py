"""Write your own constraint, and train with it: Sinkhorn's balanced assignment, as in SwAV, on the digits.

    python examples/constraint.py [RUN] [KEY=VALUE ...]

A constraint turns scores into labels. SeCu's own learns one number for each cluster from batch to batch; this one
balances every batch by itself. With optim.epochs=30 it takes half a minute and gets nine of ten digits right.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secu.constraints import Constraint
from secu.data import load
from secu.results import find_results
from secu.run import Run
from secu.settings import load_config
from secu.train import train
from secu.training import Listener


class Sinkhorn(Constraint):
    """Gives all clusters the same share of a batch, and all images the same weight, in turns."""

    temperature, rounds = 0.05, 3

    def assign(self, scores_BHK: Tensor, previous_BH: Tensor) -> Tensor:
        """Return a label for each of B images and H heads; clusters that pad a small head up to K get nothing."""
        shares_BHK = torch.softmax(scores_BHK / self.temperature, -1)
        for _ in range(self.rounds):
            shares_BHK = shares_BHK / shares_BHK.sum(0).clamp(min=1e-9)
            shares_BHK = shares_BHK / shares_BHK.sum(-1, keepdim=True)
        return shares_BHK.argmax(-1)


class WithSinkhorn(Listener):
    """Hears when training starts, and replaces the constraint; all else is the usual run, checkpoints included."""

    def started(self, *, model: Any, **facts: Any) -> None:
        """Put ours in the place of none."""
        model.clustering.constraint = Sinkhorn(model.clustering.constraint.clusters)


def main(out: str = "runs/sinkhorn", *overrides: str) -> None:
    """Train the recipe ``digits`` with our constraint instead of SeCu's, and print the scores."""
    config = load_config("digits", ["constraint.kind=none", *overrides])
    images, run = load("digits", "all"), Run.create(Path(out), config)
    model = train(config, images, run, device="cpu", listener=WithSinkhorn())
    scores = find_results(run, model, images).scores
    assert scores is not None
    print(f"{out}: ACC {scores.acc:.3f}, NMI {scores.nmi:.3f}, ARI {scores.ari:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
