"""Step 10 of the tour: the one training loop, for the command line, the estimator and everybody else."""

import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import secu
from secu.checkpoint import Trained, build, load_weights, restore, save, start_from
from secu.config import Config
from secu.data import ImageSource
from secu.engine import ClusterStep, Engine, choose_engine
from secu.errors import UserError
from secu.evaluate import embed, predict, score_clusters
from secu.run import Run, void, write_json

CHECKPOINT_SECONDS = 60  # what an interruption may cost, besides the epoch in flight


class Listener:
    """What a training run tells; override what you want to hear."""

    def started(self, *, engine: str, device: str, model: Trained, steps: int) -> None:
        """Training begins: the model's epochs, some of them maybe done already, have so many steps each."""

    def stepped(self) -> None:
        """One step was issued."""

    def epoch_ended(self, record: dict[str, Any]) -> None:
        """One epoch is over; the record is what goes to metrics.jsonl."""

    def busy(self, what: str) -> None:
        """Training is over, and something else takes its time: ``what`` says in plain words."""

    def ended(self) -> None:
        """Everything is written; another run may follow."""


def nothing(model: Trained) -> dict[str, float]:
    """Observe nothing."""
    return {}


@dataclass(frozen=True)
class Job:
    """A config to train, where, who is told, and what is done to the model before and between epochs."""

    config: Config
    run: Run
    listener: Listener
    prepare: Callable[[Trained], None] = void
    observe: Callable[[Trained], dict[str, float]] = nothing


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
    model = build(config, len(images), images.shape, torch.device("cpu"))
    if config.init_from is not None:
        start_from(Run.open(Path(config.init_from)), model)


def check_alike(configs: Sequence[Config]) -> None:
    """Raise what keeps configs from being trained side by side."""
    if any(config.data != configs[0].data for config in configs):
        raise UserError("runs side by side must train on the same data")
    if len({(config.optim.total_epochs, config.optim.batch_size) for config in configs}) > 1:
        raise UserError("runs side by side must have the same batch size and number of epochs")


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
    observe: Callable[[Trained], dict[str, float]] = nothing,
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
        observe: Is called with the model after every epoch, and returns what to add to its record.

    Returns:
        The model; ``finished`` says whether the time limit came first.
    """
    job = Job(config, run, listener or Listener(), prepare, observe)
    return train_together([job], images, test=test, device=device, resume=resume, time_limit=time_limit)[0]


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
    trainings = [Training(job, images, place, kind, resume=resume) for job in jobs]
    models = [training.model for training in trainings]
    if len({model.epochs_done for model in models}) > 1:
        raise UserError("runs side by side must have the same number of epochs behind them; resume them one by one")
    engine = Engine([training.step for training in trainings], kind)
    for training in trainings:
        training.begin()
    saved, longest_end = time.monotonic(), 0.0
    while not models[0].finished:
        began = time.monotonic()
        losses = engine.epoch(models[0].epochs_done, jobs[0].listener.stepped)
        trained = time.monotonic()
        for training, values in zip(trainings, losses, strict=True):
            training.end_epoch(values, trained - began, trained - started, test)
        if save_due := models[0].finished or time.monotonic() - saved > CHECKPOINT_SECONDS:
            saved = save_all(trainings)
        ended = time.monotonic()
        longest_end = max(longest_end, ended - trained)  # scores and a checkpoint, which the next epoch may need, too
        if ended - started + (trained - began) + longest_end > time_limit:
            if not save_due:
                save_all(trainings)
            break
    for training in trainings:
        describe(training.run, training.model, kind, place, beside=len(jobs) - 1)
    return models


def save_all(trainings: "Sequence[Training]") -> float:
    """Write a checkpoint of each, and return the time."""
    for training in trainings:
        save(training.run, training.model, training.step)
    return time.monotonic()


class Training:
    """One run in the making: its model, its step, and what is written down after each epoch."""

    def __init__(self, job: Job, images: ImageSource, device: torch.device, engine: str, *, resume: bool) -> None:
        self.run, self.listener, self.observe = job.run, job.listener, job.observe
        self.engine, self.device = engine, device
        self.model = model = build(job.config, len(images), images.shape, device)
        self.step = ClusterStep(
            *(job.config, images, model.augmentation, model.encoder, model.clustering, device),
            compiled=engine != "eager",
        )
        if resume and self.run.has_checkpoint():
            restore(self.run, model, self.step)
        else:
            if job.config.init_from is not None:
                start_from(Run.open(Path(job.config.init_from)), model)
            job.prepare(model)
        self.seconds_before = model.seconds
        self.labels = torch.empty(0)

    def begin(self) -> None:
        """Forget records of epochs that the checkpoint does not have, and say that training begins."""
        self.run.keep_metrics(self.model.epochs_done)
        self.labels = self.model.clustering.labels[:, 0].clone()
        steps = len(self.step.sizes)
        self.listener.started(engine=self.engine, device=str(self.device), model=self.model, steps=steps)

    def end_epoch(
        self, losses: tuple[float, float], epoch_seconds: float, seconds: float, test: ImageSource | None
    ) -> None:
        """Write an epoch's record, with scores if they are due."""
        model, labels = self.model, self.model.clustering.labels[:, 0]
        if not math.isfinite(sum(losses)):
            loss, epoch = losses[0], model.epochs_done
            raise UserError(f"loss: {loss} after epoch {epoch} is not finite; lower optim.lr or centers.lr")
        sizes = model.clustering.sizes()
        model.seconds = self.seconds_before + seconds
        record = {
            "epoch": model.epochs_done,
            "loss": losses[0],
            "center_loss": losses[1],
            "lr": float(self.step.rates[0]),
            "largest": int(sizes.max()),
            "smallest": int(sizes.min()),
            "changed": float((labels != self.labels).float().mean()),
            "epoch_seconds": round(epoch_seconds, 3),
            "seconds": round(model.seconds, 3),
        }
        record |= model.clustering.record() | self.observe(model)
        self.labels = labels.clone()
        model.epochs_done += 1
        if model.config.selflabel and model.config.selflabel.keep_best:
            keep_best(self.run, model, record)
        if is_due(model.config, model.epochs_done):
            record |= scores_on(model, test)
        self.run.add_metrics(record)
        self.listener.epoch_ended(record)


def keep_best(run: Run, model: Trained, record: dict[str, Any]) -> None:
    """Keep the model of the best epoch so far, by its label-free score, and end with that one."""
    records = [*run.metrics(), record]
    best = max(records, key=lambda epoch: epoch["information"])
    if best is record:
        run.save_model("best.safetensors", {"encoder": model.encoder, "clustering": model.clustering})
    if model.finished:
        load_weights(run, "best.safetensors", model)
        record["kept_epoch"] = best["epoch"]


def is_due(config: Config, epochs_done: int) -> bool:
    """Say whether this epoch ends with scores on the test images."""
    every = config.evaluate_every
    return epochs_done == config.optim.total_epochs or (every > 0 and epochs_done % every == 0)


def scores_on(model: Trained, test: ImageSource | None) -> dict[str, float]:
    """Return ACC, NMI and ARI of the first head on the test images, if their true labels are known."""
    if test is None:
        return {}
    embeddings = embed(model.encoder, model.augmentation, test)
    predictions = predict(embeddings, model.clustering.head(), model.config.loss.prediction_temperature)
    scores = score_clusters(test, predictions.cluster)
    return {} if scores is None else scores._asdict()


def describe(run: Run, model: Trained, engine: str, device: torch.device, beside: int) -> None:
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
            "beside": beside,  # runs that took turns with this one on the device, so that its seconds are shared
            "versions": {"secu": secu.__version__, "torch": torch.__version__, "python": platform.python_version()},
            "last_epoch": records[-1] if records else {},
        },
    )
