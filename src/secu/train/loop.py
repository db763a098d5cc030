"""The training loop, for one run or for several side by side."""

from collections.abc import Sequence

from secu.base import processes
from secu.base.errors import UserError
from secu.data import Images
from secu.train.clock import Clock
from secu.train.engine import Engine, fastest_convolutions
from secu.train.session import Session
from secu.train.signals import OneInterruption


@fastest_convolutions()
def train(sessions: Sequence[Session], clock: Clock, test: Images | None = None) -> None:
    """Train runs on the same images side by side, step by step, until they are finished or out of time.

    On a GPU the steps of all runs form one captured graph, which is faster than training one run after the other.

    Args:
        sessions: The runs, with open folders; they must have completed the same number of epochs.
        clock: Holds the time limit.
        test: Images to score on, every ``config.evaluate_every`` epochs and at the end.
    """
    first = sessions[0]
    if len({session.place for session in sessions}) > 1:
        raise UserError("runs side by side must have completed the same number of epochs; resume them one by one")
    engine = Engine([session.step for session in sessions], first.engine)
    if first.finished:  # resumed after an interruption between the last epoch and the end
        for session in sessions:
            session.finish(test)
            session.describe()
    clock.save()
    clock.copy()
    with OneInterruption() as interruption:
        try:
            while not first.finished:
                _epoch(sessions, engine, clock, test, interruption)
                if interruption.requested:  # a library swallowed the exception
                    raise KeyboardInterrupt
                save_due = first.finished or clock.checkpoint_due
                if save_due:
                    _save(sessions, clock, interruption)
                clock.end_epoch()
                if processes.agree(clock.out_of_time):
                    if not save_due:
                        _save(sessions, clock, interruption)
                    break
        except KeyboardInterrupt:
            _save(sessions, clock, interruption)
            raise
        except RuntimeError:
            if processes.world() > 1:  # another process ended, and torchrun is about to end this one
                _save(sessions, clock, interruption)
            raise


def _epoch(
    sessions: Sequence[Session], engine: Engine, clock: Clock, test: Images | None, interruption: OneInterruption
) -> None:
    """Train all runs for an epoch, and keep copies of their states."""
    step = sessions[0].step
    done = 0

    def after_step() -> None:
        nonlocal done
        done += 1
        sessions[0].listener.stepped()
        at_end = step.first + done == len(step.sizes)
        if clock.copy_due and not at_end and processes.is_main():
            _keep_middle(sessions, clock, interruption)

    clock.start_epoch()
    losses = engine.epoch(sessions[0].epochs_done, after_step)
    clock.end_steps(share=1 - step.first / len(step.sizes))
    for session, values in zip(sessions, losses, strict=True):
        session.end_epoch(values, clock, test)
    for session in sessions:
        if session.finished:
            session.finish(test)
    for session in sessions:
        session.remember()
    clock.copy()


def _keep_middle(sessions: Sequence[Session], clock: Clock, interruption: OneInterruption) -> None:
    """Copy the states of all runs in the middle of a long epoch; every ten minutes, write them."""
    for session in sessions:
        session.remember_middle(clock)
    clock.copy()
    if clock.middle_due:
        _save(sessions, clock, interruption)


def _save(sessions: Sequence[Session], clock: Clock, interruption: OneInterruption) -> None:
    """Write checkpoints, unless an interruption left the runs at different epochs."""
    done = {session.last.place if session.last else (0, 0) for session in sessions}
    if len(done) > 1:
        return
    with interruption.postponed():
        for session in sessions:
            if session.last is not None:
                session.save()
        clock.save()
