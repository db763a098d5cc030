"""Cluster your own images: from a source to a finished run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch

from secu.apps import pipeline
from secu.apps.feature_plan import PRETRAINED, Facts, choose_backbone
from secu.apps.hints import hints_of, read_hints
from secu.apps.images import Loading, load_inputs, require_unchanged
from secu.apps.plan import Plan, make_plan
from secu.apps.ranges import Range, range_for
from secu.apps.reading import room_for
from secu.base import processes
from secu.base.errors import UserError
from secu.config import Config
from secu.data import Images, Source, VectorSource, open_source, remember, require_all, shape_of
from secu.data.hints import Hints
from secu.nets.pretrained import describe, missing_extra, require_extra
from secu.settings import merge, resolve
from secu.train.device import choose_device
from secu.train.listener import Listener
from secu.train.run import Run

BATCH = 64  # batch size for computing pixel statistics
SCRATCH = "scratch"  # as an encoder: a network that starts from random weights
STATISTICS = 2_000  # maximum number of images used for the mean and standard deviation of the pixels


@dataclass(frozen=True)
class FitRequest:
    """What the user asked for."""

    source: str | Source  # a name for ``open_source``, or an open source
    clusters: int | Range | None  # a number, a range that the run chooses from, or None for one by the number of images
    balance: float | None = None
    labels: str | None = None
    overrides: Mapping[str, Any] | None = None
    device: str = "auto"
    allow_bad: bool = False
    cache: Path | None = None
    encoder: str | None = None  # SCRATCH or a pretrained backbone; None: chosen by rule
    hints: Any = None  # the path of a table, or names: see ``read_hints``


@dataclass(frozen=True)
class Prepared:
    """A fit that is planned but not started: its open source, its plan, and the run to resume, if any."""

    request: FitRequest
    source: Source
    plan: Plan
    notes: tuple[str, ...]  # how pixel values are interpreted if that was ambiguous, and what could be better
    before: Run | None
    hints: Hints | None = None  # about the images of the source


def prepare(request: FitRequest, before: Run | None = None) -> Prepared:
    """List the images, probe a sample of them, and choose all settings that the user did not specify.

    When resuming, images are decoded exactly as in the previous run, so that changed images can be detected.
    """
    overrides = dict(request.overrides or {})
    if before is not None:
        kept = {"image_size", "channels", "values", "on_demand"}
        overrides = merge({"data": before.config().data.model_dump(include=kept, exclude_none=True)}, overrides)
        if request.hints is None and before.config().hints.checksum is not None:
            raise UserError(f"resume: {before.path} was started with hints; give them again")
    overrides = _with_encoder(overrides, request.encoder)
    device = choose_device(request.device)
    settings = resolve(overrides)
    _refuse_inputs(settings)
    asked = settings.data
    source = request.source if isinstance(request.source, Source) else open_source(request.source, request.labels)
    source = source.limited(asked.max_pixels)
    source.require_images()
    probe = source.probe()
    values = _values(source, probe.values, asked.values)
    features = source.vectors.shape[1] if isinstance(source, VectorSource) else 0
    room = processes.agree(room_for(source, request.cache) if before is None else None)
    streamed = source.on_demand
    facts = Facts(len(source.ids), probe.side, probe.channels, device.type, features, room=room, on_demand=streamed)
    facts, note = _with_backbone(facts, overrides, scratch=request.encoder == SCRATCH)
    hints = None if request.hints is None else read_hints(request.hints, source)
    inputs = {
        "data": {"source": source.place or None, "labels": request.labels, "values": values},
        "hints": {"checksum": None if hints is None else hints.checksum(source.ids)},
    }
    wanted = range_for(facts.images) if request.clusters is None else request.clusters
    plan = make_plan(facts, wanted, request.balance, merge(overrides, inputs))
    _require_clusters(plan.config, wanted, hints)
    notes = tuple(text for text in (source.note(values), note) if text)
    return Prepared(request, source, plan, notes, before, hints)


def _require_clusters(config: Config, wanted: int | Range, hints: Hints | None) -> None:
    """Raise unless the main head has the requested number of clusters, which must be enough for the hints."""
    names = 0 if hints is None else len(hints.names)
    if names > config.clusters:
        raise UserError(f"hints: {names} names need at least {names} clusters, got {config.clusters}")
    if isinstance(wanted, int) and config.clusters != wanted:
        what = f"the requested {wanted} clusters"
        must = f"contain {what} at position {config.head} (head)" if config.head else f"start with {what}"
        raise UserError(f"heads: {list(config.heads)} must {must}")


def _with_encoder(overrides: dict[str, Any], encoder: str | None) -> dict[str, Any]:
    """Return the overrides with the requested encoder, which must not contradict them."""
    if encoder is None:
        return overrides
    backbone = overrides.get("encoder", {}).get("backbone")
    agrees = backbone in (None, encoder) or (encoder == SCRATCH and describe(backbone) is None)
    if not agrees:
        raise UserError(f"encoder: {encoder} contradicts encoder.backbone={backbone}; give one of them")
    return overrides if encoder == SCRATCH else merge(overrides, {"encoder": {"backbone": encoder}})


def _with_backbone(facts: Facts, overrides: Mapping[str, Any], *, scratch: bool) -> tuple[Facts, str]:
    """Return the facts with the frozen backbone, if one is to be used, and a note for the user."""
    asked = overrides.get("encoder", {})
    backbone = asked.get("backbone")
    trainable = asked.get("trainable")
    if facts.features and (scratch or backbone not in (None, "none")):
        raise UserError(f"encoder: {backbone or SCRATCH} needs images, got feature vectors")
    if facts.features or scratch:
        return facts, ""
    if backbone is None and trainable is None:
        size = overrides.get("data", {}).get("image_size") or facts.side
        frozen, why = choose_backbone(replace(facts, side=size))
        command = missing_extra(PRETRAINED)
        return replace(facts, frozen=frozen), why if command and command in why else ""
    if backbone is None or describe(backbone) is None:
        if trainable not in (None, "all"):
            raise UserError(f"encoder.trainable: {trainable} needs a pretrained encoder.backbone, got {backbone}")
        return facts, ""
    require_extra(backbone)
    return (replace(facts, frozen=backbone) if trainable in (None, "nothing") else facts), ""


def _refuse_inputs(asked: Config) -> None:
    given = {"source": asked.data.source, "labels": asked.data.labels, "hints": asked.hints.checksum}
    for name, value in given.items():
        if value is not None:
            key = "hints.checksum" if name == "hints" else f"data.{name}"
            raise UserError(f"{key}: {value!r} cannot be set here; use the {name} argument")


def _values(source: Source, found: str | None, asked: str | None) -> str | None:
    """Return how pixel values are interpreted; raise if the requested interpretation does not fit the data."""
    if asked is None:
        return found
    try:
        values = source.values_of(asked)
    except UserError:
        values = None
    if values != asked:
        held = f"holds {found}" if found else "has no values that can be read in another way"
        raise UserError(f"data.values: {source.name} {held}, not {asked}")
    return values


def fit(
    prepared: Prepared, out: Path, *, listener: Listener | None = None, **options: Unpack[pipeline.Options]
) -> pipeline.Finished:
    """Cluster the images and write a run folder; there are no results if the time limit is reached first."""
    listener = listener or Listener()
    request = prepared.request
    config = prepared.plan.config
    reading: Loading = {"cache": request.cache, "allow_bad": request.allow_bad, "progress": listener.reading}
    images = load_inputs(config, prepared.source, device=request.device, **reading)
    if config.data.strict:
        require_all(images)
    most = prepared.plan.most_clusters
    if len(images) < most:
        needed = f"{most} clusters need at least {most} readable images"
        raise UserError(f"clusters: {needed}, got {len(images)}")
    if prepared.hints is not None:
        images = replace(images, hints=hints_of(prepared.hints, images, prepared.source))
    known = remember(images)
    before = prepared.before
    if before is not None and shape_of(config.data) == before.input_shape():  # otherwise a setting differs
        require_unchanged(before, known)
    if len(images.shape) == 3:
        config = with_statistics(config, images)
    test = images if request.labels else None
    options["device"] = request.device
    return pipeline.run(config, images, out, command="fit", listener=listener, test=test, known=known, **options)


def with_statistics(config: Config, images: Images) -> Config:
    """Return the config with the per-channel mean and standard deviation of the images, unless the user set them."""
    step = -(-len(images) // STATISTICS)
    index = torch.arange(0, len(images), step)
    channels, height, width = images.shape
    moments = torch.zeros(2, channels, dtype=torch.float64)
    for part in index.split(BATCH):  # large images might not all fit in memory as floats
        values = images.fetch(part).double() / 255
        moments += torch.stack([values.sum((0, 2, 3)), values.square().sum((0, 2, 3))])
    first, second = moments / (len(index) * height * width)
    mean = [round(value, 4) for value in first.tolist()]
    std = [round(max(value, 0.01), 4) for value in (second - first.square()).clamp(min=0).sqrt().tolist()]
    asked = config.data.model_dump(include=config.data.model_fields_set & {"mean", "std"})
    return resolve(merge(config.model_dump(), {"data": {"mean": mean, "std": std, **asked}}))
