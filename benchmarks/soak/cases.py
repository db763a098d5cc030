"""Commands that write something, what must be true after they were killed, and what a second try must lead to."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_digits

from secu.base.errors import UserError
from secu.train.checkpoint import load_predictor
from secu.train.place import FILES, LOCK
from secu.train.run import Run
from soak.programs import Ended, run

IMAGES = 60
TINY = (
    "data.image_size=8",
    "optim.batch_size=32",
    "optim.warmup_epochs=1",
    "encoder.dim=8",
    "engine=eager",
)
FIT = ("fit", "photos", "--from-scratch", "--device", "cpu", *TINY, "optim.epochs=3", "answer=head", "--out", "run")
DIGITS = ("data.source=digits.npy", "data.channels=1", *TINY, "optim.epochs=1", "heads=[3]", "--device", "cpu")
TRAIN = ("train", "digits", *DIGITS, "--out", "run")
REPEAT = ("repeat", "digits", *DIGITS, "--seeds", "0..1", "--out", "seeds")
DEMO = (*TINY, "optim.epochs=2", "optim.batch_size=512", "heads=[10]", "--device", "cpu", "--out", "run")
SECOND = ("selflabel", "done", "optim.epochs=2", "--device", "cpu", "--out", "run")
SAME = ("model.safetensors", "assignments.csv", "assignments.parquet", "clusters.csv", "config.yaml", "images.json")

Paths = dict[str, bytes]


@dataclass(frozen=True)
class Case:
    """A command that writes something.

    Attributes:
        name: The name in the table.
        command: Arguments of secu.
        before: A folder of the references that is there before, and its name; none for "".
        again: Arguments of the second try, given the folder in which the first was stopped.
        result: The name of what is written.
        reference: What the second try must lead to, in the folder of references.
    """

    name: str
    command: tuple[str, ...]
    result: str
    reference: str
    before: str = ""
    again: Callable[[Path], tuple[str, ...]] | None = None

    def prepare(self, references: Path, folder: Path) -> None:
        """Fill the folder in which the command runs."""
        if self.before:
            shutil.copytree(references / self.before, folder / self.result, symlinks=True)

    def second_try(self, folder: Path) -> tuple[str, ...]:
        """Return the arguments that a person would use after the first try was stopped."""
        return self.again(folder) if self.again else self.command


def resumed(*command: str) -> Callable[[Path], tuple[str, ...]]:
    """Return the second try of a command that may be resumed."""
    return lambda folder: (*command, "--resume")


def forced(folder: Path) -> tuple[str, ...]:
    """Replace the old run again if it is still there; otherwise the new one goes on."""
    is_old = Run.open(folder / "run").config().clusters == 4
    return (*FIT, "-k", "3", "--force" if is_old else "--resume")


def spelled_out(command: tuple[str, ...], references: Path) -> tuple[str, ...]:
    """Return the arguments with the absolute paths of what a command reads."""
    places = {name: str(references / name) for name in ("photos", "done")}
    places["data.source=digits.npy"] = f"data.source={references / 'digits.npy'}"
    return tuple(places.get(word, word) for word in command)


CASES = (
    Case("fit", (*FIT, "-k", "3"), "run", "done", again=resumed(*FIT, "-k", "3")),
    Case("fit --force", (*FIT, "-k", "3", "--force"), "run", "done", "old", forced),
    Case("fit --resume", (*FIT, "-k", "3", "--resume"), "run", "done", "half"),
    Case("train", TRAIN, "run", "trained", again=resumed(*TRAIN)),
    Case("selflabel", SECOND, "run", "second", again=resumed(*SECOND)),
    Case("repeat", REPEAT, "seeds", "seeds"),
    Case("predict", ("predict", "done", "photos", "-o", "out.csv", "--device", "cpu"), "out.csv", "out.csv"),
    Case("predict -o parts/", ("predict", "done", "photos", "-o", "parts/", "--device", "cpu"), "parts", "parts"),
    Case("embed", ("embed", "photos", "-o", "out.npy", "--device", "cpu"), "out.npy", "out.npy"),
    Case("sort", ("sort", "done", "sorted", "--copy", "--device", "cpu"), "sorted", "sorted"),
    Case("export", ("export", "done", "model.onnx"), "model.onnx", "model.onnx"),
    Case("demo", ("demo", *DEMO), "run", "demo", again=resumed("train", "digits", *DEMO)),  # as its last line says
    Case("report", ("report", "run", "--device", "cpu"), "run", "done", "done"),
)


def make_references(folder: Path) -> dict[str, float]:
    """Run every command undisturbed; return its seconds."""
    photos = folder / "photos"
    photos.mkdir()
    digits = (load_digits().images[:IMAGES] * 15).astype(np.uint8)
    np.save(folder / "digits.npy", digits)
    for number, pixels in enumerate(digits):
        Image.fromarray(pixels).save(photos / f"{number}.png")
    seconds = {}
    _must(run(spelled_out((*FIT, "-k", "3", "--time-limit", "0.001"), folder), folder))
    (folder / "run").rename(folder / "half")
    _must(run(spelled_out((*FIT, "-k", "4"), folder), folder))
    (folder / "run").rename(folder / "old")
    for case in CASES:
        if case.before:
            shutil.copytree(folder / case.before, folder / case.result)
        ended = _must(run(spelled_out(case.command, folder), folder))
        seconds[case.name] = ended.seconds
        if case.result != case.reference:
            shutil.rmtree(folder / case.reference, ignore_errors=True)
            (folder / case.result).rename(folder / case.reference)
    for errors in folder.glob("errors-*.txt"):
        errors.unlink()
    return seconds


def _must(ended: Ended) -> Ended:
    if not ended.explained(0):
        raise RuntimeError(f"a command failed undisturbed, with {ended.code}: {ended.errors}")
    return ended


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
    if result.is_file() and result.read_bytes() != (references / case.reference).read_bytes():
        return "corrupt: half a file"
    if case.name == "sort" and result.exists() and contents(result) != contents(references / case.reference):
        return "corrupt: half a folder"
    for found in runs_in(result):
        if problem := inconsistent(found):
            return problem
    return ""


def is_complete(case: Case, folder: Path) -> bool:
    """Return whether the first try was stopped after its work was done, and a second one would refuse to repeat it."""
    return case.name == "sort" and (folder / case.result).exists()


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
    if ours.is_file():
        same = ours.read_bytes() == theirs.read_bytes()
    elif case.name in ("sort", "predict -o parts/"):
        same = contents(ours) == contents(theirs)
    else:
        pairs = list(zip(runs_in(ours), runs_in(theirs), strict=True))
        same = bool(pairs) and all(outcome(a) == outcome(b) for a, b in pairs)
    if not same:
        return f"corrupt: {case.result} differs from that of an undisturbed command"
    left = leftovers(folder)
    return f"left behind: {', '.join(left[:3])}" if left else ""


def contents(path: Path) -> Paths:
    """Return all files below a folder, but no locks."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
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
    return files, present, {key: value.tolist() for key, value in state.items()}, metrics


def _is_left(name: str) -> bool:
    return name.endswith(".tmp") or name.startswith(".tmp") or name == ".next"


def leftovers(folder: Path) -> list[str]:
    """Return the temporary files in a folder and below its results."""
    found = []
    for place, folders, files in os.walk(folder):
        found += [os.path.join(place, name) for name in (*folders, *files) if _is_left(name)]
    return found
