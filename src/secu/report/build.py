"""Numbers → the content of a report, as plain values ready for JSON. No pixels, no HTML.

Shapes: N images, K clusters, D dimensions. ``None`` stands for a number that does not exist (the mean of no image).
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from secu.metrics import confusion
from secu.report.data import ReportData
from secu.report.layout import lay_out, sample

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ALIKE = 3  # look-alike clusters on a card
CURVES = ("loss", "center_loss", "largest", "smallest", "changed", "lr", "acc", "nmi", "ari")
LARGEST_TABLE = 40  # classes or clusters: beyond, a confusion matrix is no longer read
MIX_UPS = 8  # most frequent confusions listed
MOST_PICTURES = 9000  # on all cards together


def floats(values: Tensor) -> Floats:
    """Return a tensor as an array of doubles."""
    return np.asarray(values.detach().cpu().double().numpy())


def ints(values: Tensor) -> Ints:
    """Return a tensor as an array of integers."""
    return np.asarray(values.detach().cpu().long().numpy())


def number(value: float, digits: int = 4) -> float | None:
    """Round for JSON, which knows neither NaN nor infinity."""
    return round(float(value), digits) if math.isfinite(value) else None


def numbers(values: Iterable[float], digits: int = 4) -> list[float | None]:
    """Round each value for JSON."""
    return [number(value, digits) for value in values]


def pictures_a_card(clusters: int) -> tuple[int, int, int]:
    """Return how many typical, uncertain and outlying pictures a card shows: fewer where there are many cards."""
    if clusters <= 40:
        return 12, 6, 6
    if clusters <= 1000:
        return (6, 3, 3) if clusters <= 200 else (6, 2, 1)
    return max(1, MOST_PICTURES // clusters), 0, 0


def members_of(cluster_N: Ints, clusters: int) -> list[Ints]:
    """Return the index of each cluster's images."""
    order = np.argsort(cluster_N, kind="stable")
    ends = np.cumsum(np.bincount(cluster_N, minlength=clusters))
    return np.split(order, ends[:-1])


def first_by(values: Floats, index: Ints, count: int) -> list[int]:
    """Return the ``count`` images of smallest value; equal ones in their own order."""
    order = np.argsort(values[index], kind="stable")[:count]
    return [int(i) for i in index[order]]


def choose_pictures(data: ReportData, members: Sequence[Ints]) -> list[dict[str, list[int]]]:
    """Choose each card's pictures: closest to the center, least sure of the others, and marked as outliers."""
    confidence, cosine = floats(data.confidence), floats(data.cosine)
    outlier = ints(data.outlier) > 0
    many = pictures_a_card(len(members))
    cards = []
    for index in members:
        typical = first_by(-cosine, index, many[0])
        others = index[~np.isin(index, typical)]
        uncertain = first_by(confidence, others, many[1])
        strange = first_by(cosine, index[outlier[index]], many[2])
        cards.append({"typical": typical, "uncertain": uncertain, "strange": strange})
    return cards


def look_alikes(centers_KD: Floats, cluster_N: Ints, second_N: Ints, count: int = ALIKE) -> list[list[dict[str, Any]]]:
    """Return each cluster's nearest clusters: cosine of the centers, and how many images waver between the two."""
    clusters = len(centers_KD)
    norms = np.linalg.norm(centers_KD, axis=1, keepdims=True)
    unit_KD = np.nan_to_num(centers_KD / np.where(norms > 0, norms, 1))
    cosines_KK = unit_KD @ unit_KD.T
    np.fill_diagonal(cosines_KK, -np.inf)
    wavering_KK = np.zeros((clusters, clusters), np.int64)
    np.add.at(wavering_KK, (cluster_N, second_N), 1)
    empty_K = np.bincount(cluster_N, minlength=clusters) == 0
    cosines_KK[:, empty_K] = -np.inf
    nearest_KA = np.argsort(-cosines_KK, axis=1, kind="stable")[:, :count]
    return [
        [
            {"cluster": int(b), "cosine": number(cosines_KK[a, b]), "second": int(wavering_KK[a, b])}
            for b in nearest
            if np.isfinite(cosines_KK[a, b])
        ]
        for a, nearest in enumerate(nearest_KA)
    ]


def mean_of(values: Floats, index: Ints) -> float | None:
    """Return the mean over some images; None where there are none."""
    return number(values[index].mean()) if len(index) else None


def main_classes(data: ReportData, index: Ints) -> list[list[Any]]:
    """Return the three most frequent true classes among some images, with their numbers."""
    if data.targets is None:
        return []
    targets = ints(data.targets)[index]
    counts = np.bincount(targets[targets >= 0])
    best = np.argsort(-counts, kind="stable")[:3]
    return [[data.class_name(int(target)), int(counts[target])] for target in best if counts[target]]


def cluster_cards(data: ReportData) -> list[dict[str, Any]]:
    """Return the content of all cards."""
    cluster, clusters = ints(data.cluster), len(data.centers)
    members = members_of(cluster, clusters)
    confidence, cosine, outlier = floats(data.confidence), floats(data.cosine), ints(data.outlier)
    alike = look_alikes(floats(data.centers), cluster, ints(data.second))
    return [
        {
            "size": len(index),
            "cohesion": mean_of(cosine, index),
            "sure": mean_of(confidence, index),
            "outliers": int(outlier[index].sum()),
            "classes": main_classes(data, index),
            "alike": near,
            **pictures,
        }
        for index, near, pictures in zip(members, alike, choose_pictures(data, members), strict=True)
    ]


def summarize(data: ReportData) -> dict[str, Any]:
    """Return the numbers of the overview."""
    confidence = np.clip(np.nan_to_num(floats(data.confidence)), 0, 1)
    sizes = np.bincount(ints(data.cluster), minlength=len(data.centers))
    histogram, _ = np.histogram(confidence, bins=10, range=(0, 1))
    return {
        "images": len(data.ids),
        "clusters": len(data.centers),
        "smallest": int(sizes.min()),
        "largest": int(sizes.max()),
        "sure": float(confidence.mean()),
        "outliers": int((ints(data.outlier) > 0).sum()),
        "histogram": [int(count) for count in histogram],
    }


def picture_facts(data: ReportData, index: Sequence[int]) -> dict[str, list[Any]]:
    """Return what is told about each picture that is shown, column by column."""
    rows = np.array(index, np.int64)
    return {
        "index": [int(i) for i in rows],
        "name": [data.ids[i] for i in rows],
        "cluster": ints(data.cluster)[rows].tolist(),
        "sure": numbers(floats(data.confidence)[rows], 3),
        "second": ints(data.second)[rows].tolist(),
        "secondSure": numbers(floats(data.second_confidence)[rows], 3),
        "cosine": numbers(floats(data.cosine)[rows], 3),
        "outlier": (ints(data.outlier)[rows] > 0).astype(int).tolist(),
        "target": [] if data.targets is None else ints(data.targets)[rows].tolist(),
    }


def map_points(data: ReportData) -> dict[str, Any]:
    """Return the sample on the map: whole numbers from 0 to 10,000."""
    index = sample(len(data.ids))
    layout = lay_out(floats(data.embeddings[index.tolist()]))
    x, y = np.rint(layout.points * 10_000).astype(int).T
    return {"method": layout.method, "index": index.tolist(), "x": x.tolist(), "y": y.tolist()}


def curves(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Turn a record an epoch into a list a quantity; one that no epoch has is left out."""
    columns: dict[str, list[Any]] = {"epoch": [int(record["epoch"]) for record in metrics]}
    for name in CURVES:
        values = [number(float(record.get(name, math.nan)), 6) for record in metrics]
        if any(value is not None for value in values):
            columns[name] = values
    return columns


def compare_to_classes(data: ReportData) -> dict[str, Any] | None:
    """Match clusters to true classes one to one, as the accuracy does, and count what goes where."""
    if data.targets is None:
        return None
    targets, cluster = ints(data.targets), ints(data.cluster)
    known = targets >= 0
    if not known.any():
        return None
    found = confusion(targets[known], cluster[known])
    table = np.zeros((max(len(found), len(data.class_names)), len(data.centers)), np.int64)
    table[: len(found), : found.shape[1]] = found
    rows, columns = linear_sum_assignment(table, maximize=True)
    match = {int(row): int(column) for row, column in zip(rows, columns, strict=True)}
    order = [match[row] for row in range(len(table)) if row in match]
    order += [column for column in range(table.shape[1]) if column not in set(order)]
    others = table.copy()
    others[rows, columns] = 0
    worst = np.argsort(-others, axis=None, kind="stable")[:MIX_UPS]
    pairs = (divmod(int(flat), table.shape[1]) for flat in worst)
    return {
        "match": [match.get(row) for row in range(len(table))],
        "totals": table.sum(1).tolist(),
        "found": [int(table[row, match[row]]) if row in match else 0 for row in range(len(table))],
        "order": order,
        "table": table[:, order].tolist() if max(table.shape) <= LARGEST_TABLE else None,
        "mixups": [[row, column, int(others[row, column])] for row, column in pairs if others[row, column]],
        "classes": [data.class_name(row) for row in range(len(table))],
    }


def fingerprint(data: ReportData) -> str:
    """Name this clustering of these images, so that a reader's edits are found again for it and for no other."""
    digest = hashlib.sha256(ints(data.cluster).tobytes())
    for name in data.ids:
        digest.update(name.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:20]


def content(data: ReportData) -> dict[str, Any]:
    """Return all the page shows, but for the pixels."""
    points, cards = map_points(data), cluster_cards(data)
    shown = list(dict.fromkeys(i for card in cards for part in ("typical", "uncertain", "strange") for i in card[part]))
    rest = sorted(set(points["index"]) - set(shown))
    return {
        "fingerprint": fingerprint(data),
        "images": len(data.ids),
        "ids": list(data.ids),
        "cluster": ints(data.cluster).tolist(),
        "clusters": cards,
        "pictures": picture_facts(data, shown + rest),
        "onCards": len(shown),
        "map": points,
        "curves": curves(data.metrics),
        "truth": compare_to_classes(data),
    }
