"""A run is a folder that explains itself, and from which anything can be redone.

    config.yaml         the config as resolved
    run.json            where and how it was made: versions, device, seconds, final scores
    images.json         own images: the id of each that it is trained on, with a checksum of its pixels
    metrics.jsonl       a line an epoch
    model.safetensors   encoder and centers
    state.pt            all that is needed to resume: the model, label memory, constraint, momentum, epoch
    assignments.csv     the cluster of every training image; assignments.parquet is the same
    clusters.csv        size and cohesion of every cluster, and under which cosine an image is an outlier
    skipped.csv         own images that were left out, with the reason
    exemplars.png       the images closest to each center
    report.html         everything to look at
    selflabel.json      what self-labeling changed; best.safetensors is the model of the epoch it ends with

Every file is written beside its place and then renamed, so that an interruption leaves the old one or the new one; but
metrics.jsonl grows by a line an epoch, of which a cut one is not read.
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
from torch import Tensor, nn

from secu.config import Config
from secu.errors import UserError
from secu.files import is_taken, write_atomically, write_text
from secu.settings import flatten, merge, resolve

FILES = (
    *("config.yaml", "run.json", "images.json", "metrics.jsonl", "model.safetensors", "state.pt", "assignments.csv"),
    *("assignments.parquet", "clusters.csv", "skipped.csv", "exemplars.png", "report.html", "summary.json"),
    *("best.safetensors", "selflabel.json"),
)

MODEL = ("encoder.", "clustering.centers.weight")  # the tensors of a checkpoint that a trained model is made of


class Run:
    """A run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def check_free(cls, path: Path, *, force: bool = False, resume: bool = False) -> None:
        """Refuse a folder that holds something, unless that is a run and may be replaced or resumed."""
        if resume and force:
            raise UserError("--resume and --force contradict each other; choose one")
        if path.exists() and not path.is_dir():
            raise UserError(f"out: {path} is a file; name a folder that does not exist yet")
        if not is_taken(path):
            return
        ours = cls._is_run(path)
        if not force and not resume:
            ways = ", --resume it or replace it with --force" if ours else ""
            raise UserError(f"out: {path} exists; choose another folder{ways}")
        if force and not ours:
            raise UserError(f"out: {path} is not a run folder (no config.yaml of ours), so force leaves it alone")

    @classmethod
    def create(cls, path: Path, config: Config, *, force: bool = False) -> "Run":
        """Make a new run folder; an existing one is only replaced by ``force``, and only if it is a run."""
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
        """Create the run's folder, or open it to resume with the very same settings."""
        cls.check_free(path, force=force, resume=resume)
        if config.init_from and Path(config.init_from).resolve() == path.resolve():
            raise UserError(f"init_from: {config.init_from} is the run that force would replace; choose another folder")
        run = cls.to_resume(path) if resume else None
        if run is None:
            return cls.create(path, config, force=force)
        ours, theirs = flatten(config.settings()), flatten(run.config().settings())
        if different := [key for key in ours | theirs if ours.get(key) != theirs.get(key)]:
            key = different[0]
            change = f"{key}={theirs.get(key)}, got {key}={ours.get(key)}"
            raise UserError(f"resume: {path} was started with {change}; begin anew elsewhere")
        return run

    @classmethod
    def to_resume(cls, path: Path) -> "Run | None":
        """Open the run that is to be resumed; None if there is nothing in the folder, so that it starts anew."""
        if not is_taken(path):
            return None
        run = cls.open(path)
        if (path / "run.json").is_file() and not run.has_checkpoint():  # trained, but not to be trained over
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
        """Say whether a folder is ours to clear: config.yaml is a common name."""
        try:
            cls.open(path).config()
        except UserError:
            return False
        return True

    def discard_unsaved(self) -> None:
        """Remove a run that has nothing to go on from: it went wrong before its first checkpoint."""
        if self.has_checkpoint():
            return
        for name in FILES:
            (self.path / name).unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def config(self) -> Config:
        """Return the config the run was made with."""
        path = self.path / "config.yaml"
        try:
            settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError):
            raise UserError(f"run: {path} is not valid YAML") from None
        if not isinstance(settings, dict):
            raise UserError(f"run: {path} does not hold a config")
        return resolve(settings)

    def amend(self, change: Mapping[str, Any]) -> Config:
        """Change the config of a finished run, whose weights are not touched by it, and return the new one."""
        config = resolve(merge(self.config().model_dump(mode="json"), change))
        write_text(self.path / "config.yaml", yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        return config

    def images(self) -> dict[str, int | None] | None:
        """Return id and checksum of the own images it is trained on; None if it did not note them."""
        path = self.path / "images.json"
        if not path.is_file():
            return None
        try:
            noted = json.loads(path.read_bytes())
        except ValueError:
            noted = None
        if not isinstance(noted, dict):
            raise UserError(f"run: {path} is not a list of images of this program")
        return noted

    def warnings(self) -> tuple[str, ...]:
        """Return what self-labeling found doubtful of itself; nothing for other runs."""
        path = self.path / "selflabel.json"
        return tuple(json.loads(path.read_text(encoding="utf-8"))["warnings"]) if path.is_file() else ()

    @property
    def finished(self) -> bool:
        """Whether training has come to its end."""
        return bool(self._record().get("finished"))

    def unfinished(self) -> str:
        """Return a line for whoever uses a model whose training has not come to its end; empty if it has."""
        if self.finished:
            return ""
        done = self._record().get("epochs_done", len(self.metrics()))
        config = self.config()
        command = "selflabel" if config.selflabel else "fit" if config.data.name == "own" else "train"
        told = f"training stopped after {done:,} of {config.optim.total_epochs:,} epochs"
        return f"{told}: secu {command} with --resume goes on"

    def _record(self) -> dict[str, Any]:
        """Return run.json, or nothing before the first checkpoint."""
        path = self.path / "run.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}

    def metrics(self) -> list[dict[str, Any]]:
        """Return the records of all epochs; a last line that was cut off by a crash is left out."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def keep_metrics(self, epochs: int) -> None:
        """Drop the records of epochs that the checkpoint does not have."""
        records = [record for record in self.metrics() if record["epoch"] < epochs]
        write_text(self.path / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records))

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        """Append one epoch's record."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def has_checkpoint(self) -> bool:
        """Say whether there is something to resume from."""
        return (self.path / "state.pt").is_file()

    def save(self, modules: Mapping[str, nn.Module], state: Mapping[str, Any]) -> None:
        """Save a checkpoint: state.pt holds all that resuming needs, model.safetensors what others need of it."""
        tensors = self.save_model("model.safetensors", modules)
        # Last, as resuming believes it: a finished state beside an older model would never be put right.
        place = self.path / "state.pt"
        try:
            write_atomically(place, lambda path: torch.save({**state, "tensors": tensors}, path))
        except RuntimeError as error:  # torch's way to say that the disk is full
            raise UserError(f"run: cannot write {place}: is the disk full? ({str(error).splitlines()[0]})") from None

    def save_model(
        self, name: str, modules: Mapping[str, nn.Module], metadata: Mapping[str, str] | None = None
    ) -> dict[str, Tensor]:
        """Write what a trained model is made of, and return all tensors of the modules."""
        tensors = {
            f"{part}.{key}": value.detach().cpu().contiguous()
            for part, module in modules.items()
            for key, value in module.state_dict().items()
        }
        model = {key: value for key, value in tensors.items() if key.startswith(MODEL)}
        try:
            write_atomically(self.path / name, lambda path: save_file(model, path, dict(metadata or {})))
        except SafetensorError as error:  # its way to say that the disk is full
            raise UserError(f"run: cannot write {self.path / name}: {error}") from None
        return tensors

    def metadata(self, name: str) -> dict[str, str]:
        """Return what was noted in a model file; nothing if there is none."""
        if not (self.path / name).is_file():
            return {}
        with safe_open(self.path / name, "pt") as file:
            return dict(file.metadata() or {})

    def load_state(self) -> dict[str, Any]:
        """Return the last checkpoint; only tensors and plain values are ever unpickled."""
        path = self.path / "state.pt"
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise UserError(f"run: {self.path} has no checkpoint (state.pt) to resume from") from None
        except Exception as error:
            raise UserError(f"run: {path} is not a checkpoint of this program ({type(error).__name__})") from None
        if not (isinstance(state, dict) and state.keys() >= {"tensors", "momentum", "epochs_done", "seconds"}):
            raise UserError(f"run: {path} is not a checkpoint of this program")
        return state

    def load_model(self, name: str = "model.safetensors") -> dict[str, Tensor]:
        """Return the tensors of the trained model."""
        path = self.path / name
        try:
            tensors = dict(load_file(path))
        except FileNotFoundError:
            raise UserError(f"run: {self.path} has no model yet ({name}); was it stopped early?") from None
        except SafetensorError as error:
            raise UserError(f"run: {path} is not a safetensors file ({error})") from None
        if not all(any(key.startswith(part) for key in tensors) for part in MODEL):
            raise UserError(f"run: {path} is not a model of this program")
        return tensors

    def write_csv(self, name: str, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
        """Write a table atomically."""

        def write(path: Path) -> None:
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(header)
                writer.writerows(rows)

        write_atomically(self.path / name, write)
