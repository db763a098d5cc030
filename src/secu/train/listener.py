"""Callbacks for the progress of a run: all progress output goes through a listener."""

from collections.abc import Callable
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


def _pass_on(event: str) -> Callable[..., None]:
    """Return a method of ``Listeners`` that passes an event on."""

    def pass_on(self: "Listeners", *arguments: Any, **named: Any) -> None:
        for listener in self.listeners:
            getattr(listener, event)(*arguments, **named)

    return pass_on


class Listeners(Listener):
    """Several listeners, each of which receives every event."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = listeners

    note = _pass_on("note")
    reading = _pass_on("reading")
    started = _pass_on("started")
    stepped = _pass_on("stepped")
    epoch_ended = _pass_on("epoch_ended")
    busy = _pass_on("busy")
    warned = _pass_on("warned")
    ended = _pass_on("ended")
