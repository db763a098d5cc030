"""Many clusters: scores, assignment, both losses forward and backward, at ImageNet's heads.

    python benchmarks/heads.py                                                 # 10 heads of 1,000 to 10,000 clusters
    python benchmarks/heads.py --device cpu --clusters 5 --heads 3 --batch 8   # a tiny try

Prints milliseconds and gigabytes for each constraint, as the engine of the device runs it.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from secu.clustering import Clustering
from secu.settings import load_config
from secu.train import choose_device

KINDS = ("none", "size", "entropy")
REPEATS = 20


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
    report = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        **{name: getattr(arguments, name) for name in ("clusters", "heads", "batch", "dim", "images")},
        "constraints": {kind: measure(kind, arguments, device) for kind in KINDS},
    }
    print(f"{'constraint':>12}  {'milliseconds':>12}  {'GB':>6}")
    for kind, (milliseconds, gigabytes) in report["constraints"].items():
        print(f"{kind:>12}  {milliseconds:12.2f}  {gigabytes:6.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def measure(kind: str, arguments: argparse.Namespace, device: torch.device) -> tuple[float, float]:
    """Return the median milliseconds of a step of all heads, and the peak of memory it takes beside its state."""
    heads = [arguments.clusters * (number + 1) for number in range(arguments.heads)]
    config = load_config("cifar10", [f"constraint.kind={kind}", f"heads={heads}"])
    clustering = Clustering(config, arguments.images, arguments.dim).to(device)
    embeddings = F.normalize(torch.randn(2, arguments.batch, arguments.dim, device=device), dim=-1).requires_grad_()
    index = torch.randperm(arguments.images, device=device)[: arguments.batch]
    step = torch.compile(clustering.step, fullgraph=True, dynamic=False) if device.type == "cuda" else clustering.step

    def work() -> None:
        embeddings.grad = None
        clustering.zero_grad(set_to_none=True)
        losses = step(embeddings, index)
        (losses.representation + losses.centers).backward()

    if device.type != "cuda":
        return 1000 * median_seconds(work, 3, lambda: None), 0.0
    held = torch.cuda.memory_allocated()
    replay = captured(work)
    torch.cuda.reset_peak_memory_stats()
    work()
    gigabytes = (torch.cuda.max_memory_allocated() - held) / 1e9
    return 1000 * median_seconds(replay, REPEATS, torch.cuda.synchronize), gigabytes


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


def median_seconds(work: Callable[[], None], repeats: int, synchronize: Callable[[], None]) -> float:
    """Time ``work`` so many times."""
    times = []
    for _ in range(repeats):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


if __name__ == "__main__":
    main()
