"""One run during training: its method, its step, and its records and checkpoints."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secu.base import collectives, processes
from secu.base.errors import UserError
from secu.cluster.metrics import score_known
from secu.config import Config
from secu.data import Images
from secu.methods import Conclusion, build_method
from secu.settings import flatten
from secu.train.checkpoint import Checkpoint, copied, load_method, load_tensors, model_tensors, on_host, select
from secu.train.clock import Clock
from secu.train.device import name_of, versions
from secu.train.feed import Feed, ResidentFeed
from secu.train.listener import Listener
from secu.train.place import BEST, MODEL
from secu.train.run import Run
from secu.train.step import Step

AS_GOOD = 0.05  # an epoch counts as good if its label-free score is within this margin of the best


class Session:
    """A run being trained. Building one writes nothing; ``begin`` creates or opens its folder.

    ``command`` is the secu command whose --resume continues the run, shown in hints. ``feed`` are inputs that are
    already on the device, shared with another run; ``beside`` is the number of other runs that train side by side.
    """

    def __init__(
        self,
        config: Config,
        images: Images,
        out: Path,
        device: torch.device,
        engine: str,
        *,
        command: str,
        listener: Listener,
        resume: bool = False,
        feed: Feed | None = None,
        beside: int = 0,
    ) -> None:
        self.config = config
        self.images = images
        self.run = Run(out)
        self.device = device
        self.engine = engine
        self.command = command
        self.listener = listener
        self.resumed = resume and self.run.has_checkpoint()
        self.beside = beside
        self.method = build_method(config, len(images), images.shape, device)
        self.method.take_hints(images)
        self.step = Step(self.method, images, device, compiled=engine != "eager", feed=feed)
        self.epochs_done = 0
        self.seconds = 0.0
        self.best_score = -math.inf
        self.best: dict[str, Tensor] | None = None  # candidate for the final model, not yet on disk
        self.best_epoch = 0
        self.kept: dict[str, Any] = {}
        self.amended: list[str] = []
        self.last: Checkpoint | None = None
        self._prepare()
        collectives.copy_from_main({**self.method.state_dict(), **self.step.momentum()})
        self.seconds_before = self.seconds

    def _prepare(self) -> None:
        """Restore the last checkpoint, or initialize the method."""
        if self.resumed:
            checkpoint = Checkpoint.load(self.run)
            checkpoint.restore(self.run, self.method, self.step)
            self.epochs_done = checkpoint.epochs_done
            self.seconds = checkpoint.seconds
            self.best_score = float(self.run.metadata(BEST).get("best", -math.inf))
            self.amended = self.run.record().get("amended", [])
        first = None
        if self.config.init_from is not None and (not self.resumed or self.method.needs_first_run):
            first = load_method(Run.open(Path(self.config.init_from)), self.device)
        self.method.prepare(self.images, first, resumed=self.resumed)
        if (inputs := self.method.inputs()) is not None:
            self.step.feed = ResidentFeed(inputs)

    @property
    def place(self) -> tuple[int, int]:
        """Number of complete epochs, and of steps in the epoch in progress if the run is resumed in its middle."""
        return self.epochs_done, self.step.steps_resumed

    @property
    def finished(self) -> bool:
        """Whether all epochs are done."""
        return self.epochs_done == self.config.optim.total_epochs

    def begin(self) -> None:
        """Begin a new run or continue the one in the folder, and report the start of training.

        Of several processes, only the main one writes to the folder.
        """
        if processes.is_main():
            if not self.resumed:
                self.run = Run.begin(self.run.path, self.config)
            self.run.keep_metrics(self.epochs_done)
        self.listener.started(
            engine=self.engine,
            device=str(self.device),
            epochs=self.config.optim.total_epochs,
            epochs_done=self.epochs_done,
            steps=len(self.step.sizes),
        )

    def end_epoch(self, losses: dict[str, float], clock: Clock, test: Images | None) -> None:
        """Record an epoch, with scores if they are due."""
        for name, loss in losses.items():
            if not math.isfinite(loss):
                where = f"after epoch {self.epochs_done} of {self.run.path}"
                advice = "lower optim.lr or centers.lr"
                if self.step.loss_scale != 1:
                    advice += ", or set optim.precision=bf16"
                raise UserError(f"{name}: {loss} {where} is not finite; {advice}")
        self.seconds = self.seconds_before + clock.seconds
        if (broken := self.images.broken) is not None:
            broken.share()
            if line := broken.report():
                self.listener.note(f"warning: {line}")
        record = {
            "epoch": self.epochs_done,
            **losses,
            "lr": float(self.step.rates[0]),
            **(self.method.record() if processes.is_main() else {}),
            "epoch_seconds": round(clock.epoch_seconds, 3),
            "seconds": round(self.seconds, 3),
        }
        self.epochs_done += 1
        self.method.end_epoch(self.epochs_done / self.config.optim.total_epochs)
        every = self.config.evaluate_every
        if self.finished or (every and self.epochs_done % every == 0):
            record |= self.scores_on(test)
        if processes.is_main():
            self._keep_if_good(record)
            self.run.add_metrics(record)
            self.listener.epoch_ended(record, losses)

    def scores_on(self, test: Images | None) -> dict[str, float]:
        """Return ACC, NMI and ARI on the test images, if their true labels are known."""
        if test is None or test.targets is None:
            return {}
        clusters = self.method.predictor().predict_together(test).cluster
        rows = list(test.readable_rows()) if test.broken else slice(None)
        scores = score_known(test.targets[rows], clusters[rows])
        return {} if scores is None else scores._asdict()

    def _keep_if_good(self, record: dict[str, Any]) -> None:
        """Keep a copy of the model unless its label-free score is clearly below the best one so far."""
        score = self.method.score(record)
        if score is None:
            return
        self.best_score = max(score, self.best_score)
        if score >= self.best_score - AS_GOOD:
            self.best = copied(select(self.method.state_dict(), self.method.trained_tensors))
            self.best_epoch = record["epoch"]

    def finish(self, test: Images | None) -> None:
        """Restore the model of the last epoch with a good label-free score, if the method has such a score."""
        self._write_best()
        epoch = processes.agree(self.run.metadata(BEST).get("epoch") if processes.is_main() else None)
        if epoch is None:
            return
        if processes.is_main():
            load_tensors(self.method, self.run.load_model(BEST), str(self.run.path))
        collectives.copy_from_main(self.method.state_dict())
        self.kept = {"epoch": int(epoch), **self.scores_on(test)}

    def _write_best(self) -> None:
        if self.best is not None:
            noted = {"epoch": str(self.best_epoch), "best": str(self.best_score)}
            self.run.save_model(BEST, on_host(self.best), noted)
            self.best = None

    def remember(self) -> None:
        """Copy the state after an epoch, so that an interrupted epoch does not corrupt the checkpoint."""
        self.last = Checkpoint.take(self.method, self.step, self.epochs_done, self.seconds)

    def remember_middle(self, clock: Clock) -> None:
        """Copy the state between two steps of an epoch."""
        seconds = self.seconds_before + clock.elapsed
        self.last = Checkpoint.take(self.method, self.step, self.epochs_done, seconds, in_epoch=True)

    def save(self) -> None:
        """Write the best model, then the last checkpoint; resuming needs both. A new run replaces the old one now."""
        if not processes.is_main():
            return
        assert self.last is not None
        self._write_best()
        self.last.save(self.run, self.method.trained_tensors)
        self.describe()
        self.run.put_in_place()

    def describe(self) -> None:
        """Write run.json, which describes the last checkpoint."""
        if not processes.is_main():
            return
        epochs_done = self.last.epochs_done if self.last else self.epochs_done
        seconds = self.last.seconds if self.last else self.seconds
        records = self.run.metrics()[:epochs_done]
        facts = {
            "finished": epochs_done >= self.config.optim.total_epochs,
            "epochs_done": epochs_done,
            "seconds": round(seconds, 3),
            "seed": self.config.seed,
            "command": self.command,
            "losses": list(self.step.loss_names) or self.run.record().get("losses", []),
            "device": name_of(self.device),
            "engine": self.engine,
            "threads": torch.get_num_threads(),  # affects rounding on a CPU
            "beside": self.beside,  # runs that shared the device and so contributed to the seconds
            "versions": versions(),
            "last_epoch": records[-1] if records else {},
        }
        facts |= {"processes": processes.world()} if processes.world() > 1 else {}
        facts |= {"launch": processes.launch()} if processes.launch() else {}
        facts |= {"kept": self.kept} if self.kept else {}
        facts |= {"amended": self.amended} if self.amended else {}
        self.run.write_record(facts)

    def conclude(self, test: Images | None) -> Conclusion:
        """Let the method finish, and write its summary; of several processes, only the main one does."""
        scored = None if test is self.images else test
        conclusion = self.method.conclude(self.images, scored) if processes.is_main() else Conclusion()
        if processes.agree(conclusion.restored):
            collectives.copy_from_main(select(self.method.state_dict(), self.method.trained_tensors))
            self.kept = {"epoch": None, **self.scores_on(test)}
        if not processes.is_main():
            return conclusion
        if conclusion.settings:
            self.run.save_model(MODEL, model_tensors(self.method))  # before the config refers to anything new in it
            self.amended = sorted(flatten(conclusion.settings))
            self.describe()  # before the config changes: resuming refuses changes that run.json does not list
            self.config = self.method.config = self.run.amend(conclusion.settings)
        summary = dict(conclusion.summary)
        warnings = list(conclusion.warnings)
        if self.images.broken:
            summary["unreadable"] = {"images": len(self.images.broken), "share": self.images.broken.share_of_all}
            warnings.append(self.images.broken.warning())
        if summary or warnings:
            self.run.write_outcome({**summary, "warnings": warnings})
        return conclusion
