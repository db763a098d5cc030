"""Small runs on feature vectors, for tests: made-up vectors, and a network that stands in for a pretrained one."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from PIL import Image
from torch import nn

from own_images import request_of
from secu.apps.fit import FitRequest
from secu.settings import merge

COLORS = {"blue": (40, 60, 220), "green": (40, 200, 60), "red": (220, 50, 40)}
COUNT = 121  # a last batch of one would be too small, so the last one has 41
SHORT: dict[str, Any] = {
    "optim": {"epochs": 3, "warmup_epochs": 0, "batch_size": 40},
    "encoder": {"dim": 8, "hidden_dim": 16},
}
TREE = merge(SHORT, {"answer": "tree"})


def blobs(count: int = COUNT, features: int = 16, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 vectors around three points, and the group of each."""
    numbers = np.random.default_rng(seed)
    places = 3 * np.random.default_rng(9).standard_normal((3, features))
    groups = numbers.integers(3, size=count)
    return (places[groups] + numbers.standard_normal((count, features))).astype(np.float32), groups


def write_npy(path: Path, **more: Any) -> Path:
    """Write vectors as a matrix."""
    np.save(path, blobs(**more)[0])
    return path


def write_table(path: Path, pictures: Path) -> Path:
    """Write vectors as a Parquet file that names a picture and a group for each."""
    files = sorted(pictures.rglob("*.png"))
    vectors, groups = blobs(len(files))
    columns = {
        "path": [str(file) for file in files],
        "group": [f"group {group}" for group in groups],
        "features": list(vectors),
    }
    parquet.write_table(pa.table(columns), path)
    return path


def paint(folder: Path, count: int = 45) -> Path:
    """Write pictures of 30 pixels in three colors, each with some noise, in a folder for each color."""
    for i in range(count):
        name = sorted(COLORS)[i % 3]
        noise = np.random.default_rng(i).integers(-30, 31, (30, 30, 3))
        (folder / name).mkdir(parents=True, exist_ok=True)
        pixels = np.clip(np.array(COLORS[name]) + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


class Quarters(nn.Module):
    """Stands in for a pretrained network: the means of the quarters of each channel; it counts what it has seen."""

    features = 12

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return twelve features of each image."""
        if not torch.compiler.is_exporting():
            self.seen += len(x)
        return nn.functional.avg_pool2d(x, x.shape[-1] // 2).flatten(1)


def use_quarters(patch: pytest.MonkeyPatch, weights: str = "some weights") -> Quarters:
    """Replace lite0, whose package need not be installed."""
    net = Quarters()
    patch.setattr("secu.nets.front.build_backbone", lambda config, channels: net)
    for module in ("front", "embedding"):
        patch.setattr(f"secu.nets.{module}.weights_id", lambda name: hashlib.sha256(weights.encode()).hexdigest())
    for module in ("fit", "feature_plan"):
        patch.setattr(f"secu.apps.{module}.missing_extra", lambda name: None)
    patch.setattr("secu.apps.fit.require_extra", lambda name: None)
    patch.setattr("secu.nets.embedding.cores", lambda: 1)
    return net


def frozen_request(pictures: Path, cache: Path, **more: Any) -> FitRequest:
    """Return the request for a short run on the features of pictures."""
    overrides = merge(SHORT, {"data": {"image_size": 32}})
    return request_of(pictures, **{"overrides": overrides, "cache": cache, "encoder": "lite0", **more})
