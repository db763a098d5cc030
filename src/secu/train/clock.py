"""Timing of a run: epoch durations, when a checkpoint is due, and whether there is time for another epoch."""

import time

CHECKPOINT_SECONDS = 60  # a crash loses at most this much training, plus the epoch in progress or ten minutes of it
COPY_SECONDS = 60  # how old the copy of a run's state may become in a long epoch; an interruption writes this copy
MIDDLE_SECONDS = 600  # how old the checkpoint on disk may become in a long epoch


class Clock:
    """Starts when it is created; runs that train side by side share one clock."""

    def __init__(self, limit: float) -> None:
        self.limit = limit  # seconds after which training stops
        self.started = time.monotonic()
        self.saved = self.started
        self.copied = self.started
        self.epoch_began = self.started
        self.epoch_trained = self.started
        self.epoch_share = 1.0
        self.longest_end = 0.0  # longest time that scores and checkpoints took after an epoch

    def start_epoch(self) -> None:
        """Mark the start of an epoch."""
        self.epoch_began = time.monotonic()

    def end_steps(self, share: float = 1.0) -> None:
        """Mark the end of an epoch's last step; ``share`` of its steps were made since its start."""
        self.epoch_trained = time.monotonic()
        self.epoch_share = share

    def end_epoch(self) -> None:
        """Mark the end of everything that follows an epoch's steps."""
        self.longest_end = max(self.longest_end, time.monotonic() - self.epoch_trained)

    def copy(self) -> None:
        """Mark that the state was copied."""
        self.copied = time.monotonic()

    def save(self) -> None:
        """Mark that a checkpoint was written."""
        self.saved = time.monotonic()

    @property
    def epoch_seconds(self) -> float:
        """Duration of the last epoch's steps."""
        return self.epoch_trained - self.epoch_began

    @property
    def seconds(self) -> float:
        """Time from the start to the last epoch's last step."""
        return self.epoch_trained - self.started

    @property
    def checkpoint_due(self) -> bool:
        """Whether the last checkpoint is too old."""
        return time.monotonic() - self.saved > CHECKPOINT_SECONDS

    @property
    def copy_due(self) -> bool:
        """Whether the last copy of the state is too old, in the middle of an epoch."""
        return time.monotonic() - self.copied > COPY_SECONDS

    @property
    def middle_due(self) -> bool:
        """Whether the last checkpoint is too old, in the middle of an epoch."""
        return time.monotonic() - self.saved > MIDDLE_SECONDS

    @property
    def elapsed(self) -> float:
        """Time since the start."""
        return time.monotonic() - self.started

    @property
    def out_of_time(self) -> bool:
        """Whether another epoch, with its scores and checkpoint, would end after the limit."""
        whole_epoch = self.epoch_seconds / self.epoch_share
        return self.elapsed + whole_epoch + self.longest_end > self.limit
