"""How well a run finds the number of clusters, on data sets whose number of classes is known.

    python benchmarks/choose_k.py embed cifar10 --cache CACHE --data FOLDER   # features of a data set, once
    python benchmarks/choose_k.py list                                 # the names of all cases
    python benchmarks/choose_k.py train --cache CACHE --seed 1         # one run for each case, which is kept in CACHE
    python benchmarks/choose_k.py train --cache CACHE --seed 1 --case cifar10-10-0   # one run
    python benchmarks/choose_k.py score --cache CACHE                  # rows → benchmarks/results/choose-k.json
    python benchmarks/choose_k.py score --cache CACHE --seed 1 --out rows.json   # rows → another file
    python benchmarks/choose_k.py merge rows.json                      # → benchmarks/results/choose-k.json
    python benchmarks/choose_k.py publish                              # → the tables in docs

Rows of the same case and seed are replaced; all others are kept.

The rule was chosen on the cases named "choice" alone; the others ("check") were scored once, with the rule unchanged.
"""

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from choose_k_cases import CASES, Case, embed, inputs_of, store
from choose_k_scores import SEEDS, agreement_of_seeds, other_scores
from choose_k_tables import RANGE, Row, guide_tables, is_close, tables
from defaults import checked_out, hardware
from results import KEPT, ROOT, with_table
from torch import Tensor

from secu.apps.fit import SCRATCH, FitRequest, fit, prepare
from secu.base.files import write_json, write_text
from secu.cluster.metrics import accuracy
from secu.cluster.tree import grow_tree
from secu.config import FeaturesConfig
from secu.data import open_images
from secu.methods.answer import relabeled
from secu.methods.number import compare_sizes
from secu.train.checkpoint import load_method
from secu.views.features import FeatureViews

RESULT = KEPT / "choose-k.json"
DOC = ROOT / "docs" / "lab" / "how-many.md"
GUIDE = ROOT / "docs" / "how-many.md"
BEGIN_CUTS = "<!-- cuts: made by benchmarks/choose_k.py publish -->\n"
BEGIN = "<!-- results: made by benchmarks/choose_k.py publish -->\n"
END = "<!-- end of results -->"
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/choose_k.py score --cache CACHE"
OURS = tuple(f"benchmarks/choose_k{part}.py" for part in ("", "_cases", "_scores"))


def run_of(case: Case, runs: Path, seed: int) -> Path:
    """Return the file of a run."""
    return runs / f"{case.name}-seed-{seed}.npz"


def seeds_of(case: Case, runs: Path) -> list[int]:
    """Return the seeds that a case was trained with."""
    before = f"{case.name}-seed-"
    return sorted(int(path.stem.removeprefix(before)) for path in runs.glob(f"{before}*.npz"))


def train(case: Case, cache: Path, runs: Path, seed: int, more: Mapping[str, Any] | None = None) -> None:
    """Train the heads of a case, with other settings if any are given, and keep their labels and the embeddings."""
    path = run_of(case, runs, seed)
    if path.exists():
        return
    inputs, targets = inputs_of(case, cache)
    heads = RANGE.heads(len(inputs))
    middle = RANGE.middle()
    settings = {"seed": seed, "heads": heads, "head": middle, "answer": "head", **(more or {})}
    encoder = SCRATCH if case.is_scratch else None
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        request = FitRequest(open_images(inputs), heads[middle], overrides=settings, device="cpu", encoder=encoder)
        finished = fit(prepare(request), Path(folder) / "run", report=False)
        assert finished.results is not None
        method = load_method(finished.run, torch.device("cpu"))
        embeddings = finished.results.embeddings
        labels = [(embeddings @ method.clustering.head(n).T).argmax(-1).numpy() for n in range(len(heads))]
    small = {"embeddings": embeddings.half().numpy(), "labels": np.array(labels, np.uint8)}
    seconds = time.monotonic() - began
    store(path, **small, heads=heads, targets=targets, seconds=seconds)
    print(f"{case.name}, seed {seed}: {len(inputs)} images, {seconds:.0f} s", flush=True)


def points_of(case: Case, embeddings: Tensor, cache: Path) -> Tensor:
    """Return what a run measures distances between: its standardized vectors or, on pixels, its embeddings."""
    if case.is_scratch:
        return embeddings
    vectors = torch.from_numpy(inputs_of(case, cache)[0])
    views = FeatureViews(vectors.shape[1], FeaturesConfig())
    views.learn(vectors)
    return views.plain(vectors)


def measure(case: Case, cache: Path, runs: Path, seed: int, *, compared: bool = True) -> Row:
    """Return what a run says about a case, what other scores would say if compared, and how good heads and cuts are."""
    with np.load(run_of(case, runs, seed)) as kept:
        run = dict(kept)
    embeddings = F.normalize(torch.from_numpy(run["embeddings"]).float(), dim=-1)
    heads = run["heads"].tolist()
    labels = list(torch.from_numpy(run["labels"]).long())
    points = points_of(case, embeddings, cache)
    tree = grow_tree(embeddings, labels[-1], len(heads) - 1) if len(labels[-1].unique()) > 1 else None
    choice = compare_sizes(heads, labels, tree, points, seed)
    low, high = choice.plausible
    others = other_scores(choice, labels, embeddings, points, seed) if compared else {}
    more = [number for number in seeds_of(case, runs) if compared and number != seed]
    if more:
        with np.load(run_of(case, runs, more[0])) as kept:
            others[SEEDS] = agreement_of_seeds(run["labels"], kept["labels"])
    size = min(choice.sizes, key=lambda number: (abs(math.log(number / case.groups)), number))
    cut = labels[-1] if tree is None else relabeled(labels[-1], tree, min(size, len(tree.leaves)))
    return {
        "case": case.name,
        "seed": seed,
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


def rounded(values: Sequence[float]) -> list[float]:
    """Return numbers for a file."""
    return [round(value, 4) for value in values]


def score(cases: Sequence[Case], cache: Path, runs: Path, seed: int | None, commit: str | None) -> list[Row]:
    """Return the rows of all runs of these cases, of one seed or of all."""
    made = {"commit": checked_out(*OURS) or commit, "cpu": hardware("cpu")["cpu"], "torch": torch.__version__}
    found = [(case, number) for case in cases for number in seeds_of(case, runs) if seed in (None, number)]
    return [measure(case, cache, runs, number) | made for case, number in found]


def merge(rows: Sequence[Row], out: Path) -> None:
    """Let rows replace those of the same case and seed in a file, or join them."""
    stored = json.loads(out.read_text())["rows"] if out.exists() else []
    merged = {(row["case"], row["seed"]): row for row in (*stored, *rows)}
    order = [case.name for case in CASES]
    keys = sorted(merged, key=lambda key: (order.index(key[0]), key[1]))
    content = {"command": COMMAND, "range": list(RANGE), "rows": [merged[key] for key in keys]}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, content)
    print(f"{out}: {len(rows)} rows added or replaced, {len(merged)} in all", flush=True)


def publish() -> None:
    """Write the tables into the documentation."""
    rows = json.loads(RESULT.read_text())["rows"]
    answers, cuts = guide_tables(rows)
    guide = with_table(GUIDE.read_text(), answers, BEGIN, END)
    write_text(GUIDE, with_table(guide, cuts, BEGIN_CUTS, END))
    write_text(DOC, with_table(DOC.read_text(), tables(rows), BEGIN, END))


def chosen_cases(sources: Sequence[str], names: Sequence[str]) -> list[Case]:
    """Return the cases with these names and of these sources, those that take longest first; all if none is given."""
    unknown = {*names} - {case.name for case in CASES} | {*sources} - {case.source for case in CASES}
    if unknown:
        raise SystemExit(f"choose_k.py: no such case or data set: {', '.join(sorted(unknown))}")
    asked = [case for case in CASES if case.name in names or case.source in sources or not (names or sources)]
    return sorted(asked, key=lambda case: not case.is_scratch)


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("embed", "list", "train", "score", "merge", "publish"))
    parser.add_argument("names", nargs="*", help="data sets, all if none is given; for merge: files of rows")
    parser.add_argument("--case", action="append", default=[], help="one case by its name; may be repeated")
    parser.add_argument("--seed", type=int, help="seed of the run: 0 by default, and all that were trained for score")
    parser.add_argument("--cache", type=Path, default=Path("choose-k"), help="folder of the embedded data sets")
    parser.add_argument("--runs", type=Path, help="folder of the trained runs; CACHE/runs by default")
    parser.add_argument("--out", type=Path, default=RESULT, help="file that score and merge add rows to")
    parser.add_argument("--data", type=Path, help="folder of the data set")
    parser.add_argument("--commit", help="the commit, for a copy of the code without git")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    runs = asked.runs or asked.cache / "runs"
    if asked.what == "embed":
        for name in asked.names:
            embed(name, asked.cache, asked.data)
    elif asked.what == "merge":
        merge([row for name in asked.names for row in json.loads(Path(name).read_text())["rows"]], asked.out)
    elif asked.what == "publish":
        publish()
    else:
        cases = chosen_cases(asked.names, asked.case)
        if asked.what == "list":
            print(*(case.name for case in cases), sep="\n")
        elif asked.what == "train":
            for case in cases:
                train(case, asked.cache, runs, asked.seed or 0)
        else:
            merge(score(cases, asked.cache, runs, asked.seed, asked.commit), asked.out)


if __name__ == "__main__":
    main()
