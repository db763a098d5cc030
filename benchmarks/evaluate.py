"""How many images per second are evaluated, from JPEG files to cosines, compared with decoding them alone.

    python benchmarks/evaluate.py                                  # 50,000 photos of 500 x 375 pixels, ResNet-50
    python benchmarks/evaluate.py --device cpu --images 2000 --different 200 --cheap

Weights are random, which does not affect the speed. The photos are noise on gradients; the files are read from the page
cache. --cheap replaces the network by a mean over pixels, so that the rate is that of everything around it.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from secu.data import Images, decoded, load
from secu.methods import build_method
from secu.methods.predictor import Predictor
from secu.settings import load_config
from secu.train.device import choose_device


def main() -> None:
    """Measure both, alternately, and print."""
    arguments = parse()
    device = choose_device(arguments.device)
    config = load_config(arguments.recipe, arguments.overrides)
    with tempfile.TemporaryDirectory(prefix="secu-") as folder:
        write_photos(Path(folder) / "imagenet" / "val" / "photos", arguments.images, arguments.different)
        images = load(config.data, "test", Path(folder))
        predictor = build_method(config, max(config.heads), images.shape, device).predictor()
        if arguments.cheap:
            predictor.encode = cheap  # type: ignore[method-assign]
        evaluate(predictor, images.select(range(min(len(images), 256))))  # warm up
        pairs = [(decode(images), evaluate(predictor, images)) for _ in range(arguments.repeats)]
    decoding, evaluating = (max(rates) for rates in zip(*pairs, strict=True))  # others can only slow it down
    report = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "recipe": arguments.recipe,
        "overrides": arguments.overrides,
        "cheap": arguments.cheap,
        "images": arguments.images,
        "evaluate_seconds": round(arguments.images / evaluating, 2),
        "evaluate_images_per_second": round(evaluating, 1),
        "decoding_alone": round(decoding, 1),
        "share": round(evaluating / decoding, 3),
    }
    for name, value in report.items():
        print(f"{name:>28}  {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="key=value settings")
    parser.add_argument("--recipe", default="imagenet")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument(
        "--different", type=int, default=1000, help="photos that are drawn; the others are links to them"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cheap", action="store_true", help="without a network")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    return parser.parse_args()


def write_photos(folder: Path, count: int, different: int) -> None:
    """Write JPEGs of 500 x 375 pixels."""
    folder.mkdir(parents=True)
    numbers = np.random.default_rng(0)
    y, x = np.mgrid[:375, :500]
    for i in range(min(count, different)):
        slope = (numbers.random() * x + numbers.random() * y)[..., None] * numbers.random(3) % 256
        coarse = Image.fromarray(numbers.integers(0, 256, (94, 125, 3), np.uint8)).resize((500, 375))
        photo = np.uint8(0.6 * slope + 0.4 * np.asarray(coarse))
        Image.fromarray(photo).save(folder / f"{i}.JPEG", quality=90)
    for i in range(different, count):
        os.link(folder / f"{i % different}.JPEG", folder / f"{i}.JPEG")


def decode(images: Images) -> float:
    """Return the images per second of decoding alone."""
    assert images.source is not None
    began = time.perf_counter()
    done = sum(1 for _ in decoded(images.source, images.shape))
    return done / (time.perf_counter() - began)


def evaluate(predictor: Predictor, images: Images) -> float:
    """Return the images per second of a whole evaluation, up to clusters in host memory."""
    began = time.perf_counter()
    predictor.predict(images)
    return len(images) / (time.perf_counter() - began)


def cheap(pixels: torch.Tensor) -> torch.Tensor:
    """Return 128 numbers that depend on all pixels, in place of an embedding."""
    return pixels.float().mean((1, 2, 3))[:, None].expand(-1, 128)


if __name__ == "__main__":
    main()
