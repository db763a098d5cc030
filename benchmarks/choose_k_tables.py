"""The tables of choose_k.py: rows of all cases and seeds → the documentation."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from choose_k_cases import SCRATCH
from choose_k_scores import SEEDS, STRENGTH
from results import percent

from secu.apps.ranges import Range

Row = dict[str, Any]

RANGE = Range(3, 40)
CLOSE = 0.25  # how far a recommended number may be from the true one, as a share of that
MOST_LOST = 2  # points
PARTS = {"choice": "cases that the rule was chosen by", "check": "the other cases"}
KINDS: dict[str, Callable[[Row], bool]] = {
    "on features or vectors, groups of about equal size": lambda row: not is_scratch(row) and not row["uneven"],
    "on features or vectors, sizes that fall to a tenth": lambda row: not is_scratch(row) and row["uneven"],
    "digits from scratch": lambda row: row["source"] == "digits-scratch",
    "photos of CIFAR-10 from scratch, on a CPU": lambda row: row["source"] == "cifar10-scratch",
}
OTHERS = {
    "the rule": "silhouette of heads, on vectors (the rule)",
    "cuts": "silhouette of cuts of the tree, on vectors",
    "heads, on embeddings": "silhouette of heads, on embeddings",
    "shifted": "silhouette of heads with moved borders, on vectors",
    "k-means": "silhouette of k-means, on vectors",
    "information": "mutual information of neighbors' labels, as a share of log K",
    "neighbors": "agreement of neighbors' labels (Cohen's κ)",
    "probes": "agreement of a head with a linear classifier that learned it on the other half (Cohen's κ)",
    SEEDS: "agreement of the heads of two seeds (ARI)",
    "agreement with k-means": "agreement of a head with k-means (ARI)",
    "coding length": "coding length of heads, on vectors (round Gaussians, BIC)",
    STRENGTH: "prediction strength of k-means on halves, on vectors (largest number of at least 0.8)",
}


def is_close(found: int, true: int) -> bool:
    """Return whether a number is within a quarter of the true one."""
    return abs(found - true) <= CLOSE * true


def is_scratch(row: Row) -> bool:
    """Return whether a row is that of a run on pixels."""
    scratch: bool = row["source"].endswith(SCRATCH)
    return scratch


def by_case(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each case, in the order of seeds."""
    cases: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        cases[row["case"]].append(row)
    return [sorted(group, key=lambda row: row["seed"]) for group in cases.values()]


def share(rows: Sequence[Row], name: str) -> str:
    """Return how many of the rows have a property, and the percentage."""
    count = sum(bool(row[name]) for row in rows)
    return f"{count} of {len(rows)} ({count / len(rows):.0%})"


def agreeing(rows: Sequence[Row]) -> str:
    """Return for how many cases all seeds recommend the same number."""
    cases = [group for group in by_case(rows) if len(group) > 1]
    if not cases:
        return "one seed only"
    count = sum(len({row["recommended"] for row in group}) == 1 for group in cases)
    return f"{count} of {len(cases)}"


def width_of(rows: Sequence[Row]) -> float:
    """Return the geometric mean of the upper end of the range divided by the lower one."""
    return math.exp(np.mean([math.log(row["high"] / row["low"]) for row in rows]))


def best_fixed(rows: Sequence[Row], ratio: float) -> tuple[int, int]:
    """Return the range of this ratio that has the most true numbers: what a rule without data could reach at best."""
    ranges = [(low, math.floor(low * ratio)) for low in range(*RANGE)]
    return max(ranges, key=lambda ends: sum(ends[0] <= row["groups"] <= ends[1] for row in rows))


def kinds_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each kind, if there are any."""
    kinds = {name: [row for row in rows if belongs(row)] for name, belongs in KINDS.items()}
    return {name: chosen for name, chosen in kinds.items() if chosen}


def answer_table(groups: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return how often the range and the recommended number are right in each group of rows."""
    columns = ("true number in the range", "recommended within 25%", "range, high ÷ low", "all seeds agree")
    lines = [f"| | cases | runs | {' | '.join(columns)} |", "|---|---|---|---|---|---|---|"]
    for name, rows in groups.items():
        hits = f"{share(rows, 'in_range')} | {share(rows, 'close')}"
        counts = f"{len(by_case(rows))} | {len(rows)}"
        lines.append(f"| {name} | {counts} | {hits} | {width_of(rows):.1f} | {agreeing(rows)} |")
    return lines


def summary_table(rows: list[Row]) -> list[str]:
    """Return how often the answer is right in each part and for each kind, and what a fixed answer would reach."""
    parts = {name: [row for row in rows if row["part"] == part] for part, name in PARTS.items()}
    low, high = best_fixed(rows, width_of(rows))
    middle = max(range(*RANGE), key=lambda size: sum(is_close(size, row["groups"]) for row in rows))
    fixed = [
        {"in_range": low <= row["groups"] <= high, "close": is_close(middle, row["groups"])}
        for row in rows
        if row["part"] == "check"
    ]
    answer = f"always {low} to {high}, and {middle}: the best fixed answers, on the other cases"
    hits = f"{share(fixed, 'in_range')} | {share(fixed, 'close')}"
    last = f"| {answer} | | {len(fixed)} | {hits} | {high / low:.1f} | |"
    return [*answer_table(parts), last, "", *answer_table(kinds_of(rows))]


def case_table(rows: list[Row]) -> list[str]:
    """Return one row per case: the answers of all seeds, and the mean ACC of the head and the cut of the true size."""
    lines = ["| case | images | true | range | recommended | head, ACC | cut, ACC |", "|---|---|---|---|---|---|---|"]
    for group in by_case(rows):
        row = group[0]
        kind = f"{row['source']}{', uneven' if row['uneven'] else ''}{'' if row['part'] == 'choice' else ' *'}"
        spans = [f"{row['low']} to {row['high']}{'' if row['in_range'] else ' (misses it)'}" for row in group]
        found = [f"{row['recommended']}{'' if row['close'] else ' (far)'}" for row in group]
        answers = f"{'; '.join(dict.fromkeys(spans))} | {', '.join(found)}"
        accuracies = " | ".join(percent([row[name] for row in group], ".1") for name in ("acc_head", "acc_cut"))
        lines.append(f"| {kind} | {row['images']:,} | {row['groups']} | {answers} | {accuracies} |")
    return lines


def score_table(rows: list[Row]) -> list[str]:
    """Return how often the best number by each score is close to the true one, among the runs that have the score."""
    lines = ["| recommended within 25%, by | choice | other |", "|---|---|---|"]
    for name, title in OTHERS.items():
        known = [row for row in rows if name == "the rule" or name in row["others"]]
        if not known:
            continue
        parts = []
        for part in PARTS:
            chosen = [row for row in known if row["part"] == part]
            found = [row["recommended"] if name == "the rule" else row["others"][name] for row in chosen]
            hits = sum(is_close(size, row["groups"]) for size, row in zip(found, chosen, strict=True))
            parts.append(f"{hits} of {len(chosen)}")
        lines.append(f"| {title} | {' | '.join(parts)} |")
    return lines


def cut_table(rows: list[Row]) -> list[str]:
    """Return by how much cuts of the tree are better or worse than heads."""
    lines = [
        "| ACC of a cut minus that of the head, points | mean | worst | runs worse by more than 2 |",
        "|---|---|---|---|",
    ]
    for name, chosen in kinds_of(rows).items():
        gains = [100 * (row["acc_cut"] - row["acc_head"]) for row in chosen]
        worse = sum(gain < -MOST_LOST for gain in gains)
        lines.append(f"| {name} | {np.mean(gains):+.1f} | {min(gains):+.1f} | {worse} of {len(gains)} |")
    return lines


def tables(rows: list[Row]) -> str:
    """Return the tables of the lab notes."""
    parts = (summary_table(rows), case_table(rows), score_table(rows), cut_table(rows))
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def guide_tables(rows: list[Row]) -> tuple[str, str]:
    """Return the tables of the guide: the answers for each kind of images, and cuts of the tree."""
    return "\n".join(answer_table(kinds_of(rows))) + "\n", "\n".join(cut_table(rows)) + "\n"
