"""Size and speed of the report: made-up results of real size, opened in headless Chromium.

    python benchmarks/report.py build FOLDER             # 3, 30 and 1,000 clusters → FOLDER/3.html, …
    python benchmarks/report.py measure FOLDER           # open each in Chromium → benchmarks/results/report.json

Each report has 100,000 images of 96 pixels and a tree of three leaves per cluster (at least 12). Measured are the size
of the file, the first contentful paint, when the page answers (its scripts have run, so a search would work), and how
long a search and a cut of the tree take until their result is painted.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from defaults import checked_out, hardware
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from secu.cluster.tree import grow_tree
from secu.data import Images
from secu.methods.predictor import Predictions, outlier_limits
from secu.results.found import Results
from secu.results.leaves import Leaves
from secu.results.pictures import Pictures
from secu.results.report import Report, ReportData
from secu.settings import load_config

KEPT = Path(__file__).parent / "results" / "report.json"
CLUSTERS = (3, 30, 1000)
IMAGES = 100_000
SIDE = 96
DIM = 64
SPREAD = 0.11  # of the images around their leaf
REPEATS = 5
WORDS = ("boat", "cat", "door", "fern", "gate", "horse", "lamp", "moss", "rock", "tree")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1280,900",
)


class MadeUp(Images):
    """Pictures of blobs on a gradient, in the colors of their group; made when they are shown."""

    group_N: Tensor

    def iter_pictures(self, sides: Iterable[int]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield each picture."""
        down, across = np.mgrid[0:SIDE, 0:SIDE] / SIDE
        for index in sides:
            leaf = np.random.default_rng(int(self.group_N[index]))
            own = np.random.default_rng(index)
            low, high, blob = leaf.uniform(0, 255, (3, 3, 1, 1))
            middle = leaf.uniform(0.25, 0.75, 2) + own.normal(0, 0.08, 2)
            inside = np.hypot(down - middle[0], across - middle[1]) < leaf.uniform(0.1, 0.3)
            picture = np.where(inside, blob, low + (high - low) * (down + across) / 2)
            yield index, np.clip(picture + own.normal(0, 9, picture.shape), 0, 255).astype(np.uint8)


def make_results(clusters: int, images: int) -> Results:
    """Return results with groups of groups: leaves around clusters, images around leaves, of uneven sizes."""
    draw = torch.Generator().manual_seed(clusters)
    leaves = max(12, 3 * clusters)
    coarse_KD = normalize(torch.randn(clusters, DIM, generator=draw), dim=1)
    centers_LD = normalize(coarse_KD[torch.arange(leaves) % clusters] + 0.1 * torch.randn(leaves, DIM, generator=draw))
    weights_L = torch.rand(leaves, generator=draw) + 0.1
    truth_N = torch.multinomial(weights_L, images, replacement=True, generator=draw)
    embeddings_ND = normalize(centers_LD[truth_N] + SPREAD * torch.randn(images, DIM, generator=draw))
    cosines_NL = embeddings_ND @ centers_LD.T
    leaf_N = cosines_NL.argmax(1)
    tree = grow_tree(embeddings_ND, leaf_N, 0)
    found = predictions(embeddings_ND, coarse_KD)
    names = [f"photos/{2020 + i % 5}/{WORDS[int(t) % 10]}/IMG_{i:06d}.jpg" for i, t in enumerate(truth_N)]
    pictures = MadeUp(None, ids=names, numbers=range(images), shape=(3, SIDE, SIDE))
    object.__setattr__(pictures, "group_N", truth_N)  # the class is frozen
    return Results(
        images=pictures,
        embeddings=embeddings_ND,
        centers=coarse_KD,
        predictions=found,
        limits=outlier_limits(found, clusters),
        scores=None,
        warnings=(),
        leaves=Leaves(tree, centers_LD[tree.leaves], leaf_N, cosines_NL.amax(1)),
    )


def predictions(embeddings_ND: Tensor, centers_KD: Tensor) -> Predictions:
    """Return the two best clusters of every image."""
    best_N2, cluster_N2 = (embeddings_ND @ centers_KD.T).topk(2)
    chance_N2 = torch.softmax(embeddings_ND @ centers_KD.T / 0.1, 1).gather(1, cluster_N2)
    return Predictions(cluster_N2[:, 0], chance_N2[:, 0], cluster_N2[:, 1], chance_N2[:, 1], best_N2[:, 0])


def build(folder: Path, clusters: int, images: int = IMAGES) -> float:
    """Write a report, and return how long that took."""
    data = ReportData(
        title=f"{clusters:,} clusters",
        results=make_results(clusters, images),
        metrics=[{"epoch": e, "loss": 2 / (e + 1), "center_loss": 1 / (e + 1), "lr": 0.1} for e in range(60)],
        config=load_config("digits", [f"heads=[{clusters}]"]),
    )
    begun = time.monotonic()
    report = Report(data)
    text = report.render(Pictures(data.results.images, report.on_cards, report.on_map))
    (folder / f"{clusters}.html").write_text(text, encoding="utf-8")
    return time.monotonic() - begun


TIMES = """
const done = arguments[0];
new PerformanceObserver(list => {
  const paint = list.getEntriesByName("first-contentful-paint")[0];
  const [page] = performance.getEntriesByType("navigation");
  if (paint) done({ first_paint: paint.startTime, answers: page.domContentLoadedEventStart });
}).observe({ type: "paint", buffered: true });
"""
AFTER = """
const done = arguments[arguments.length - 1];
const start = performance.now();
const paint = () => requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
"""
SEARCH = f"""{AFTER}
document.getElementById("search").value = arguments[0];
document.getElementById("search").dispatchEvent(new Event("input"));
paint();
"""
CUT = f"""{AFTER}
const level = document.getElementById("level");
level.value = arguments[0];
level.dispatchEvent(new Event("input"));
document.getElementById("cut").click();
paint();
"""


def open_browser(profile: str) -> Any:
    """Return a headless browser."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = "/usr/bin/chromium"
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    return webdriver.Chrome(options, Service("/usr/bin/chromedriver"))


def measure(path: Path, clusters: int) -> dict[str, float]:
    """Open a report in a fresh browser, and return milliseconds."""
    with tempfile.TemporaryDirectory() as profile:
        browser = open_browser(profile)
        try:
            browser.get(path.resolve().as_uri())
            times: dict[str, float] = browser.execute_async_script(TIMES)
            times["search"] = browser.execute_async_script(SEARCH, "cat 01")
            times["cut"] = browser.execute_async_script(CUT, str(max(4, clusters // 2)))
            return times
        finally:
            browser.quit()


def main() -> None:
    """Build or measure the reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("build", "measure"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clusters", type=int, nargs="*", default=CLUSTERS)
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--json", type=Path, default=KEPT)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.what == "build":
        for clusters in arguments.clusters:
            print(f"{clusters:>6,} clusters: written in {build(arguments.folder, clusters, arguments.images):.1f} s")
        return
    rows = {}
    for clusters in arguments.clusters:
        rows[str(clusters)] = summary(arguments.folder / f"{clusters}.html", clusters, arguments.repeats)
        print(clusters, json.dumps(rows[str(clusters)]))
    record = {
        "command": "python benchmarks/report.py build FOLDER, then measure FOLDER",
        "commit": checked_out(),
        "images": arguments.images,
        "side": SIDE,
        "repeats": arguments.repeats,
        "hardware": hardware("cpu"),
        "load_average": [round(load, 1) for load in os.getloadavg()],  # above the cores: others used them, too
        "clusters": rows,
    }
    arguments.json.write_text(json.dumps(record, indent=2) + "\n")


def summary(path: Path, clusters: int, repeats: int) -> dict[str, Any]:
    """Return the size of a report, and the median and the largest of its times."""
    times = [measure(path, clusters) for _ in range(repeats)]
    row: dict[str, Any] = {"bytes": path.stat().st_size}
    for name in times[0]:
        values = [t[name] for t in times]
        row[f"{name}_ms"] = {"median": round(statistics.median(values)), "most": round(max(values))}
    return row


if __name__ == "__main__":
    main()
