"""Commands that write something, what is there before, and what a second try must lead to (judge.py)."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from secu.apps.exports.writing import FORMATS
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
HINTED = (*FIT, "-k", "3", "--hints", "hints.csv")
WATCHED = (*FIT, "-k", "3", "--tensorboard")
SUFFIX = {"embedding-atlas": ".parquet"}  # the others are folders
HINTS = "id,label\n0.png,zero\n10.png,zero\n1.png,one\n11.png,one\n"


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
        appears: Whether the result appears as a whole: it is old, new or, if nothing was there, missing. A new one is
            refused if it is there.
    """

    name: str
    command: tuple[str, ...]
    result: str
    reference: str
    before: str = ""
    again: Callable[[Path], tuple[str, ...]] | None = None
    appears: bool = False

    def prepare(self, references: Path, folder: Path) -> None:
        """Fill the folder in which the command runs."""
        before = references / self.before
        if self.before and before.is_dir():
            shutil.copytree(before, folder / self.result, symlinks=True)
        elif self.before:
            shutil.copy(before, folder / self.result)

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


def exported(tool: str, suffix: str = "", *, force: bool = False) -> Case:
    """Return the export of a run's clusters to a tool, or its replacement of the export of another run."""
    result = f"exported{suffix}"
    command = ("export", "done", result, "--to", tool, "--device", "cpu")
    new = Case(f"export --to {tool}", command, result, f"{tool}{suffix}", appears=True)
    if not force:
        return new
    old = f"old-{tool}{suffix}"
    return replace(new, name=f"{new.name} --force", command=(*command, "--force"), before=old)


def spelled_out(command: tuple[str, ...], references: Path) -> tuple[str, ...]:
    """Return the arguments with the absolute paths of what a command reads."""
    places = {name: str(references / name) for name in ("photos", "done", "old", "hints.csv")}
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
    Case("sort", ("sort", "done", "sorted", "--copy", "--device", "cpu"), "sorted", "sorted", appears=True),
    Case("export", ("export", "done", "model.onnx"), "model.onnx", "model.onnx"),
    Case("demo", ("demo", *DEMO), "run", "demo", again=resumed("train", "digits", *DEMO)),  # as its last line says
    Case("report", ("report", "run", "--device", "cpu"), "run", "done", "done"),
    Case("fit --hints", HINTED, "run", "hinted", again=resumed(*HINTED)),
    Case("fit --tensorboard", WATCHED, "run", "watched", again=resumed(*WATCHED)),
    *(exported(tool, SUFFIX.get(tool, "")) for tool in FORMATS.names()),
    *(exported(tool, SUFFIX.get(tool, ""), force=True) for tool in FORMATS.names()),
)


def make_references(folder: Path) -> dict[str, float]:
    """Run every command undisturbed; return its seconds."""
    photos = folder / "photos"
    photos.mkdir()
    digits = (load_digits().images[:IMAGES] * 15).astype(np.uint8)
    np.save(folder / "digits.npy", digits)
    for number, pixels in enumerate(digits):
        Image.fromarray(pixels).save(photos / f"{number}.png")
    (folder / "hints.csv").write_text(HINTS)
    seconds = {}
    _must(run(spelled_out((*FIT, "-k", "3", "--time-limit", "0.001"), folder), folder))
    (folder / "run").rename(folder / "half")
    _must(run(spelled_out((*FIT, "-k", "4"), folder), folder))
    (folder / "run").rename(folder / "old")
    for case in CASES:
        if case.appears and case.before:  # by the same command, of another run
            of_old = ["old" if word == "done" else word for word in case.command]
            _must(run(spelled_out(tuple(of_old), folder), folder))
            (folder / case.result).rename(folder / case.before)
        case.prepare(folder, folder)
        ended = _must(run(spelled_out(case.command, folder), folder))
        seconds[case.name] = ended.seconds
        if case.result != case.reference:
            remove(folder / case.reference)
            (folder / case.result).rename(folder / case.reference)
    for errors in folder.glob("errors-*.txt"):
        errors.unlink()
    return seconds


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _must(ended: Ended) -> Ended:
    if not ended.explained(0):
        raise RuntimeError(f"a command failed undisturbed, with {ended.code}: {ended.errors}")
    return ended
