"""Whether a weaker entropy term, or bounds on sizes, let a run see the number of clusters of uneven groups.

    python benchmarks/choose_k_settings.py measure --cache CACHE   # rows → benchmarks/results/choose-k-settings.json
    python benchmarks/choose_k_settings.py measure size-0.9 --all --cache CACHE   # one setting, on many more cases
    python benchmarks/choose_k_settings.py publish                 # → the tables in docs

The features of the data sets are those of ``choose_k.py embed``. With little or no weight of the entropy, surplus
clusters can stay empty, so two answers are compared: that of the rule of the package, and how many clusters of the
finest head have images. Settings are measured on four cases; with ``--all``, on every case but those from scratch.
The results of one setting on all of these are compared with those of the default, from ``choose_k.py``.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from choose_k import DOC, checked_out, measure, run_of, train
from choose_k import RESULT as DEFAULTS
from choose_k_cases import CASES, Case, inputs_of
from choose_k_tables import Row, kinds_of, share, width_of
from defaults import hardware
from results import KEPT, percent, with_table

from secu.base.files import write_json, write_text

RESULT = KEPT / "choose-k-settings.json"
BEGIN = "<!-- settings: made by benchmarks/choose_k_settings.py publish -->\n"
BEGIN_ALL = "<!-- a setting on all cases: made by benchmarks/choose_k_settings.py publish -->\n"
END = "<!-- end of results -->"
OURS = tuple(f"benchmarks/choose_k{part}.py" for part in ("", "_cases", "_scores", "_settings"))
SEED = 0
NAMES = ("cifar10-10-0", "cifar10-10-uneven-0", "cifar10-6-uneven-4", "digits-7-uneven-2")
SETTINGS = {
    "default": "entropy, weight 0.12 N (the default)",
    "entropy-0.06": "entropy, weight 0.06 N",
    "entropy-0.03": "entropy, weight 0.03 N",
    "entropy-0.005": "entropy, weight 0.005 N",
    "size-0.9": "lower bound of 0.9 of an equal share",
    "size-0.3": "lower bound of 0.3 of an equal share",
}
ALL = tuple(case.name for case in CASES if not case.is_scratch)
ON_ALL = "size-0.9"  # the setting that is measured on all of these


def settings_of(name: str, images: int) -> dict[str, Any]:
    """Return the constraint of a setting."""
    kind, _, value = name.partition("-")
    if kind == "default":
        return {}
    if kind == "entropy":
        return {"constraint": {"kind": "entropy", "alpha": float(value) * images}}
    return {"constraint": {"kind": "size", "lower": float(value), "dual_schedule": "falling"}}


def measure_setting(case: Case, name: str, cache: Path) -> Row:
    """Return what a run with this setting says about a case, after training it if it has not been trained."""
    runs = cache / ("runs" if name == "default" else f"runs-{name}")
    images = len(inputs_of(case, cache)[0])
    train(case, cache, runs, SEED, settings_of(name, images))
    row = measure(case, cache, runs, SEED, compared=False)
    del row["others"]
    with np.load(run_of(case, runs, SEED)) as kept:
        filled = [len(np.unique(labels)) for labels in kept["labels"]]
        finest = int(kept["heads"][-1])
    return row | {"setting": name, "filled": filled, "finest": finest}


def merge(rows: Sequence[Row], made: Mapping[str, Any]) -> None:
    """Let rows replace those of the same case and setting in the file of results."""
    stored = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    merged = {(row["setting"], row["case"]): row for row in (*stored, *(row | dict(made) for row in rows))}
    order = [case.name for case in CASES]
    keys = sorted(merged, key=lambda key: (list(SETTINGS).index(key[0]), order.index(key[1])))
    write_json(RESULT, {"rows": [merged[key] for key in keys]})


def table(rows: Sequence[Row]) -> str:
    """Return one row per case and setting, for the four cases that all settings are compared on."""
    columns = "range | recommended | clusters with images, of all in the finest head | ACC of the head of that size"
    lines = [f"| case | true | constraint | {columns} |", "|---|---|---|---|---|---|---|"]
    chosen = [row for row in rows if row["case"] in NAMES]
    for row in sorted(chosen, key=lambda row: NAMES.index(row["case"])):
        kind = f"{row['source']}{', uneven' if row['uneven'] else ''}"
        answer = f"{row['low']} to {row['high']} | {row['recommended']}"
        filled = f"{row['filled'][-1]} of {row['finest']} | {percent([row['acc_head']], '.1')}"
        lines.append(f"| {kind} | {row['groups']} | {SETTINGS[row['setting']]} | {answer} | {filled} |")
    return "\n".join(lines) + "\n"


def table_of_all(rows: Sequence[Row], defaults: Sequence[Row]) -> str:
    """Return how often one setting and the default are right, on all cases that the setting was measured on."""
    changed = [row for row in rows if row["setting"] == ON_ALL]
    names = {row["case"] for row in changed}
    same = [row for row in defaults if row["case"] in names and row["seed"] == SEED]
    assert len(same) == len(changed), "not every case was measured with the default"
    columns = "true number in the range | recommended within 25% | range, high ÷ low"
    lines = [f"| | constraint | {columns} |", "|---|---|---|---|---|"]
    parts = {"default": kinds_of(same) | {"all": same}, ON_ALL: kinds_of(changed) | {"all": changed}}
    for kind in parts["default"]:
        for setting, kinds in parts.items():
            found = kinds[kind]
            hits = f"{share(found, 'in_range')} | {share(found, 'close')}"
            lines.append(f"| {kind} | {SETTINGS[setting]} | {hits} | {width_of(found):.1f} |")
    return "\n".join(lines) + "\n"


def publish() -> None:
    """Write the tables into the documentation."""
    rows = json.loads(RESULT.read_text())["rows"]
    defaults = json.loads(DEFAULTS.read_text())["rows"]
    page = with_table(DOC.read_text(), table(rows), BEGIN, END)
    write_text(DOC, with_table(page, table_of_all(rows, defaults), BEGIN_ALL, END))


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("measure", "publish"))
    parser.add_argument("settings", nargs="*", help="names of settings; all by default")
    parser.add_argument("--case", action="append", default=[], help="one case by its name; may be repeated")
    parser.add_argument("--all", action="store_true", help="all cases but those from scratch, instead of four")
    parser.add_argument("--cache", type=Path, default=Path("choose-k"), help="folder of the embedded data sets")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.what == "publish":
        publish()
        return
    made = {"commit": checked_out(*OURS), "cpu": hardware("cpu")["cpu"], "torch": torch.__version__}
    names = asked.case or (ALL if asked.all else NAMES)
    for name in asked.settings or SETTINGS:
        for case in CASES:
            if case.name in names:
                merge([measure_setting(case, name, asked.cache)], made)


if __name__ == "__main__":
    main()
