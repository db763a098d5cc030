"""Store full runs, and generate the README's table and figure from the stored runs.

python benchmarks/results.py keep cifar10 runs/cifar10              # → benchmarks/results/cifar10-0.json
python benchmarks/results.py keep cifar10 runs/cifar10-selflabel    # → cifar10-selflabel-0.json; needs its first run
python benchmarks/results.py publish                                # → results.csv, README's table, docs/accuracy.png
"""

import argparse
import csv
import io
import json
import statistics
import subprocess
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from pathlib import Path
from typing import Any

from secu.apps.selflabel import second_config
from secu.base.errors import UserError
from secu.base.files import write_atomically, write_json, write_text
from secu.config import Config
from secu.settings import load_config, merge, with_shape
from secu.train.run import Run

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "benchmarks" / "results"
BEGIN = "<!-- results: made by benchmarks/results.py publish -->\n"
END = "<!-- end of results -->"
METRICS = ("acc", "nmi", "ari")


def keep(recipe: str, folder: Path, commit: str, *, shared: bool = False, whole: float | None = None) -> Path:
    """Store a finished run of a recipe, after checking that it is one: same settings, whole schedule.

    Args:
        recipe: Its name.
        folder: The run; a self-labeling run needs its first run where it was.
        commit: The commit that the run was made at.
        shared: Whether other work used the device as well, so that the run took longer than it needs.
        whole: Seconds of the whole command, from the shell to the report, as measured by the shell.
    """
    run = Run.open(folder)
    record = run.record()
    if not record:
        raise UserError(f"{folder} is not finished: it has no run.json")
    first = first_run(run)
    require_recipe(recipe, first)
    if not record["finished"]:
        raise UserError(f"{folder} is not finished: {record['epochs_done']} epochs")
    outcome = {} if run is first else outcome_of(run, first)
    epochs = [epoch for epoch in run.metrics() if "acc" in epoch]
    final = epochs[-1] | record.get("kept", {}) | outcome.get("after", {})  # self-labeling may end with another epoch
    name, path, command, config = described(recipe, run, first, record)
    fields = ("epoch", "seconds", *METRICS, "loss", "largest", "smallest")
    content = {
        "recipe": name,
        "command": command,
        "commit": commit,
        "first_seed": first.config().seed,
        **{name: record[name] for name in ("seed", "device", "engine", "versions", "seconds")},
        **({} if whole is None else {"whole_seconds": whole}),
        "beside": record.get("beside", 0),
        "shared": shared,
        "threads": record["threads"],
        **{name: final[name] for name in (*METRICS, "largest", "smallest")},
        **({"kept_epoch": record.get("kept"), "selflabel": outcome} if outcome else {}),
        "config": config.model_dump(mode="json"),
        "epochs": [{name: epoch[name] for name in fields} for epoch in epochs],
    }
    write_json(path, content)
    return path


def first_run(run: Run) -> Run:
    """Return the run that a self-labeling run started from; any other run itself."""
    config = run.config()
    return Run.open(Path(str(config.init_from))) if config.method == "selflabel" else run


def require_recipe(recipe: str, run: Run) -> None:
    """Raise if the settings of a run differ from its recipe."""
    shape = run.input_shape()  # a run states the shape of its images, a recipe need not
    expected = with_shape(load_config(recipe, [f"seed={run.config().seed}"]), shape)
    if with_shape(run.config(), shape).settings() != expected.settings():
        raise UserError(f"{run.path} was not made by recipe {recipe} as it is now")


def described(recipe: str, run: Run, first: Run, record: dict[str, Any]) -> tuple[str, Path, str, Config]:
    """Return the name of a result, its file, the command that repeats it, and its settings."""
    config = run.config()
    first_seed = first.config().seed
    name = recipe
    command = f"secu train {recipe} --seed {first_seed}"
    if run is not first:
        name = f"{recipe}-selflabel"
        command = f"{command} && secu selflabel runs/{recipe}"
        config = config.model_copy(update={"init_from": f"runs/{recipe}"})  # wherever it was on that machine
    file = f"{name}-{first_seed}"
    if config.seed != first_seed:  # self-labeling of one run, again
        file = f"{file}-{config.seed}"
        command = f"{command} seed={config.seed}"
    if record["device"].startswith("cpu"):  # the order of sums depends on the number of threads
        command = f"export OMP_NUM_THREADS={record['threads']}; {command}"
    return name, KEPT / f"{file}.json", command, config


def outcome_of(run: Run, first: Run) -> dict[str, Any]:
    """Return what self-labeling changed, after checking that it had its usual settings."""
    outcome = run.outcome()
    config = run.config()
    images = sum(outcome["after"]["sizes"])
    usual = second_config(first.config(), first.path, images, {"seed": config.seed})
    found = {"confidence_temperature": config.loss.confidence_temperature}  # by the run itself, at its end
    if config.settings() != merge(usual.settings(), {"loss": found}):
        raise UserError(f"{run.path} was not made by secu selflabel as it is now")
    return outcome


def kept() -> dict[str, list[dict[str, Any]]]:
    """Return all kept runs by recipe."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(KEPT.glob("*.json")):
        record = json.loads(path.read_text())
        if "epochs" in record:
            runs.setdefault(record["recipe"], []).append(record)
    for records in runs.values():
        records.sort(key=lambda record: (first_seed_of(record), record["seed"]))
    return runs


def as_csv(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Return one line per run."""
    where = ("device", "engine", "commit")
    fields = ("recipe", "seed", "first_seed", *METRICS, "largest", "smallest", "seconds", "beside", "shared", *where)
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    rows = (record for records in runs.values() for record in records)
    writer.writerows({**record, "first_seed": first_seed_of(record)} for record in rows)
    return text.getvalue()


def as_table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Return the README's table: the paper's number and the mean ± standard deviation of all seeds kept.

    Runs that were trained side by side count with their part of the minutes. Runs that shared the device with other
    work are left out of the minutes, unless all of them did.
    """
    lines = [
        "| recipe | paper ACC / NMI / ARI | measured ACC | NMI | ARI | seeds | minutes | on |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for recipe, records in runs.items():
        paper = records[0]["config"]["paper"]
        printed = f"{paper['acc']} / {paper['nmi']} / {paper['ari']}" if paper else "–"
        measured = " | ".join(spread([record[name] for record in records]) for name in METRICS)
        alone = [record for record in records if not record["shared"]]
        took = minutes([record["seconds"] / (1 + record.get("beside", 0)) for record in alone or records])
        took = took if alone else f"{took}, shared"
        devices = ", ".join(sorted({record["device"] for record in records}))
        seeds = ", ".join(map(seed_of, records))
        lines.append(f"| `{recipe}` | {printed} | {measured} | {seeds} | {took} | {devices} |")
    return "\n".join(lines) + "\n"


def seed_of(record: dict[str, Any]) -> str:
    """Return a run's seed, and that of the run that it started from, if it is another."""
    seed = record["seed"]
    first = first_seed_of(record)
    return f"{seed}" if seed == first else f"{seed} from {first}"


def first_seed_of(record: dict[str, Any]) -> int:
    """Return the seed of the run that a run started from, or its own."""
    seed: int = record.get("first_seed", record["seed"])
    return seed


def spread(shares: list[float]) -> str:
    """Return mean ± standard deviation in percent, or the one value there is."""
    mean = percent(shares, "0.01")
    return mean if len(shares) == 1 else f"{mean} ± {100 * statistics.stdev(shares):.2f}"


def percent(shares: list[float], digits: str) -> str:
    """Return the mean in percent, truncated: nothing is rounded up."""
    exact = 100 * statistics.mean(Decimal(str(share)) for share in shares)
    return str(exact.quantize(Decimal(digits), ROUND_FLOOR))


def minutes(seconds: list[float]) -> str:
    """Return the mean in minutes, rounded up."""
    exact = statistics.mean(Decimal(str(value)) for value in seconds) / 60
    return str(exact.quantize(Decimal("0.1"), ROUND_CEILING))


def with_table(page: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """Return a page with the text between two marks replaced."""
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    assert found, f"no {begin!r} in the page"
    assert closed, f"no {end!r} in the page"
    return f"{before}{begin}{table}{end}{after}"


def draw(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw accuracy against wall-clock time for every run on a GPU that was trained by itself.

    Runs that were trained side by side have no time of their own. A self-labeling run follows its first run, in the
    same color.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 4.4), layout="constrained")
    colors: dict[str, str] = {}
    for recipe, records in runs.items():
        base = recipe.removesuffix("-selflabel")
        before = [] if base == recipe else runs.get(base, [])
        for record in records:
            if not record["device"].startswith("cuda") or record.get("beside", 0):
                continue
            first = seconds_before(record, before)
            label = f"{recipe}, seed {seed_of(record)}: {spread([record['acc']])}"
            axes.plot(
                [(first + epoch["seconds"]) / 60 for epoch in record["epochs"]],
                [100 * epoch["acc"] for epoch in record["epochs"]],
                "--" if record["shared"] else "-",
                color=colors.setdefault(base, f"C{len(colors)}"),
                label=f"{label}, GPU shared" if record["shared"] else label,
                marker="." if base == recipe else "x",
            )
    axes.set(xlabel="minutes from the start of the first run, including compilation", ylabel="ACC on the test split, %")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize="small")
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=110))


def seconds_before(record: dict[str, Any], before: list[dict[str, Any]]) -> float:
    """Return the seconds of the run that a self-labeling run started from; 0 for any other run."""
    same = [first for first in before if first["seed"] == first_seed_of(record)]
    return float(sum(first["seconds"] / (1 + first.get("beside", 0)) for first in same))


def publish() -> None:
    """Write everything that is generated from the kept runs."""
    runs = kept()
    write_text(KEPT / "results.csv", as_csv(runs))
    readme = ROOT / "README.md"
    write_text(readme, with_table(readme.read_text(), as_table(runs)))
    draw(runs, ROOT / "docs" / "accuracy.png")


def checked_out() -> str:
    """Return the commit that is checked out."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return head.stdout.strip()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    keeping = commands.add_parser("keep", help="store a finished run")
    keeping.add_argument("recipe")
    keeping.add_argument("run", type=Path)
    keeping.add_argument("--commit", help="commit of the run; default: the one checked out")
    keeping.add_argument("--shared", action="store_true", help="other work used the device, too")
    keeping.add_argument("--whole", type=float, help="seconds of the whole command, from the shell to the report")
    commands.add_parser("publish", help="rewrite table and picture")
    arguments = parser.parse_args()
    if arguments.command == "publish":
        return publish()
    try:
        about = {"shared": arguments.shared, "whole": arguments.whole}
        print(keep(arguments.recipe, arguments.run, arguments.commit or checked_out(), **about))
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
