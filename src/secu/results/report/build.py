"""Build the content of a report as plain, JSON-serializable values, without pixels or HTML.

``None`` represents an undefined number, such as the mean of an empty cluster.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from secu.base.names import escape
from secu.config import Config
from secu.results.found import Results
from secu.results.report.cards import KINDS, cluster_cards
from secu.results.report.center_map import center_map
from secu.results.report.duplicates import duplicate_groups
from secu.results.report.layout import lay_out, sample
from secu.results.report.limits import fit_names, thin
from secu.results.report.tree import encode_leaves, tree_content
from secu.results.report.truth import compare_to_classes, has_truth
from secu.results.report.values import floats, ints, number, numbers

LOSSES = ("loss", "center_loss")  # of runs that do not name theirs
CURVES = ("largest", "smallest", "changed", "lr", "acc", "nmi", "ari")  # besides the losses
MAP_UNITS = 10_000  # integers take less space in the file than fractions


@dataclass(frozen=True, eq=False, kw_only=True)
class ReportData:
    """Everything a report shows."""

    title: str  # name of the run
    results: Results
    metrics: Sequence[Mapping[str, Any]]  # as in metrics.jsonl
    config: Config
    facts: Mapping[str, str] = field(default_factory=dict)  # how the run was made, shown as given
    warnings: Sequence[str] = ()
    number: Sequence[str] = ()  # why the run has its number of clusters; empty if the user gave it
    losses: Sequence[str] = LOSSES  # their names in the metrics

    @cached_property
    def ids(self) -> list[str]:
        """The id of each image as in assignments.csv, which the page can read."""
        return [escape(name) for name in self.results.ids]


def content(data: ReportData) -> dict[str, Any]:
    """Return everything the page shows, except pixels."""
    results = data.results
    cards = cluster_cards(results)
    points = map_points(results)
    same = duplicate_groups(results)
    shown = [card[kind] for card in cards for kind in KINDS] + same["groups"]
    on_cards = list(dict.fromkeys(i for row in shown for i in row))
    tree, in_tree = tree_content(results, on_cards + points["index"])
    on_cards = list(dict.fromkeys(on_cards + in_tree))
    on_map = sorted(set(points["index"]) - set(on_cards))
    return {
        "fingerprint": fingerprint(data),
        "images": len(data.ids),
        "ids": data.ids,
        "cluster": ints(results.predictions.cluster).tolist(),
        "leaf": encode_leaves(results),
        "clusters": cards,
        "tree": tree,
        "pictures": picture_facts(data, on_cards + on_map),
        "onCards": len(on_cards),
        "map": points,
        "centers": center_map(results),
        "losses": list(data.losses),
        "curves": curves(data.metrics, data.losses),
        "truth": compare_to_classes(results),
        "duplicates": same,
    }


def summarize(results: Results) -> dict[str, Any]:
    """Return the numbers of the overview."""
    confidence = np.clip(np.nan_to_num(floats(results.predictions.confidence)), 0, 1)
    sizes = np.bincount(ints(results.predictions.cluster), minlength=len(results.centers))
    histogram, _ = np.histogram(confidence, bins=10, range=(0, 1))
    return {
        "images": len(results.images),
        "clusters": len(results.centers),
        "smallest": int(sizes.min()),
        "largest": int(sizes.max()),
        "confidence": float(confidence.mean()),
        "outliers": int(results.outlier.sum()),
        "histogram": [int(count) for count in histogram],
    }


def picture_facts(data: ReportData, index: Sequence[int]) -> dict[str, Any]:
    """Return the metadata of each displayed picture, as columns, and the length that names were shortened to."""
    rows = np.array(index, np.int64)
    predictions = data.results.predictions
    targets = data.results.images.targets if has_truth(data.results) else None
    names, length = fit_names([data.ids[i] for i in rows])
    return {
        "index": [int(i) for i in rows],
        "name": names,
        "nameLength": length,
        "cluster": ints(predictions.cluster)[rows].tolist(),
        "leaf": [] if data.results.leaves is None else ints(data.results.leaves.leaf)[rows].tolist(),
        "confidence": numbers(floats(predictions.confidence)[rows], 3),
        "second": ints(predictions.second)[rows].tolist(),
        "secondConfidence": numbers(floats(predictions.second_confidence)[rows], 3),
        "cosine": numbers(floats(predictions.cosine)[rows], 3),
        "outlier": ints(data.results.outlier)[rows].tolist(),
        "target": [] if targets is None else ints(targets)[rows].tolist(),
    }


def map_points(results: Results) -> dict[str, Any]:
    """Return the sample of images on the map, with integer coordinates from 0 to MAP_UNITS."""
    index = sample(len(results.images)).tolist()
    layout = lay_out(floats(results.embeddings[index]))
    x, y = np.rint(layout.points * MAP_UNITS).astype(int).T
    return {"method": layout.method, "index": index, "x": x.tolist(), "y": y.tolist()}


def curves(metrics: Sequence[Mapping[str, Any]], losses: Sequence[str] = LOSSES) -> dict[str, list[Any]]:
    """Turn one record per epoch into one list per quantity, leaving out quantities that were never recorded.

    If there are very many epochs, only every n-th is kept.
    """
    metrics = [metrics[i] for i in thin(len(metrics))]
    columns: dict[str, list[Any]] = {"epoch": [int(record["epoch"]) for record in metrics]}
    for name in (*losses, *CURVES):
        values = [number(float(record.get(name, math.nan)), 6) for record in metrics]
        if any(value is not None for value in values):
            columns[name] = values
    return columns


def fingerprint(data: ReportData) -> str:
    """Return a key for this clustering of these images, under which the browser stores the user's edits."""
    digest = hashlib.sha256(ints(data.results.predictions.cluster).tobytes())
    for name in data.ids:
        digest.update(name.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:20]
