"""A recipe from its data to a finished run, once or for many seeds."""

import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeVar

from secu.checkpoint import Trained
from secu.config import Config
from secu.data import load
from secu.errors import UserError
from secu.results import write_results
from secu.run import Run
from secu.settings import load_config, parse_overrides
from secu.train import check, check_alike, choose_device, train_together
from secu.training import Job, Listener

METRICS = ("acc", "nmi", "ari")
MOST_SEEDS = 1_000
T = TypeVar("T")


def run_recipe(
    config: Config, path: Path, *, listener: Listener | None = None, force: bool = False, **settings: Any
) -> Trained:
    """Load the data, train, and write the results; ``settings`` are those of ``run_side_by_side``."""
    return run_side_by_side([(config, path, listener or Listener())], force=force, **settings)[0]


def run_side_by_side(
    wanted: Sequence[tuple[Config, Path, Listener]],
    *,
    data: Path | None = None,
    device: str = "auto",
    resume: bool = False,
    force: bool = False,
    time_limit: float = float("inf"),
) -> list[Trained]:
    """Run several recipes of one data set at the same time; the models say whether the time limit came first."""
    # The folders come last: what is wrong shall neither leave an empty run nor cost an old one.
    choose_device(device)
    for _, path, _ in wanted:
        Run.check_free(path, force=force, resume=resume)
    check_alike([config for config, _, _ in wanted])
    config = wanted[0][0]
    for name in ("source", "labels", "channels", "values"):
        if (value := getattr(config.data, name)) is not None:
            raise UserError(f"data.{name}: {value} is for own images (secu fit), got data.name={config.data.name}")
    images = load(config.data.name, config.data.train, data, config.data.image_size)
    test = load(config.data.name, config.data.test, data, config.data.image_size)
    for config, path, _ in wanted:
        if not (resume and Run(path).has_checkpoint()):
            check(config, images, device)
    jobs = [
        Job(config, Run.start(path, config, resume=resume, force=force), listener) for config, path, listener in wanted
    ]
    try:
        models = train_together(jobs, images, test=test, device=device, resume=resume, time_limit=time_limit)
    except UserError:
        for job in jobs:
            job.run.discard_unsaved()
        raise
    for job, model in zip(jobs, models, strict=True):
        if model.finished:
            for warning in write_results(job.run, model, images, tell=job.listener.busy).warnings:
                job.listener.warned(warning)
        job.listener.ended()
    return models


def parse_seeds(text: str) -> list[int]:
    """Turn 0..7 or 1,4,9 into seeds."""
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        first, last = int(match[1]), int(match[2])
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

    Called again after an interruption it goes on where it was: finished seeds are kept, those in flight are resumed.
    ``listener`` is asked for one for each seed, and told whether that is the first of those side by side.
    """
    if together < 1:
        raise UserError(f"together: {together} must be at least 1")
    if (seed := parse_overrides(overrides).get("seed")) is not None:
        raise UserError(f"seed: {seed} is not read here; name all seeds with --seeds")
    if (out / "config.yaml").is_file():
        raise UserError(f"out: {out} is a run; name a folder for the runs of all seeds")
    configs = [load_config(recipe, [*overrides, f"seed={seed}"]) for seed in seeds]
    runs = [Run(out / f"seed-{config.seed}") for config in configs]
    for config, run in zip(configs, runs, strict=True):
        if run.path.exists():
            Run.start(run.path, config, resume=True, force=False)  # complains if it is another's
    waiting = [(config, run) for config, run in zip(configs, runs, strict=True) if not is_finished(run)]
    # Only seeds that stand at the same epoch can go on side by side.
    for _, group in groupby(
        waiting, lambda item: item[1].load_state()["epochs_done"] if item[1].has_checkpoint() else 0
    ):
        for batch in batched(group, together):
            wanted = [(config, run.path, listener(config.seed, run is batch[0][1])) for config, run in batch]
            run_side_by_side(wanted, data=data, device=device, resume=True)
    return [{"seed": config.seed, **run.metrics()[-1]} for config, run in zip(configs, runs, strict=True)]


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of so many items each; the last may be shorter."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def is_finished(run: Run) -> bool:
    """Say whether a run has come to its end and written its results."""
    return run.finished and (run.path / "report.html").is_file()


def summary(records: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows of the paper's tables: each metric's mean ± deviation and best, and the sizes of the best run."""
    best = max(records, key=lambda record: record["acc"])
    rows: list[tuple[str, ...]] = []
    for name in METRICS:
        values = [100 * record[name] for record in records]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        rows.append((name.upper(), f"{statistics.mean(values):.2f} ± {spread:.2f}", f"{100 * best[name]:.2f}"))
    for name in ("largest", "smallest"):
        mean = statistics.mean(record[name] for record in records)
        rows.append((f"{name} cluster", f"{mean:,.0f}", f"{best[name]:,}"))
    return rows
