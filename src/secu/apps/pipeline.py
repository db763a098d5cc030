"""From settings and images to a finished run folder: the code path shared by all commands and the estimator.

The order matters: all checks run before anything is written. The folder is locked meanwhile, and an old run in it is
replaced when the new one has its first checkpoint. A new run that fails before that leaves nothing behind.
"""

import hashlib
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict, Unpack

from secu.base import processes
from secu.base.errors import UserError
from secu.base.files import write_json
from secu.config import Config
from secu.data import Images, Known
from secu.results.found import Results
from secu.results.results import find_results, write_results
from secu.settings import with_shape
from secu.train.clock import Clock
from secu.train.device import choose_device
from secu.train.engine import choose_engine, load_compiler
from secu.train.feed import ResidentFeed
from secu.train.listener import Listener
from secu.train.loop import train
from secu.train.place import held
from secu.train.run import Run
from secu.train.session import Session


@dataclass(frozen=True)
class Request:
    """A requested run: its settings, its folder, and its listener."""

    config: Config
    out: Path
    listener: Listener


@dataclass(frozen=True, eq=False)
class Finished:
    """Outcome of a run; ``results`` is None if the time limit was reached first, and in all but the main process."""

    run: Run
    epochs_done: int
    seconds: float
    results: Results | None
    warnings: tuple[str, ...] = ()


class Options(TypedDict, total=False):
    """Options for executing a run, in addition to its settings; the defaults are those of ``run_together``."""

    device: str
    resume: bool  # continue from the last checkpoint
    force: bool  # replace the run in the folder
    time_limit: float  # seconds after which training stops cleanly, with a checkpoint
    report: bool  # write pictures and the report in addition to the tables


def run(
    config: Config,
    images: Images,
    out: Path,
    *,
    command: str = "",
    listener: Listener | None = None,
    test: Images | None = None,
    known: Known | None = None,
    **options: Unpack[Options],
) -> Finished:
    """Train a config on images, whose targets are never read, and write its results into a run folder.

    ``command`` is the secu command whose --resume continues the run, shown in hints; empty if there is none. ``test``
    are images to score on; ``known`` are ids and checksums of the training images, written to images.json.
    """
    request = Request(config, out, listener or Listener())
    return run_together([request], images, command=command, test=test, known=known, **options)[0]


def run_together(
    requests: Sequence[Request],
    images: Images,
    *,
    command: str = "",
    test: Images | None = None,
    known: Known | None = None,
    device: str = "auto",
    resume: bool = False,
    force: bool = False,
    time_limit: float = math.inf,
    report: bool = True,
) -> list[Finished]:
    """Train several configs on the same images side by side; otherwise the same as ``run``."""
    clock = Clock(time_limit)
    requests = [replace(request, config=with_shape(request.config, images.shape)) for request in requests]
    check_alike([request.config for request in requests])
    for request in requests:
        Run.check_free(request.out, force=force, resume=resume)
    _require_same_everywhere(requests, images)
    with ExitStack() as locks:
        for request in requests if processes.is_main() else ():
            locks.enter_context(held(request.out))
            Run.check_start(request.out, request.config, force=force, resume=resume)
        sessions = _open_sessions(requests, images, command, device, resume=resume)
        for session in sessions:
            session.begin()
            if known and processes.is_main():
                write_json(session.run.folder / "images.json", known)
        train(sessions, clock, test)
        return [_finish(session, test, report=report) for session in sessions]


def _require_same_everywhere(requests: Sequence[Request], images: Images) -> None:
    """Raise if the processes that share the runs have chosen other settings, or have read other images."""
    digest = hashlib.sha256(repr([request.config for request in requests]).encode())
    for name in images.ids if processes.world() > 1 else ():
        digest.update(name.encode("utf-8", "surrogatepass") + b"\0")
    if len(set(processes.collect(digest.hexdigest()))) > 1:
        raise UserError("the processes have read different images, or chosen different settings; start them again")


def _open_sessions(
    requests: Sequence[Request], images: Images, command: str, device: str, *, resume: bool
) -> list[Session]:
    """Build the method of each run without writing anything; this catches most errors in the settings."""
    place = choose_device(device)
    engine = choose_engine(requests[0].config.engine, place)
    load_compiler(engine)
    sessions: list[Session] = []
    for request in requests:
        feed = sessions[0].step.feed if sessions else None
        sessions.append(
            Session(
                request.config,
                images,
                request.out,
                place,
                engine,
                command=command,
                listener=request.listener,
                resume=resume,
                feed=feed if isinstance(feed, ResidentFeed) else None,  # inputs on the device are shared by all runs
                beside=len(requests) - 1,
            )
        )
    return sessions


def _finish(session: Session, test: Images | None, *, report: bool) -> Finished:
    """Write the results of a run, unless the time limit was reached."""
    run = session.run
    if not session.finished:
        session.listener.ended()
        return Finished(run, session.epochs_done, session.seconds, None)
    session.conclude(test)
    session.listener.busy("assigning all images")
    predictor = session.method.predictor()
    embeddings_ND = predictor.embed_together(session.images)
    if not processes.is_main():
        return Finished(run, session.epochs_done, session.seconds, None)
    results = find_results(run, predictor, session.images, embeddings_ND, session.method.clustering)
    write_results(run, results, pictures=report, busy=session.listener.busy)
    for warning in results.warnings:
        session.listener.warned(warning)
    session.listener.ended()
    if results.duplicates:
        session.listener.note(f"near-duplicates of other images: {results.duplicates:,}; see the report")
    return Finished(run, session.epochs_done, session.seconds, results, results.warnings)


def check_alike(configs: Sequence[Config]) -> None:
    """Refuse configs that cannot be trained side by side."""
    if any(config.data != configs[0].data for config in configs):
        raise UserError("runs side by side must train on the same data")
    if len({(config.optim.total_epochs, config.optim.batch_size, config.engine) for config in configs}) > 1:
        raise UserError("runs side by side must have the same batch size, number of epochs and engine")
