"""Benchmark of many clusters: scores, assignment and both losses, forward and backward, with ImageNet's heads.

    python benchmarks/heads.py                                                 # 10 heads of 1,000 to 10,000 clusters
    python benchmarks/heads.py --device cpu --clusters 5 --heads 3 --batch 8   # a tiny trial

Prints milliseconds and gigabytes for each constraint, with the default engine of the device. The constraints take
turns, so that a GPU that slows down over time does not favor any of them.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from step import synchronize, total

from secu.cluster.clustering import Clustering
from secu.settings import load_config
from secu.train.device import choose_device

KINDS = ("none", "size", "entropy")
ROUNDS = 10
REPEATS = 20


class Prepared(NamedTuple):
    """A step of all heads."""

    eager: Callable[[], None]  # holds the tensors that the captured one reads
    step: Callable[[], None]
    gigabytes: float  # at its peak, in addition to its state


def main() -> None:
    """Measure every constraint and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, default=1000, help="of the first head; the n-th has n times as many")
    parser.add_argument("--heads", type=int, default=10)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--images", type=int, default=1_281_167, help="in the label memory")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    works = {kind: prepare(kind, arguments, device) for kind in KINDS}
    on_gpu = device.type == "cuda"
    rounds = ROUNDS if on_gpu else 1
    repeats = REPEATS if on_gpu else 3
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, prepared in works.items():
            times[kind] += seconds(prepared.step, repeats, device)
    report = {
        "device": torch.cuda.get_device_name() if on_gpu else device.type,
        "torch": torch.__version__,
        **{name: getattr(arguments, name) for name in ("clusters", "heads", "batch", "dim", "images")},
        "constraints": {kind: (1000 * statistics.median(times[kind]), works[kind].gigabytes) for kind in KINDS},
    }
    print(f"{'constraint':>12}  {'milliseconds':>12}  {'GB':>6}")
    for kind, (milliseconds, gigabytes) in report["constraints"].items():
        print(f"{kind:>12}  {milliseconds:12.2f}  {gigabytes:6.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def prepare(kind: str, arguments: argparse.Namespace, device: torch.device) -> Prepared:
    """Build the heads, and capture a step of them where that is possible."""
    heads = [arguments.clusters * (number + 1) for number in range(arguments.heads)]
    config = load_config("cifar10", [f"constraint.kind={kind}", f"heads={heads}"])
    clustering = Clustering(config, arguments.images, arguments.dim).to(device)
    embeddings = F.normalize(torch.randn(2, arguments.batch, arguments.dim, device=device), dim=-1).requires_grad_()
    index = torch.randperm(arguments.images, device=device)[: arguments.batch]
    step = torch.compile(clustering.step, fullgraph=True, dynamic=False) if device.type == "cuda" else clustering.step

    def work() -> None:
        embeddings.grad = None
        clustering.zero_grad(set_to_none=True)
        total(step(embeddings, index)).backward()

    if device.type != "cuda":
        return Prepared(work, work, 0.0)
    held = torch.cuda.memory_allocated()
    replay = captured(work)
    torch.cuda.reset_peak_memory_stats()
    work()
    gigabytes = (torch.cuda.max_memory_allocated() - held) / 1e9
    return Prepared(work, replay, gigabytes)


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """Return ``work`` as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph.replay


def seconds(work: Callable[[], None], repeats: int, device: torch.device) -> list[float]:
    """Return the seconds of each of several calls."""
    times = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    main()
