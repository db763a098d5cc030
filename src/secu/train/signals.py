"""Signals during training: the first one interrupts, but never a checkpoint; later ones wait for the checkpoint."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

# Ctrl-C; the request of a scheduler or of kill; the end of a terminal. Windows has no SIGHUP.
STOPPING = [number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]


class OneInterruption:
    """Passes the first signal to its handler, which may raise, and only counts all further ones.

    Signals that have no handler in Python are left alone.
    """

    def __init__(self) -> None:
        self.requested = False  # whether a signal arrived; a library may have swallowed what its handler raised
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._waiting: list[int] | None = None  # signals that arrived while a checkpoint is written

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for number in STOPPING:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._waiting is not None:
            self._waiting.append(number)
        elif not self.requested:
            self.requested = True
            self._handlers[number](number, frame)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Handle signals that arrive in the block at its end."""
        self._waiting = []
        try:
            yield
        finally:
            waiting = self._waiting
            self._waiting = None
        for number in waiting:
            self._handle(number, None)
