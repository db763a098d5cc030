"""What a training step costs: seconds an epoch, the share of the arithmetic floor, and the time of each part.

    python benchmarks/step.py                                  # recipe cifar10 on this machine's best device
    python benchmarks/step.py --images 64 --device cpu encoder.backbone=small heads=[4] optim.batch_size=16

Images are random uint8, in the number and shape of CIFAR-10: the cost of a step does not depend on what they show.
"""

import time

START = time.monotonic()

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from secu.checkpoint import build
from secu.config import Config
from secu.data import Images
from secu.engine import Engine, choose_engine, load_compiler
from secu.settings import load_config
from secu.steps import ClusterStep
from secu.train import choose_device

REPEATS = 20


def main() -> None:
    """Train a few epochs, time the parts, and print."""
    arguments = parse()
    device = choose_device(arguments.device)
    config = load_config(arguments.recipe, arguments.overrides)
    engine = choose_engine(config.engine, device)
    load_compiler(engine)
    some = torch.randint(0, 256, (min(arguments.images, 1000), 3, 32, 32), dtype=torch.uint8)
    images = Images(some[torch.arange(arguments.images) % len(some)])
    steps = [make_step(config, images, device, engine) for _ in range(arguments.beside + 1)]
    runner, step = Engine(steps, engine), steps[0]
    first: list[float] = []

    def after_step() -> None:
        if not first:
            synchronize(device)
            first.append(time.monotonic() - START)

    seconds = []
    for number in range(arguments.epochs + 1):
        began = time.monotonic()
        runner.epoch(number, after_step)  # ends with a read-back of the losses, so the device is done
        seconds.append(time.monotonic() - began)
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    parts = time_parts(step, device)
    epoch = statistics.median(seconds[1:]) / len(steps)
    floor = arithmetic(step, device) * len(images) / config.optim.batch_size / matrix_rate(device)
    report = {
        "recipe": arguments.recipe,
        "overrides": arguments.overrides,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "engine": engine,
        "trainings_side_by_side": len(steps),
        "images": len(images),
        "start_to_first_step_seconds": round(first[0], 2),
        "first_epoch_seconds": round(seconds[0], 3),
        "epoch_seconds": round(epoch, 4),
        "images_per_second": round(len(images) / epoch),
        "share_of_floor": round(floor / epoch, 3),
        "gpu_memory_gb": round(memory / 1e9, 3),
        "part_milliseconds": {name: round(1000 * value, 3) for name, value in parts.items()},
    }
    for name, value in report.items():
        print(f"{name:>28}  {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def make_step(config: Config, images: Images, device: torch.device, engine: str) -> ClusterStep:
    """Return the step of an untrained model, with torch set as it is for a training."""
    torch.backends.cudnn.benchmark = True
    model = build(config, len(images), images.shape, device)
    parts = (model.augmentation, model.encoder, model.clustering)
    return ClusterStep(config, images, *parts, device, compiled=engine != "eager")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="key=value settings")
    parser.add_argument("--recipe", default="cifar10")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--epochs", type=int, default=4, help="timed epochs, after one that warms up")
    parser.add_argument("--beside", type=int, default=0, help="other trainings in the same captured step")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    return parser.parse_args()


def time_parts(step: ClusterStep, device: torch.device) -> dict[str, float]:
    """Time the parts of one full batch by themselves, each as the engine runs it."""
    size = step.sizes[0]
    augment, encode, assign = step.parts(size)
    index = torch.arange(size, device=device)
    pixels, draws = step.feed.pixels(index), step.augmentation.draw(size, step.generator)
    views = augment(pixels, draws).flatten(0, 1)
    embeddings = embed(step, encode, views).detach().requires_grad_()
    slope = torch.randn_like(embeddings)

    def heads() -> None:
        losses = assign(embeddings, index)
        (losses.representation + losses.centers).backward()

    def augment_views() -> None:
        augment(pixels, step.augmentation.draw(size, step.generator))

    def forward() -> None:
        with torch.no_grad():
            embed(step, encode, views)

    def forward_backward() -> None:
        embed(step, encode, views).backward(slope)

    whole = {
        "augment": augment_views,
        "encoder forward": forward,
        "encoder forward and backward": forward_backward,
        "heads": heads,
        "optimiser": step.optimizer.step,
    }
    return {name: measure(work, step, device) for name, work in whole.items()}


def embed(step: ClusterStep, encode: Callable[..., torch.Tensor], views: torch.Tensor) -> torch.Tensor:
    """Encode as the step does."""
    with step.autocast():
        return encode(views)


def measure(work: Callable[[], object], step: ClusterStep, device: torch.device) -> float:
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


def arithmetic(step: ClusterStep, device: torch.device) -> float:
    """Count the floating-point operations of the encoder, forward and backward, in one step."""
    size = step.sizes[0]
    shape = (2 * size, step.augmentation.channels, *step.augmentation.view_size)
    counter = FlopCounterMode(display=False)
    with counter:
        step.encoder(torch.rand(shape, device=device)).sum().backward()
    step.optimizer.zero_grad(set_to_none=True)
    return float(counter.get_total_flops())


def matrix_rate(device: torch.device) -> float:
    """Measure what a large matrix product reaches here, in operations a second (bfloat16 on CUDA)."""
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


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


if __name__ == "__main__":
    main()
