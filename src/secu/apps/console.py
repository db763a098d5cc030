"""Console output of a running command: progress bars in a terminal, plain lines in a log file."""

import time
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.status import Status
from rich.table import Column
from rich.text import Text

from secu.apps.fit import Prepared
from secu.base.names import printable
from secu.train.listener import Listener

BAR_WIDTH = 12  # of the bar of epochs, whose line also has losses and times
LINE_SECONDS = 30  # minimum time between two progress lines when the output is not a terminal


class ConsoleListener(Listener):
    """Displays the progress of a run; use it as a context manager, so that bars are removed if the run fails.

    The name begins each line, to distinguish runs that train side by side. Notes may have a console of their own: they
    must not end up in a pipe that carries the output.
    """

    def __init__(self, console: Console, name: str = "", *, bar: bool = True, notes: Console | None = None) -> None:
        self.console = console
        self.name = name
        self.notes = notes or console
        self.status: Status | None = None
        self.last_line = 0.0
        hidden = not (bar and console.is_terminal)
        columns = (TextColumn("reading images"), BarColumn(), MofNCompleteColumn(), *remaining())
        self.reading_bar = Progress(*columns, console=console, transient=True, disable=hidden)
        self.reading_task = self.reading_bar.add_task("", total=None)
        count = (TextColumn("epoch"), BarColumn(BAR_WIDTH), MofNCompleteColumn(table_column=whole()))
        times = (TimeElapsedColumn(table_column=whole()), *remaining())
        self.bar = Progress(
            *count,
            NoteColumn("{task.fields[note]}", table_column=Column()),
            *times,
            console=console,
            transient=True,
            disable=hidden,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.ended()

    def note(self, text: str) -> None:
        """Print a note."""
        self.notes.print(text, highlight=False, markup=False, soft_wrap=True)

    def reading(self, done: int, total: int) -> None:
        """Show how many images have been read; in a log, print a line at the start, at the end, and periodically."""
        now = time.monotonic()
        if not self.console.is_terminal and (done in (1, total) or now - self.last_line > LINE_SECONDS):
            self.console.print(f"reading images: {done:,} of {total:,}", highlight=False, soft_wrap=True)
            self.last_line = now
        self.reading_bar.start()
        self.reading_bar.update(self.reading_task, completed=done, total=total)
        if done == total:
            self.reading_bar.stop()

    def started(self, *, engine: str, device: str, epochs: int, epochs_done: int, steps: int) -> None:
        """Print the device and the engine, and show the bar."""
        again = f", resumed after {epochs_done} epoch{'s' * (epochs_done > 1)}" if epochs_done else ""
        self.console.print(f"{self.name}training on {device}, engine {engine}{again}")
        self.reading_bar.stop()
        self.bar.start()
        self.steps = steps
        self.epochs = epochs
        self.first: tuple[int, float] | None = None
        self.last_line = 0.0
        self.task = self.bar.add_task("", total=epochs, completed=epochs_done, note="")

    def stepped(self) -> None:
        """Advance the bar by a fraction of an epoch."""
        self.bar.advance(self.task, 1 / self.steps)

    def epoch_ended(self, record: dict[str, Any], losses: dict[str, float]) -> None:
        """Show losses and cluster sizes, and print a line for every evaluation; in a log, also for the last epoch."""
        note = "  ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in losses.items())
        if "smallest" in record:
            note += f"  clusters {record['smallest']:,} to {record['largest']:,}"
        self.bar.update(self.task, completed=record["epoch"] + 1, note=note)
        left = self._left(record["epoch"] + 1)
        recent = time.monotonic() - self.last_line < LINE_SECONDS and record["epoch"] + 1 < self.epochs
        if "acc" not in record and (self.console.is_terminal or recent):
            return
        scores = "".join(f"  {name.upper()} {record[name]:.4f}" for name in ("acc", "nmi", "ari") if name in record)
        count = f"{self.name}epoch {record['epoch'] + 1:4d} of {self.epochs}"
        line = f"{count}  {note}{scores}  {record['seconds']:.1f} s{left}"
        self.console.print(line, highlight=False, soft_wrap=True)
        self.last_line = time.monotonic()

    def _left(self, done: int) -> str:
        """Return how long the remaining epochs will take, for a log; in a terminal, the bar shows this.

        The first epoch of a process is not counted, because it includes the start.
        """
        now = time.monotonic()
        self.first = self.first or (done, now)
        first, began = self.first
        if self.console.is_terminal or done in (first, self.epochs):
            return ""
        return f", about {duration((now - began) * (self.epochs - done) / (done - first))} left"

    def busy(self, what: str) -> None:
        """Replace the bar with a status line for the work after the last epoch."""
        self.bar.stop()
        if not self.console.is_terminal:
            self.console.print(what)
            return
        self.status = self.status or self.console.status(what)
        self.status.update(what)
        self.status.start()

    def warned(self, warning: str) -> None:
        """Remove the bars and print a warning."""
        self.ended()
        self.console.print(f"{self.name}warning: {warning}", highlight=False, markup=False, soft_wrap=True)

    def ended(self) -> None:
        """Remove the bars."""
        self.reading_bar.stop()
        self.bar.stop()
        if self.status is not None:
            self.status.stop()


class CallbackListener(ConsoleListener):
    """Displays a run's progress and calls the user's function after each epoch."""

    def __init__(self, console: Console, callback: Callable[[dict[str, Any]], object] | None) -> None:
        super().__init__(console)
        self.callback = callback

    def epoch_ended(self, record: dict[str, Any], losses: dict[str, float]) -> None:
        """Show the epoch, and pass a copy of its record to the callback."""
        super().epoch_ended(record, losses)
        if self.callback is not None:
            self.callback(dict(record))


def show_plan(console: Console, prepared: Prepared, *, reasons: bool) -> None:
    """Print what a fit will do and how long it should take, optionally with the reasons."""
    source = prepared.source
    plan = prepared.plan
    console.print(f"{len(source.ids):,} images in {printable(source.name)}", soft_wrap=True)
    for note in prepared.notes:
        console.print(note, soft_wrap=True)
    for reason in plan.reasons if reasons else ():
        console.print(f"  {reason}", soft_wrap=True)
    console.print(f"about {duration(plan.total_seconds)} on this device", soft_wrap=True)
    if plan.hopeless:
        advice = "use a GPU, smaller images (data.image_size) or fewer images"
        console.print(f"this would take too long here: {advice}", soft_wrap=True)


def remaining() -> tuple[ProgressColumn, ProgressColumn]:
    """Return the columns of a bar that show how long the rest will take."""
    return TextColumn("left"), TimeRemainingColumn(table_column=whole())


def whole() -> Column:
    """Return a column that is never shortened."""
    return Column(no_wrap=True)


class NoteColumn(TextColumn):
    """A text in a single line, which is shortened first if a terminal is narrow: the times must stay readable."""

    def render(self, task: Task) -> Text:
        """Return the text."""
        text = super().render(task)
        text.no_wrap = True
        text.overflow = "ellipsis"
        return text


def duration(seconds: float) -> str:
    """Format a duration for display."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
