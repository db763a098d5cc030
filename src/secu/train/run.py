"""A run is a self-contained folder with everything needed to understand, resume and reproduce it.

    config.yaml         all resolved settings
    run.json            how it was trained: versions, device, seconds, final scores, checksum of the model
    images.json         your own images: the id of each training image, with a checksum of its pixels
    metrics.jsonl       one line per epoch
    model.safetensors   encoder and centers
    state.safetensors   everything needed to resume: model, label memory, constraint, momentum, epoch
    assignments.csv     the cluster of every training image; assignments.parquet has the same content
    clusters.csv        size and cohesion of every cluster, and the cosine below which an image is an outlier
    skipped.csv         images that could not be read, with the reason
    exemplars.png       the images closest to each center
    report.html         interactive report
    tensorboard/        events for TensorBoard, if asked for
    outcome.json        summary that the method reports; best.safetensors is the model of the best epoch so far

Files are written to a temporary name and then renamed, so that an interruption leaves either the old or the new
version. The exception is metrics.jsonl, which grows by one line per epoch; a truncated last line is ignored. A new run
is built out of sight and put into place with its first checkpoint: see place.py.
"""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from secu.base import processes
from secu.base.errors import UserError, shortened
from secu.base.files import write_json
from secu.config import Config
from secu.data import Shape, input_shape, shape_of
from secu.settings import flatten, with_shape
from secu.train.place import (
    LOCK,
    MODEL,
    OLD_STATE,
    STATE,
    finish_replacement,
    holds_files,
    new_folder,
    put_in_place,
    require_unlocked,
)
from secu.train.records import Records
from secu.train.tensors import read_old_state, read_state, read_tensors, write_state, write_tensors

ATTEMPTS = 3  # a model and run.json may be replaced between reading one and the other


class Run(Records):
    """A run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path  # where its files are: a hidden subfolder while the run is new and has no checkpoint

    @classmethod
    def check_free(cls, path: Path, *, force: bool = False, resume: bool = False) -> None:
        """Raise if the folder is in use or not empty, unless it is a run that may be replaced or resumed.

        Of several processes, the main one checks, and the others wait.
        """
        if resume and force:
            raise UserError("--resume and --force cannot be combined")
        if processes.is_main():
            require_unlocked(path)
            cls._check_content(path, force=force, resume=resume)
        processes.barrier()

    @classmethod
    def continued(cls, path: Path, *, resume: bool, force: bool) -> tuple[bool, bool]:
        """Return whether to resume and whether to replace the run in a folder.

        When torchrun restarts processes, the run that they had begun is resumed, whatever the command says.
        """
        if not processes.restarted():
            return resume, force
        begun = False
        if processes.is_main():
            finish_replacement(path)
            begun = cls(path).record().get("launch") == processes.launch()
        return (True, False) if processes.agree(begun) else (resume, force)

    @classmethod
    def _check_content(cls, path: Path, *, force: bool, resume: bool) -> None:
        if path.exists() and not path.is_dir():
            raise UserError(f"out: {path} is a file; choose a new folder")
        if not holds_files(path):
            return
        finish_replacement(path)
        ours = cls._is_run(path)
        if not force and not resume:
            ways = ", --resume it or replace it with --force" if ours else ""
            raise UserError(f"out: {path} exists; choose another folder{ways}")
        if force and not ours:
            raise UserError(f"out: {path} is not a secu run folder, so it will not be replaced")

    @classmethod
    def create(cls, path: Path, config: Config, *, force: bool = False) -> "Run":
        """Begin a new run in a folder that is empty or, with ``force``, holds a run to be replaced."""
        cls._check_content(path, force=force, resume=False)
        return cls.begin(path, config)

    @classmethod
    def begin(cls, path: Path, config: Config) -> "Run":
        """Begin a new run next to the old one, if any, which ``put_in_place`` replaces; nothing is checked."""
        run = cls(path)
        run.folder = new_folder(path)
        run.write_config(config)
        return run

    def put_in_place(self) -> "Run":
        """Replace the old run in the folder, if any; nothing happens if this run is in its place already."""
        if self.folder != self.path:
            put_in_place(self.path)
            self.folder = self.path
        return self

    @classmethod
    def check_start(cls, path: Path, config: Config, *, resume: bool, force: bool) -> None:
        """Raise if a run with these settings must not start in a folder, or continue the run in it."""
        cls._check_content(path, force=force, resume=resume)
        if config.init_from and Path(config.init_from).resolve() == path.resolve():
            raise UserError(f"init_from: {config.init_from} is the run that would be replaced; choose another folder")
        run = cls.to_resume(path) if resume else None
        if run is not None:
            run.require_settings(config)

    def require_settings(self, config: Config) -> None:
        """Raise if the settings differ from those the run was started with, except settings its method amended."""
        shape = input_shape(self.config().data)
        ours = flatten(with_shape(config, shape).settings())
        theirs = flatten(with_shape(self.config(), shape).settings())
        amended = self.record().get("amended", ())
        for key in ours | theirs:
            if ours.get(key) != theirs.get(key) and key not in amended:
                change = f"{key}={shortened(str(theirs.get(key)))}, got {key}={shortened(str(ours.get(key)))}"
                raise UserError(f"resume: {self.path} was started with {change}; start a new run elsewhere")

    def input_shape(self) -> Shape:
        """Return the input shape of the run's model."""
        return shape_of(self.config().data)

    @classmethod
    def to_resume(cls, path: Path) -> "Run | None":
        """Open the run to resume; None if the folder is empty, in which case a new run starts."""
        if not holds_files(path):
            return None
        run = cls.open(path)
        if (path / "run.json").is_file() and not run.has_checkpoint():  # do not overwrite a finished model
            raise UserError(f"run: {path} has no checkpoint ({STATE}) to resume from")
        return run

    @classmethod
    def open(cls, path: Path) -> "Run":
        """Open an existing run folder."""
        finish_replacement(path)
        if not (path / "config.yaml").is_file():
            raise UserError(f"run: {path} is not a run folder (no config.yaml in it)")
        return cls(path)

    @classmethod
    def _is_run(cls, path: Path) -> bool:
        """Return whether a folder has our mark: a lock, or in earlier versions only the version in run.json."""
        if (path / LOCK).is_file():
            return True
        try:
            return "secu" in cls.open(path).record().get("versions", {})
        except UserError:  # a file named config.yaml proves nothing
            return False

    def has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint to resume from."""
        return any((self.folder / name).is_file() for name in (STATE, OLD_STATE))

    def save_state(self, state: Mapping[str, Any]) -> None:
        """Write the state, which contains everything needed to resume: see ``Checkpoint``."""
        write_state(self.folder / STATE, state)
        (self.folder / OLD_STATE).unlink(missing_ok=True)

    def load_state(self) -> dict[str, Any]:
        """Return the last checkpoint."""
        if not self.has_checkpoint():
            raise UserError(f"run: {self.path} has no checkpoint ({STATE}) to resume from")
        path = self.folder / (STATE if (self.folder / STATE).is_file() else OLD_STATE)
        state = read_state(path) if path.name == STATE else read_old_state(path)
        total = self.config().optim.total_epochs
        if not 0 <= state["epochs_done"] <= total or not 0 <= state["seconds"] < math.inf:
            numbers = f"{state['epochs_done']} epochs of {total} in {state['seconds']} seconds"
            raise UserError(f"run: {path} is damaged: it claims {numbers}")
        return state

    def save_model(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Write the tensors of a trained model.

        Its checksum is announced in run.json before it replaces the old model, so that at every moment the model in the
        folder has a checksum that is known.
        """
        write_tensors(self.folder / name, tensors, metadata, before=self._announce if name == MODEL else None)

    def _announce(self, model: Path) -> None:
        if record := self.record():
            digest = hashlib.sha256(model.read_bytes()).hexdigest()
            write_json(self.folder / "run.json", {**record, "next_model_sha256": digest})

    def metadata(self, name: str) -> dict[str, str]:
        """Return the metadata of a model file; empty if the file does not exist."""
        path = self.folder / name
        return read_tensors(path).metadata if path.is_file() else {}

    def load_model(self, name: str = MODEL) -> dict[str, Tensor]:
        """Return the tensors of the trained model, which must be the one that run.json describes."""
        path = self.folder / name
        for _ in range(ATTEMPTS):
            try:
                file = read_tensors(path)
            except FileNotFoundError:
                raise UserError(f"run: {self.path} has no model yet ({name}); was it stopped early?") from None
            record = self.record() if name == MODEL else {}
            known = [record[key] for key in ("model_sha256", "next_model_sha256") if key in record]
            if not known or file.sha256 in known:
                return file.tensors
        raise UserError(f"run: {path} is not the model that run.json describes (its checksum differs); restore it")
