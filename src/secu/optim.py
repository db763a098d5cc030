"""How weights follow gradients: SGD, LARS and the learning rates of a run.

Learning rates are tensors on the device, so that a captured step reads a new one at every replay.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from secu.config import Config, OptimConfig


class LARS(torch.optim.Optimizer):
    """SGD with momentum whose step is scaled, tensor by tensor, to the norm of the weights (You et al., 2017).

    Biases and norms, which have one dimension, are neither scaled nor decayed; a group with ``adapt=False`` is plain
    SGD. Written with foreach operations and no read-back, so that it can be captured.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], momentum: float, weight_decay: float, trust: float = 1e-3):
        defaults = {"lr": 0.0, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "adapt": True}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every weight that has a gradient."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            moves = [self._direction(weight, group) for weight in weights]
            buffers = [self.state[weight]["momentum_buffer"] for weight in weights]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, moves)
            torch._foreach_sub_(weights, torch._foreach_mul(buffers, group["lr"]))

    @staticmethod
    def _direction(weight: Tensor, group: dict[str, Any]) -> Tensor:
        gradient, decay, trust = weight.grad, float(group["weight_decay"]), float(group["trust"])
        assert gradient is not None
        if group["adapt"] and weight.ndim == 1:
            return gradient
        gradient = gradient + decay * weight
        if not group["adapt"]:
            return gradient
        size = weight.norm()
        return gradient * torch.where(size > 0, trust * size / gradient.norm().clamp(min=1e-30), 1.0)


def build_optimizer(
    config: OptimConfig, encoder: nn.Module, centers: nn.Module, encoder_lr: Tensor, center_lr: Tensor
) -> torch.optim.Optimizer:
    """Return one optimiser for encoder and centers, which read their learning rates from the two tensors.

    Centers are decayed like all weights: they are free vectors that are normalised when used, so that decay keeps
    their step on the sphere from shrinking. LARS leaves them to plain SGD.
    """
    groups: list[dict[str, Any]] = [{"params": list(encoder.parameters()), "lr": encoder_lr}]
    if center_weights := list(centers.parameters()):
        groups.append({"params": center_weights, "lr": center_lr})
    if config.name == "lars":
        groups[1:] = [group | {"adapt": False} for group in groups[1:]]
        optimizer: torch.optim.Optimizer = LARS(groups, config.momentum, config.weight_decay)
    else:
        optimizer = torch.optim.SGD(groups, momentum=config.momentum, weight_decay=config.weight_decay, fused=True)
    # Momentum that starts as zeros is what both would make at their first step: a checkpoint finds it always there.
    for weight in (weight for group in groups for weight in group["params"]):
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return optimizer


def learning_rates(config: Config, epoch: int, steps: int) -> Tensor:
    """Return encoder and center learning rate for each step of an epoch (steps, 2).

    The initial epochs leave the encoder at 0; then it warms up linearly and falls to 0 along a half cosine. Centers
    have a constant rate, or one that rises from 0 by (1 − cos)/2 over the whole run.
    """
    rates = [_at(config, epoch + step / steps) for step in range(steps)]
    return torch.tensor(rates, dtype=torch.float32)


def _at(config: Config, time: float) -> tuple[float, float]:
    optim, centers = config.optim, config.centers
    center_lr = centers.lr
    if centers.schedule == "rising":
        center_lr *= (1 - math.cos(math.pi * time / optim.total_epochs)) / 2
    trained = time - optim.initial_epochs
    if trained < 0:
        return 0.0, center_lr
    if trained < optim.warmup_epochs:
        return optim.lr * trained / optim.warmup_epochs, center_lr
    done = (trained - optim.warmup_epochs) / max(optim.epochs - optim.warmup_epochs, 1)
    return optim.lr * (1 + math.cos(math.pi * min(done, 1))) / 2, center_lr
