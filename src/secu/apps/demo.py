"""The demo: cluster handwritten digits into ten groups, from scratch, in two minutes on two CPU cores."""

import time
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from secu.apps import pipeline
from secu.base.files import write_json
from secu.cluster.metrics import Scores, score
from secu.data import Images, load
from secu.settings import load_config
from secu.train.device import choose_device
from secu.train.listener import Listener
from secu.train.run import Run


@dataclass(frozen=True)
class Demo:
    """Results of the demo: scores and times of SeCu and of k-means on the pixels."""

    run: Run
    secu: Scores
    seconds: float
    kmeans: Scores
    kmeans_seconds: float


def kmeans_on_pixels(images: Images, clusters: int, seed: int) -> Scores:
    """Return the scores of k-means (best of ten starts) on the raw pixels."""
    from sklearn.cluster import KMeans

    assert images.tensor is not None
    assert images.targets is not None
    pixels = images.tensor.flatten(1).numpy() / 255
    found = KMeans(clusters, n_init=10, random_state=seed).fit_predict(pixels)
    return score(images.targets.numpy(), found)


def run_demo(out: Path, *, seed: int, overrides: tuple[str, ...], listener: Listener, device: str = "cpu") -> Demo:
    """Train the recipe ``digits``, compare it with k-means, and write a run folder with summary.json."""
    config = load_config("digits", (*overrides, f"seed={seed}"))
    choose_device(device)  # fail early on an unavailable device, before k-means runs
    images = load(config.data)
    began = time.monotonic()
    kmeans = kmeans_on_pixels(images, config.clusters, seed)
    kmeans_seconds = time.monotonic() - began
    finished = pipeline.run(config, images, out, command="train", test=images, device=device, listener=listener)
    assert finished.results is not None
    scores = finished.results.scores
    assert scores is not None
    summary = {**scores._asdict(), "kmeans_acc": kmeans.acc, "seconds": round(finished.seconds, 1)}
    write_json(finished.run.path / "summary.json", summary)
    return Demo(finished.run, scores, finished.seconds, kmeans, kmeans_seconds)


def free_folder(wanted: Path) -> Path:
    """Return the folder, or the first of folder-2, folder-3, … that does not exist: the demo is often run twice."""
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in count(2))
    return next(path for path in chain([wanted], numbered) if not path.exists())
