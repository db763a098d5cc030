"""How well a run finds the number of clusters, on data sets whose number of classes is known.

    python benchmarks/choose_k.py embed cifar10 --cache CACHE --data FOLDER   # features of a data set, once
    python benchmarks/choose_k.py train --cache CACHE                  # one run for each case, which is kept in CACHE
    python benchmarks/choose_k.py score --cache CACHE                  # → benchmarks/results/choose-k.json
    python benchmarks/choose_k.py publish                              # → the tables in docs

The rule was chosen on the cases named "choice" alone; the others ("check") were scored once, with the rule unchanged.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from choose_k_cases import CASES, Case, embed, inputs_of
from choose_k_scores import STRENGTH, other_scores
from defaults import checked_out, hardware
from results import KEPT, ROOT, percent, with_table
from torch import Tensor

from secu.apps.fit import FitRequest, fit, prepare
from secu.apps.ranges import Range
from secu.base.files import write_json, write_text
from secu.cluster.metrics import accuracy
from secu.cluster.tree import grow_tree
from secu.config import FeaturesConfig
from secu.data import open_images
from secu.methods.answer import relabeled
from secu.methods.number import compare_sizes
from secu.train.checkpoint import load_method
from secu.views.features import FeatureViews

SEED = 0
RANGE = Range(3, 40)
CLOSE = 0.25  # how far a recommended number may be from the true one, as a share of that
MOST_LOST = 2  # points
RESULT = KEPT / "choose-k.json"
DOC = ROOT / "docs" / "lab" / "how-many.md"
BEGIN = "<!-- results: made by benchmarks/choose_k.py publish -->\n"
END = "<!-- end of results -->"
PARTS = {"choice": "cases that the rule was chosen by", "check": "the other cases"}
OTHERS = {
    "the rule": "silhouette of heads, on vectors (the rule)",
    "cuts": "silhouette of cuts of the tree, on vectors",
    "heads, on embeddings": "silhouette of heads, on embeddings",
    "k-means": "silhouette of k-means, on vectors",
    "information": "mutual information of neighbors' labels, as a share of log K",
    "agreement with k-means": "agreement of a head with k-means (ARI)",
    "coding length": "coding length of heads, on vectors (round Gaussians, BIC)",
    STRENGTH: "prediction strength of k-means on halves, on vectors (largest number of at least 0.8)",
}


def train(case: Case, cache: Path) -> None:
    """Train the heads of a case, and keep their labels and the embeddings."""
    path = cache / "runs" / f"{case.name}.npz"
    if path.exists():
        return
    inputs, targets = inputs_of(case, cache)
    heads = RANGE.heads(len(inputs))
    middle = RANGE.middle()
    settings = {"seed": SEED, "heads": heads, "head": middle, "answer": "head"}
    encoder = "scratch" if case.source == "digits-scratch" else None
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        request = FitRequest(open_images(inputs), heads[middle], overrides=settings, device="cpu", encoder=encoder)
        finished = fit(prepare(request), Path(folder) / "run", report=False)
        assert finished.results is not None
        method = load_method(finished.run, torch.device("cpu"))
        embeddings = finished.results.embeddings
        labels = [(embeddings @ method.clustering.head(n).T).argmax(-1).numpy() for n in range(len(heads))]
    path.parent.mkdir(exist_ok=True)
    seconds = time.monotonic() - began
    np.savez(path, embeddings=embeddings.half().numpy(), labels=labels, heads=heads, targets=targets, seconds=seconds)
    print(f"{case.name}: {len(inputs)} images, {seconds:.0f} s", flush=True)


def points_of(case: Case, embeddings: Tensor, cache: Path) -> Tensor:
    """Return what a run measures distances between: its standardized vectors or, on pixels, its embeddings."""
    if case.source == "digits-scratch":
        return embeddings
    vectors = torch.from_numpy(inputs_of(case, cache)[0])
    views = FeatureViews(vectors.shape[1], FeaturesConfig())
    views.learn(vectors)
    return views.plain(vectors)


def measure(case: Case, cache: Path) -> dict[str, Any]:
    """Return what a run says about a case, what other scores would say, and how good heads and cuts are."""
    with np.load(cache / "runs" / f"{case.name}.npz") as kept:
        run = dict(kept)
    embeddings = F.normalize(torch.from_numpy(run["embeddings"]).float(), dim=-1)
    heads = run["heads"].tolist()
    labels = list(torch.from_numpy(run["labels"]))
    points = points_of(case, embeddings, cache)
    tree = grow_tree(embeddings, labels[-1], len(heads) - 1)
    choice = compare_sizes(heads, labels, tree, points, SEED)
    low, high = choice.plausible
    others = other_scores(choice, labels, embeddings, points, SEED)
    size = min(choice.sizes, key=lambda number: (abs(math.log(number / case.groups)), number))
    cut = relabeled(labels[-1], tree, min(size, len(tree.leaves)))
    return {
        "case": case.name,
        "source": case.source,
        "groups": case.groups,
        "uneven": case.uneven,
        "images": len(embeddings),
        "part": "choice" if case.took_part else "check",
        "recommended": choice.recommended,
        "low": low,
        "high": high,
        "in_range": low <= case.groups <= high,
        "close": is_close(choice.recommended, case.groups),
        "scores": rounded(choice.scores),
        "cuts": rounded(choice.cuts),
        "sizes": list(choice.sizes),
        "others": {name: choice.sizes[int(np.argmax(values))] for name, values in others.items()},
        "nearest_size": size,
        "acc_head": round(accuracy(run["targets"], labels[heads.index(size)].numpy()), 4),
        "acc_cut": round(accuracy(run["targets"], cut.numpy()), 4),
        "seconds": round(float(run["seconds"]), 1),
    }


def is_close(found: int, true: int) -> bool:
    """Return whether a number is within a quarter of the true one."""
    return abs(found - true) <= CLOSE * true


def rounded(values: Sequence[float]) -> list[float]:
    """Return numbers for a file."""
    return [round(value, 4) for value in values]


def share(rows: list[dict[str, Any]], name: str) -> str:
    """Return how many of the rows have a property, and the percentage."""
    count = sum(bool(row[name]) for row in rows)
    return f"{count} of {len(rows)} ({count / len(rows):.0%})"


def best_fixed(rows: list[dict[str, Any]], ratio: float) -> tuple[int, int]:
    """Return the range of this ratio that has the most true numbers: what a rule without data could reach at best."""
    ranges = [(low, math.floor(low * ratio)) for low in range(*RANGE)]
    return max(ranges, key=lambda ends: sum(ends[0] <= row["groups"] <= ends[1] for row in rows))


def summary_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return how often the range and the recommended number are right, and what a fixed answer would reach."""
    lines = ["| | true number in the range | recommended within 25% | range, high ÷ low |", "|---|---|---|---|"]
    for part, name in PARTS.items():
        chosen = [row for row in rows if row["part"] == part]
        width = math.exp(np.mean([math.log(row["high"] / row["low"]) for row in chosen]))
        lines.append(f"| {name} | {share(chosen, 'in_range')} | {share(chosen, 'close')} | {width:.1f} |")
    width = math.exp(np.mean([math.log(row["high"] / row["low"]) for row in rows]))
    low, high = best_fixed(rows, width)
    middle = max(range(*RANGE), key=lambda size: sum(is_close(size, row["groups"]) for row in rows))
    fixed = [
        {"in_range": low <= row["groups"] <= high, "close": is_close(middle, row["groups"])}
        for row in rows
        if row["part"] == "check"
    ]
    answer = f"always {low} to {high}, and {middle}: the best fixed answers, on the other cases"
    return [*lines, f"| {answer} | {share(fixed, 'in_range')} | {share(fixed, 'close')} | {high / low:.1f} |"]


def case_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return one row per case, with the ACC of the head and of the cut nearest to the true number."""
    lines = ["| case | images | true | range | recommended | head, ACC | cut, ACC |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        kind = f"{row['source']}{', uneven' if row['uneven'] else ''}{'' if row['part'] == 'choice' else ' *'}"
        span = f"{row['low']} to {row['high']}{'' if row['in_range'] else ' (misses it)'}"
        found = f"{row['recommended']}{'' if row['close'] else ' (far)'}"
        accuracies = f"{percent([row['acc_head']], '.1')} | {percent([row['acc_cut']], '.1')}"
        lines.append(f"| {kind} | {row['images']:,} | {row['groups']} | {span} | {found} | {accuracies} |")
    return lines


def score_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return how often the best number by each score is close to the true one."""
    lines = ["| recommended within 25%, by | choice | other |", "|---|---|---|"]
    for name, title in OTHERS.items():
        parts = []
        for part in PARTS:
            chosen = [row for row in rows if row["part"] == part]
            found = [row["recommended"] if name == "the rule" else row["others"][name] for row in chosen]
            hits = sum(is_close(size, row["groups"]) for size, row in zip(found, chosen, strict=True))
            parts.append(f"{hits} of {len(chosen)}")
        lines.append(f"| {title} | {' | '.join(parts)} |")
    return lines


def cut_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return by how much cuts of the tree are better or worse than heads."""
    lines = [
        "| ACC of a cut minus that of the head, points | mean | worst | cases worse by more than 2 |",
        "|---|---|---|---|",
    ]
    for uneven, name in ((False, "groups of equal size"), (True, "sizes that fall to a tenth")):
        gains = [100 * (row["acc_cut"] - row["acc_head"]) for row in rows if row["uneven"] is uneven]
        worse = sum(gain < -MOST_LOST for gain in gains)
        lines.append(f"| {name} | {np.mean(gains):+.1f} | {min(gains):+.1f} | {worse} of {len(gains)} |")
    return lines


def tables(rows: list[dict[str, Any]]) -> str:
    """Return the tables of the documentation."""
    parts = (summary_table(rows), case_table(rows), score_table(rows), cut_table(rows))
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def score(cache: Path) -> None:
    """Score all cases, and keep the results."""
    rows = [measure(case, cache) for case in CASES if (cache / "runs" / f"{case.name}.npz").exists()]
    content = {
        "command": "OMP_NUM_THREADS=1 python benchmarks/choose_k.py score --cache CACHE",
        "commit": checked_out(),
        "seed": SEED,
        "hardware": hardware("cpu"),
        "range": list(RANGE),
        "rows": rows,
    }
    write_json(RESULT, content)


def publish() -> None:
    """Write the tables into the documentation."""
    rows = json.loads(RESULT.read_text())["rows"]
    write_text(DOC, with_table(DOC.read_text(), tables(rows), BEGIN, END))


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("embed", "train", "score", "publish"))
    parser.add_argument("names", nargs="*", help="data sets; all if none is given")
    parser.add_argument("--cache", type=Path, default=Path("choose-k"), help="folder for features and runs")
    parser.add_argument("--data", type=Path, help="folder of the data set")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "embed":
        for name in arguments.names:
            embed(name, arguments.cache, arguments.data)
    elif arguments.what == "train":
        for case in CASES:
            if not arguments.names or case.source in arguments.names:
                train(case, arguments.cache)
    elif arguments.what == "score":
        score(arguments.cache)
    else:
        publish()


if __name__ == "__main__":
    main()
