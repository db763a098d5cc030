"""A first run for the tests of self-labeling: small, and with clusters that mean something."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from secu.data import Images
from secu.methods.predictor import Predictions
from secu.settings import load_config
from secu.train.checkpoint import load_predictor, select
from secu.train.run import Run
from small_runs import CPU, digits, trained

KINDS = (0, 1, 4, 6)
TINY = ("heads=[4,6]", "optim.epochs=1", "optim.warmup_epochs=0", "encoder.dim=16")
SHORT: dict[str, Any] = {
    "optim": {"epochs": 3},
    "selflabel": {"warmup_epochs": 1, "confidence": 0.6, "keep_best": False},
}
COUNT = 240
STEPS = 8  # of an epoch


@cache
def few_digits() -> Images:
    """Return 240 digits of four kinds."""
    everything = digits(1797)
    chosen = torch.isin(everything.targets, torch.tensor(KINDS)).nonzero()[:COUNT, 0]
    return Images(everything.tensor[chosen], everything.targets[chosen])


def make_first(path: Path, *overrides: str) -> Run:
    """Make the run to start from.

    It is taught the true classes for a moment, as learning clusters that mean something would take long.
    """
    images = few_digits()
    session = trained(path, load_config("digits", [*TINY, *overrides]), images, test=images)
    method = session.method
    classes = torch.full((10,), -1)
    classes[list(KINDS)] = torch.arange(len(KINDS))
    optimizer = torch.optim.SGD(method.encoder.parameters(), 0.05, 0.9)
    numbers = torch.Generator().manual_seed(0)
    for _ in range(20):
        for index in torch.randperm(COUNT, generator=numbers).split(40):
            views = method.views.render(images.tensor[index], method.views.draw(len(index), numbers)).flatten(0, 1)
            logits = method.encoder(views) @ method.clustering.head().T / 0.2
            optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), classes[images.targets[index]].repeat(2)).backward()
            optimizer.step()
    session.run.save_model("model.safetensors", select(method.state_dict(), method.trained_tensors))
    return session.run


def predictions_of(run: Run, images: Images) -> Predictions:
    """Return what the model in a run's folder says about images."""
    return load_predictor(run, CPU).predict(images)
