"""A run is a self-contained folder with everything needed to understand, resume and reproduce it.

    config.yaml         all resolved settings
    run.json            how it was trained: versions, device, seconds, final scores
    images.json         your own images: the id of each training image, with a checksum of its pixels
    metrics.jsonl       one line per epoch
    model.safetensors   encoder and centers
    state.pt            everything needed to resume: model, label memory, constraint, momentum, epoch
    assignments.csv     the cluster of every training image; assignments.parquet has the same content
    clusters.csv        size and cohesion of every cluster, and the cosine below which an image is an outlier
    skipped.csv         images that could not be read, with the reason
    exemplars.png       the images closest to each center
    report.html         interactive report
    outcome.json        summary that the method reports; best.safetensors is the model of the best epoch so far

Files are written to a temporary name and then renamed, so that an interruption leaves either the old or the new
version. The exception is metrics.jsonl, which grows by one line per epoch; a truncated last line is ignored.
"""

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from secu.config import Config
from secu.data import Shape, input_shape, shape_of
from secu.errors import UserError
from secu.settings import flatten, merge, resolve, with_shape
from secu.train.files import is_taken, write_atomically, write_text

MODEL = "model.safetensors"
BEST = "best.safetensors"
OUTCOMES = ("outcome.json", "selflabel.json")  # the second is the name used by version 0.1
STATE = {"tensors": dict, "momentum": dict, "epochs_done": int, "seconds": float}  # content of state.pt
FILES = (
    "config.yaml",
    "run.json",
    "images.json",
    "metrics.jsonl",
    MODEL,
    BEST,
    "state.pt",
    "assignments.csv",
    "assignments.parquet",
    "clusters.csv",
    "skipped.csv",
    "exemplars.png",
    "report.html",
    "summary.json",
    *OUTCOMES,
)


class Run:
    """A run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def check_free(cls, path: Path, *, force: bool = False, resume: bool = False) -> None:
        """Raise if the folder is not empty, unless it is a run that may be replaced or resumed."""
        if resume and force:
            raise UserError("--resume and --force cannot be combined")
        if path.exists() and not path.is_dir():
            raise UserError(f"out: {path} is a file; choose a new folder")
        if not is_taken(path):
            return
        ours = cls._is_run(path)
        if not force and not resume:
            ways = ", --resume it or replace it with --force" if ours else ""
            raise UserError(f"out: {path} exists; choose another folder{ways}")
        if force and not ours:
            raise UserError(f"out: {path} is not a secu run folder, so it will not be replaced")

    @classmethod
    def create(cls, path: Path, config: Config, *, force: bool = False) -> "Run":
        """Create a new run folder; an existing one is replaced only with ``force``, and only if it is a run."""
        cls.check_free(path, force=force)
        for name in FILES if path.is_dir() else ():
            (path / name).unlink(missing_ok=True)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"out: cannot create {path}: {error.strerror}") from None
        run = cls(path)
        write_text(path / "config.yaml", yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        return run

    @classmethod
    def start(cls, path: Path, config: Config, *, resume: bool, force: bool) -> "Run":
        """Create the run folder, or open it to resume with the same settings."""
        run = cls.check_start(path, config, resume=resume, force=force)
        return cls.create(path, config, force=force) if run is None else run

    @classmethod
    def check_start(cls, path: Path, config: Config, *, resume: bool, force: bool) -> "Run | None":
        """Run the checks of ``start`` without touching the folder; return the run to resume, if any."""
        cls.check_free(path, force=force, resume=resume)
        if config.init_from and Path(config.init_from).resolve() == path.resolve():
            raise UserError(f"init_from: {config.init_from} is the run that would be replaced; choose another folder")
        run = cls.to_resume(path) if resume else None
        if run is not None:
            run.require_settings(config)
        return run

    def require_settings(self, config: Config) -> None:
        """Raise if the settings differ from those the run was started with, except settings its method amended."""
        shape = input_shape(self.config().data)
        ours = flatten(with_shape(config, shape).settings())
        theirs = flatten(with_shape(self.config(), shape).settings())
        amended = self.record().get("amended", ())
        for key in ours | theirs:
            if ours.get(key) != theirs.get(key) and key not in amended:
                change = f"{key}={theirs.get(key)}, got {key}={ours.get(key)}"
                raise UserError(f"resume: {self.path} was started with {change}; start a new run elsewhere")

    def input_shape(self) -> Shape:
        """Return the input shape of the run's model."""
        return shape_of(self.config().data)

    @classmethod
    def to_resume(cls, path: Path) -> "Run | None":
        """Open the run to resume; None if the folder is empty, in which case a new run starts."""
        if not is_taken(path):
            return None
        run = cls.open(path)
        if (path / "run.json").is_file() and not run.has_checkpoint():  # do not overwrite a finished model
            raise UserError(f"run: {path} has no checkpoint (state.pt) to resume from")
        return run

    @classmethod
    def open(cls, path: Path) -> "Run":
        """Open an existing run folder."""
        if not (path / "config.yaml").is_file():
            raise UserError(f"run: {path} is not a run folder (no config.yaml in it)")
        return cls(path)

    @classmethod
    def _is_run(cls, path: Path) -> bool:
        """Return whether a folder is a run folder; a file named config.yaml alone proves nothing."""
        try:
            cls.open(path).config()
        except UserError:
            return False
        return True

    def discard_unsaved(self) -> None:
        """Remove a run that failed before its first checkpoint and therefore cannot be resumed."""
        if self.has_checkpoint():
            return
        for name in FILES:
            (self.path / name).unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def config(self) -> Config:
        """Return the settings of the run."""
        path = self.path / "config.yaml"
        try:
            settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError):
            raise UserError(f"run: {path} is not valid YAML") from None
        if not isinstance(settings, dict):
            raise UserError(f"run: {path} does not contain a config")
        return resolve(settings)

    def amend(self, change: Mapping[str, Any]) -> Config:
        """Change settings of a finished run that do not affect its weights, and return the new config."""
        config = resolve(merge(self.config().model_dump(mode="json"), change))
        write_text(self.path / "config.yaml", yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        return config

    def images(self) -> dict[str, int | None] | None:
        """Return ids and checksums of the training images; None if they were not recorded."""
        path = self.path / "images.json"
        if not path.is_file():
            return None
        try:
            noted = json.loads(path.read_bytes())
        except ValueError:
            noted = None
        if not isinstance(noted, dict):
            raise UserError(f"run: {path} is not a list of images written by secu")
        return noted

    def outcome(self) -> dict[str, Any]:
        """Return the summary that the method reported; empty if there is none."""
        for name in OUTCOMES:
            path = self.path / name
            if path.is_file():
                return dict(json.loads(path.read_text(encoding="utf-8")))
        return {}

    def warnings(self) -> tuple[str, ...]:
        """Return the method's own warnings."""
        return tuple(self.outcome().get("warnings", ()))

    @property
    def finished(self) -> bool:
        """Whether training is complete."""
        return bool(self.record().get("finished"))

    def unfinished(self) -> str:
        """Return a warning if training is not complete; an empty string if it is."""
        if self.finished:
            return ""
        record = self.record()
        done = record.get("epochs_done", len(self.metrics()))
        total = self.config().optim.total_epochs
        command = f"secu {record['command']}" if record.get("command") else "the original command"
        return f"training stopped after {done:,} of {total:,} epochs; to continue, run {command} with --resume"

    def record(self) -> dict[str, Any]:
        """Return run.json; empty before the first checkpoint."""
        path = self.path / "run.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}

    def metrics(self) -> list[dict[str, Any]]:
        """Return the records of all epochs, ignoring a last line truncated by a crash."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def keep_metrics(self, epochs: int) -> None:
        """Drop the records of epochs that the checkpoint does not include."""
        records = [record for record in self.metrics() if record["epoch"] < epochs]
        write_text(self.path / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records))

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        """Append one epoch's record."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint to resume from."""
        return (self.path / "state.pt").is_file()

    def save_state(self, state: Mapping[str, Any]) -> None:
        """Write state.pt, which contains everything needed to resume."""
        place = self.path / "state.pt"
        try:
            write_atomically(place, lambda path: torch.save(dict(state), path))
        except RuntimeError as error:  # how torch reports a full disk
            raise UserError(f"run: cannot write {place}: is the disk full? ({str(error).splitlines()[0]})") from None

    def save_model(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Write the tensors of a trained model."""
        try:
            write_atomically(self.path / name, lambda path: save_file(dict(tensors), path, dict(metadata or {})))
        except SafetensorError as error:  # how safetensors reports a full disk
            raise UserError(f"run: cannot write {self.path / name}: {error}") from None

    def metadata(self, name: str) -> dict[str, str]:
        """Return the metadata of a model file; empty if the file does not exist."""
        path = self.path / name
        if not path.is_file():
            return {}
        try:
            with safe_open(path, "pt") as file:
                return dict(file.metadata() or {})
        except SafetensorError as error:
            raise UserError(f"run: {path} is not a safetensors file ({error})") from None

    def load_state(self) -> dict[str, Any]:
        """Return the last checkpoint; only tensors and plain values are ever unpickled."""
        path = self.path / "state.pt"
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise UserError(f"run: {self.path} has no checkpoint (state.pt) to resume from") from None
        except Exception as error:
            raise UserError(f"run: {path} is not a checkpoint written by secu ({type(error).__name__})") from None
        if not (isinstance(state, dict) and all(isinstance(state.get(name), kind) for name, kind in STATE.items())):
            raise UserError(f"run: {path} is not a checkpoint written by secu")
        return state

    def load_model(self, name: str = MODEL) -> dict[str, Tensor]:
        """Return the tensors of the trained model."""
        path = self.path / name
        try:
            return dict(load_file(path))
        except FileNotFoundError:
            raise UserError(f"run: {self.path} has no model yet ({name}); was it stopped early?") from None
        except SafetensorError as error:
            raise UserError(f"run: {path} is not a safetensors file ({error})") from None

    def write_csv(self, name: str, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
        """Write a table atomically."""

        def write(path: Path) -> None:
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(header)
                writer.writerows(rows)

        write_atomically(self.path / name, write)
