"""Self-labeling: train a second run from a finished one, on the same images (see methods/selflabel.py)."""

import math
from pathlib import Path
from typing import Any, Unpack

from secu.apps import pipeline
from secu.apps.images import images_of, images_to_score, require_unchanged
from secu.base.errors import UserError
from secu.config import Config
from secu.data import Images, Known
from secu.settings import flatten, merge, resolve
from secu.train.listener import Listener
from secu.train.run import Run

STEPS_PER_EPOCH = 49  # as for CIFAR-10: 50,000 images in batches of 1,024
LARGEST_BATCH = 1024
SMALLEST_BATCH = 32
LEARNING_RATE = 0.1  # at the largest batch size; scaled in proportion to the batch size
# For small data sets: labels and teacher change slowly, and uncertain images are trained on as well.
CAREFUL = {"decay": 0.998, "uncertain": "probabilities", "kept": 0.5, "smallest": 0.5}
# The setting that the paper follows, that of SCAN; its learning rate and optimizer are not given.
PUBLISHED: dict[str, Any] = {
    "optim": {"schedule": "constant", "warmup_epochs": 0},
    "selflabel": {
        "decay": 0.0,
        "uncertain": "nothing",
        "kept": 0.0,
        "smallest": 0.0,
        "sharpen": False,
        "statistics": "separate",
        "weak_flip": False,
        "strong_style": "scan",
        "crop_padding": 0.0,
    },
}
MANY_IMAGES = 1_000_000  # from here on, the paper trains for 11 epochs instead of 100


def self_label(
    first: Run,
    out: Path,
    overrides: dict[str, Any] | None = None,
    *,
    as_published: bool = False,
    images: Images | None = None,
    data: Path | None = None,
    listener: Listener | None = None,
    **options: Unpack[pipeline.Options],
) -> pipeline.Finished:
    """Train the model of a finished run on its own confident labels.

    With ``as_published``, the settings in ``PUBLISHED`` replace our rules, and the centers learn. ``images`` are the
    run's images, if they are already loaded; otherwise they are loaded again, data sets from ``data``.
    """
    if out.resolve() == first.path.resolve():
        raise UserError(f"out: {out} is the run to start from; name another folder")
    resume = options.get("resume", False)
    Run.check_free(out, force=options.get("force", False), resume=resume)
    if not first.finished:
        raise UserError(f"run: {first.path} is not finished; resume it first (--resume)")
    listener = listener or Listener()
    images = images or images_of(first, listener, root=data)
    checksums = first.images()
    known = {name: checksums[name] for name in images.ids} if checksums else {}
    begun = Run.to_resume(out) if resume else None
    if begun is None:
        config = second_config(first.config(), first.path, len(images), overrides or {}, as_published=as_published)
    else:
        changes = merge(PUBLISHED if as_published else {}, overrides or {})
        config = _resumed_config(begun, first, known, changes)
    test = images_to_score(first.config(), images, data)
    return pipeline.run(config, images, out, command="selflabel", listener=listener, test=test, known=known, **options)


def _resumed_config(run: Run, first: Run, known: Known, overrides: dict[str, Any]) -> Config:
    """Return the config of the run to resume, after checking that it was started from ``first``."""
    config = run.config()
    if config.method != "selflabel" or config.init_from is None:
        raise UserError(f"resume: {run.path} is not a self-labeling run")
    if Path(config.init_from).resolve() != first.path.resolve():
        raise UserError(f"resume: {run.path} was started from {config.init_from}, got {first.path}")
    require_unchanged(run, known)
    return resolve(merge(config.model_dump(mode="json"), overrides))


def second_config(
    first: Config, path: Path, images: int, overrides: dict[str, Any], *, as_published: bool = False
) -> Config:
    """Return the config of the second stage: images, encoder and main head of the first run, with the paper's schedule.

    Small data sets get a smaller batch size, so that an epoch has as many steps as in the paper, a proportionally
    smaller learning rate, and more conservative settings, unless it is ``as_published``. ``path`` is the first run's
    folder.
    """
    settings = _continued(first, path, images)
    if overrides.get("selflabel", {}) is None:
        raise UserError("selflabel: null would turn off self-labeling; leave it out")
    if as_published:
        overrides = merge(PUBLISHED, overrides)
    asked = resolve(merge(settings, overrides))
    assert asked.selflabel is not None
    _check_given(path, resolve(settings), asked)
    settings["optim"]["lr"] = LEARNING_RATE * asked.optim.batch_size / LARGEST_BATCH
    warmup = min(asked.selflabel.warmup_epochs, asked.optim.epochs // 5)
    settings["optim"]["warmup_epochs"] = warmup
    if asked.optim.epochs != settings["optim"]["epochs"]:  # otherwise a short run would train on fixed labels only
        settings["selflabel"]["warmup_epochs"] = warmup
    if as_published:  # the whole model has one learning rate
        settings["centers"]["lr"] = resolve(merge(settings, overrides)).optim.lr
    return resolve(merge(settings, overrides))


def _continued(first: Config, path: Path, images: int) -> dict[str, Any]:
    """Return the settings of a second stage, except those that depend on what the user asks for."""
    if first.encoder.trainable == "nothing" or first.data.features:
        raise UserError(f"selflabel: {path} clusters fixed features; self-labeling needs a run that trains its encoder")
    if first.answer in ("shifted", "tree"):  # its labels are not those of the head that the second run would start from
        what = "merged clusters" if first.answer == "tree" else "clusters with offsets"
        raise UserError(f"selflabel: {path} reports {what}; self-labeling needs a run with answer=head")
    batch = 2 ** round(math.log2(max(images / STEPS_PER_EPOCH, 1)))
    settings = first.model_dump(mode="json") | {
        "description": f"self-labeling of {path.name}",
        "paper": first.paper_selflabel and first.paper_selflabel.model_dump(),
        "paper_selflabel": None,
        "method": "selflabel",
        "init_from": str(path.resolve()),
        "heads": [first.clusters],
        "head": 0,
        "answer": "head",
        "hints": {},
        "neighbors": {},
        "constraint": {"kind": "none"},
        "centers": {"kind": "sgd", "lr": 0.0},
        "selflabel": {} if batch >= LARGEST_BATCH else dict(CAREFUL),
        "loss": {"temperature": first.loss.temperature, "hard_label_weight": first.loss.hard_label_weight},
    }
    settings["optim"] = {
        "name": "sgd",
        "momentum": 0.9,
        "weight_decay": first.optim.weight_decay,
        "batch_size": min(max(batch, SMALLEST_BATCH), LARGEST_BATCH, images),
        "epochs": 100 if images < MANY_IMAGES else 11,
        "initial_epochs": 0,
        "warmup_epochs": 0,
        "precision": first.optim.precision,
    }
    return settings


def _check_given(path: Path, given: Config, asked: Config) -> None:
    """Raise if the user changes a setting that the first run determines: init_from, its images or its model."""
    ours = flatten(given.settings())
    for key, value in flatten(asked.settings()).items():
        if value == ours.get(key):
            continue
        if key == "init_from":
            raise UserError(f"init_from: self-labeling starts from {path}, got {value}")
        if key == "loss.confidence_temperature":
            raise UserError(f"{key}: {value} would be overwritten by calibration; leave it out")
        if key.partition(".")[0] in ("data", "encoder", "heads", "head", "answer", "method"):
            raise UserError(f"{key}: self-labeling continues {path}, so it must be {ours.get(key)}, got {value}")
