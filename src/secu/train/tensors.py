"""Files of tensors: written atomically, and checked when they are read.

A file is read into memory before anything in it is used. A memory map would end the process by a signal if the file
were truncated meanwhile.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from secu.base.errors import UserError
from secu.base.files import write_atomically
from secu.data.text import one_line

STATE_PARTS = ("tensors", "momentum", "middle")
OLD_STATE_KEYS = {"tensors": dict, "momentum": dict, "epochs_done": int, "seconds": float}


class TensorFile(NamedTuple):
    """Content of a file: its tensors, its metadata, and the SHA-256 of its bytes."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    sha256: str


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    before: Callable[[Path], object] | None = None,
) -> None:
    """Write a safetensors file; ``before`` is called with the complete temporary file before it is renamed."""

    def write(temporary: Path) -> None:
        # Not save_file, which would use a temporary file of its own.
        temporary.write_bytes(save(dict(tensors), dict(metadata or {})))
        if before is not None:
            before(temporary)

    write_atomically(path, write)


def read_tensors(path: Path) -> TensorFile:
    """Read a safetensors file; if there is none, ``FileNotFoundError`` is raised."""
    content = path.read_bytes()
    try:
        tensors = load(content)
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
    except (SafetensorError, ValueError, KeyError) as error:  # KeyError: a dtype that torch does not have
        raise UserError(f"run: {path} is not a safetensors file ({one_line(error)})") from None
    require_finite(path, tensors)
    return TensorFile(tensors, header.get("__metadata__", {}), hashlib.sha256(content).hexdigest())


def require_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise if a tensor contains NaN or infinite values: every prediction would be meaningless."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UserError(f"run: {path} is damaged: {name[:100]} contains NaN or infinite values")


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint: groups of tensors, and two numbers as metadata."""
    tensors = {f"{part}.{name}": tensor for part in STATE_PARTS for name, tensor in state.get(part, {}).items()}
    write_tensors(path, tensors, {key: json.dumps(state[key]) for key in ("epochs_done", "seconds")})


def read_state(path: Path) -> dict[str, Any]:
    """Read a checkpoint."""
    file = read_tensors(path)
    state: dict[str, Any] = {part: {} for part in STATE_PARTS}
    try:
        state |= {"epochs_done": int(file.metadata["epochs_done"]), "seconds": float(file.metadata["seconds"])}
        for name, tensor in file.tensors.items():
            part, _, rest = name.partition(".")
            state[part][rest] = tensor
    except (KeyError, ValueError, TypeError):
        raise UserError(f"run: {path} is not a checkpoint written by secu") from None
    return state


def read_old_state(path: Path) -> dict[str, Any]:
    """Read the checkpoint of an earlier version; only tensors and plain values are ever unpickled."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"run: {path} is not a checkpoint written by secu ({type(error).__name__})") from None
    if not isinstance(state, dict) or any(not isinstance(state.get(key), kind) for key, kind in OLD_STATE_KEYS.items()):
        raise UserError(f"run: {path} is not a checkpoint written by secu")
    named = [*state["tensors"].items(), *state["momentum"].items()]
    if not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in named):
        raise UserError(f"run: {path} is not a checkpoint written by secu")
    require_finite(path, state["tensors"] | state["momentum"])
    return state
