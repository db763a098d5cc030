"""Compare an ordinary PyTorch pipeline with the package's engine.

In the ordinary pipeline, loader workers augment image by image with pillow, the encoder runs eagerly in mixed
precision, and heads are a Python loop. Algorithm and network are the same, and both views share one pass, since two
would be slower.

    python benchmarks/ordinary.py                                        # recipe cifar10, 16 workers
    python benchmarks/ordinary.py --device cpu --images 64 --steps 2 --workers 0 encoder.backbone=small heads=[4,6]
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from step import make_step
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from secu.cluster.clustering import Clustering
from secu.config import AugmentConfig, Config
from secu.data import Images
from secu.nets.encoder import Encoder
from secu.settings import load_config
from secu.train.device import choose_device
from secu.train.engine import Engine, choose_engine

WARM_UP = 5
FETCHED_AHEAD = 2  # batches per worker: they are ready before the first step, and would make the loader look fast
ENHANCERS = {"brightness": ImageEnhance.Brightness, "contrast": ImageEnhance.Contrast, "saturation": ImageEnhance.Color}


class Views(Dataset[tuple[Tensor, Tensor, int]]):
    """Random uint8 images, augmented twice each, one at a time."""

    def __init__(self, config: Config, images: int) -> None:
        self.config = config
        self.pixels = np.random.default_rng(0).integers(0, 256, (images, 32, 32, 3), np.uint8)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        image = Image.fromarray(self.pixels[index])
        first, second = (self.normalize(augment(image, self.config.augment, view)) for view in range(2))
        return first, second, index

    def normalize(self, image: Image.Image) -> Tensor:
        """Turn a picture into a tensor around zero."""
        values: NDArray[np.float32] = np.asarray(image, np.float32) / 255
        values = (values - np.float32(self.config.data.mean)) / np.float32(self.config.data.std)
        return torch.from_numpy(values).permute(2, 0, 1).contiguous()


def augment(image: Image.Image, config: AugmentConfig, view: int) -> Image.Image:
    """Apply the operations of views/augment.py to a single picture."""
    image = random_crop(image, config)
    if random.random() < config.jitter_prob:
        image = jitter(image, config)
    if random.random() < config.gray_prob:
        image = ImageOps.grayscale(image).convert("RGB")
    if random.random() < config.blur_prob[view]:
        image = image.filter(ImageFilter.GaussianBlur(random.uniform(*config.blur_radius)))
    if random.random() < config.solarize_prob[view]:
        image = ImageOps.solarize(image)
    return ImageOps.mirror(image) if random.random() < config.flip_prob else image


def random_crop(image: Image.Image, config: AugmentConfig) -> Image.Image:
    """Crop a random box and resize it to the picture's size."""
    width, height = image.size
    for _ in range(10):
        area = random.uniform(config.crop_min, 1) * width * height
        aspect = math.exp(random.uniform(-1, 1) * math.log(config.crop_aspect))
        wide = round(math.sqrt(area * aspect))
        tall = round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < tall <= height:
            left = random.randint(0, width - wide)
            top = random.randint(0, height - tall)
            box = (left, top, left + wide, top + tall)
            return image.crop(box).resize(image.size, Image.Resampling.BILINEAR)
    return image


def jitter(image: Image.Image, config: AugmentConfig) -> Image.Image:
    """Change brightness, contrast, saturation and hue in random order."""
    for name in random.sample(("brightness", "contrast", "saturation", "hue"), 4):
        strength = getattr(config, name)
        if name == "hue":
            hue, saturation, value = image.convert("HSV").split()
            turned = (np.asarray(hue, np.int16) + round(255 * random.uniform(-strength, strength))) % 256
            image = Image.merge("HSV", (Image.fromarray(turned.astype(np.uint8)), saturation, value)).convert("RGB")
            continue
        image = ENHANCERS[name](image).enhance(random.uniform(1 - strength, 1 + strength))
    return image


def run(config: Config, images: int, steps: int, workers: int, device: torch.device) -> float:
    """Train for some steps and return the mean seconds of one, including the wait for the loader."""
    encoder = Encoder(config.encoder, 3).to(device).train()
    heads = [
        Clustering(config.model_copy(update={"heads": (clusters,), "head": 0}), images, encoder.dim).to(device)
        for clusters in config.heads
    ]
    weights = [*encoder.parameters(), *(weight for head in heads for weight in head.parameters())]
    optimizer = torch.optim.SGD(weights, 0.01, momentum=0.9, weight_decay=1e-4)
    loader = DataLoader(
        Views(config, images),
        config.optim.batch_size,
        shuffle=True,
        num_workers=workers,
        prefetch_factor=FETCHED_AHEAD if workers else None,
        pin_memory=device.type == "cuda",
        persistent_workers=workers > 0,
    )
    warm_up = WARM_UP + FETCHED_AHEAD * workers
    ends: list[float] = []
    while len(ends) < warm_up + steps:
        for first, second, index in loader:
            views = torch.cat([first, second]).to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                embeddings = encoder(views)
            losses = [head.step(embeddings, index.to(device)) for head in heads]
            loss = sum(value for part in losses for value in part.values()) / len(heads)
            assert isinstance(loss, Tensor)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()  # the progress line of an ordinary loop
            ends.append(time.perf_counter())
            if len(ends) == warm_up + steps:
                break
    return (ends[-1] - ends[warm_up - 1]) / steps


def engine_seconds(config: Config, images: int, device: torch.device) -> float:
    """Return the seconds of an epoch of the same run as the package trains it.

    The first epoch compiles and captures; each ends when its losses are read from the device.
    """
    kind = choose_engine(config.engine, device)
    pixels = torch.from_numpy(Views(config, images).pixels).permute(0, 3, 1, 2).contiguous()
    engine = Engine([make_step(config, Images(pixels), device, kind)], kind)
    ends = []
    for number in range(3):
        engine.epoch(number)
        ends.append(time.perf_counter())
    return (ends[-1] - ends[0]) / 2


def main() -> None:
    """Read the command line, run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="key=value settings")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    config = load_config("cifar10", arguments.overrides)
    seconds = run(config, arguments.images, arguments.steps, arguments.workers, device)
    epoch = math.ceil(arguments.images / config.optim.batch_size) * seconds
    engine = engine_seconds(config, arguments.images, device)
    report = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "workers": arguments.workers,
        "step_milliseconds": round(1000 * seconds, 2),
        "epoch_seconds": round(epoch, 2),
        "engine_epoch_seconds": round(engine, 3),
        "times_faster": round(epoch / engine, 2),
    }
    for name, value in report.items():
        print(f"{name:>22}  {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
