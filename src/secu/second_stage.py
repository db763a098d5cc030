"""The settings of self-labeling: those of the run to start from, the paper's schedule, and what the images suggest."""

import math
from pathlib import Path
from typing import Any

from secu.config import Config
from secu.data.own.known import Known, changes
from secu.errors import UserError
from secu.run import Run
from secu.settings import flatten, merge, resolve

STEPS_AN_EPOCH = 49  # what a batch of 1,024 makes of CIFAR-10's 50,000 images
LARGEST_BATCH, SMALLEST_BATCH = 1024, 32
LEARNING_RATE = 0.1  # at the largest batch; falls in proportion
# For few images: labels and the model that gives them hold still, and what is unsure is not forgotten.
CAREFUL = {"decay": 0.998, "unsure": "chances", "kept": 0.5, "smallest": 0.5}
MANY = 1_000_000  # images, from which on the paper trains for 11 epochs instead of 100


def begun_config(run: Run, source: Run, known: Known, overrides: dict[str, Any]) -> Config:
    """Return the config of the second run that is to be resumed, after a look whether it is one, and of this run."""
    config = run.config()
    if config.selflabel is None or config.init_from is None:
        raise UserError(f"resume: {run.path} is no run of self-labeling")
    if Path(config.init_from).resolve() != source.path.resolve():
        raise UserError(f"resume: {run.path} was started from {config.init_from}, got {source.path}")
    if told := changes(run.images() or known, known):
        raise UserError(f"resume: the images changed since {run.path} began: {told}; put them back, or begin a new run")
    return resolve(merge(config.model_dump(mode="json"), overrides))


def check_given(path: Path, given: Config, asked: Config) -> None:
    """Refuse to change what is not chosen here: the run to start from, its images and its model."""
    ours, theirs = flatten(given.settings()), flatten(asked.settings())
    for key, value in theirs.items():
        if value == ours.get(key):
            continue
        if key == "init_from":
            raise UserError(f"init_from: self-labeling starts from {path}, got {value}")
        if key == "loss.confidence_temperature":
            raise UserError(f"{key}: {value} would be replaced, as self-labeling finds it at the end; leave it out")
        if key.partition(".")[0] in ("data", "encoder", "heads"):
            raise UserError(f"{key}: self-labeling teaches {path}, so it must be {ours.get(key)}, got {value}")


def second_config(first: Config, path: Path, images: int, overrides: dict[str, Any]) -> Config:
    """Return the config of the second stage: the first run's images, encoder and first head; the paper's schedule.

    ``path`` is the first run's folder. Few images get a smaller batch, so that an epoch has as many steps as the
    paper's, and the learning rate follows it; and they are taught with more care.
    """
    wanted = 2 ** round(math.log2(max(images / STEPS_AN_EPOCH, 1)))
    settings = first.model_dump(mode="json") | {
        "description": f"self-labeling of {path.name}",
        "paper": first.paper_selflabel and first.paper_selflabel.model_dump(),
        "paper_selflabel": None,
        "init_from": str(path.resolve()),
        "heads": [first.heads[0]],
        "constraint": {"kind": "none"},
        "centers": {"kind": "sgd", "lr": 0.0},
        "selflabel": {} if wanted >= LARGEST_BATCH else dict(CAREFUL),
        "loss": {"temperature": first.loss.temperature, "hard_label_weight": first.loss.hard_label_weight},
    }
    settings["optim"] = {
        "name": "sgd",
        "momentum": 0.9,
        "weight_decay": first.optim.weight_decay,
        "batch_size": min(max(wanted, SMALLEST_BATCH), LARGEST_BATCH, images),
        "epochs": 100 if images < MANY else 11,
        "initial_epochs": 0,
        "warmup_epochs": 0,
        "mixed_precision": first.optim.mixed_precision,
    }
    asked = resolve(merge(settings, overrides))
    if asked.selflabel is None:
        raise UserError("selflabel: None turns off what this command is for; leave it out")
    check_given(path, resolve(settings), asked)
    settings["optim"]["lr"] = LEARNING_RATE * asked.optim.batch_size / LARGEST_BATCH
    settings["optim"]["warmup_epochs"] = warm_up = min(asked.selflabel.warmup_epochs, asked.optim.epochs // 5)
    if asked.optim.epochs != settings["optim"]["epochs"]:  # or a short training would learn fixed labels to its end
        settings["selflabel"]["warmup_epochs"] = warm_up
    return resolve(merge(settings, overrides))
