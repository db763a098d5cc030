"""Small real runs on the CPU, for the tests of training."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import torch

from secu.config import Config
from secu.data import Images, load
from secu.settings import load_config, with_shape
from secu.train.clock import Clock
from secu.train.listener import Listener
from secu.train.loop import train
from secu.train.run import Run
from secu.train.session import Session

CPU = torch.device("cpu")
TINY = ("heads=[3,5]", "optim.epochs=3", "optim.warmup_epochs=1", "optim.batch_size=48", "encoder.dim=16")
EPOCHS = 4
STEPS = 5  # of an epoch of 200 images


@cache
def digits(count: int = 200) -> Images:
    """Return the first digits of scikit-learn's data set, 8 by 8 pixels."""
    everything = load(load_config("digits").data)
    assert everything.tensor is not None
    assert everything.targets is not None
    return Images(everything.tensor[:count], everything.targets[:count])


def config_of(*overrides: str, recipe: str = "digits") -> Config:
    """Return the settings of a run that takes half a second."""
    return load_config(recipe, (*TINY, *overrides))


def new_run(path: Path, config: Config, *, force: bool = False) -> Run:
    """Return a new run that is in its place, for tests that write its files themselves."""
    return Run.create(path, config, force=force).put_in_place()


def open_session(
    path: Path,
    config: Config,
    images: Images,
    *,
    listener: Listener | None = None,
    resume: bool = False,
    engine: str = "eager",
) -> Session:
    """Return a session as the pipeline opens it."""
    return Session(
        with_shape(config, images.shape),
        images,
        path,
        CPU,
        engine,
        command="train digits",
        listener=listener or Listener(),
        resume=resume,
    )


def trained(
    path: Path,
    config: Config,
    images: Images,
    *,
    test: Images | None = None,
    time_limit: float = math.inf,
    resume: bool = False,
    force: bool = False,
    **options: Any,
) -> Session:
    """Train in a folder, as the pipeline does, and return the session."""
    Run.check_start(path, config, resume=resume, force=force)
    session = open_session(path, config, images, resume=resume, **options)
    session.begin()
    train([session], Clock(time_limit), test)
    return session


def records(run: Run) -> list[dict[str, Any]]:
    """Return the run's metrics without times."""
    return [{key: value for key, value in record.items() if "seconds" not in key} for record in run.metrics()]


def model_bytes(run: Run) -> bytes:
    """Return the model file."""
    return (run.path / "model.safetensors").read_bytes()


def assert_same(ours: Run, theirs: Run) -> None:
    """Compare two runs bit for bit: the model, what resuming needs, and what was recorded on the way."""
    assert model_bytes(ours) == model_bytes(theirs)
    states = [run.load_state() for run in (ours, theirs)]
    for part in ("tensors", "momentum"):
        assert states[0][part].keys() == states[1][part].keys()
        for key, value in states[0][part].items():
            assert torch.equal(value, states[1][part][key]), key
    assert states[0]["epochs_done"] == states[1]["epochs_done"]
    assert records(ours) == records(theirs)


class Interrupting(Listener):
    """Presses Ctrl-C in the middle of an epoch, or at its end, before a checkpoint can be written."""

    def __init__(self, *, step: int | None = None, epoch: int | None = None) -> None:
        self.step = step
        self.epoch = epoch
        self.steps = 0

    def stepped(self) -> None:
        self.steps += 1
        if self.steps == self.step:
            raise KeyboardInterrupt

    def epoch_ended(self, record: dict[str, Any], losses: dict[str, float]) -> None:
        if record["epoch"] == self.epoch:
            raise KeyboardInterrupt
