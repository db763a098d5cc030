"""The records in a run folder: its settings, its images, and what was reported during training and at its end.

A damaged file is reported in one line that says what is wrong with it.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from secu.base.errors import UserError
from secu.base.files import read_json, write_json, write_text
from secu.base.yamls import read_yaml
from secu.config import Config
from secu.settings import merge, resolve
from secu.train.place import MODEL, OUTCOMES

LARGEST = 1e300  # of a number; Python cannot convert all larger integers to floats

# Types of what is read from run.json; some keys are missing in runs of earlier versions.
RECORD: dict[str, type | tuple[type, ...]] = {
    "finished": bool,
    "epochs_done": int,
    "seconds": (int, float),
    "seed": int,
    "command": str,
    "losses": list,
    "device": str,
    "engine": str,
    "launch": str,
    "versions": dict,
    "last_epoch": dict,
    "kept": dict,
    "amended": list,
    "estimator": dict,
    "model_sha256": str,
    "next_model_sha256": str,
}


class Records:
    """The records of a run."""

    folder: Path  # where its files are

    def config(self) -> Config:
        """Return the settings of the run."""
        path = self.folder / "config.yaml"
        settings = read_yaml(path, "run")
        if not isinstance(settings, dict):
            raise UserError(f"run: {path} does not contain a config")
        return resolve(settings)

    def write_config(self, config: Config) -> None:
        """Write config.yaml."""
        write_text(self.folder / "config.yaml", yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))

    def amend(self, change: Mapping[str, Any]) -> Config:
        """Change settings of a finished run that do not affect its weights, and return the new config."""
        config = resolve(merge(self.config().model_dump(mode="json"), change))
        self.write_config(config)
        return config

    def images(self) -> dict[str, int | None] | None:
        """Return ids and checksums of the training images; None if they were not recorded."""
        path = self.folder / "images.json"
        if not path.is_file():
            return None
        known = read_json(path, dict)
        if not all(value is None or isinstance(value, int) for value in known.values()):
            raise _damaged(path, "it does not hold one checksum per image")
        return known

    def outcome(self) -> dict[str, Any]:
        """Return the summary that the method reported; empty if there is none."""
        path = next((self.folder / name for name in OUTCOMES if (self.folder / name).is_file()), None)
        if path is None:
            return {}
        outcome = read_json(path, dict)
        if not _is_texts(outcome.get("warnings", [])):
            raise _damaged(path, "warnings must be a list of texts")
        number = outcome.get("number", {})
        if not isinstance(number, dict) or not _is_texts(number.get("reasons", [])):
            raise _damaged(path, "number must have reasons, a list of texts")
        return outcome

    def write_outcome(self, outcome: Mapping[str, Any]) -> None:
        """Write the summary that the method reported."""
        write_json(self.folder / OUTCOMES[0], outcome)
        for earlier in OUTCOMES[1:]:
            (self.folder / earlier).unlink(missing_ok=True)

    def warnings(self) -> tuple[str, ...]:
        """Return the method's own warnings."""
        return tuple(self.outcome().get("warnings", ()))

    def number_reasons(self) -> tuple[str, ...]:
        """Return why the run has its number of clusters, in plain words; empty if the user gave that number."""
        number = self.outcome().get("number", {})
        return tuple(number.get("reasons", ()))

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
        path = self.folder / "run.json"
        if not path.is_file():
            return {}
        record = read_json(path, dict)
        for key, kind in RECORD.items():
            if key in record and not (isinstance(record[key], kind) and _is_usual(record[key])):
                raise _damaged(path, f"{key} has the value {str(record[key])[:100]!r}")
        for key in ("losses", "amended"):
            if not _is_texts(record.get(key, [])):
                raise _damaged(path, f"{key} must be a list of names")
        return record

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Write run.json, with the checksum of the model."""
        model = self.folder / MODEL
        digest = {"model_sha256": hashlib.sha256(model.read_bytes()).hexdigest()} if model.is_file() else {}
        write_json(self.folder / "run.json", {**record, **digest})

    def metrics(self) -> list[dict[str, Any]]:
        """Return the records of all epochs, ignoring a last line truncated by a crash."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return [_epoch(path, number, line) for number, line in enumerate(lines, 1) if line.endswith(b"\n")]

    def model_metrics(self) -> list[dict[str, Any]]:
        """Return the records of the epochs that led to the model: none if self-labeling kept the previous run's."""
        return [] if "rejected" in self.outcome() else self.metrics()

    def keep_metrics(self, epochs: int) -> None:
        """Drop the records of epochs that the checkpoint does not include."""
        records = [record for record in self.metrics() if record["epoch"] < epochs]
        write_text(self.folder / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records))

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        """Append one epoch's record."""
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _epoch(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("epoch"), int):
        raise _damaged(path, f"line {number} is not a JSON object with an epoch")
    for key, value in record.items():
        if not isinstance(value, int | float) or not _is_usual(value):
            raise _damaged(path, f"{key[:100]} in line {number} must be a number")
    return record


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_usual(value: object) -> bool:
    """Return whether a number, if it is one, can be converted and printed."""
    return not isinstance(value, int | float) or not abs(value) > LARGEST


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"run: {path} is damaged: {why}")
