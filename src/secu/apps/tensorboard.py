"""Events for TensorBoard in the run folder: every number of metrics.jsonl, and the exemplars at the end."""

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from secu.base import processes
from secu.base.errors import UserError
from secu.train.listener import Listener, Listeners
from secu.train.place import EVENTS, NEXT
from secu.train.run import Run

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Listener):
    """Writes the events of a run.

    The events of a resumed run are written anew from its metrics.jsonl, so that no epoch appears twice, even if it was
    interrupted between an epoch and its checkpoint. A new run gets its events when it is put into place.
    """

    def __init__(self, path: Path) -> None:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError:
            raise UserError("--tensorboard: needs the package tensorboard: pip install 'secu[tensorboard]'") from None
        self.path = path
        self.writer: SummaryWriter | None = None
        self.waiting: list[dict[str, Any]] = []  # records that are not written yet

    def started(self, *, engine: str, device: str, epochs: int, epochs_done: int, steps: int) -> None:
        """Begin with the epochs that are done already."""
        self._close()
        self.waiting = [] if self._is_hidden() else Run(self.path).metrics()
        self.epochs = epochs
        self.begun = time.time() - (self.waiting[-1]["seconds"] if self.waiting else 0)
        self._write()

    def epoch_ended(self, record: dict[str, Any], losses: dict[str, float]) -> None:
        """Write the numbers of an epoch."""
        self.waiting.append(record)
        self._write()

    def ended(self) -> None:
        """Write what is left, and the exemplars of a finished run."""
        self._write()
        sheet = self.path / "exemplars.png"
        if self.writer is not None and Run(self.path).finished and sheet.is_file():
            with Image.open(sheet) as image:
                pixels = np.asarray(image.convert("RGB"))
            self.writer.add_image("exemplars", pixels, self.epochs - 1, dataformats="HWC")
        self._close()

    def _is_hidden(self) -> bool:
        """Return whether the run is new and not in its place yet, where the run that it replaces may still be."""
        return (self.path / NEXT).is_dir()

    def _write(self) -> None:
        """Write the waiting records, if the run is in its place."""
        if self._is_hidden() or not self.waiting:
            return
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            shutil.rmtree(self.path / EVENTS, ignore_errors=True)  # all earlier events of the run
            # A running TensorBoard forgets what it has read before: all steps from 0.
            self.writer = SummaryWriter(str(self.path / EVENTS), purge_step=0)
        for record in self.waiting:
            for name, value in record.items():
                if name != "epoch":
                    self.writer.add_scalar(name, value, record["epoch"], self.begun + record["seconds"])
        self.waiting = []
        self.writer.flush()

    def _close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def with_tensorboard(wanted: bool, path: Path, *listeners: Listener) -> Listener:
    """Return the listeners as one and, if wanted, with events for TensorBoard, written by the main process alone."""
    return Listeners(*listeners, *([TensorBoard(path)] if wanted and processes.is_main() else []))
