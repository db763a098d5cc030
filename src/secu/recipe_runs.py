"""A recipe from its data to a finished run, once or for many seeds."""

import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from secu.checkpoint import Trained
from secu.config import Config, load_config
from secu.data import load
from secu.errors import UserError
from secu.results import write_results
from secu.run import Run
from secu.train import Listener, choose_device, train

METRICS = ("acc", "nmi", "ari")


def run_recipe(
    config: Config,
    path: Path,
    *,
    data: Path | None = None,
    device: str = "auto",
    resume: bool = False,
    force: bool = False,
    time_limit: float = float("inf"),
    listener: Listener | None = None,
) -> Trained:
    """Load the data, train, and write the results; the model says whether the time limit came first."""
    # The folder comes last: a wrong device or missing data shall neither leave an empty run nor cost an old one.
    choose_device(device)
    images = load(config.data.name, config.data.train, data, config.data.image_size)
    test = load(config.data.name, config.data.test, data, config.data.image_size)
    run = Run.start(path, config, resume=resume, force=force)
    try:
        model = train(
            config, images, run, test=test, device=device, resume=resume, time_limit=time_limit, listener=listener
        )
    except UserError:
        run.discard_empty()
        raise
    if model.finished:
        write_results(run, model, images)
    return model


def parse_seeds(text: str) -> list[int]:
    """Turn 0..7 or 1,4,9 into seeds."""
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        first, last = int(match[1]), int(match[2])
        if first <= last:
            return list(range(first, last + 1))
    elif re.fullmatch(r"\d+(,\d+)*", text):
        return list(dict.fromkeys(map(int, text.split(","))))
    raise UserError(f"--seeds: {text!r} must be a rising range like 0..7 or a list like 1,4,9")


def repeat(
    recipe: str,
    overrides: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    *,
    data: Path | None = None,
    device: str = "auto",
    listener: Callable[[int], Listener],
) -> list[dict[str, Any]]:
    """Run every seed that is not finished yet, one after the other, and return the last record of each.

    Called again after an interruption it goes on where it was: finished seeds are kept, the one in flight is resumed.
    """
    configs = [load_config(recipe, [*overrides, f"seed={seed}"]) for seed in seeds]
    for config in configs:
        path = out / f"seed-{config.seed}"
        if not is_finished(Run.start(path, config, resume=True, force=False)):
            run_recipe(config, path, data=data, device=device, resume=True, listener=listener(config.seed))
    return [{"seed": seed, **Run.open(out / f"seed-{seed}").metrics()[-1]} for seed in seeds]


def is_finished(run: Run) -> bool:
    """Say whether a run has come to its end and written its results."""
    record = run.path / "run.json"
    return record.is_file() and json.loads(record.read_text())["finished"] and (run.path / "report.html").is_file()


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
