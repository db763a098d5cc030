"""Averages of models: of the last part of a run, or of a student by its teacher."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from secu.cluster.centers import Centers
from secu.nets.encoder import Encoder


class Average(nn.Module):
    """The mean of encoder and centers over the ends of epochs, each with the same weight.

    The mean includes batch-norm statistics, which are noisy as they depend mostly on the last batches. Centers enter as
    unit vectors, since only their direction matters. Epochs count once ``start``, a fraction of the run, is exceeded.
    """

    count: Tensor
    centers: Tensor

    def __init__(self, encoder: Encoder, centers: Centers, start: float) -> None:
        super().__init__()
        self.start = start
        self.encoder = copy.deepcopy(encoder).requires_grad_(False)
        self.register_buffer("centers", torch.zeros_like(centers.weight))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))  # of epochs

    @torch.no_grad()
    def add(self, encoder: Encoder, centers: Centers, done: float) -> None:
        """Add the model at the end of an epoch; ``done`` is the fraction of the run that is complete."""
        if done <= self.start:
            return
        self.count += 1
        means = [*values_of(self.encoder), self.centers]
        move_towards(means, [*values_of(encoder), centers.unit()], 1 / int(self.count))

    @torch.no_grad()
    def put_into(self, encoder: Encoder, centers: Centers) -> None:
        """Replace encoder and centers by their means."""
        move_towards([*values_of(encoder), centers.weight], [*values_of(self.encoder), self.centers], 1)


def values_of(encoder: Encoder) -> list[Tensor]:
    """Return the weights and batch-norm statistics."""
    return [*encoder.parameters(), *encoder.buffers()]


@torch.no_grad()
def move_towards(means: Sequence[Tensor], values: Sequence[Tensor], weight: float) -> None:
    """Move each mean towards a value, in place; counters, which cannot be averaged, are copied.

    Not torch.optim.swa_utils: one in-place pass over weights and statistics can be captured in a graph.
    """
    floats = [number for number, mean in enumerate(means) if mean.is_floating_point()]
    torch._foreach_lerp_([means[n] for n in floats], [values[n] for n in floats], weight)
    for number in set(range(len(means))) - set(floats):
        means[number].copy_(values[number])
