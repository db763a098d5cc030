"""Choice of the device."""

import torch

from secu.errors import UserError


def choose_device(wanted: str) -> torch.device:
    """Return the device to train on: ``auto`` is the best one available."""
    available = ["cpu"]
    if torch.backends.mps.is_available():
        available.insert(0, "mps")
    if torch.cuda.is_available():
        available.insert(0, "cuda")
    if wanted == "auto":
        return torch.device(available[0])
    if wanted not in available:
        raise UserError(f"device: {wanted!r} is not available here; valid: auto, {', '.join(available)}")
    return torch.device(wanted)
