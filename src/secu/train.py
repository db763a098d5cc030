"""Step 11 of the tour: the one training loop, for the command line, the estimator and everybody else."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from secu.checkpoint import Trained, build, start_from
from secu.config import Config
from secu.data import ImageSource
from secu.engine import Engine, choose_engine, fastest_convolutions, load_compiler
from secu.errors import UserError
from secu.feed import ResidentFeed
from secu.files import void
from secu.run import Run
from secu.training import Job, Listener, Training, nothing

CHECKPOINT_SECONDS = 60  # what a crash may cost, besides the epoch in flight


def choose_device(wanted: str) -> torch.device:
    """Return the device to train on: ``auto`` is the best there is."""
    available = ["cpu"]
    if torch.backends.mps.is_available():
        available.insert(0, "mps")
    if torch.cuda.is_available():
        available.insert(0, "cuda")
    if wanted == "auto":
        return torch.device(available[0])
    if wanted not in available:
        raise UserError(f"device: {wanted!r} is not available here; valid: auto, {', '.join(available)}")
    return torch.device(wanted)


def check(config: Config, images: ImageSource, device: str) -> None:
    """Raise what would stop a training before its first step, while nothing is written or replaced yet."""
    choose_engine(config.engine, choose_device(device))
    if config.selflabel and config.init_from is None:
        raise UserError("selflabel: there are no labels to start from; use the command secu selflabel")
    model = build(config, len(images), images.shape, torch.device("cpu"))
    if config.init_from is not None:
        start_from(Run.open(Path(config.init_from)), model)


def check_alike(configs: Sequence[Config]) -> None:
    """Raise what keeps configs from being trained side by side."""
    if any(config.data != configs[0].data for config in configs):
        raise UserError("runs side by side must train on the same data")
    if len({(config.optim.total_epochs, config.optim.batch_size, config.engine) for config in configs}) > 1:
        raise UserError("runs side by side must have the same batch size, number of epochs and engine")


def train(
    config: Config,
    images: ImageSource,
    run: Run,
    *,
    test: ImageSource | None = None,
    device: str = "auto",
    resume: bool = False,
    time_limit: float = math.inf,
    listener: Listener | None = None,
    prepare: Callable[[Trained], None] = void,
    after_epoch: Callable[[Trained], dict[str, float]] = nothing,
) -> Trained:
    """Train a config on images and leave everything in the run's folder.

    Args:
        config: What to do.
        images: The training images; their targets are not read.
        run: The folder, new or (with ``resume``) with a checkpoint in it.
        test: Images to score on, every ``config.evaluate_every`` epochs and at the end.
        device: auto, cuda, mps or cpu.
        resume: Go on from the last checkpoint.
        time_limit: Seconds after which training stops cleanly, with a checkpoint; no epoch is begun that would, with
            scores and a checkpoint, end later.
        listener: Is told about progress.
        prepare: Is called with the new model before its first epoch, not when a run is resumed.
        after_epoch: Is called with the model after every epoch; may adjust it, and returns what to add to its record.

    Returns:
        The model; ``finished`` says whether the time limit came first.
    """
    job = Job(config, run, listener or Listener(), prepare, after_epoch)
    return train_together([job], images, test=test, device=device, resume=resume, time_limit=time_limit)[0]


@fastest_convolutions()
def train_together(
    jobs: Sequence[Job],
    images: ImageSource,
    *,
    test: ImageSource | None = None,
    device: str = "auto",
    resume: bool = False,
    time_limit: float = math.inf,
) -> list[Trained]:
    """Train several configs on the same images, step by step side by side: ``train`` for each of them.

    On a GPU all steps are one captured graph, which takes less time than one training after the other.
    """
    started = time.monotonic()
    place = choose_device(device)
    kind = choose_engine(jobs[0].config.engine, place)
    check_alike([job.config for job in jobs])
    load_compiler(kind)
    trainings: list[Training] = []
    for job in jobs:
        feed = trainings[0].step.feed if trainings else None  # images on the device serve all
        shared = feed if isinstance(feed, ResidentFeed) else None
        trainings.append(Training(job, images, place, kind, resume=resume, feed=shared, beside=len(jobs) - 1))
    models = [training.model for training in trainings]
    if len({model.epochs_done for model in models}) > 1:
        raise UserError("runs side by side must have the same number of epochs behind them; resume them one by one")
    engine = Engine([training.step for training in trainings], kind)
    for training in trainings:
        training.begin()
        if training.model.finished:  # a run that is resumed may have stopped just before it was described
            training.finish(test)
            training.describe()
    saved, longest_end = time.monotonic(), 0.0
    try:
        while not models[0].finished:
            began = time.monotonic()
            losses = engine.epoch(models[0].epochs_done, jobs[0].listener.stepped)
            trained = time.monotonic()
            for training, values in zip(trainings, losses, strict=True):
                training.end_epoch(values, trained - began, trained - started, test)
            if models[0].finished:
                for training in trainings:
                    training.finish(test)
            for training in trainings:
                training.remember()
            if save_due := models[0].finished or time.monotonic() - saved > CHECKPOINT_SECONDS:
                saved = save_all(trainings)
            ended = time.monotonic()
            longest_end = max(longest_end, ended - trained)  # scores and a checkpoint, which the next may need, too
            if ended - started + (trained - began) + longest_end > time_limit:
                if not save_due:
                    save_all(trainings)
                break
    except KeyboardInterrupt:
        save_all(trainings)
        raise
    return models


def save_all(trainings: Sequence[Training]) -> float:
    """Write a checkpoint of each, unless an interruption came before all had ended the same epoch; return the time."""
    if len({training.last.state["epochs_done"] if training.last else 0 for training in trainings}) == 1:
        for training in trainings:
            if training.last:
                training.save()
    return time.monotonic()
