"""Choice of the device."""

import torch

from secu import processes
from secu.errors import UserError


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
