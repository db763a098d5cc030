"""Whether several processes train as one: the whole recipe digits, in double precision, on the CPU.

    python benchmarks/processes.py                                         # → benchmarks/results/processes-digits.json
    python benchmarks/processes.py --precision single --json FILE          # where rounding decides about some labels
    python benchmarks/processes.py --processes 4 --json FILE optim.epochs=2    # a short trial

It trains in one process, and again in several that torchrun starts. After every step, the label memory and the state of
the constraint (its duals or counts) are compared bit for bit; after every epoch, all weights and buffers. The JSON file
names the first step and epoch that differ, or null. At the end, all processes must hold the same bits.
"""

import argparse
import hashlib
import json
import math
import os
import resource
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from defaults import checked_out, hardware
from results import KEPT

from secu.base import processes
from secu.base.files import write_json
from secu.data import load
from secu.settings import load_config, with_shape
from secu.train.clock import Clock
from secu.train.listener import Listener
from secu.train.loop import train
from secu.train.run import Run
from secu.train.session import Session

Record = dict[str, Any]
RECIPE = "digits"
LABELS = "clustering.labels"
CONSTRAINT = "clustering.constraint."
SHOWN = (1, 2, 5, 10, 20, 40, 60, 80, 100)  # epochs whose state is compared in the JSON file


class Recorder(Listener):
    """Keeps a digest of the labels and of the constraint after every step, and the whole state after every epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.session: Session | None = None
        self.labels: list[str] = []
        self.constraint: list[str] = []

    def stepped(self) -> None:
        """Record a step."""
        assert self.session is not None
        state = self.session.method.state_dict()
        self.labels.append(digest({LABELS: state[LABELS]}))
        self.constraint.append(digest({name: value for name, value in state.items() if name.startswith(CONSTRAINT)}))
        epoch, rest = divmod(len(self.labels), len(self.session.step.sizes))
        if not rest and processes.is_main():
            torch.save(state, self.folder / f"epoch-{epoch}.pt")


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return a hash of the names and bytes of tensors."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(name.encode())
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def record(folder: Path, arguments: argparse.Namespace) -> None:
    """Train as one of the processes, and write what happened; the run itself is written to the same folder."""
    torch.set_num_threads(1)
    if arguments.precision == "double":
        torch.set_default_dtype(torch.float64)
        torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign,assignment]
    if processes.launched():
        processes.start()
    config = load_config(RECIPE, arguments.overrides)
    images = load(config.data)
    recorder = Recorder(folder)
    session = Session(
        with_shape(config, images.shape),
        images,
        folder / "run",
        torch.device("cpu"),
        "eager",
        command=f"train {RECIPE}",
        listener=recorder,
    )
    recorder.session = session
    session.begin()
    train([session], Clock(math.inf), images)
    digests = processes.collect(digest(session.method.state_dict()))
    if processes.is_main():
        write_json(
            folder / "record.json",
            {
                "labels": recorder.labels,
                "constraint": recorder.constraint,
                "steps_per_epoch": len(session.step.sizes),
                "all_processes_equal": len(set(digests)) == 1,
            },
        )
    processes.barrier()
    if processes.launched():
        os._exit(0)  # as secu does: threads of a process group may abort while Python ends


def start(world: int, folder: Path, arguments: argparse.Namespace) -> float:
    """Train in one process or with torchrun; return the CPU seconds of all processes."""
    folder.mkdir()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    options = ["--record", str(folder), "--precision", arguments.precision]
    words = [sys.executable, *(torchrun if world > 1 else []), __file__, *options, *arguments.overrides]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_difference(ours: list[Any], theirs: list[Any]) -> int | None:
    """Return the number, from 1, of the first entry that differs; None if there is none."""
    assert len(ours) == len(theirs)
    return next((number for number, (a, b) in enumerate(zip(ours, theirs, strict=True), 1) if a != b), None)


def compare_states(ours: Path, theirs: Path) -> Record:
    """Return how far two states are apart: labels that differ, and the largest difference of any weight or buffer.

    The difference within a tensor is relative to its largest value.
    """
    a, b = torch.load(ours), torch.load(theirs)
    assert a.keys() == b.keys()
    apart = {
        name: float((value - b[name]).abs().max() / b[name].abs().max().clamp(min=1e-30))
        for name, value in a.items()
        if value.is_floating_point() and value.numel()
    }
    worst = max(apart, key=lambda name: apart[name])
    different = float((a[LABELS] != b[LABELS]).double().mean())
    return {"labels_that_differ": different, "difference": apart[worst], "tensor": worst}


def compare(one: Path, several: Path) -> Record:
    """Compare a run in one process with one in several."""
    ours, theirs = (json.loads((folder / "record.json").read_text()) for folder in (several, one))
    epochs = len(theirs["labels"]) // theirs["steps_per_epoch"]
    states = {
        epoch: compare_states(several / f"epoch-{epoch}.pt", one / f"epoch-{epoch}.pt")
        for epoch in range(1, epochs + 1)
    }
    return {
        "epochs_compared": epochs,  # "epochs" is the mark of a run that results.py keeps
        "steps_compared": len(theirs["labels"]),
        "first_step_with_other_labels": first_difference(ours["labels"], theirs["labels"]),
        "first_step_with_another_constraint": first_difference(ours["constraint"], theirs["constraint"]),
        "all_processes_equal": ours["all_processes_equal"],
        "largest_difference": max(state["difference"] for state in states.values()),
        "after_epoch": {epoch: state for epoch, state in states.items() if epoch in SHOWN or epoch == epochs},
        "acc": [Run.open(folder / "run").metrics()[-1]["acc"] for folder in (one, several)],
    }


def main() -> None:
    """Train in one process and in several, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="key=value settings")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--precision", choices=("double", "single"), default="double")
    parser.add_argument("--json", type=Path, default=KEPT / "processes-digits.json")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.record:
        record(arguments.record, arguments)
        return
    about = {
        "command": shlex.join(["python", "benchmarks/processes.py", *sys.argv[1:]]),
        "commit": checked_out("benchmarks/processes.py"),
        "hardware": hardware("cpu") | {"threads": 1},  # of each process
        "torch": torch.__version__,
        "recipe": RECIPE,
        "overrides": arguments.overrides,
        "precision": arguments.precision,
        "processes": arguments.processes,
    }
    with tempfile.TemporaryDirectory() as folder:
        one, several = (Path(folder) / name for name in ("one", "several"))
        seconds = [start(world, path, arguments) for world, path in ((1, one), (arguments.processes, several))]
        report = about | compare(one, several) | {"cpu_seconds": [round(value) for value in seconds]}
    write_json(arguments.json, report)
    for name, value in report.items():
        print(f"{name:>35}  {value}")


if __name__ == "__main__":
    main()
