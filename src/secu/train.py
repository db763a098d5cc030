"""Step 10 of the tour: the one training loop, for the command line, the estimator and everybody else."""

import math
import platform
import time
from pathlib import Path
from typing import Any

import torch

import secu
from secu.checkpoint import Trained, build, restore, save, start_from
from secu.config import Config
from secu.data import ImageSource
from secu.engine import Step, choose_engine
from secu.errors import UserError
from secu.evaluate import embed, predict, score_clusters
from secu.run import Run, write_json

CHECKPOINT_SECONDS = 60  # what an interruption may cost, besides the epoch in flight


class Listener:
    """What a training run tells; override what you want to hear."""

    def started(self, *, engine: str, device: str, model: Trained, steps: int) -> None:
        """Training begins: the model's epochs, some of them maybe done already, have so many steps each."""

    def stepped(self) -> None:
        """One step was issued."""

    def epoch_ended(self, record: dict[str, Any]) -> None:
        """One epoch is over; the record is what goes to metrics.jsonl."""


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
) -> Trained:
    """Train a config on images and leave everything in the run's folder.

    Args:
        config: What to do.
        images: The training images; their targets are not read.
        run: The folder, new or (with ``resume``) with a checkpoint in it.
        test: Images to score on, every ``config.evaluate_every`` epochs and at the end.
        device: auto, cuda, mps or cpu.
        resume: Go on from the last checkpoint.
        time_limit: Seconds after which training stops cleanly, with a checkpoint.
        listener: Is told about progress.

    Returns:
        The model; ``finished`` says whether the time limit came first.
    """
    started, listener = time.monotonic(), listener or Listener()
    place = choose_device(device)
    engine = choose_engine(config.engine, place)
    model = build(config, len(images), images.shape, place)
    step = Step(config, images, model.augmentation, model.encoder, model.clustering, place, engine)
    if resume and run.has_checkpoint():
        restore(run, model, step)
    elif config.init_from is not None:
        start_from(Run.open(Path(config.init_from)), model)
    run.keep_metrics(model.epochs_done)
    before, saved = model.seconds, time.monotonic()
    listener.started(engine=engine, device=str(place), model=model, steps=len(step.sizes))
    while not model.finished:
        began = time.monotonic()
        record = train_epoch(model, step, listener)
        now = time.monotonic()
        model.seconds = before + now - started
        record |= {"epoch_seconds": round(now - began, 3), "seconds": round(model.seconds, 3)}
        if is_due(config, model.epochs_done):
            record |= scores_on(model, test)
        run.add_metrics(record)
        listener.epoch_ended(record)
        out_of_time = now - started + (now - began) > time_limit
        if model.finished or out_of_time or now - saved > CHECKPOINT_SECONDS:
            save(run, model, step)
            saved = time.monotonic()
        if out_of_time:
            break
    describe(run, model, engine, place)
    return model


def train_epoch(model: Trained, step: Step, listener: Listener) -> dict[str, Any]:
    """Train the next epoch and return its record."""
    labels = model.clustering.labels[:, 0].clone()
    loss, center_loss = step.epoch(model.epochs_done, listener.stepped)
    if not math.isfinite(loss + center_loss):
        raise UserError(f"loss: {loss} after epoch {model.epochs_done} is not finite; lower optim.lr or centers.lr")
    sizes = model.clustering.sizes()
    record = {
        "epoch": model.epochs_done,
        "loss": loss,
        "center_loss": center_loss,
        "lr": float(step.rates[0]),
        "largest": int(sizes.max()),
        "smallest": int(sizes.min()),
        "changed": float((model.clustering.labels[:, 0] != labels).float().mean()),
    }
    model.epochs_done += 1
    return record


def is_due(config: Config, epochs_done: int) -> bool:
    """Say whether this epoch ends with scores on the test images."""
    every = config.evaluate_every
    return epochs_done == config.optim.total_epochs or (every > 0 and epochs_done % every == 0)


def scores_on(model: Trained, test: ImageSource | None) -> dict[str, float]:
    """Return ACC, NMI and ARI of the first head on the test images, if their true labels are known."""
    if test is None:
        return {}
    embeddings = embed(model.encoder, model.augmentation, test)
    predictions = predict(embeddings, model.clustering.head(), model.config.loss.temperature)
    scores = score_clusters(test, predictions.cluster)
    return {} if scores is None else scores._asdict()


def describe(run: Run, model: Trained, engine: str, device: torch.device) -> None:
    """Write run.json: where the numbers of this run come from."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    records = run.metrics()
    write_json(
        run.path / "run.json",
        {
            "finished": model.finished,
            "epochs_done": model.epochs_done,
            "seconds": round(model.seconds, 3),
            "seed": model.config.seed,
            "device": f"{device.type} ({name})",
            "engine": engine,
            "versions": {"secu": secu.__version__, "torch": torch.__version__, "python": platform.python_version()},
            "last_epoch": records[-1] if records else {},
        },
    )
