"""Batch-norm with the statistics of each view."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secu.base import collectives

VIEWS = 2  # a training batch holds all first views, then all second views


class ViewNorm(nn.Module):
    """Batch-norm over (N, C, …) with separate training statistics for each of the ``views`` in a batch.

    If processes share a batch, the statistics are those of the whole batch.
    """

    running_mean: Tensor
    running_var: Tensor
    views = VIEWS  # in a training batch
    momentum = 0.1

    def __init__(self, features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize; in training, normalize each view separately and update the running statistics with each."""
        if not self.training:
            return self._library(x)
        if collectives.divided() or torch.compiler.is_compiling():
            return self._fused(x)
        return torch.cat([self._library(view) for view in x.chunk(self.views)])

    def _library(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )

    def _fused(self, x: Tensor) -> Tensor:
        """Normalize all views at once, in the form that compiles to the fewest passes over the data.

        The forward pass is two sums and one multiply-add, and so is its derivative. Processes that share the batch add
        up their sums.
        """
        views = x.unflatten(0, (self.views, -1)).float()
        others = (1, *range(3, views.ndim))  # all but view and channel
        mean, square = collectives.mean_over_batch(
            views.mean(others, keepdim=True), views.square().mean(others, keepdim=True)
        )
        variance = (square - mean.square()).clamp(min=0)
        shape = mean.shape[1:]
        scale = torch.rsqrt(variance + self.eps) * self.weight.view(shape)
        y: Tensor = views * scale + (self.bias.view(shape) - mean * scale)
        self._update(mean, variance, collectives.whole(views[0, :, 0].numel()))
        return y.to(x.dtype).flatten(0, 1)

    @torch.no_grad()
    def _update(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Update the running statistics with those of each view (V, 1, C, …) over ``count`` values."""
        for view in range(self.views):
            self.running_mean.lerp_(mean[view].flatten(), self.momentum)
            self.running_var.lerp_(variance[view].flatten() * (count / (count - 1)), self.momentum)
