"""Trials of a second stage: train variants from one finished run, and record ACC next to scores that need no labels.

    python benchmarks/second_stage.py runs/cifar10 --json trials.json \
        "ours" "published as-published" "slower as-published optim.lr=0.01 optim.epochs=50" \
        "semi method=semi selflabel.kept=0.2" "aligned method=semi-aligned seed=1"
    python benchmarks/second_stage.py runs/cifar10 @variants.txt --json trials.json         # one variant per line

A variant is a name, followed by settings of ``secu selflabel``; ``as-published`` stands for its option, and
``method=semi`` for the method in trusted_labels.py. Variants run one after the other, each for at most --seconds. Each
evaluation is printed as one line of JSON, and everything so far is written to the file. A variant that fails is
recorded with its error, and the next one begins. Trials leave no run folders.

True labels are only used for scoring: acc, nmi, ari and calibration_error on the test split; acc_train and
acc_trusted on the training images.
"""

import argparse
import gc
import json
import math
import shlex
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from defaults import checked_out, hardware
from torch import Tensor
from trusted_labels import LARGEST_BATCH, SETTINGS

from secu.apps.images import images_of, images_to_score
from secu.apps.selflabel import second_config
from secu.base.errors import UserError
from secu.base.files import write_json
from secu.cluster.metrics import calibration_error, matched, mutual_information, score_known
from secu.config import Config, SelfLabelConfig
from secu.data import Images
from secu.methods import build_method
from secu.methods.consistency import consistency
from secu.methods.predictor import Predictions, choose
from secu.methods.selflabel import SelfLabeling
from secu.settings import merge, parse_overrides, resolve
from secu.train.checkpoint import load_method
from secu.train.device import choose_device
from secu.train.engine import Engine, choose_engine, fastest_convolutions
from secu.train.listener import Listener
from secu.train.run import Run
from secu.train.step import Step
from secu.views.neighbors import find_neighbors
from secu.views.strong import StrongAugmentation

Record = dict[str, Any]

PUBLISHED = "as-published"
NEIGHBORS = 20  # per image, in the embeddings of the first run
SEEN = 5_000  # images whose random views are compared
SILHOUETTE_IMAGES = 2_000


@dataclass(frozen=True)
class Start:
    """What all variants start from."""

    run: Run
    images: Images
    test: Images | None
    device: torch.device
    strong_views: StrongAugmentation  # the same for all variants
    embeddings_ND: Tensor  # of the first run
    neighbors_Nk: Tensor
    found: Predictions  # by the first run


def main() -> None:
    """Train all variants."""
    arguments = parse()
    device = choose_device(arguments.device)
    start = begin(Run.open(arguments.run), arguments.data, device)
    report: Record = {
        "command": shlex.join(sys.argv),
        "commit": arguments.commit or checked_out("benchmarks/second_stage.py", "benchmarks/trusted_labels.py"),
        "hardware": hardware(device.type),
        "torch": torch.__version__,
        "first_run": {"name": start.run.path.name, **{key: start.run.record().get(key) for key in ("seed", "kept")}},
        "trials": [],
    }
    for words in arguments.variants:
        trial: Record = {"variant": words, "evaluations": [], "error": None}
        report["trials"].append(trial)
        try:
            train(start, words, arguments, report)
        except Exception as error:  # also out of memory; the other variants may fit
            traceback.print_exc()
            trial["error"] = f"{type(error).__name__}: {error}"
        write_json(arguments.json, report)
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, fromfile_prefix_chars="@"
    )
    parser.add_argument("run", type=Path, help="finished run to start from")
    parser.add_argument("variants", nargs="+", help='such as "slow optim.lr=0.01"')
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--every", type=int, default=5, help="epochs between two evaluations")
    parser.add_argument("--seconds", type=float, default=math.inf, help="limit for each variant, without compilation")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", help="commit of the code; default: the one checked out, if nothing was changed")
    return parser.parse_args()


def begin(run: Run, data: Path | None, device: torch.device) -> Start:
    """Load the images, and what the first run finds in them."""
    images = images_of(run, Listener(), root=data)
    predictor = load_method(run, device).predictor()
    embeddings_ND = predictor.embed(images)
    neighbors_Nk = find_neighbors(embeddings_ND, NEIGHBORS).of(torch.arange(len(images)))
    found = predictor.choose(predictor.compare(embeddings_ND))
    test = images_to_score(run.config(), images, data)
    config = run.config()
    channels, height, width = images.shape
    strong_views = StrongAugmentation(
        config.augment, SelfLabelConfig(), config.data.mean, config.data.std, channels, (height, width)
    ).to(device)
    return Start(run, images, test, device, strong_views, embeddings_ND, neighbors_Nk, found)


def config_of(start: Start, words: str) -> Config:
    """Return the config of a variant."""
    _, *settings = shlex.split(words)
    overrides = parse_overrides(word for word in settings if word != PUBLISHED)
    method = overrides.pop("method", "selflabel")
    first = start.run.config()
    images = len(start.images)
    if method != "selflabel":
        batch = second_config(first, start.run.path, images, {}).optim.batch_size
        chosen = merge(SETTINGS, {"optim": {"batch_size": min(batch, LARGEST_BATCH)}})
        overrides = merge(chosen, overrides)
    config = second_config(first, start.run.path, images, overrides, as_published=PUBLISHED in settings)
    return resolve(merge(config.model_dump(mode="json"), {"method": method}))


@fastest_convolutions()
def train(start: Start, words: str, arguments: argparse.Namespace, report: Record) -> None:
    """Train a variant, and evaluate it before the first epoch, every few epochs and at the end."""
    config = config_of(start, words)
    trial = report["trials"][-1]
    trial["settings"] = config.settings()
    method = build_method(config, len(start.images), start.images.shape, start.device)
    assert isinstance(method, SelfLabeling)
    method.prepare(start.images, load_method(start.run, start.device), resumed=False)
    kind = choose_engine(config.engine, start.device)
    engine = Engine([Step(method, start.images, start.device, compiled=kind != "eager")], kind)
    seconds: list[float] = []

    def note(losses: dict[str, float]) -> None:
        line = {"variant": words.split()[0], "epoch": len(seconds), "seconds": round(sum(seconds), 2)}
        trial["evaluations"].append(line | evaluate(method, start) | rounded(losses))
        print(json.dumps(trial["evaluations"][-1]), flush=True)
        write_json(arguments.json, report)

    note({})
    for epoch in range(config.optim.total_epochs):
        began = time.perf_counter()
        losses = engine.epoch(epoch)[0]
        seconds.append(time.perf_counter() - began)
        if not all(map(math.isfinite, losses.values())):
            raise UserError(f"loss: {losses} after epoch {epoch} is not finite")
        # The first epoch compiles, which a second run of the same variant would not do.
        over = sum(seconds[1:]) > arguments.seconds
        if (epoch + 1) % arguments.every == 0 or over or epoch + 1 == config.optim.total_epochs:
            note(losses)
        if over:
            break


def evaluate(method: SelfLabeling, start: Start) -> Record:
    """Return scores with and without true labels."""
    predictor = method.predictor()
    embeddings_ND = predictor.embed(start.images)
    found = choose(predictor.compare(embeddings_ND), method.config.loss.temperature)
    scores: Record = {}
    if start.test is not None and start.test.targets is not None:
        tested = predictor.predict(start.test)
        known = score_known(start.test.targets, tested.cluster)
        scores |= known._asdict() if known else {}
        right = matched(start.test.targets.numpy(), tested.cluster.numpy())
        scores["calibration_error"] = calibration_error(tested.confidence.numpy(), right)
    if start.images.targets is not None:
        scores["acc_train"] = float(matched(start.images.targets.numpy(), found.cluster.numpy()).mean())
        right_N = torch.from_numpy(matched(start.images.targets.numpy(), start.found.cluster.numpy()))
        if (kept_N := method.clustering.kept.cpu()).any():
            scores["acc_trusted"] = float(right_N[kept_N].float().mean())
    statistics = {name: value for name, value in method.clustering.record().items() if name != "moved"}
    return rounded(scores | without_labels(method, start, embeddings_ND, found) | statistics)


def without_labels(method: SelfLabeling, start: Start, embeddings_ND: Tensor, found: Predictions) -> Record:
    """Return scores of a model that need no true labels, from what it finds in the training images."""
    predictor = method.predictor()
    index_N = torch.arange(0, len(start.images), -(-len(start.images) // SEEN))
    usual = consistency(predictor, method.lesson.views, start.images, index_N)
    strong = consistency(predictor, start.strong_views, start.images, index_N, numbers=(1,))
    labels_N = found.cluster
    clusters = method.config.clusters
    pairs = labels_N[:, None] * clusters + labels_N[start.neighbors_Nk]
    table_KK = pairs.flatten().bincount(minlength=clusters**2).view(clusters, clusters)
    sizes = labels_N.bincount(minlength=clusters)
    confidence = float(found.confidence.mean())
    return {
        "information": (usual.information + strong.information) / 2,
        "information_usual": usual.information,
        "information_strong": strong.information,
        "agreement_usual": usual.agreement,
        "agreement_strong": strong.agreement,
        "neighbor_agreement": float(table_KK.trace() / table_KK.sum()),
        "neighbor_information": mutual_information(table_KK),
        "confidence": confidence,
        "confidence_minus_agreement": confidence - usual.agreement,
        "silhouette": silhouette(embeddings_ND, labels_N),
        "silhouette_first": silhouette(start.embeddings_ND, labels_N),
        "moved": float((labels_N != start.found.cluster).float().mean()),
        "model_largest": int(sizes.max()),
        "model_smallest": int(sizes.min()),
    }


def silhouette(embeddings_ND: Tensor, labels_N: Tensor) -> float | None:
    """Return the mean silhouette by cosine of evenly spaced images; None if all are in one cluster."""
    from sklearn.metrics import silhouette_score

    chosen = slice(None, None, -(-len(labels_N) // SILHOUETTE_IMAGES))
    labels = labels_N[chosen].numpy()
    if len(set(labels.tolist())) < 2:
        return None
    return float(silhouette_score(embeddings_ND[chosen].cpu().numpy(), labels, metric="cosine"))


def rounded(values: Record) -> Record:
    """Return a record with four digits after the point."""
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}


if __name__ == "__main__":
    main()
