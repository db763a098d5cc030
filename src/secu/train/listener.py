"""Callbacks for the progress of a run: all progress output goes through a listener."""

from typing import Any


class Listener:
    """Receives the events of a run; override the methods you need."""

    def note(self, text: str) -> None:
        """Handle a note, for example about missing images."""

    def reading(self, done: int, total: int) -> None:
        """Handle progress in reading images."""

    def started(self, *, engine: str, device: str, epochs: int, epochs_done: int, steps: int) -> None:
        """Handle the start of training, possibly of a resumed run; ``steps`` is the number of steps per epoch."""

    def stepped(self) -> None:
        """Handle one training step."""

    def epoch_ended(self, record: dict[str, Any], losses: dict[str, float]) -> None:
        """Handle the end of an epoch; the record, which includes the losses, is its line in metrics.jsonl."""

    def busy(self, what: str) -> None:
        """Handle the start of other slow work, such as writing the report."""

    def warned(self, warning: str) -> None:
        """Handle a warning about the quality of the clusters."""

    def ended(self) -> None:
        """Handle the end of a run; another one may follow."""


class Listeners(Listener):
    """Several listeners, each of which receives every event."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = listeners

    def note(self, text: str) -> None:
        """Pass on a note."""
        for listener in self.listeners:
            listener.note(text)

    def reading(self, done: int, total: int) -> None:
        """Pass on progress in reading images."""
        for listener in self.listeners:
            listener.reading(done, total)

    def started(self, *, engine: str, device: str, epochs: int, epochs_done: int, steps: int) -> None:
        """Pass on the start of training."""
        for listener in self.listeners:
            listener.started(engine=engine, device=device, epochs=epochs, epochs_done=epochs_done, steps=steps)

    def stepped(self) -> None:
        """Pass on a training step."""
        for listener in self.listeners:
            listener.stepped()

    def epoch_ended(self, record: dict[str, Any], losses: dict[str, float]) -> None:
        """Pass on the end of an epoch."""
        for listener in self.listeners:
            listener.epoch_ended(record, losses)

    def busy(self, what: str) -> None:
        """Pass on the start of other slow work."""
        for listener in self.listeners:
            listener.busy(what)

    def warned(self, warning: str) -> None:
        """Pass on a warning."""
        for listener in self.listeners:
            listener.warned(warning)

    def ended(self) -> None:
        """Pass on the end of a run."""
        for listener in self.listeners:
            listener.ended()
