"""What must be true after a command was stopped, and in the end."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file

from secu.base.errors import UserError
from secu.train.checkpoint import load_predictor
from secu.train.place import EVENTS, FILES, LOCK
from secu.train.run import Run
from soak.cases import Case

SAME = ("model.safetensors", "assignments.csv", "assignments.parquet", "clusters.csv", "config.yaml", "images.json")
TIME = re.compile(rb'"timestamp": \{[^}]*\}')  # in the metadata of an export to FiftyOne

Paths = dict[str, bytes]


def broken_after_stop(case: Case, references: Path, folder: Path) -> str:
    """Return what is wrong after the first try was stopped; an empty string if everything is in order."""
    result = folder / case.result
    if case.name == "fit --force":
        if not (result / "config.yaml").exists() and not (result / ".ready").exists():
            return "lost: neither the old nor the new run is there"
        try:
            old = Run.open(result).config().clusters == 4
        except UserError as error:
            return f"corrupt: {error}"
        if old and contents(result) != contents(references / "old"):
            return "corrupt: the old run has changed"
    if case.name == "report" and not (result / "report.html").read_bytes().rstrip().endswith(b"</html>"):
        return "corrupt: half a report"
    if case.appears:
        return broken_appearance(case, references, folder)
    if result.is_file() and result.read_bytes() != (references / case.reference).read_bytes():
        return "corrupt: half a file"
    for found in runs_in(result):
        if problem := inconsistent(found):
            return problem
    return ""


def broken_appearance(case: Case, references: Path, folder: Path) -> str:
    """Return what is wrong with a result that appears as a whole; an empty string if it is the old or the new one."""
    result = folder / case.result
    if not result.exists():
        return "lost: neither the old nor the new result is there" if case.before else ""
    whole = [contents(references / name) for name in (case.reference, case.before) if name]
    return "" if contents(result) in whole else "corrupt: half a result"


def is_complete(case: Case, folder: Path) -> bool:
    """Return whether the first try was stopped after its work was done, and a second one would refuse to repeat it."""
    return case.appears and not case.before and (folder / case.result).exists()


def runs_in(result: Path) -> Iterator[Path]:
    """Yield the runs in a folder."""
    for config in (result / "config.yaml", *sorted(result.glob("seed-*/config.yaml"))):
        if config.is_file():
            yield config.parent


def inconsistent(path: Path) -> str:
    """Return in which way the files of a run contradict each other; an empty string if they do not."""
    try:
        run = Run.open(path)
        clusters = run.config().clusters
        if len(load_predictor(run, _cpu()).centers) != clusters:
            return f"corrupt: a model of other than {clusters} clusters"
        record = run.record()
        epochs = [line["epoch"] for line in run.metrics()]
        if epochs != list(range(len(epochs))) or len(epochs) < record["epochs_done"]:
            return f"corrupt: epochs {epochs} in metrics.jsonl, {record['epochs_done']} in run.json"
        if run.has_checkpoint():
            run.load_state()
    except (UserError, OSError, KeyError) as error:
        return f"corrupt: {error}"
    return ""


def _cpu() -> object:
    import torch

    return torch.device("cpu")


def different_in_the_end(case: Case, references: Path, folder: Path) -> str:
    """Return in what a result differs from that of an undisturbed command; an empty string if in nothing."""
    ours = folder / case.result
    theirs = references / case.reference
    runs = list(runs_in(theirs))
    if runs:
        pairs = zip(runs_in(ours), runs, strict=True)
        same = all(outcome(a) == outcome(b) for a, b in pairs)
    else:
        same = contents(ours) == contents(theirs)
    if not same:
        return f"corrupt: {case.result} differs from that of an undisturbed command"
    left = leftovers(folder)
    return f"left behind: {', '.join(left[:3])}" if left else ""


def contents(path: Path) -> Paths:
    """Return a file, or all files below a folder but no locks, without the time at which they were written."""
    return {
        str(file.relative_to(path)): TIME.sub(b"", file.read_bytes())
        for file in ([path] if path.is_file() else sorted(path.rglob("*")))
        if file.is_file() and file.name != LOCK and ".next" not in file.parts and not file.name.endswith(".tmp")
    }


def outcome(path: Path) -> object:
    """Return what two runs with the same settings have in common."""
    state = load_file(path / "state.safetensors")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    files = {name: (path / name).read_bytes() for name in SAME if (path / name).is_file()}
    written = (name for name in FILES if name != "summary.json")  # by the demo alone, not by the run that continues it
    present = sorted(name for name in written if (path / name).is_file())
    metrics = [{key: value for key, value in line.items() if "seconds" not in key} for line in lines]
    return files, present, {key: value.tolist() for key, value in state.items()}, metrics, events(path)


def events(path: Path) -> object:
    """Return what TensorBoard shows of a run: its numbers but seconds, and the steps of its pictures."""
    if not (path / EVENTS).exists():
        return None
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(path / EVENTS))
    reader.Reload()
    tags = reader.Tags()
    names = [name for name in tags["scalars"] if "seconds" not in name]
    numbers = {name: [(event.step, event.value) for event in reader.Scalars(name)] for name in names}
    return numbers, {name: [event.step for event in reader.Images(name)] for name in tags["images"]}


def _is_left(name: str) -> bool:
    return name.endswith(".tmp") or name.startswith(".tmp") or name == ".next"


def leftovers(folder: Path) -> list[str]:
    """Return the temporary files in a folder and below its results."""
    found = []
    for place, folders, files in os.walk(folder):
        found += [os.path.join(place, name) for name in (*folders, *files) if _is_left(name)]
    return found
