"""How much a few labeled images help: accuracy on the other images, with hints, without, and of simple baselines.

    python benchmarks/hints.py embed cifar10-test --cache CACHE --data FOLDER   # features of a data set, once
    python benchmarks/hints.py run cifar10-test --cache CACHE                  # → benchmarks/results/hints.json
    python benchmarks/hints.py publish                                         # → the table in docs/lab/hints.md

Labeled images are drawn at random, the same number of each class. Settings were chosen on digits and on training images
of CIFAR-10, none of which are in the table of the other data sets.
"""

import argparse
import csv
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from data_sets import cifar10_test, digits, fashion, uneven_sizes
from defaults import checked_out, hardware
from numpy.typing import NDArray
from results import KEPT, ROOT, percent, with_table

from secu.apps.embed import config_for
from secu.apps.fit import FitRequest, fit, prepare
from secu.apps.images import load_inputs
from secu.base.files import write_json, write_text
from secu.cluster.metrics import accuracy
from secu.config import FeaturesConfig
from secu.data import open_images
from secu.results.found import Results
from secu.views.features import FeatureViews

READERS = {"cifar10-test": cifar10_test, "fashion": fashion, "digits": digits}
IMAGES = 10_000  # most images of a data set, in a fixed random order
COUNTS = (10, 1, 3, 30)  # labeled images of each class
SEEDS = (0, 1, 2)
UNEVEN = "-uneven"  # at the end of a name: sizes that fall to a tenth
LOOKED_AT = 20  # most typical images of a cluster that a user of the report looks at
RESULT = KEPT / "hints.json"
DOC = ROOT / "docs" / "lab" / "hints.md"
BEGIN = "<!-- results: made by benchmarks/hints.py publish -->\n"
END = "<!-- end of results -->"
TITLES = {
    "cifar10-test": "CIFAR-10, test images",
    "cifar10-test-uneven": "the same, uneven",
    "fashion": "Fashion-MNIST",
    "fashion-uneven": "the same, uneven",
    "digits": "digits *",
}
COLUMNS = {
    "without": "SeCu without",
    "hints": "SeCu with hints",
    "kmeans": "k-means started at the labeled images",
    "linear": "linear classifier",
    "nearest": "nearest labeled image",
}


def embed(name: str, cache: Path, data: Path | None) -> None:
    """Keep the features of a data set under the default pretrained network; of digits, the pixels."""
    pictures = READERS[name](data)
    rows = np.random.default_rng(0).permutation(len(pictures.targets))[:IMAGES]
    if name == "digits":
        features = pictures.pixels[rows].reshape(len(rows), -1).astype(np.float32)
    else:
        source = open_images(np.ascontiguousarray(pictures.pixels[rows]))
        images = load_inputs(config_for(source, "lite0"), source, device="cpu")
        assert images.tensor is not None
        features = images.tensor.numpy()
    cache.mkdir(parents=True, exist_ok=True)
    np.savez(cache / f"{name}.npz", features=features, targets=pictures.targets[rows])


def read(name: str, cache: Path) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return features and classes of a data set, or of an uneven part of it."""
    with np.load(cache / f"{name.removesuffix(UNEVEN)}.npz") as kept:
        features, targets = kept["features"].astype(np.float32), kept["targets"]
    if not name.endswith(UNEVEN):
        return features, targets
    sizes = uneven_sizes(np.bincount(targets), len(targets))
    rows = np.sort(np.concatenate([np.flatnonzero(targets == group)[:size] for group, size in enumerate(sizes)]))
    return features[rows], targets[rows]


def labeled(targets: NDArray[np.int64], count: int, seed: int) -> NDArray[np.int64]:
    """Return random images, so many of each class."""
    numbers = np.random.default_rng(seed)
    chosen = [numbers.permutation(np.flatnonzero(targets == group))[:count] for group in range(targets.max() + 1)]
    return np.sort(np.concatenate(chosen))


def cluster(features: NDArray[np.float32], groups: int, seed: int, hints: Any = None) -> Results:
    """Return the results of one run."""
    with TemporaryDirectory() as folder:
        request = FitRequest(open_images(features), groups, overrides={"seed": seed}, device="cpu", hints=hints)
        results = fit(prepare(request), Path(folder) / "run", report=False).results
    assert results is not None
    return results


def baselines(
    features: NDArray[np.float32], targets: NDArray[np.int64], rows: NDArray[np.int64], rest: NDArray[np.int64]
) -> dict[str, float]:
    """Return the accuracies of baselines that know the same labels, on the vectors that a run is trained on."""
    from sklearn.cluster import KMeans
    from sklearn.linear_model import LogisticRegression

    views = FeatureViews(features.shape[1], FeaturesConfig())
    views.learn(torch.from_numpy(features))
    points = F.normalize(views.plain(torch.from_numpy(features)), dim=-1).numpy()
    groups = int(targets.max()) + 1
    means = np.stack([points[rows[targets[rows] == group]].mean(0) for group in range(groups)])
    found = KMeans(groups, init=means, n_init=1).fit(points).labels_
    linear = LogisticRegression(C=10, max_iter=2000).fit(points[rows], targets[rows]).predict(points[rest])
    nearest = targets[rows][(points[rest] @ points[rows].T).argmax(1)]
    return {
        "kmeans": accuracy(targets[rest], found[rest]),
        "linear": float((linear == targets[rest]).mean()),
        "nearest": float((nearest == targets[rest]).mean()),
    }


def measure(name: str, count: int, seed: int, cache: Path) -> dict[str, Any]:
    """Return all accuracies on the images that are not labeled."""
    features, targets = read(name, cache)
    rows = labeled(targets, count, seed)
    rest = np.setdiff1d(np.arange(len(targets)), rows)
    groups = int(targets.max()) + 1
    hints = np.full(len(targets), -1)
    hints[rows] = targets[rows]
    began = time.monotonic()
    found = cluster(features, groups, seed, hints).predictions.cluster.numpy()
    seconds = time.monotonic() - began
    scores = {"without": accuracy(targets[rest], without(name, seed, cache)[rest])}
    scores |= {"hints": accuracy(targets[rest], found[rest])}
    scores |= baselines(features, targets, rows, rest)
    rounded = {key: round(value, 4) for key, value in scores.items()}
    return {
        "data": name,
        "labels": count,
        "seed": seed,
        "images": len(targets),
        **rounded,
        "seconds": round(seconds, 1),
    }


def without(name: str, seed: int, cache: Path) -> NDArray[np.int64]:
    """Return the clusters of a run without hints, which is kept."""
    path = cache / f"{name}-without-{seed}.npz"
    if not path.exists():
        features, targets = read(name, cache)
        found = cluster(features, int(targets.max()) + 1, seed).predictions
        np.savez(path, cluster=found.cluster.numpy(), cosine=found.cosine.numpy())
    with np.load(path) as kept:
        clusters: NDArray[np.int64] = kept["cluster"]
    return clusters


def measure_edits(name: str, seed: int, cache: Path) -> dict[str, Any]:
    """Return the accuracies before and after a user edits the report: a name for each cluster, and marks.

    The user looks at the most typical images of each cluster, names it after most of them, and marks the others.
    """
    features, targets = read(name, cache)
    first = without(name, seed, cache)
    with np.load(cache / f"{name}-without-{seed}.npz") as kept:
        cosine = kept["cosine"]
    table = [["id", "cluster", "name", "merged_cluster", "marked_wrong"]]
    seen = np.zeros(len(targets), bool)
    for number in range(int(first.max()) + 1):
        members = np.flatnonzero(first == number)
        typical = members[np.argsort(-cosine[members])][:LOOKED_AT]
        seen[typical] = True
        title = np.bincount(targets[typical]).argmax()
        wrong = set(typical[targets[typical] != title].tolist())
        table += [[i, number, f"class {title}", number, "yes" if i in wrong else "no"] for i in members.tolist()]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "names.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(table)
        found = cluster(features, int(targets.max()) + 1, seed, path).predictions.cluster.numpy()
    before, after = (round(accuracy(targets[~seen], labels[~seen]), 4) for labels in (first, found))
    return {"data": name, "edits": LOOKED_AT, "seed": seed, "without": before, "hints": after}


def run(names: list[str], cache: Path, counts: list[int], *, edits: bool) -> None:
    """Measure what is missing, and keep each result at once."""
    content = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": []}
    for name in names:
        for seed in SEEDS:
            for count in counts:
                if not any(
                    (row["data"], row.get("labels"), row["seed"]) == (name, count, seed) for row in content["rows"]
                ):
                    keep(content, measure(name, count, seed, cache))
            if edits and not any(
                (row["data"], "edits" in row, row["seed"]) == (name, True, seed) for row in content["rows"]
            ):
                keep(content, measure_edits(name, seed, cache))


def keep(content: dict[str, Any], row: dict[str, Any]) -> None:
    """Add a row to the results."""
    content["rows"].append(row)
    facts = {"command": "OMP_NUM_THREADS=1 python benchmarks/hints.py run NAME --cache CACHE", "commit": checked_out()}
    write_json(RESULT, {**facts, "hardware": hardware("cpu"), "rows": content["rows"]})
    print(row, flush=True)


def tables(rows: list[dict[str, Any]]) -> str:
    """Return the tables of the documentation: means over the seeds."""
    lines = [
        f"| data | labels per class | seeds | {' | '.join(COLUMNS.values())} |",
        f"|---|---|---|{'---|' * len(COLUMNS)}",
    ]
    for name, title in TITLES.items():
        for count in sorted(COUNTS):
            found = [row for row in rows if (row["data"], row.get("labels")) == (name, count)]
            if found:
                values = [percent([row[key] for row in found], ".1") for key in COLUMNS]
                seeds = ", ".join(str(row["seed"]) for row in found)
                lines.append(f"| {title} | {count} | {seeds} | {' | '.join(values)} |")
    lines += ["", "| edits of the report | before | after |", "|---|---|---|"]
    for name, title in TITLES.items():
        found = [row for row in rows if row["data"] == name and "edits" in row]
        if found:
            before, after = (percent([row[key] for row in found], ".1") for key in ("without", "hints"))
            lines.append(f"| {title} | {before} | {after} |")
    return "\n".join(lines) + "\n"


def publish() -> None:
    """Write the tables into the documentation."""
    rows = json.loads(RESULT.read_text())["rows"]
    write_text(DOC, with_table(DOC.read_text(), tables(rows), BEGIN, END))


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("embed", "run", "publish"))
    parser.add_argument("names", nargs="*", help="data sets")
    parser.add_argument("--cache", type=Path, default=Path("hints"), help="folder for features")
    parser.add_argument("--data", type=Path, help="folder of the data set")
    parser.add_argument("--labels", type=int, nargs="+", default=list(COUNTS), help="labeled images of each class")
    parser.add_argument("--edits", action="store_true", help="also with edits of the report as hints")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "embed":
        for name in arguments.names:
            embed(name, arguments.cache, arguments.data)
    elif arguments.what == "run":
        run(arguments.names, arguments.cache, arguments.labels, edits=arguments.edits)
    else:
        publish()


if __name__ == "__main__":
    main()
