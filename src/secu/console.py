"""What a person sees while a run goes on: a bar with the time to finish, or plain lines in a log file."""

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.status import Status

from secu.checkpoint import Trained
from secu.data.own import Source, printable
from secu.plan import Plan
from secu.training import Listener

LINE_SECONDS = 30  # between two lines in a log that is not a terminal


class Shown:
    """Something with a bar; use as a context, so that the bar is gone when something goes wrong."""

    bar: Progress
    status: Status | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take away the bar and what stands in its place."""
        self.bar.stop()
        if self.status is not None:
            self.status.stop()


class ProgressListener(Shown, Listener):
    """Shows a training run."""

    def __init__(self, console: Console, name: str = "", *, bar: bool = True) -> None:
        self.console, self.name = console, name
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        quiet = not (bar and console.is_terminal)
        self.bar = Progress(TextColumn("epoch"), *columns, *times, console=console, transient=True, disable=quiet)
        self.steps, self.epochs, self.last_line = 1, 0, 0.0

    def started(self, *, engine: str, device: str, model: Trained, steps: int) -> None:
        """Say where training happens and show the bar."""
        again = f", resumed after {model.epochs_done} epochs" if model.epochs_done else ""
        self.console.print(f"{self.name}training on {device}, engine {engine}{again}")
        self.bar.start()
        self.steps, self.epochs = steps, model.config.optim.total_epochs
        self.task = self.bar.add_task("", total=self.epochs, completed=model.epochs_done, note="")

    def stepped(self) -> None:
        """Move the bar by a fraction of an epoch."""
        self.bar.advance(self.task, 1 / self.steps)

    def epoch_ended(self, record: dict[str, Any]) -> None:
        """Show loss and cluster sizes, and a line that stays for every evaluation; in a log for the last epoch, too."""
        note = f"loss {record['loss']:.3f}  clusters {record['smallest']:,} to {record['largest']:,}"
        self.bar.update(self.task, completed=record["epoch"] + 1, note=note)
        quiet = time.monotonic() - self.last_line < LINE_SECONDS and record["epoch"] + 1 < self.epochs
        if "acc" not in record and (self.console.is_terminal or quiet):
            return
        scores = "".join(f"  {name.upper()} {record[name]:.4f}" for name in ("acc", "nmi", "ari") if name in record)
        line = f"{self.name}epoch {record['epoch'] + 1:4d}  {note}{scores}  {record['seconds']:.1f} s"
        self.console.print(line, highlight=False, soft_wrap=True)
        self.last_line = time.monotonic()

    def busy(self, what: str) -> None:
        """Say what happens after the last epoch, in place of a bar that stands still."""
        self.bar.stop()
        if not self.console.is_terminal:
            self.console.print(what)
            return
        self.status = self.status or self.console.status(what)
        self.status.update(what)
        self.status.start()

    def warned(self, warning: str) -> None:
        """Print it."""
        self.console.print(f"{self.name}warning: {warning}", highlight=False, markup=False, soft_wrap=True)

    def ended(self) -> None:
        """Make room for the next run."""
        self.close()


class DecodeProgress(Shown):
    """Shows how far decoding is; call it with the images done and their total."""

    def __init__(self, console: Console) -> None:
        self.console, self.last_line = console, 0.0
        columns = (TextColumn("reading images"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task("", total=None)

    def __call__(self, done: int, total: int) -> None:
        """Move the bar, which is gone when all is done; in a log a line at the start, now and then and at the end."""
        now = time.monotonic()
        if not self.console.is_terminal and (done in (1, total) or now - self.last_line > LINE_SECONDS):
            self.console.print(f"reading images: {done:,} of {total:,}", highlight=False, soft_wrap=True)
            self.last_line = now
        self.bar.start()
        self.bar.update(self.task, completed=done, total=total)
        if done == total:
            self.bar.stop()


def show_plan(console: Console, source: Source, plan: Plan, *, reasons: bool) -> None:
    """Print what a fit will do, on request why, and how long it should take."""
    console.print(f"{len(source):,} images in {printable(source.name)}", soft_wrap=True)
    if source.note:
        console.print(source.note, soft_wrap=True)
    for reason in plan.reasons if reasons else ():
        console.print(f"  {reason}", soft_wrap=True)
    console.print(f"about {duration(plan.seconds)} on this device", soft_wrap=True)
    if plan.hopeless:
        advice = "take a GPU, smaller images (data.image_size) or a part of the images"
        console.print(f"this is hopeless here: {advice}", soft_wrap=True)


def duration(seconds: float) -> str:
    """Return a time as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
