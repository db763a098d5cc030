"""Cost of a training step: seconds per epoch, ratio to the arithmetic lower bound, and the time of each part.

    python benchmarks/step.py                                  # recipe cifar10 on this machine's best device
    python benchmarks/step.py --recipe imagenet --images 4096  # ResNet-50, batches of 1,024, heads of up to 10,000
    python benchmarks/step.py --features 768 --clusters 1000 --images 1280000  # secu fit of feature vectors
    torchrun --nproc-per-node 1 benchmarks/step.py             # with the collectives of several processes
    python benchmarks/step.py --images 64 --device cpu encoder.backbone=small heads=[4] optim.batch_size=16

Images are random uint8 in the shape of the recipe's; the cost of a step does not depend on their content. They are kept
on the device, and crops are taken there, even if the recipe takes them from files. Feature vectors are random points
around as many centers as there are clusters.
"""

import time

START = time.monotonic()

import argparse
import gc
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from secu.apps.feature_plan import Facts
from secu.apps.plan import make_plan
from secu.base import processes
from secu.config import Config
from secu.data import Images, shape_of
from secu.methods import build_method
from secu.settings import load_config, parse_overrides
from secu.train.device import choose_device
from secu.train.engine import Engine, choose_engine, load_compiler
from secu.train.feed import ResidentFeed
from secu.train.step import Step

REPEATS = 20
COUNTED = 8  # images whose arithmetic is counted, which is proportional to their number


def main() -> None:
    """Train a few epochs, time the parts, and print."""
    arguments = parse()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        processes.start()
    device = choose_device(arguments.device)
    config, images = planned(arguments, device) if arguments.features else recipe(arguments)
    engine = choose_engine(config.engine, device)
    load_compiler(engine)
    steps = [make_step(config, images, device, engine) for _ in range(arguments.beside + 1)]
    prepared = time.monotonic() - START
    first, seconds = time_epochs(steps, engine, arguments.epochs, device)
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    release(device)
    parts = time_parts(steps[0], device)
    epoch = statistics.median(seconds[1:]) / len(steps)
    floor = 0 if arguments.features else len(images) * arithmetic(steps[0], device) / matrix_rate(device)
    step_seconds = epoch / len(steps[0].sizes)
    report = {
        "recipe": f"{arguments.features} features" if arguments.features else arguments.recipe,
        "overrides": arguments.overrides,
        "heads": config.heads,
        "processes": processes.world() if processes.grouped() else 0,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "engine": engine,
        "trainings_side_by_side": len(steps),
        "images": len(images),
        "prepare_seconds": round(prepared, 2),
        "start_to_first_step_seconds": round(first, 2),
        "first_epoch_seconds": round(seconds[0], 3),
        "epoch_seconds": round(epoch, 4),
        "batch_size": config.optim.batch_size,
        "step_milliseconds": round(1000 * step_seconds, 3),
        "images_per_second": round(len(images) / epoch),
        "share_of_floor": round(floor / epoch, 3),
        "share_of_heads": round(parts["heads"] / step_seconds, 3),
        "gpu_memory_gb": round(memory / 1e9, 3),
        "part_milliseconds": {name: round(1000 * value, 3) for name, value in parts.items()},
    }
    if processes.is_main():
        for name, value in report.items():
            print(f"{name:>28}  {value}")
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    if processes.grouped():
        processes.barrier()
        os._exit(0)  # as secu does: threads of a process group may abort while Python ends


def recipe(arguments: argparse.Namespace) -> tuple[Config, Images]:
    """Return the config of a recipe, and random images."""
    config = load_config(arguments.recipe, ["augment.crop_from=square", *arguments.overrides])
    some = torch.randint(0, 256, (min(arguments.images, 1000), *shape_of(config.data)), dtype=torch.uint8)
    return config, Images(some[torch.arange(arguments.images) % len(some)])


def planned(arguments: argparse.Namespace, device: torch.device) -> tuple[Config, Images]:
    """Return the config that the rules choose for feature vectors, and random ones."""
    facts = Facts(arguments.images, 0, 1, device.type, features=arguments.features)
    config = make_plan(facts, arguments.clusters, None, parse_overrides(arguments.overrides)).config
    centers_KD = torch.randn(arguments.clusters, arguments.features)
    vectors_ND = torch.empty(arguments.images, arguments.features, dtype=torch.float16)
    for part in vectors_ND.split(2**16):
        part.copy_(centers_KD[torch.randint(len(centers_KD), (len(part),))] + 2 * torch.randn(part.shape))
    return config, Images(vectors_ND)


def time_epochs(steps: Sequence[Step], engine: str, epochs: int, device: torch.device) -> tuple[float, list[float]]:
    """Train; return the seconds from the program's start to the end of the first step, and those of each epoch."""
    runner = Engine(steps, engine)
    first: list[float] = []

    def after_step() -> None:
        if not first:
            synchronize(device)
            first.append(time.monotonic() - START)

    seconds = []
    for number in range(epochs + 1):
        began = time.monotonic()
        runner.epoch(number, after_step)  # ends with a read-back of the losses, so the device is done
        seconds.append(time.monotonic() - began)
    return first[0], seconds


def make_step(config: Config, images: Images, device: torch.device, engine: str) -> Step:
    """Return the step of an untrained method, with torch set as it is for a run."""
    torch.backends.cudnn.benchmark = True
    method = build_method(config, len(images), images.shape, device)
    method.prepare(images, None, resumed=False)
    inputs = method.inputs()
    feed = None if inputs is None else ResidentFeed(inputs)
    return Step(method, images, device, compiled=engine != "eager", feed=feed)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="key=value settings")
    parser.add_argument("--recipe", default="cifar10")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--features", type=int, default=0, help="length of feature vectors, instead of a recipe")
    parser.add_argument("--clusters", type=int, default=1000, help="of feature vectors")
    parser.add_argument("--epochs", type=int, default=4, help="timed epochs, after one that warms up")
    parser.add_argument("--beside", type=int, default=0, help="other runs in the same captured step")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    return parser.parse_args()


def time_parts(step: Step, device: torch.device) -> dict[str, float]:
    """Time the parts of one full batch by themselves, each as the engine runs it."""
    size = step.sizes[0]
    method = step.method
    call = step.compiled_call
    index = torch.arange(size, device=device)
    inputs = step.feed.inputs(index)
    views = call(method.views.render, inputs, method.views.draw(size, step.generator)).flatten(0, 1)
    embeddings = embed(step, views).detach().requires_grad_()
    slope = torch.randn_like(embeddings)

    def augment() -> None:
        call(method.views.render, inputs, method.views.draw(size, step.generator))

    def forward() -> None:
        with torch.no_grad():
            embed(step, views)

    def forward_backward() -> None:
        embed(step, views).backward(slope)

    def heads() -> None:
        total(call(method.clustering.step, embeddings, index)).backward()

    whole: dict[str, Callable[[], object]] = {
        "augment": augment,
        "encoder forward": forward,
        "encoder forward and backward": forward_backward,
        "heads": heads,
        "optimiser": step.optimizer.step,  # as spelled in the kept results
    }
    times = {}
    for name, work in whole.items():
        times[name] = measure(work, step, device)
        release(device)
    return times


def total(losses: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the sum that is minimized."""
    return torch.stack(list(losses.values())).sum()


def embed(step: Step, views: torch.Tensor) -> torch.Tensor:
    """Encode as the method does."""
    with step.method.autocast():
        embeddings: torch.Tensor = step.compiled_call(step.method.encoder, views)
    return embeddings


def measure(work: Callable[[], object], step: Step, device: torch.device) -> float:
    """Return the median seconds of ``work``; on CUDA as a replayed graph, so that launches cost nothing."""
    stream = torch.cuda.Stream() if device.type == "cuda" else None
    run: Callable[[], object] = work
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(step.generator)
        with torch.cuda.graph(graph, stream=stream):
            work()
        run = graph.replay
    else:
        work()
    times = []
    for _ in range(REPEATS if stream is not None else 3):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def arithmetic(step: Step, device: torch.device) -> float:
    """Count the floating-point operations of the encoder for both views of an image, forward and backward."""
    views = step.method.views
    images = min(step.sizes[0], COUNTED)  # a whole batch without mixed precision might not fit
    shape = (2 * images, views.channels, *views.view_size)
    counter = FlopCounterMode(display=False)
    with counter:
        step.method.encoder(torch.rand(shape, device=device)).sum().backward()
    step.optimizer.zero_grad(set_to_none=True)
    return float(counter.get_total_flops()) / images


def matrix_rate(device: torch.device) -> float:
    """Measure what a large matrix product reaches here, in operations per second (bfloat16 on CUDA)."""
    side = 8192 if device.type == "cuda" else 512
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = torch.randn(2, side, side, device=device, dtype=kind).unbind()
    times = []
    for _ in range(8):
        synchronize(device)
        began = time.perf_counter()
        a @ b
        synchronize(device)
        times.append(time.perf_counter() - began)
    return 2 * side**3 / min(times)


def release(device: torch.device) -> None:
    """Return the memory of graphs that are no longer used; two captured steps of a large network might not fit."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


if __name__ == "__main__":
    main()
