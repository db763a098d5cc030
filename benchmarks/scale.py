"""What 8 and 64 GPUs would reach: a model. Nothing in it was measured on more than one GPU.

    python benchmarks/scale.py            # print the tables
    python benchmarks/scale.py publish    # rewrite them in docs/scale.md

Measured: a step on one GPU, without a process group and with a group of one, which makes every exchange but has nobody
to wait for. Counted: bytes and number of exchanges. Assumed: bandwidth and latency between GPUs.
"""

import argparse
import json
from typing import NamedTuple

import torch
from results import KEPT, ROOT, with_table

from secu.base.files import write_text
from secu.methods import build_method
from secu.nets.norm import ViewNorm
from secu.settings import load_config
from secu.train.gradients import GradientSum

DOC = ROOT / "docs" / "scale.md"
BEGIN = "<!-- model: made by benchmarks/scale.py publish -->\n"
END = "<!-- end of model -->"
# A step of each recipe, without and with a process group of one; both in the same lease, at the same commit.
STEPS = {
    "cifar10": ("step-cifar10-babbef0.json", "step-cifar10-group-babbef0.json"),
    "imagenet": ("step-imagenet-0a62107.json", "step-imagenet-group-0a62107.json"),
}
LABEL_BYTES = 8
SUM_BYTES = 4
GPUS = (8, 64)


class Links(NamedTuple):
    """What is assumed about the connections between GPUs."""

    bytes_per_second: float  # at which an all-reduce passes data from GPU to GPU
    latency: float  # seconds that an exchange takes longer than in a group of one, if it carries nothing


# Half of what NVLink 4 carries in one direction (450 GB/s), and half of eight adapters of 400 Gbit/s per machine.
ONE_MACHINE = Links(225e9, 10e-6)
SEVERAL_MACHINES = Links(200e9, 30e-6)
PER_MACHINE = 8


class Step(NamedTuple):
    """A measured step."""

    batch: int
    seconds: float  # on one GPU
    group_seconds: float  # additional, with a process group of one


class Traffic(NamedTuple):
    """What a step exchanges."""

    gradients: int  # bytes that are all-reduced
    sums: int  # bytes of batch-norm, forward and backward, that are all-reduced
    labels_per_image: int  # bytes that are gathered
    exchanges: int


def measured(recipe: str) -> Step:
    """Return the kept measurements; a group that was no slower than none costs nothing."""
    alone, group = (json.loads((KEPT / name).read_text()) for name in STEPS[recipe])
    cost = max(0.0, group["step_milliseconds"] - alone["step_milliseconds"])
    return Step(alone["batch_size"], alone["step_milliseconds"] / 1000, cost / 1000)


def traffic(recipe: str) -> Traffic:
    """Count what a step of a recipe exchanges."""
    config = load_config(recipe)
    method = build_method(config, 1000, (3, 32, 32), torch.device("cpu"))
    encoder, centers = method.trained_parameters()
    weights = [*encoder, *centers]
    norms = [module for module in method.modules() if isinstance(module, ViewNorm)]
    channels = sum(norm.weight.numel() for norm in norms)
    both = 2  # forward and backward
    moments = 2  # mean and mean square
    columns = 1 + 2 * len(config.heads)  # which image, its label and its previous label in every head
    return Traffic(
        gradients=sum(weight.nbytes for weight in weights),
        sums=both * moments * ViewNorm.views * channels * SUM_BYTES,
        labels_per_image=columns * LABEL_BYTES,
        exchanges=both * len(norms) + len(GradientSum(weights).buckets) + 1,
    )


def seconds(step: Step, moved: Traffic, gpus: int, images: int, *, hidden: bool) -> float:
    """Return the modeled seconds of a step.

    Args:
        step: Measured on one GPU; its time is taken to be proportional to the images, which favors few images.
        moved: What is exchanged.
        gpus: Their number.
        images: Of each GPU.
        hidden: Whether the backward pass hides the transport of gradients entirely; otherwise not at all.
    """
    links = ONE_MACHINE if gpus <= PER_MACHINE else SEVERAL_MACHINES
    share = (gpus - 1) / gpus
    carried = 2 * share * (moved.sums + (0 if hidden else moved.gradients))  # every value goes around twice
    carried += share * gpus * images * moved.labels_per_image
    waiting = moved.exchanges * links.latency if gpus > 1 else 0.0
    return step.seconds * images / step.batch + step.group_seconds + waiting + carried / links.bytes_per_second


def predictions(step: Step, moved: Traffic) -> str:
    """Return a table: the batch of the recipe divided among GPUs, and its batch on each of them."""
    one = step.batch / step.seconds
    lines = [
        "| GPUs | images of each | whole batch | ms per step | images per second | times one GPU |",
        "|---|---|---|---|---|---|",
        f"| 1, measured | {step.batch} | {step.batch} | {1000 * step.seconds:.2f} | {one:,.0f} | |",
    ]
    for gpus in GPUS:
        for images in (step.batch // gpus, step.batch):
            best, worst = (seconds(step, moved, gpus, images, hidden=hidden) for hidden in (True, False))
            least, most = (gpus * images / time for time in (worst, best))
            lines.append(
                f"| {gpus} | {images} | {gpus * images:,} | {1000 * best:.1f} to {1000 * worst:.1f} "
                f"| {round(least, -3):,.0f} to {round(most, -3):,.0f} | {least / one:.1f} to {most / one:.1f} |"
            )
    return "\n".join(lines)


def counts() -> str:
    """Return a table of what a step exchanges."""
    lines = [
        "| recipe | gradients | batch-norm sums | labels of the batch | exchanges |",
        "|---|---|---|---|---|",
    ]
    for recipe in STEPS:
        moved = traffic(recipe)
        labels = moved.labels_per_image * load_config(recipe).optim.batch_size
        lines.append(
            f"| `{recipe}` | {moved.gradients / 1e6:.1f} MB | {moved.sums / 1e3:,.0f} kB | {labels / 1e3:.0f} kB "
            f"| {moved.exchanges} |"
        )
    return "\n".join(lines)


def tables() -> str:
    """Return everything that is generated."""
    modeled = [f"`{recipe}`:\n\n{predictions(measured(recipe), traffic(recipe))}" for recipe in STEPS]
    return "\n\n".join([counts(), *modeled]) + "\n"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("print", "publish"), default="print")
    if parser.parse_args().what == "publish":
        write_text(DOC, with_table(DOC.read_text(), tables(), BEGIN, END))
    else:
        print(tables())


if __name__ == "__main__":
    main()
