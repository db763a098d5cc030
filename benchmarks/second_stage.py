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
from pathlib import Path

import torch
from defaults import checked_out, hardware
from second_stage_scores import Record, Start, begin, evaluate, rounded
from trusted_labels import LARGEST_BATCH, LEARNING_RATE, SETTINGS

from secu.apps.selflabel import second_config
from secu.base.errors import UserError
from secu.base.files import write_json
from secu.config import Config
from secu.methods import build_method
from secu.methods.selflabel import SelfLabeling
from secu.settings import merge, parse_overrides, resolve
from secu.train.checkpoint import load_method
from secu.train.device import choose_device
from secu.train.engine import Engine, choose_engine, fastest_convolutions
from secu.train.run import Run
from secu.train.step import Step

PUBLISHED = "as-published"
FILES = ("second_stage", "second_stage_scores", "trusted_labels")


def main() -> None:
    """Train all variants."""
    arguments = parse()
    device = choose_device(arguments.device)
    start = begin(Run.open(arguments.run), arguments.data, device)
    report: Record = {
        "command": shlex.join(sys.argv),
        "commit": arguments.commit or checked_out(*(f"benchmarks/{name}.py" for name in FILES)),
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


def config_of(start: Start, words: str) -> Config:
    """Return the config of a variant."""
    _, *settings = shlex.split(words)
    overrides = parse_overrides(word for word in settings if word != PUBLISHED)
    method = overrides.pop("method", "selflabel")
    first = start.run.config()
    images = len(start.images)
    if method != "selflabel":
        batch = min(second_config(first, start.run.path, images, {}).optim.batch_size, LARGEST_BATCH)
        chosen = {"optim": {"batch_size": batch, "lr": LEARNING_RATE * batch / LARGEST_BATCH}}
        overrides = merge(merge(SETTINGS, chosen), overrides)
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
        method.end_epoch((epoch + 1) / config.optim.total_epochs)  # at the end, an average may become the model
        # The first epoch compiles, which a second run of the same variant would not do.
        over = sum(seconds[1:]) > arguments.seconds
        if (epoch + 1) % arguments.every == 0 or over or epoch + 1 == config.optim.total_epochs:
            note(losses)
        if over:
            break


if __name__ == "__main__":
    main()
