"""Throughput of ``secu predict``, compared with the bare forward pass of its encoder.

    python benchmarks/predict.py                                  # ResNet-18, 32 pixels, 200,000 images in an .npy file
    python benchmarks/predict.py --device cpu --images 600 encoder.backbone=small encoder.dim=16

Images and weights are random, which does not affect the speed. The first number includes reading, copying to the
device, choosing clusters and writing the table; the second is the encoder alone on a batch that is already on the
device. The time before the first image, mostly for loading the model, is printed separately.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from secu.apps.predict import Stream
from secu.data import open_source
from secu.methods import build_method
from secu.results.tables import table_writer
from secu.settings import merge, parse_overrides, resolve
from secu.train.checkpoint import select
from secu.train.device import choose_device
from secu.train.listener import Listener
from secu.train.run import MODEL, Run

CLUSTERS = 10
SIDE = 32


def main() -> None:
    """Measure both and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="key=value settings")
    parser.add_argument("--images", type=int, default=200_000)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    with tempfile.TemporaryDirectory(prefix="secu-") as folder:
        run = make_run(Path(folder), arguments.overrides)
        array = Path(folder) / "new.npy"
        pixels = np.random.default_rng(0).integers(0, 256, (min(arguments.images, 10_000), SIDE, SIDE, 3), np.uint8)
        np.save(array, pixels[np.arange(arguments.images) % len(pixels)])
        for _ in ("to warm up", "to measure"):
            began = time.perf_counter()
            stream = Stream(run, open_source(array), device, Listener())
            ready = time.perf_counter()
            with table_writer(Path(folder) / "new.csv", "csv") as writer:
                stream.write(writer)
            whole = arguments.images / (time.perf_counter() - ready)
        bare = bare_speed(stream, arguments.images)
    report = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "images": arguments.images,
        "overrides": arguments.overrides,
        "start_seconds": round(ready - began, 3),
        "predict_images_per_second": round(whole),
        "encoder_images_per_second": round(bare),
        "share": round(whole / bare, 3),
    }
    for name, value in report.items():
        print(f"{name:>28}  {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def make_run(folder: Path, overrides: list[str]) -> Run:
    """Write the folder of a run that was never trained."""
    data = {"image_size": SIDE, "channels": 3, "mean": [0.5] * 3, "std": [0.25] * 3}
    config = resolve(merge({"heads": [CLUSTERS], "data": data}, parse_overrides(overrides)))
    run = Run.create(folder / "run", config).put_in_place()
    method = build_method(config, CLUSTERS, (3, SIDE, SIDE), torch.device("cpu"))
    run.save_model(MODEL, select(method.state_dict(), method.trained_tensors))
    rows = "".join(f"{number},-1\n" for number in range(CLUSTERS))
    (run.path / "clusters.csv").write_text(f"cluster,outlier_below\n{rows}")
    return run


def bare_speed(stream: Stream, images: int) -> float:
    """Return the images per second of the encoder alone."""
    batch = torch.rand(min(stream.batch, images), 3, SIDE, SIDE, device=stream.device)
    encoder = stream.predictor.encoder
    rounds = max(2, images // len(batch))
    with torch.inference_mode():
        for warm in (True, False):
            began = time.perf_counter()
            for _ in range(2 if warm else rounds):
                encoder.embed(batch)
            if stream.device.type == "cuda":
                torch.cuda.synchronize()
    return rounds * len(batch) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
