"""Train a recipe, once or with several seeds."""

import re
import statistics
from collections.abc import Callable, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Unpack

from secu.apps.images import images_to_score, open_inputs, require_unchanged
from secu.apps.pipeline import Finished, Options, Request, run_together
from secu.base.errors import UserError
from secu.config import Config
from secu.data import remember, require_all
from secu.settings import load_config, parse_overrides
from secu.train.checkpoint import Checkpoint
from secu.train.device import choose_device
from secu.train.listener import Listener
from secu.train.run import Run

METRICS = ("acc", "nmi", "ari")
MOST_SEEDS = 1_000


def run_recipes(requests: Sequence[Request], *, data: Path | None = None, **options: Unpack[Options]) -> list[Finished]:
    """Load the data of one or more recipes on the same data, train them side by side, and write the results."""
    device = options.get("device", "auto")
    choose_device(device)  # fail early, before the data is read
    resume = options.get("resume", False)
    for request in requests:
        Run.check_free(request.out, force=options.get("force", False), resume=resume)
    config = requests[0].config
    images = open_inputs(config, root=data, device=device, progress=requests[0].listener.reading)
    if config.data.strict:
        require_all(images)
    if left_out := len(images.skipped) + len(images.repeated):
        requests[0].listener.note(f"images left out: {left_out:,}")
    known = remember(images)
    for request in requests:
        if resume and (run := Run.to_resume(request.out)) is not None:
            require_unchanged(run, known)
    test = images_to_score(config, images, data, device)
    return run_together(requests, images, command="train", test=test, known=known, **options)


def parse_seeds(text: str) -> list[int]:
    """Parse seeds such as ``0..7`` or ``1,4,9``."""
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        first, last = map(int, match.groups())
        if first <= last < first + MOST_SEEDS:
            return list(range(first, last + 1))
    elif re.fullmatch(r"\d+(,\d+)*", text):
        return list(dict.fromkeys(map(int, text.split(","))))
    raise UserError(
        f"--seeds: {text!r} must be a rising range like 0..7, of at most {MOST_SEEDS:,}, or a list like 1,4,9"
    )


def repeat(
    recipe: str,
    overrides: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    *,
    together: int = 1,
    data: Path | None = None,
    device: str = "auto",
    listener: Callable[[int, bool], Listener],
) -> list[dict[str, Any]]:
    """Run every seed that is not finished yet, ``together`` at a time, and return the last record of each.

    Calling it again after an interruption keeps finished seeds and resumes unfinished ones. ``listener`` is called with
    each seed and with whether it is the first of those that train side by side.
    """
    if together < 1:
        raise UserError(f"together: {together} must be at least 1")
    if (seed := parse_overrides(overrides).get("seed")) is not None:
        raise UserError(f"seed: {seed} has no effect here; list the seeds with --seeds")
    if (out / "config.yaml").is_file():
        raise UserError(f"out: {out} is a run folder; choose a folder for the runs of all seeds")
    configs = [load_config(recipe, [*overrides, f"seed={seed}"]) for seed in seeds]
    places = {config.seed: out / f"seed-{config.seed}" for config in configs}
    waiting = [config for config in configs if not _is_finished(config, places[config.seed])]
    # Only seeds that have completed the same number of steps can be resumed side by side.
    for _, group in groupby(waiting, lambda config: _place(places[config.seed])):
        rest = iter(group)
        while batch := list(islice(rest, together)):
            requests = [
                Request(config, places[config.seed], listener(config.seed, config is batch[0])) for config in batch
            ]
            run_recipes(requests, data=data, device=device, resume=True)
    return [{"seed": config.seed, **Run(places[config.seed]).metrics()[-1]} for config in configs]


def _is_finished(config: Config, path: Path) -> bool:
    """Return whether a seed has finished with results; raise if its folder was started with different settings."""
    if not path.exists():
        return False
    run = Run.to_resume(path)
    if run is None:
        return False
    run.require_settings(config)
    return run.finished and (path / "report.html").is_file()


def _place(path: Path) -> tuple[int, int]:
    run = Run(path)
    return Checkpoint.load(run).place if run.has_checkpoint() else (0, 0)


def summary(records: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return rows as in the paper's tables: mean ± standard deviation and best of each metric, and cluster sizes."""
    scores = [name for name in METRICS if all(name in record for record in records)]  # none without true labels
    best = max(records, key=lambda record: record["acc"]) if scores else {}
    rows: list[tuple[str, ...]] = []
    for name in scores:
        values = [100 * record[name] for record in records]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        rows.append((name.upper(), f"{statistics.mean(values):.2f} ± {spread:.2f}", f"{100 * best[name]:.2f}"))
    for name in ("largest", "smallest"):
        mean = statistics.mean(record[name] for record in records)
        rows.append((f"{name} cluster", f"{mean:,.0f}", f"{best[name]:,}" if best else ""))
    return rows
