"""The processes of a command: one, or several that torchrun started.

Without torchrun there is no process group, and every function here does nothing. The tensors that processes exchange
in a training step are in collectives.py. torch is imported only where a group exists.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

Value = TypeVar("Value")

# One process may read millions of images while the others wait for it. If it fails, torchrun ends them.
LONGEST_WAIT = timedelta(days=1)
FAILED = "secu/failed"  # key in the store of the process group


class _Group:
    """The place of this process among all."""

    rank = 0
    world = 1
    exists = False


def rank() -> int:
    """Return the number of this process, from 0."""
    return _Group.rank


def world() -> int:
    """Return the number of processes."""
    return _Group.world


def grouped() -> bool:
    """Return whether there is a process group, even if it has a single member, as in benchmarks/step.py."""
    return _Group.exists


def is_main() -> bool:
    """Return whether this is the process that writes files and prints."""
    return _Group.rank == 0


def launched() -> bool:
    """Return whether torchrun started this process along with others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def launch() -> str:
    """Return a name of this launch by torchrun, which stays the same when it restarts its processes; else empty."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{run}/{os.getppid()}" if run else ""


def restarted() -> bool:
    """Return whether torchrun started the processes again after one of them failed."""
    return bool(launch()) and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def local_rank() -> int:
    """Return the number of this process on its machine, which is also that of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0")) if _Group.world > 1 else 0


def local_world() -> int:
    """Return the number of processes on this machine, which share its cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if _Group.world > 1 else 1


def parts_of(total: int) -> list[range]:
    """Return each process's part of ``total`` items."""
    count = _Group.world
    return [range(rank * total // count, (rank + 1) * total // count) for rank in range(count)]


def start() -> None:
    """Join the process group that the environment describes: gloo for tensors on the CPU, NCCL for those on GPUs."""
    import torch
    from torch import distributed
    from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

    cuda = torch.cuda.is_available()
    if cuda and int(os.environ.get("LOCAL_RANK", "0")) < torch.cuda.device_count():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # the device named "cuda" from here on
    store, number, world = next(rendezvous("env://", timeout=LONGEST_WAIT))
    # torchrun may keep its store when it restarts the processes; the addresses of the dead ones are still in there.
    store = PrefixStore(f"secu-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    distributed.init_process_group(backend, store=store, rank=number, world_size=world, timeout=LONGEST_WAIT)
    _Group.rank = number
    _Group.world = world
    _Group.exists = True


def barrier() -> None:
    """Wait until all processes have called this."""
    if _Group.world > 1:
        import torch
        from torch import distributed

        distributed.all_reduce(torch.zeros(1))


def agree(value: Value) -> Value:
    """Return the value that the main process has; all processes wait for it."""
    if _Group.world == 1:
        return value
    import torch
    from torch import distributed

    values = [value]
    distributed.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


def collect(value: Value) -> list[Value]:
    """Return the values of all processes; all of them must call this."""
    if _Group.world == 1:
        return [value]
    from torch import distributed

    values: list[Any] = [None] * _Group.world
    distributed.all_gather_object(values, value)
    return values


@contextmanager
def one_first() -> Iterator[None]:
    """Let the first process of every machine run the block before the others, which then find what it prepared."""
    if _Group.world == 1:
        yield
        return
    first = local_rank() == 0
    if not first:
        barrier()
    yield
    if first:
        barrier()


def report_failure() -> bool:
    """Return whether this is the first process that fails; the others end because of it."""
    if _Group.world == 1:
        return True
    with suppress(RuntimeError):  # the main process may hold the store, and have ended with it
        return bool(_store().add(FAILED, 1) == 1)
    return False


def failed_elsewhere() -> bool:
    """Return whether another process has failed."""
    if _Group.world == 1:
        return False
    with suppress(RuntimeError):
        return bool(_store().check([FAILED]))
    return True


def _store() -> Any:
    """Return the store of the process group."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
