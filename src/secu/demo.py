"""The demo: ten clusters of real handwritten digits, from nothing, in two minutes on two CPU cores."""

import time
from dataclasses import dataclass
from pathlib import Path

from secu.data import Images, load
from secu.files import write_json
from secu.metrics import Scores, score
from secu.results import write_results
from secu.run import Run
from secu.settings import load_config
from secu.train import choose_device, train
from secu.training import Listener


@dataclass(frozen=True)
class Demo:
    """What the demo prints: k-means on the pixels beside SeCu."""

    run: Run
    secu: Scores
    seconds: float
    kmeans: Scores
    kmeans_seconds: float


def kmeans_on_pixels(images: Images, clusters: int, seed: int) -> Scores:
    """Return what k-means (best of ten starts) makes of the raw pixels."""
    from sklearn.cluster import KMeans

    assert images.targets is not None
    pixels = images.pixels.flatten(1).numpy() / 255
    found = KMeans(clusters, n_init=10, random_state=seed).fit_predict(pixels)
    return score(images.targets.numpy(), found)


def run_demo(out: Path, *, seed: int, overrides: tuple[str, ...], listener: Listener, device: str = "cpu") -> Demo:
    """Train the recipe ``digits``, score it beside k-means and leave a run folder with summary.json."""
    config = load_config("digits", (*overrides, f"seed={seed}"))
    choose_device(device)  # a wrong one shall be told before anything is written
    images = load("digits", "all")
    assert isinstance(images, Images)
    began = time.monotonic()
    kmeans = kmeans_on_pixels(images, config.heads[0], seed)
    kmeans_seconds = time.monotonic() - began
    run = Run.create(out, config)
    model = train(config, images, run, test=images, device=device, listener=listener)
    scores = write_results(run, model, images, tell=listener.busy).scores
    assert scores is not None
    summary = {**scores._asdict(), "kmeans_acc": kmeans.acc, "seconds": round(model.seconds, 1)}
    write_json(run.path / "summary.json", summary)
    return Demo(run, scores, model.seconds, kmeans, kmeans_seconds)


def free_folder(wanted: Path) -> Path:
    """Return the folder, or the first of folder-2, folder-3, … that does not exist: a demo is often run twice."""
    path, number = wanted, 1
    while path.exists():
        number += 1
        path = wanted.with_name(f"{wanted.name}-{number}")
    return path
