"""Sums of gradients over the processes that share a batch."""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed, nn

from secu.base.collectives import divided

BUCKET = 16 * 2**20  # bytes of gradients that are added up at a time


class Exchange:
    """Sums of some tensors over all processes, in progress."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.flat = torch.cat([tensor.flatten() for tensor in tensors])
        self.work = distributed.all_reduce(self.flat, async_op=True)

    def finish(self) -> None:
        """Wait for the sums and store them."""
        self.work.wait()
        parts = self.flat.split([tensor.numel() for tensor in self.tensors])
        for tensor, part in zip(self.tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


class GradientSum:
    """Adds up the gradients of all processes, in buckets, while the backward pass still computes others.

    The weights are in the order of the forward pass.
    """

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self.buckets: list[list[nn.Parameter]] = [[]]
        size = 0
        for weight in reversed([weight for weight in weights if weight.requires_grad]):
            if size > BUCKET:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(weight)
            size += weight.nbytes
        self.bucket_of = {weight: number for number, bucket in enumerate(self.buckets) for weight in bucket}
        self._reset()
        for weight in self.bucket_of:
            weight.register_post_accumulate_grad_hook(self._ready)

    def _reset(self) -> None:
        self.missing = [len(bucket) for bucket in self.buckets]
        self.started: list[Exchange] = []
        self.values = torch.zeros(0)

    def begin(self, values: Tensor) -> None:
        """Prepare for a backward pass; ``values`` are added up along with the first bucket, in place."""
        self.values = values

    def _ready(self, weight: Tensor) -> None:
        """Start the exchange of every bucket that is complete, in the same order in every process."""
        if not divided():
            return
        self.missing[self.bucket_of[weight]] -= 1  # type: ignore[index]
        while len(self.started) < len(self.buckets) and not self.missing[len(self.started)]:
            self._start(self.buckets[len(self.started)])

    @torch.no_grad()
    def _start(self, bucket: list[nn.Parameter]) -> None:
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in bucket]
        first = [] if self.started else [self.values]
        self.started.append(Exchange(first + gradients))

    @torch.no_grad()
    def finish(self) -> None:
        """Exchange what is left, for example of buckets with an unused weight, and wait for all sums."""
        if divided():
            for bucket in self.buckets[len(self.started) :]:
                self._start(bucket)
            for exchange in self.started:
                exchange.finish()
        self._reset()
