"""Check that a code change did not change any number: tiny runs of every kind of training, bit for bit, on the CPU.

    python benchmarks/proof.py record benchmarks/results/proof-35af351.json      # about four minutes on one core
    python benchmarks/proof.py compare benchmarks/results/proof-35af351.json     # the same runs again; 1 if one differs

Only the command line is used, so that all internals may change; PYTHONPATH selects the code to run. Numbers are
reproducible only on the same kind of CPU, with the same version of torch and the same number of threads (here one).
"""

import argparse
import csv
import hashlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Digest = dict[str, Any]

# The settings of every case, with their current names; this is the only place to update when a setting is renamed.
SHORT = "optim.epochs=3 optim.warmup_epochs=1 evaluate_every=2"
SETTINGS = {
    "size": "",
    "upper-falling": "constraint.upper=1.1 constraint.dual_schedule=falling",
    "entropy": "constraint.kind=entropy",
    "closed-form": "centers.kind=closed_form",
    "kmeans": "centers.kind=kmeans",
    "ce": "loss.name=ce",
    "rest": "optim.name=lars constraint.score=log_prob constraint.dual_lr=2 centers.schedule=rising "
    "encoder.prediction_layers=2",
}
FEW = "optim.epochs=3 evaluate_every=2"
MANY = "selflabel.decay=0 selflabel.unsure=nothing selflabel.kept=0 selflabel.smallest=0.95 selflabel.warmup_epochs=1"
STOP = "--time-limit 0.001s"  # is over after the first epoch, wherever that is

# A case is the folder of a run, by the commands that make it; a later case may start from the run of an earlier one.
CASES = {name: [f"train digits --out {name} {SHORT} {settings}"] for name, settings in SETTINGS.items()}
CASES |= {
    "resumed": [f"train digits --out resumed {SHORT} {how}" for how in (STOP, f"--resume {STOP}", "--resume")],
    "together/seed-0": [f"repeat digits --out together --seeds 0,1 --together 2 {SHORT}"],
    "together/seed-1": [],
    "fit": ["fit pictures -k 3 --from-scratch answer=head --labels folder --out fit optim.epochs=4"],
    "fit-array": ["fit array.npy -k 3 --from-scratch answer=head --out fit-array optim.epochs=20"],
    "selflabel": [f"selflabel size --out selflabel {FEW}"],
    "selflabel-many": [f"selflabel size --out selflabel-many {FEW} {MANY}"],
    "selflabel-resumed": [f"selflabel size --out selflabel-resumed {FEW} {how}" for how in (STOP, "--resume")],
    "selflabel-fit": [f"selflabel fit --out selflabel-fit {FEW}"],
    "selflabel-kept": ["selflabel fit-array --out selflabel-kept optim.epochs=4 optim.lr=3"],  # the last is not kept
}
SAME = {"resumed": "size", "together/seed-0": "size", "selflabel-resumed": "selflabel"}  # must not differ at all

THREADS = "1"
TIMES = ("epoch_seconds", "seconds")
COLUMNS = ("cluster", "confidence")
MAY_GO = {"center_loss": "0.0"}  # fields that a later record may leave out where they had this value
RENAMED = {"sure": "confident", "held_up": "boosted"}  # fields of a record, by the name that they had when recorded
# Since version 0.2 scikit-learn computes the mutual information: the last digits of these fields may differ.
ROUNDED = {"information": 1e-12}


def make_pictures(folder: Path) -> None:
    """Write what ``secu fit`` is given: a folder of 60 pictures and a broken one, and an array of 130 gray ones."""
    random = np.random.default_rng(0)
    for number in range(60):
        kind, (height, width) = ("disc", "square", "stripes")[number % 3], random.integers(20, 49, 2)
        y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
        shapes = {"disc": x**2 + y**2 < 0.5, "square": np.maximum(abs(x), abs(y)) < 0.6, "stripes": np.sin(9 * x) > 0}
        colors = random.integers(0, 256, (2, 3)) // 2 + np.array([[100], [20]])
        pixels = np.where(shapes[kind][..., None], *colors) + random.integers(-15, 16, (height, width, 3))
        path = folder / "pictures" / kind / f"{number:02}.{'jpg' if number % 4 else 'png'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
    (folder / "pictures" / "disc" / "broken.png").write_bytes(b"this is no picture")
    gray = random.integers(0, 90, (130, 12, 12))
    gray[0::3, 3:9, 3:9], gray[1::3, ::2], gray[2::3, :, 6:] = 200, 220, 180
    np.save(folder / "array.npy", gray.astype(np.uint8))


def secu(command: str, folder: Path) -> None:
    """Run a secu command in a folder, on a single CPU thread."""
    words = [sys.executable, "-m", "secu", *shlex.split(command), "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": THREADS, "SECU_DATA": str(folder / "data")}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"secu {command}: {done.stderr.strip()[-500:]}")


def digest_of(run: Path) -> Digest:
    """Return the parts of a run that must not change; numbers are text, so that every bit is compared."""
    epochs = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    untimed = [{key: value for key, value in epoch.items() if key not in TIMES} for epoch in epochs]
    second = next((run / name for name in ("outcome.json", "selflabel.json") if (run / name).is_file()), None)
    rows = list(csv.DictReader((run / "assignments.csv").read_text().splitlines()))
    columns = {name: [row[name] for row in rows] for name in COLUMNS}
    return {
        "metrics": numbers_of({f"epoch {number}": epoch for number, epoch in enumerate(untimed)}),
        "tensors": tensors_of(run / "model.safetensors"),
        "kept": numbers_of(json.loads((run / "run.json").read_text()).get("kept", {})),
        "assignments": {name: hashed("\n".join(values).encode()) for name, values in columns.items()},
        "first_rows": [" ".join(row) for row in zip(*(values[:5] for values in columns.values()), strict=True)],
        "selflabel": numbers_of(json.loads(second.read_text())) if second else {},
    }


def tensors_of(path: Path) -> dict[str, str]:
    """Return a hash of type, shape and bytes of each tensor in a safetensors file."""
    content, found = path.read_bytes(), {}
    begin = 8 + int.from_bytes(content[:8], "little")
    for name, entry in sorted(json.loads(content[8:begin]).items()):
        if name != "__metadata__":
            first, last = (begin + offset for offset in entry["data_offsets"])
            found[name] = hashed(f"{entry['dtype']}{entry['shape']}".encode() + content[first:last])
    return found


def hashed(content: bytes) -> str:
    """Return the first half of a SHA-256, which is enough here."""
    return hashlib.sha256(content).hexdigest()[:32]


def numbers_of(value: Any, name: str = "") -> dict[str, str]:
    """Return all numbers of nested dicts and lists as text; a list of them, such as sizes, is one text."""
    if isinstance(value, dict):
        parts = [numbers_of(inner, f"{name}.{key}".lstrip(".")) for key, inner in value.items()]
        return {key: text for part in parts for key, text in part.items()}
    several = isinstance(value, list) and all(isinstance(inner, int | float) for inner in value)
    return {name: repr(value)} if isinstance(value, int | float) or (several and value) else {}


def difference(old: Digest, new: Digest) -> str:
    """Return the first difference, ignoring new fields and the names of tensors."""
    for part in ("metrics", "tensors", "kept", "selflabel", "assignments"):
        before, after = old[part], new[part]
        if part == "tensors" and before.keys() != after.keys() and sorted(before.values()) == sorted(after.values()):
            continue  # only names differ
        for key, value in before.items():
            place, dot, field = key.rpartition(".")
            found = after.get(key, after.get(f"{place}{dot}{RENAMED.get(field, field)}", MAY_GO.get(field)))
            if not is_same(field, value, found):
                return f"{part}: {key} was {value}, is {found or 'missing'}"
    return ""


def is_same(field: str, before: str, after: str | None) -> bool:
    """Return whether a number is unchanged; all but the few in ``ROUNDED`` must be equal in every bit."""
    if after is None or field not in ROUNDED:
        return before == after
    return abs(float(before) - float(after)) <= ROUNDED[field]


def about_here() -> dict[str, str]:
    """Return the code version and everything else that the numbers depend on."""
    package = importlib.util.find_spec("secu")
    place = Path((package and package.origin) or ".").parent
    git = ["git", "-C", str(place), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=7"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    cpu = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition("\n")[0].strip("\t :")
    versions = {name: version(name) for name in ("torch", "numpy", "scikit-learn", "pillow")}
    return {"commit": commit, "cpu": cpu, "threads": THREADS, **versions}


def run_case(case: str, folder: Path, recorded: dict[str, Digest], found: dict[str, Digest]) -> str:
    """Run a case, add its digest to ``found``, and return the first difference, if any."""
    for command in CASES[case]:
        secu(command, folder)
        if STOP in command and (folder / case / "assignments.csv").exists():
            return "was to stop after an epoch, and did not"
    found[case] = digest_of(folder / case)
    return difference(recorded[case], found[case]) or difference(found[SAME.get(case, case)], found[case])


def main() -> None:
    """Run all cases, and record them or compare them with the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    here, began, found, wrong = about_here(), time.monotonic(), dict[str, Digest](), 0
    recording: Digest = {**here, "cases": found}
    recorded = recording if arguments.what == "record" else json.loads(arguments.file.read_text())
    for name in here.keys() - {"commit"}:
        if recorded[name] != here[name]:
            print(f"note: recorded with {name} {recorded[name]}, this is {here[name]}")
    print(f"{'case':<18} {'equal':<6} first difference")
    with tempfile.TemporaryDirectory() as folder:
        make_pictures(Path(folder))
        for case in CASES:
            try:
                problem = run_case(case, Path(folder), recorded["cases"], found)
            except (RuntimeError, OSError, KeyError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            wrong += bool(problem)
            print(f"{case:<18} {'no' if problem else 'yes':<6} {problem}".rstrip(), flush=True)
    print(f"{time.monotonic() - began:.0f} s, {wrong} of {len(CASES)} cases differ")
    if arguments.what == "record" and not wrong:
        arguments.file.write_text(json.dumps(recording, indent=1) + "\n")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
