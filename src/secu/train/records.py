"""Reading of the records in a run folder; a damaged file is reported in one line that says what is wrong with it."""

import json
from pathlib import Path
from typing import Any

from secu.base.errors import UserError
from secu.base.files import read_json

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


def read_record(path: Path) -> dict[str, Any]:
    """Return run.json; empty if there is none."""
    if not path.is_file():
        return {}
    record = read_json(path, dict)
    for key, kind in RECORD.items():
        if key in record and not (isinstance(record[key], kind) and _is_usual(record[key])):
            raise _damaged(path, f"{key} has the value {str(record[key])[:100]!r}")
    for key in ("losses", "amended"):
        if not all(isinstance(text, str) for text in record.get(key, ())):
            raise _damaged(path, f"{key} must be a list of names")
    return record


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of all epochs in metrics.jsonl, ignoring a last line truncated by a crash."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [_epoch(path, number, line) for number, line in enumerate(lines, 1) if line.endswith(b"\n")]


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


def read_known(path: Path) -> dict[str, int | None] | None:
    """Return ids and checksums of the training images in images.json; None if there is no such file."""
    if not path.is_file():
        return None
    known = read_json(path, dict)
    if not all(value is None or isinstance(value, int) for value in known.values()):
        raise _damaged(path, "it does not hold one checksum per image")
    return known


def read_outcome(path: Path) -> dict[str, Any]:
    """Return the summary that a method reported."""
    outcome = read_json(path, dict)
    warnings = outcome.get("warnings", [])
    if not isinstance(warnings, list) or not all(isinstance(text, str) for text in warnings):
        raise _damaged(path, "warnings must be a list of texts")
    number = outcome.get("number", {})
    reasons = number.get("reasons", []) if isinstance(number, dict) else None
    if not isinstance(reasons, list) or not all(isinstance(text, str) for text in reasons):
        raise _damaged(path, "number must have reasons, a list of texts")
    return outcome


def _is_usual(value: object) -> bool:
    """Return whether a number, if it is one, can be converted and printed."""
    return not isinstance(value, int | float) or not abs(value) > LARGEST


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"run: {path} is damaged: {why}")
