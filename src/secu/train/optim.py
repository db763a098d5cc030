"""Optimizers (SGD, LARS) and learning rate schedules.

Learning rates are tensors on the device, so that a captured step reads a new value at every replay.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secu.config import Config, OptimConfig

SETTLING = 0.1  # share of the run, at its end, in which the schedule settling lowers the centers' rate to 0


class LARS(torch.optim.Optimizer):
    """SGD with momentum whose step is scaled by the norm of the weights, per tensor (You et al., 2017).

    One-dimensional parameters (biases, batch-norm) are neither scaled nor decayed. A group with ``adapt=False`` uses
    plain SGD. In a group with ``heads``, a tensor (H, K, D) holds H matrices, padded to the same number of rows; each
    is scaled by the norm of its own rows, of which ``heads`` states the number. The step uses foreach operations and
    never synchronizes with the host, so it can be captured.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], momentum: float, weight_decay: float, trust: float = 1e-3):
        defaults = {"lr": 0.0, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "adapt": True}
        super().__init__(groups, defaults | {"heads": None})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
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
        gradient = weight.grad
        assert gradient is not None
        decay = float(group["weight_decay"])
        trust = float(group["trust"])
        if group["adapt"] and weight.ndim == 1:
            return gradient
        gradient = gradient + decay * weight
        if not group["adapt"]:
            return gradient
        size = _norm(weight, group["heads"])
        slope = _norm(gradient, group["heads"])
        return gradient * torch.where(size > 0, trust * size / slope.clamp(min=1e-30), 1.0)


def _norm(values: Tensor, heads: Sequence[int] | None) -> Tensor:
    """Return the norm of a tensor, or those of the matrices in it (H, 1, 1)."""
    if heads is None:
        norm: Tensor = values.norm()
        return norm
    norms = [matrix[:rows].norm() for matrix, rows in zip(values, heads, strict=True)]
    return torch.stack(norms).view(-1, 1, 1)


def build_optimizer(
    config: OptimConfig,
    encoder_weights: list[nn.Parameter],
    center_weights: list[nn.Parameter],
    encoder_lr: Tensor,
    center_lr: Tensor,
    backbone_weights: Sequence[nn.Parameter] = (),
    backbone_lr: Tensor | None = None,
    heads: Sequence[int] | None = None,
) -> torch.optim.Optimizer:
    """Return one optimizer for encoder and centers; their learning rates are read from tensors.

    Those of ``encoder_weights`` that are also ``backbone_weights`` may have a learning rate of their own.

    Weight decay also applies to the centers. They are unconstrained vectors that are normalized when used, so decay
    keeps their effective step size on the sphere from shrinking. LARS applies plain SGD to them, unless ``heads``, the
    number of clusters of each head, is given; it then scales the step of each head by that head's norm.
    """
    apart = {id(weight) for weight in backbone_weights}
    backbone = [weight for weight in encoder_weights if id(weight) in apart]
    rest = [weight for weight in encoder_weights if id(weight) not in apart]
    rates = ((backbone, backbone_lr), (rest, encoder_lr), (center_weights, center_lr))
    groups: list[dict[str, Any]] = [{"params": weights, "lr": rate} for weights, rate in rates if weights]
    if config.name == "lars":
        of_centers = {"adapt": heads is not None, "heads": heads}
        groups = [group | of_centers if group["lr"] is center_lr else group for group in groups]
        optimizer: torch.optim.Optimizer = LARS(groups, config.momentum, config.weight_decay)
    else:
        optimizer = torch.optim.SGD(groups, momentum=config.momentum, weight_decay=config.weight_decay, fused=True)
    # Both optimizers start from zero momentum; allocating it here makes it part of every checkpoint.
    for weight in (*encoder_weights, *center_weights):
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return optimizer


def learning_rates(config: Config, epoch: int, steps: int) -> Tensor:
    """Return the learning rates of encoder, centers and backbone for each step of an epoch (steps, 3).

    The encoder's rate is 0 in the initial epochs, then warms up linearly, and stays there or decays to 0 along a half
    cosine. The centers' rate is constant, rises from 0 as (1 − cos)/2 over the whole run, or decays to 0 along a half
    cosine in the last tenth of the run. The backbone's rate is proportional to the encoder's.
    """
    rates = torch.tensor([_at(config, epoch + step / steps) for step in range(steps)], dtype=torch.float32)
    optim = config.optim
    ratio = 1.0 if optim.backbone_lr is None or not optim.lr else optim.backbone_lr / optim.lr
    return torch.cat([rates, ratio * rates[:, :1]], dim=1)


def _at(config: Config, time: float) -> tuple[float, float]:
    optim = config.optim
    center_lr = config.centers.lr * _share_of_center_rate(config.centers.schedule, time / optim.total_epochs)
    trained = time - optim.initial_epochs
    if trained < 0:
        return 0.0, center_lr
    if trained < optim.warmup_epochs:
        return optim.lr * trained / optim.warmup_epochs, center_lr
    if optim.schedule == "constant":
        return optim.lr, center_lr
    done = (trained - optim.warmup_epochs) / max(optim.epochs - optim.warmup_epochs, 1)
    return optim.lr * (1 + math.cos(math.pi * min(done, 1))) / 2, center_lr


def _share_of_center_rate(schedule: str, done: float) -> float:
    """Return the centers' rate as a share of the highest, at a fraction of the run."""
    if schedule == "rising":
        return (1 - math.cos(math.pi * done)) / 2
    if schedule == "settling" and done > 1 - SETTLING:
        return (1 + math.cos(math.pi * (done - 1 + SETTLING) / SETTLING)) / 2
    return 1.0
