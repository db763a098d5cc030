"""Precision of the encoder on CUDA (``optim.precision``): what a step does besides the method's autocast.

Nothing here depends on values on the device, so a captured step stays as static as any other.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from secu.config import Config

# In fp16 gradients below 6e-8 are 0, and those above 65,504 are infinite. The largest of a weight that was seen in
# ResNet-18 on CIFAR-10 is 2.2, while the encoder stands still. A power of 2 changes no digit of a gradient.
LOSS_SCALE = 2.0**12


def loss_scale(config: Config, device: torch.device) -> float:
    """Return the factor by which the losses are multiplied before the backward pass, and gradients divided after it."""
    return LOSS_SCALE if config.optim.precision == "fp16" and device.type == "cuda" else 1.0


@torch.no_grad()
def divide_gradients(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Divide the gradients of all weights by a power of 2, before weight decay and norms are computed."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    torch._foreach_mul_([weight.grad for weight in weights if weight.grad is not None], 1 / scale)


@contextmanager
def convolutions(config: Config) -> Iterator[None]:
    """Allow or forbid TF32 in convolutions inside a with-block, then restore what was set before.

    Only the encoder has convolutions. Matrix products, which losses and assignment have too, are left as they are:
    those of a projection take too little time to matter.
    """
    if config.optim.precision not in ("tf32", "fp32"):
        yield
        return
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = config.optim.precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
