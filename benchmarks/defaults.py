"""What ``secu fit`` with only --clusters achieves on data sets it was not tuned for, and k-means on the same inputs.

    python benchmarks/defaults.py run digits --out runs/digits       # → benchmarks/results/defaults-digits-cpu-0.json
    python benchmarks/defaults.py run fashion-5000 --from-scratch --out runs/fashion   # without a pretrained network
    python benchmarks/defaults.py run cifar10-5000 --fine-tuned --out runs/cifar10     # which is trained further
    python benchmarks/defaults.py run fashion-5000 --out runs/fashion --data FOLDER   # of the four *-ubyte.gz files
    python benchmarks/defaults.py run digits --out runs/try --limit 200 optim.epochs=1   # a trial: never kept
    python benchmarks/defaults.py publish                            # → the table in docs/defaults.md

Images are written to disk as a typical user would have them: PNG files in one folder per true group or, if there are
many, an array file (data_sets.py). True groups are used for scoring only.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from data_sets import SETS, Pictures, take, write_images
from numpy.typing import NDArray
from results import KEPT, METRICS, ROOT, minutes, percent, spread, with_table
from rich.console import Console
from sklearn.cluster import KMeans

from secu.apps.console import ConsoleListener
from secu.apps.feature_plan import PRETRAINED, Facts
from secu.apps.fit import SCRATCH, FitRequest, fit, prepare
from secu.apps.plan import make_plan
from secu.base.errors import UserError
from secu.base.files import is_taken, write_json, write_text
from secu.cluster.metrics import score
from secu.config import Config
from secu.data import Images
from secu.nets.pretrained import describe
from secu.settings import merge, parse_overrides, resolve
from secu.train.device import choose_device

DOC = ROOT / "docs" / "defaults.md"
BEGIN = "<!-- results: made by benchmarks/defaults.py publish -->\n"
END = "<!-- end of results -->"
Record = dict[str, Any]


def kmeans(pictures: Pictures, images: Images, seed: int) -> Record:
    """Score k-means, the best of ten initializations, on the features that were clustered, or else on the pixels."""
    if len(images.shape) == 1:
        rows, targets, kind = images.tensor.float().numpy(), images.targets.numpy(), "features"
    else:
        rows = pictures.pixels.reshape(len(pictures.pixels), -1).astype(np.float32) / 255
        targets, kind = pictures.targets, "pixels"
    began = time.monotonic()
    clusters = len(pictures.names)
    found = KMeans(clusters, n_init=10, random_state=seed).fit_predict(rows).astype(np.int64)
    seconds = round(time.monotonic() - began, 3)
    return {**score(targets, found)._asdict(), **extremes(found, clusters), "seconds": seconds, "on": kind}


def extremes(cluster: NDArray[np.int64], clusters: int) -> dict[str, int]:
    """Return the sizes of the largest and the smallest cluster."""
    sizes = np.bincount(cluster, minlength=clusters)
    return {"largest": int(sizes.max()), "smallest": int(sizes.min())}


class Clock(ConsoleListener):
    """Shows a run, and records the time at which its images were read."""

    def __init__(self) -> None:
        super().__init__(Console(stderr=True))
        self.began = time.monotonic()
        self.read = self.began

    def reading(self, done: int, total: int) -> None:
        """Record the time of the last image."""
        self.read = time.monotonic()


def measure(arguments: argparse.Namespace) -> Record:
    """Cluster a data set with the default rules and with k-means, and return a record of the results."""
    out = arguments.out
    device = choose_device(arguments.device).type
    settings = merge({"seed": arguments.seed}, parse_overrides(arguments.overrides))
    pictures = take(arguments.name, arguments.data, arguments.limit)
    out.mkdir(parents=True, exist_ok=True)
    source, labels = write_images(pictures, out)
    clusters = len(pictures.names)
    encoder = {"": None, "scratch": SCRATCH, "fine-tuned": PRETRAINED}[arguments.encoder]
    if arguments.encoder == "fine-tuned":
        settings = merge(settings, {"encoder": {"trainable": "all"}})
    request = FitRequest(
        str(source), clusters, labels=labels, overrides=settings, device=device, cache=out / "cache", encoder=encoder
    )
    if arguments.balance is not None:
        request = replace(request, balance=arguments.balance)
    prepared = prepare(request)
    with Clock() as clock:
        finished = fit(prepared, out / "run", listener=clock)
        whole = time.monotonic() - clock.began
    results = finished.results
    assert results is not None
    assert results.scores is not None
    about = finished.run.record()
    metrics = [record for record in finished.run.metrics() if "acc" in record]
    return {
        "name": arguments.name,
        "encoder": finished.run.config().encoder.backbone,
        "from_scratch": arguments.encoder == "scratch",
        "command": command_of(arguments, device),
        "commit": arguments.commit,
        "seed": arguments.seed,
        "hardware": hardware(device),
        "versions": {**about["versions"], "numpy": np.__version__, "scikit-learn": sklearn.__version__},
        "engine": about["engine"],
        "images": len(prepared.source),
        "side": prepared.source.probe().side,
        "clusters": clusters,
        "groups": dict(zip(pictures.names, np.bincount(pictures.targets).tolist(), strict=True)),
        **results.scores._asdict(),
        **extremes(results.predictions.cluster.numpy(), clusters),
        "decode_seconds": round(clock.read - clock.began, 3),
        "seconds": round(finished.seconds, 3),
        "whole_seconds": round(whole, 3),
        "promised_seconds": round(prepared.plan.total_seconds, 3),
        "answer": finished.run.outcome().get("answer"),
        "kmeans": kmeans(pictures, results.images, arguments.seed),
        "warnings": list(results.warnings),
        "plan": list(prepared.plan.reasons),
        "curve": [{key: record[key] for key in ("epoch", "seconds", *METRICS)} for record in metrics],
        "config": finished.run.config().model_dump(mode="json", exclude={"data": {"source"}}),
    }


def command_of(arguments: argparse.Namespace, device: str) -> str:
    """Return the command that reproduces this result, without machine-specific paths."""
    options = ["--out FOLDER", *["--data FOLDER"] * (arguments.data is not None)]
    options += [f"--seed {arguments.seed}", f"--device {device}"]
    asked = {"limit": arguments.limit, "balance": arguments.balance}
    options += [f"--{name} {value}" for name, value in asked.items() if value is not None]
    options += ["--from-scratch"] * (arguments.encoder == "scratch")
    options += ["--fine-tuned"] * (arguments.encoder == "fine-tuned")
    threads = [f"OMP_NUM_THREADS={torch.get_num_threads()}"] * (device == "cpu")
    words = [*threads, "python benchmarks/defaults.py run", arguments.name, *options]
    return " ".join([*words, *map(shlex.quote, arguments.overrides)])


def hardware(device: str) -> Record:
    """Return the hardware that the result was computed on."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return {
        "device": device,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def why_not_kept(arguments: argparse.Namespace) -> str:
    """Return why this is only a trial; empty if all settings are default and the code is committed."""
    if arguments.overrides or arguments.limit is not None or arguments.balance is not None:
        return "a trial, because not everything was left to the rules"
    return (
        "" if arguments.commit else "a trial, because the code is not that of a commit; name its commit with --commit"
    )


def checked_out(*more: str) -> str | None:
    """Return the current commit; None if there is none, or if ``src``, these benchmarks or ``more`` differ from it."""
    git = ["git", "-C", str(ROOT)]
    ours = ["src", "benchmarks/defaults.py", "benchmarks/data_sets.py", *more]
    change = subprocess.run([*git, "status", "--porcelain", "--", *ours], capture_output=True, text=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    return head.stdout.strip() if head.returncode == 0 and change.returncode == 0 and not change.stdout else None


def file_name(record: Record) -> str:
    """Return the name under which a result is kept."""
    kind = "scratch" if record["from_scratch"] else encoder_of(record)
    suffix = f"-{kind}" if record["from_scratch"] or kind == "fine-tuned" else ""
    return f"defaults-{record['name']}{suffix}-{record['hardware']['device']}-{record['seed']}.json"


def kept() -> list[list[Record]]:
    """Return all kept results, grouped by data set, encoder and kind of device, in the order of the sets."""
    records = [json.loads(path.read_text()) for path in sorted(KEPT.glob("defaults-*.json"))]
    encoders = ("frozen", "fine-tuned", "scratch")
    keys = [(name, encoder, device) for name in SETS for encoder in encoders for device in ("cpu", "mps", "cuda")]
    found = [[r for r in records if (r["name"], encoder_of(r), r["hardware"]["device"]) == key] for key in keys]
    return [sorted(group, key=lambda record: record["seed"]) for group in found if group]


def encoder_of(record: Record) -> str:
    """Return how the encoder was trained: frozen or fine-tuned, if it was pretrained, or from scratch."""
    encoder = record["config"]["encoder"]
    if encoder.get("trainable") == "nothing":
        return "frozen"
    return "scratch" if describe(encoder["backbone"]) is None else "fine-tuned"


def as_table(groups: list[list[Record]]) -> str:
    """Return the table: mean ± standard deviation over all kept seeds, in percent, and the same for k-means."""
    if not groups:
        return "Nothing is measured yet.\n"
    lines = [
        "| data set | images | groups | encoder | k-means ACC / NMI / ARI "
        "| ACC | NMI | ARI | clusters | seeds | minutes | on | at |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for records in groups:
        first = records[0]
        if any(settings_of(record) != settings_of(first) for record in records):
            raise UserError(f"{first['name']}: the seeds were run with different rules; run the older ones again")
        sizes = first["groups"].values()
        plain = " / ".join(percent([record["kmeans"][name] for record in records], "0.1") for name in METRICS)
        found = " | ".join(spread([record[name] for record in records]) for name in METRICS)
        largest, smallest = max(r["largest"] for r in records), min(r["smallest"] for r in records)
        took = minutes([r.get("whole_seconds") or r["decode_seconds"] + r["seconds"] for r in records])
        seeds = ", ".join(str(record["seed"]) for record in records)
        places = ", ".join(sorted({place_of(record["hardware"]) for record in records}))
        commits = ", ".join(sorted({record["commit"][:7] for record in records}))
        commits += "" if by_present_rules(first) else ", under earlier rules"
        encoder = first["config"]["encoder"]["backbone"]
        if (kind := encoder_of(first)) != "scratch":
            encoder = f"{encoder}, {kind}"
        lines.append(
            f"| `{first['name']}` | {first['images']:,} of {first['side']} px "
            f"| {first['clusters']} of {min(sizes):,} to {max(sizes):,} "
            f"| {encoder} | {plain} | {found} "
            f"| {smallest:,} to {largest:,} | {seeds} | {took} | {places} | {commits} |"
        )
    return "\n".join(lines) + "\n"


def settings_of(record: Record) -> Record:
    """Return what the rules chose, which is the same for every seed."""
    return {key: value for key, value in record["config"].items() if key not in ("seed", "head", "answer")}


def by_present_rules(record: Record) -> bool:
    """Return whether the current rules would choose the same settings for the same images."""
    try:
        then = resolve(record["config"])
    except UserError:  # a setting that is no longer one
        return False
    channels = then.data.channels or len(then.data.mean)
    kind = encoder_of(record)
    frozen = then.encoder.backbone if kind == "frozen" else ""
    facts = Facts(record["images"], record["side"], channels, record["hardware"]["device"], frozen=frozen)
    asked = {"encoder": {"backbone": then.encoder.backbone}} if kind == "fine-tuned" else {}
    now = make_plan(facts, record["clusters"], FitRequest.balance, asked).config
    return rules_of(then) == rules_of(now)


def rules_of(config: Config) -> Record:
    """Return the settings that the rules decide; images, and the answer that a run chooses, are not among them."""
    return {key: value for key, value in config.settings().items() if key not in ("seed", "data", "head", "answer")}


def place_of(hardware: Record) -> str:
    """Return a short description of the device."""
    threads = hardware["threads"]
    return hardware["gpu"] or f"{hardware['device']}, {threads} thread{'s' * (threads != 1)}"


def run(arguments: argparse.Namespace) -> None:
    """Measure, print, write to the folder, and keep what may be kept."""
    if is_taken(arguments.out):
        raise UserError(f"out: {arguments.out} exists; name a folder that does not exist yet")
    arguments.commit = arguments.commit or checked_out()  # before training, since it may change meanwhile
    trial = why_not_kept(arguments)
    record = measure(arguments)
    for key, value in record.items():
        if key not in ("curve", "config"):
            print(f"{key:>16}  {value}")
    write_json(arguments.out / ("trial.json" if trial else file_name(record)), record)
    if not trial:
        write_json(KEPT / file_name(record), record)
    print(f"not kept: {trial}" if trial else KEPT / file_name(record))


def publish() -> None:
    """Write the table from the kept results."""
    write_text(DOC, with_table(DOC.read_text(), as_table(kept()), BEGIN, END))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="action", required=True)
    running = commands.add_parser("run", help="measure one data set; with key=value settings it is a trial")
    running.add_argument("name", choices=SETS)
    running.add_argument("--out", type=Path, required=True, help="a new folder for images, run and result")
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--device", default="auto")
    running.add_argument("--data", type=Path, help="folder of Fashion-MNIST's or CIFAR-10's files")
    running.add_argument("--limit", type=int, help="number of images to use; the result is then a trial")
    kinds = running.add_mutually_exclusive_group()
    kinds.add_argument(
        "--from-scratch", action="store_const", const="scratch", dest="encoder", default="", help="as for secu fit"
    )
    kinds.add_argument(
        "--fine-tuned",
        action="store_const",
        const="fine-tuned",
        dest="encoder",
        help=f"train all of {PRETRAINED} further, with the settings of the rules",
    )
    running.add_argument("--balance", type=float, help="as for secu fit; the result is then a trial")
    running.add_argument("--commit", help="commit of the code; default: the one checked out, if nothing was changed")
    commands.add_parser("publish", help="rewrite the table")
    arguments, words = parser.parse_known_args()  # settings may be anywhere
    arguments.overrides = words
    if arguments.action == "publish" and words:
        parser.error(f"publish takes no {words[0]}")
    try:
        return publish() if arguments.action == "publish" else run(arguments)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
