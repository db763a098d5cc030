"""Step 10 of the tour: one run in the making, from its model to what is written down of each epoch."""

import copy
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import secu
from secu.checkpoint import Snapshot, Trained, build, load_weights, restore, snapshot, start_from
from secu.config import Config
from secu.data import ImageSource
from secu.errors import UserError
from secu.evaluate import embed, predict, score_clusters
from secu.feed import ResidentFeed
from secu.files import void, write_json
from secu.run import Run
from secu.steps import step_of

BEST = "best.safetensors"  # the model of self-labeling's last good epoch so far
AS_GOOD = 0.05  # of the label-free score: an epoch that is no further under the best one is taken for as good


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

    def warned(self, warning: str) -> None:
        """Everything is written, and this is to be known before the clusters are used."""

    def ended(self) -> None:
        """Everything is written; another run may follow."""


def nothing(model: Trained) -> dict[str, float]:
    """Add nothing."""
    return {}


@dataclass(frozen=True)
class Job:
    """A config to train, where, who is told, and what is done to the model before and between epochs."""

    config: Config
    run: Run
    listener: Listener
    prepare: Callable[[Trained], None] = void
    after_epoch: Callable[[Trained], dict[str, float]] = nothing


class Good(NamedTuple):
    """A copy of a model that may be the one to end with, and what is noted beside it; not on disk yet."""

    parts: dict[str, nn.Module]
    noted: dict[str, str]


class Training:
    """One run in the making: its model, its step, and what is written down after each epoch."""

    def __init__(
        self,
        job: Job,
        images: ImageSource,
        device: torch.device,
        engine: str,
        *,
        resume: bool,
        feed: ResidentFeed | None = None,
        beside: int = 0,
    ) -> None:
        self.run, self.listener, self.after_epoch = job.run, job.listener, job.after_epoch
        self.engine, self.device, self.beside = engine, device, beside
        self.model = model = build(job.config, len(images), images.shape, device)
        self.step = step_of(job.config)(
            *(job.config, images, model.augmentation, model.encoder, model.clustering, device),
            compiled=engine != "eager",
            feed=feed,
        )
        if resume and self.run.has_checkpoint():
            restore(self.run, model, self.step)
        else:
            if job.config.init_from is not None:
                start_from(Run.open(Path(job.config.init_from)), model)
            job.prepare(model)
        self.seconds_before = model.seconds
        self.last: Snapshot | None = None
        self.good: Good | None = None
        self.best_score = float(self.run.metadata(BEST).get("best", -math.inf))
        self.kept: dict[str, Any] = {}
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
        if wrong := [loss for loss in losses if not math.isfinite(loss)]:
            where = f"after epoch {model.epochs_done} of {self.run.path}"
            raise UserError(f"loss: {wrong[0]} {where} is not finite; lower optim.lr or centers.lr")
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
        record |= model.clustering.record() | self.after_epoch(model)
        self.labels = labels.clone()
        model.epochs_done += 1
        if is_due(model.config, model.epochs_done):
            record |= scores_on(model, test)
        if self.keeps_best:
            self.keep_if_good(record)
        self.run.add_metrics(record)
        self.listener.epoch_ended(record)

    def keep_if_good(self, record: dict[str, Any]) -> None:
        """Keep a copy of the model, unless its label-free score is clearly under the best so far."""
        self.best_score = max(record["information"], self.best_score)
        if record["information"] >= self.best_score - AS_GOOD:
            parts = {"encoder": self.model.encoder, "clustering": self.model.clustering}
            self.good = Good(copy.deepcopy(parts), {"epoch": str(record["epoch"]), "best": str(self.best_score)})

    def finish(self, test: ImageSource | None) -> None:
        """Go back to the last epoch that was good by the label-free score, if that is wanted."""
        if self.keeps_best:
            self.write_good()
            load_weights(self.run, BEST, self.model)
            self.kept = {"epoch": int(self.run.metadata(BEST)["epoch"]), **scores_on(self.model, test)}

    def write_good(self) -> None:
        """Write the model that is kept, if it is not on disk yet."""
        if self.good:
            self.run.save_model(BEST, *self.good)
            self.good = None

    def remember(self) -> None:
        """Copy how things stand after an epoch: what a checkpoint holds, also if the next epoch is interrupted."""
        self.last = copy.deepcopy(snapshot(self.model, self.step))

    def save(self) -> None:
        """Write a checkpoint of what was remembered, and before it what is kept: to resume a run takes both."""
        assert self.last
        self.write_good()
        self.run.save(*self.last)
        self.describe()

    @property
    def keeps_best(self) -> bool:
        """Whether the last epoch is not the one to end with."""
        return self.model.config.selflabel is not None and self.model.config.selflabel.keep_best

    def describe(self) -> None:
        """Write run.json: where the numbers of the last checkpoint come from; the model may be an epoch ahead of it."""
        device, model = self.device, self.model
        state = self.last.state if self.last else snapshot(model, self.step).state
        records = self.run.metrics()[: state["epochs_done"]]
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        facts = {
            "finished": state["epochs_done"] >= model.config.optim.total_epochs,
            "epochs_done": state["epochs_done"],
            "seconds": round(state["seconds"], 3),
            "seed": model.config.seed,
            "device": f"{device.type} ({name or platform.machine()})",
            "engine": self.engine,
            "threads": torch.get_num_threads(),  # on a CPU sums depend on it, in their last digits
            "beside": self.beside,  # runs that took turns with this one on the device, so that its seconds are shared
            "versions": {"secu": secu.__version__, "torch": torch.__version__, "python": platform.python_version()},
            "last_epoch": records[-1] if records else {},
        }
        write_json(self.run.path / "run.json", facts | ({"kept": self.kept} if self.kept else {}))


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
