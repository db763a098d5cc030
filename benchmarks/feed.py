"""How many images per second reach the training step when they are decoded on demand, beside decoding alone.

    python benchmarks/feed.py                          # → benchmarks/results/feed-cpu.json
    python benchmarks/feed.py --images 500 --json FILE

It writes photos of 500 x 375 pixels as JPEG files and as tar shards, reads them in random order through the feed of a
run, without training on them, and decodes the same bytes from memory in as many threads or processes. A feed must reach
85% of that. Each rate is the median of several rounds, in which all of them take turns; a share is the median of its
rounds, since a machine that others use is not equally fast in all of them. CPU seconds hardly depend on them, but those
of other processes are not included.
"""

import argparse
import io
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from defaults import checked_out, hardware
from PIL import Image
from results import KEPT

from secu.base.files import write_json
from secu.data import Images, load_images, open_source
from secu.data.decoding.decode import MAX_PIXELS
from secu.data.decoding.workers import Decoder, Task
from secu.data.stream import cores
from secu.train.device import choose_device
from secu.train.feed import HostFeed

REQUIRED = 0.85  # share of the rate of decoding alone
SHARDS = 4


def photos(count: int) -> list[bytes]:
    """Return JPEG files of 500 x 375 pixels: smooth colors with noise, about 75 kB each."""
    numbers = np.random.default_rng(0)
    files = []
    for _ in range(count):
        coarse = Image.fromarray(numbers.integers(0, 256, (47, 63, 3), np.uint8))
        pixels = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC)) + numbers.normal(0, 6, (375, 500, 3))
        file = io.BytesIO()
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def write_sources(folder: Path, files: list[bytes]) -> dict[str, str]:
    """Write the photos as files and as shards; return the names of the sources."""
    (folder / "files").mkdir()
    for number, content in enumerate(files):
        (folder / "files" / f"{number:06}.jpg").write_bytes(content)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"shard-{shard}.tar", "w") as archive:
            for number in range(shard, len(files), SHARDS):
                archive.add(folder / "files" / f"{number:06}.jpg", f"{number:06}.jpg")
    return {"files": str(folder / "files"), "shards": str(folder / f"shard-{{0..{SHARDS - 1}}}.tar")}


def feed_epoch(images: Images, batch: int, device: torch.device) -> None:
    """Feed all images once in random order."""
    feed = HostFeed(images, batch, device)
    batches = torch.randperm(len(images)).split(batch)
    feed.start(batches)
    for index in batches:
        feed.next()
        feed.inputs(index)
    if device.type == "cuda":
        torch.cuda.synchronize()


def decode_epoch(files: list[bytes], size: int, workers: int) -> None:
    """Decode all photos from memory, in threads or processes as a run does."""
    decoder = Decoder(len(files), workers, None, MAX_PIXELS)
    tasks = [Task(content, size, 3) for content in files]
    parts = [tasks[start : start + decoder.at_once] for start in range(0, len(tasks), decoder.at_once)]
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(decoder, parts):
            pass


class Rates(NamedTuple):
    """Images per second of a task in each round, by the clock and by the CPU time of all threads."""

    clock: list[float]
    cpu: list[float]

    def share_of(self, other: "Rates") -> float:
        """Return the median share of another task's rate, rounded down."""
        return int(1000 * statistics.median(a / b for a, b in zip(self.clock, other.clock, strict=True))) / 1000


def measure(tasks: dict[str, Callable[[], None]], count: int, repeats: int) -> dict[str, Rates]:
    """Run all tasks in turn, several times."""
    rates = {name: Rates([], []) for name in tasks}
    for _ in range(repeats):
        for name, task in tasks.items():
            began = time.monotonic(), time.process_time()
            task()
            rates[name].clock.append(count / (time.monotonic() - began[0]))
            rates[name].cpu.append(count / (time.process_time() - began[1]))
    return rates


def measure_size(sources: dict[str, str], files: list[bytes], size: int, arguments: Any) -> dict[str, Any]:
    """Return the rates for images of one size."""
    device = choose_device(arguments.device)
    tasks: dict[str, Callable[[], None]] = {
        "decoding_alone": lambda: decode_epoch(files, size, cores()),
    }
    for kind, name in sources.items():
        images = load_images(open_source(name), (3, size, size), on_demand=True)
        tasks[kind] = lambda images=images: feed_epoch(images, arguments.batch, device)  # type: ignore[misc]
    rates = measure(tasks, len(files), arguments.repeats)
    alone = rates["decoding_alone"]
    return {
        name: {
            "images_per_second": round(statistics.median(found.clock), 1),
            "images_per_second_and_core": round(statistics.median(found.clock) / cores(), 1),
            "images_per_cpu_second": round(statistics.median(found.cpu), 1),
            "share_of_decoding_alone": found.share_of(alone),
        }
        for name, found in rates.items()
    }


def main() -> None:
    """Measure every size, print the rates and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 160])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="where to write the numbers instead")
    arguments = parser.parse_args()
    device = choose_device(arguments.device).type
    files = photos(arguments.images)
    record: dict[str, Any] = {
        "command": f"python benchmarks/feed.py --images {arguments.images} --batch {arguments.batch}",
        "commit": checked_out(),
        "hardware": hardware(device),
        "cores": cores(),
        "torch": torch.__version__,
        "images": arguments.images,
        "kilobytes_per_image": round(sum(map(len, files)) / len(files) / 1000, 1),
        "required_share": REQUIRED,
        "rates": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        sources = write_sources(Path(folder), files)
        for size in arguments.sizes:
            record["rates"][str(size)] = measure_size(sources, files, size, arguments)
            for name, rates in record["rates"][str(size)].items():
                print(f"{size} pixels, {name}: {rates}")
    write_json(arguments.json or KEPT / f"feed-{device}.json", record)


if __name__ == "__main__":
    main()
