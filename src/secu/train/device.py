"""Choice of the device."""

import platform

import torch

import secu
from secu.base import processes
from secu.base.errors import UserError


def choose_device(wanted: str) -> torch.device:
    """Return the device to train on: ``auto`` is the best one available."""
    available = ["cpu"]
    if torch.backends.mps.is_available():
        available.insert(0, "mps")
    if torch.cuda.is_available():
        available.insert(0, "cuda")
    if wanted != "auto" and wanted not in available:
        raise UserError(f"device: {wanted!r} is not available here; valid: auto, {', '.join(available)}")
    device = torch.device(available[0] if wanted == "auto" else wanted)
    if device.type == "cuda" and processes.local_rank() >= torch.cuda.device_count():
        got = f"process {processes.local_rank()} of this machine has none; lower --nproc-per-node of torchrun"
        raise UserError(f"device: every process needs a GPU of its own, and {got}")
    return device


def versions() -> dict[str, str]:
    """Return the versions that a run's numbers depend on."""
    return {"secu": secu.__version__, "torch": torch.__version__, "python": platform.python_version()}


def name_of(device: torch.device) -> str:
    """Return a device's kind and model."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"{device.type} ({platform.processor() or platform.machine()})"
