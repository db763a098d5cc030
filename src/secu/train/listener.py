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
