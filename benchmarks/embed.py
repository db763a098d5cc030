"""How many images per second a frozen backbone embeds, from files to features, and how much of that is decoding.

    python benchmarks/embed.py FOLDER                        # → benchmarks/results/embed-cpu.json
    python benchmarks/embed.py FOLDER --sizes 160 --limit 500 --json FILE

FOLDER holds photos of any size. The features are not cached. Every size is measured three times; the median is kept.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from defaults import checked_out, hardware
from results import KEPT

from secu.base.files import write_json
from secu.data import Source, decoded, open_source
from secu.nets.embedding import Embedding
from secu.nets.front import Front
from secu.nets.pretrained import describe
from secu.settings import resolve
from secu.train.device import choose_device

REPEATS = 3


def embed_all(source: Source, encoder: str, size: int, device: torch.device, limit: int) -> float:
    """Return the images per second of decoding and embedding."""
    known = describe(encoder)
    assert known is not None
    data = {"image_size": size, "channels": 3, "mean": known.mean, "std": known.std}
    config = resolve({"data": data, "encoder": {"backbone": encoder, "trainable": "nothing"}})
    work = Embedding(source, Front(config, 3).to(device), (3, size, size), None, None)
    for _ in work.rows(range(max(0, len(source) - 32), len(source))):  # warm up
        pass
    began = time.monotonic()
    done = sum(len(rows) for rows in work.rows(range(len(source) - limit, len(source))))
    if device.type == "cuda":
        torch.cuda.synchronize()
    return done / (time.monotonic() - began)


def decode_all(source: Source, size: int, limit: int) -> float:
    """Return the images per second of decoding alone."""
    began = time.monotonic()
    done = sum(1 for _ in decoded(source, dict.fromkeys(range(limit), (3, size, size))))
    return done / (time.monotonic() - began)


def main() -> None:
    """Measure every size, print the rates and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--encoder", default="lite0")
    parser.add_argument("--sizes", type=int, nargs="+", default=[160, 224])
    parser.add_argument("--limit", type=int, default=2_000, help="number of images")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="where to write the numbers instead")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    source = open_source(arguments.folder)
    limit = min(arguments.limit, len(source))
    record: dict[str, Any] = {
        "command": f"python benchmarks/embed.py FOLDER --encoder {arguments.encoder} --limit {limit}",
        "commit": checked_out(),
        "hardware": hardware(device.type),
        "torch": torch.__version__,
        "images": limit,
        "original_side": source.probe().side,
        "rates": {},
    }
    for size in arguments.sizes:
        embedding = [embed_all(source, arguments.encoder, size, device, limit) for _ in range(REPEATS)]
        decoding = [decode_all(source, size, limit) for _ in range(REPEATS)]
        rates = {"images_per_second": embedding, "decoding_alone": decoding}
        record["rates"][str(size)] = {name: round(statistics.median(values), 1) for name, values in rates.items()}
        print(f"{size} pixels: {record['rates'][str(size)]}")
    write_json(arguments.json or KEPT / f"embed-{device.type}.json", record)


if __name__ == "__main__":
    main()
