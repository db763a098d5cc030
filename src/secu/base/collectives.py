"""What processes exchange about a batch that they share: labels, statistics and sums.

A batch is divided into contiguous parts, one for each process; a batch of fewer images than processes is computed as a
whole by all of them. Outside of ``shared_batch``, and without a process group, every function returns its input, and no
collective operation takes place. Shapes: B images of this process's part, G of the whole batch, W processes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from secu.base import processes


@dataclass(frozen=True)
class Batch:
    """A batch and the part of it that this process computes."""

    total: int  # number of images of the whole batch, G
    own: slice  # the part of this process
    sizes: tuple[int, ...]  # images of each process's part; empty if every process computes the whole batch

    @property
    def share(self) -> float:
        """Weight of this process's mean in the mean over the batch."""
        return self.sizes[processes.rank()] / self.total if self.sizes else 1.0


class _Current:
    """The divided batch that is being computed; None if there is none."""

    batch: Batch | None = None


def part_of(total: int) -> slice:
    """Return this process's part of a batch of ``total`` images."""
    if processes.world() > total:
        return slice(0, total)
    own = processes.parts_of(total)[processes.rank()]
    return slice(own.start, own.stop)


@contextmanager
def shared_batch(total: int) -> Iterator[Batch]:
    """Compute a batch together with the other processes inside a with-block."""
    is_divided = processes.grouped() and processes.world() <= total
    sizes = tuple(map(len, processes.parts_of(total))) if is_divided else ()
    batch = Batch(total, part_of(total), sizes)
    _Current.batch = batch if is_divided else None
    try:
        yield batch
    finally:
        _Current.batch = None


def divided() -> bool:
    """Return whether the current batch is divided among processes."""
    return _Current.batch is not None


def whole(count: int) -> int:
    """Return the number of images or values in the whole batch, given that in this process's part."""
    batch = _Current.batch
    return count if batch is None else count * batch.total // batch.sizes[processes.rank()]


def own_part(values: Tensor, dim: int) -> Tensor:
    """Return this process's part of values for all images of the batch, which are along ``dim``."""
    if _Current.batch is None:
        return values
    own = _Current.batch.own
    return values.narrow(dim, own.start, own.stop - own.start)


def gather(*columns: Tensor) -> tuple[Tensor, ...]:
    """Return integers of all images of the batch, (B,) or (B, n) → (G,) or (G, n), in one exchange for all columns."""
    batch = _Current.batch
    if batch is None:
        return columns
    rows_Bn = torch.cat([column.long().view(len(column), -1) for column in columns], dim=1)
    rows_Gn = gather_rows(rows_Bn, batch.sizes)
    parts = rows_Gn.split([column.view(len(column), -1).shape[1] for column in columns], dim=1)
    return tuple(part if column.ndim == 2 else part[:, 0] for part, column in zip(parts, columns, strict=True))


def add_up(values: Tensor) -> Tensor:
    """Return the sum of values over the parts of the batch; without gradient."""
    if _Current.batch is None:
        return values
    total = values.detach().clone()
    distributed.all_reduce(total)
    return total


def mean_over_batch(*means: Tensor) -> tuple[Tensor, ...]:
    """Return the means over the whole batch, given those over this process's part; differentiable."""
    if _Current.batch is None:
        return means
    total: Tensor = _WeightedSum.apply(torch.stack(means), _Current.batch.share)  # type: ignore[no-untyped-call]
    return total.unbind()


class _WeightedSum(torch.autograd.Function):
    """Adds up the values of all processes, each times the weight of its part."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        total = values * weight
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        distributed.all_reduce(total)
        return total * ctx.weight, None


def gather_rows(rows_Bn: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the rows (G, n) of all processes one after the other, given how many each of them has."""
    if not processes.grouped():
        return rows_Bn
    padded = F.pad(rows_Bn, (0, 0, 0, max(sizes) - len(rows_Bn)))
    everything = padded.new_empty(processes.world(), *padded.shape)
    distributed.all_gather(list(everything.unbind()), padded.contiguous())
    return torch.cat([part[:size] for part, size in zip(everything, sizes, strict=True)])


def copy_from_main(tensors: Mapping[str, Tensor]) -> None:
    """Overwrite tensors with those of the main process."""
    if processes.world() > 1:
        for tensor in tensors.values():
            content = tensor.detach().contiguous()
            distributed.broadcast(content, src=0)
            tensor.detach().copy_(content)
