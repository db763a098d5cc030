"""Cluster a person's own images: from what they named to a finished run, and back from a run to its images."""

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from secu.checkpoint import Trained
from secu.config import Config
from secu.data import ImageSource, data_root, load
from secu.data.own import OwnImages, Source, decoded_in_batches, open_source, prepare, printable
from secu.data.own.cache import Progress
from secu.data.own.known import Known, changes, remember
from secu.errors import UserError
from secu.files import void, write_json
from secu.plan import Facts, Plan, make_plan
from secu.results import Results, write_results
from secu.run import Run
from secu.settings import merge, nest, resolve
from secu.train import check, choose_device, train
from secu.training import Listener

BATCH = 64  # images decoded into memory between two calls of the progress bar
STATISTICS = 2_000  # images that mean and deviation of the pixels are taken from


@dataclass(frozen=True)
class Request:
    """What the user asked for; ``source`` is what ``open_source`` takes, or a source that is open already."""

    source: str | Source
    clusters: int
    balance: float = 0.9
    labels: str | None = None
    overrides: dict[str, Any] | None = None
    device: str = "auto"
    allow_bad: bool = False
    cache: Path | None = None


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``{"optim.lr": 0.1}`` into ``{"optim": {"lr": 0.1}}``; values may come from numpy."""
    if not isinstance(settings, Mapping):
        raise UserError(f'settings: {settings!r} must be a dict such as {{"optim.lr": 0.1}}')
    result: dict[str, Any] = {}
    for key, value in settings.items():
        plain = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
        result = merge(result, nest(str(key), plain))
    return result


def plan_for(request: Request) -> tuple[Source, Plan]:
    """List the images, look at a sample of them, and decide everything that was not asked for."""
    device, asked = choose_device(request.device), resolve(request.overrides or {})
    source = request.source if isinstance(request.source, Source) else open_source(request.source, request.labels)
    source.require_images()
    for name in ("source", "labels"):
        if (value := getattr(asked.data, name)) is not None:
            raise UserError(f"data.{name}: {value!r} cannot be a setting here; name the {name} by itself")
    if "name" in asked.data.model_fields_set and asked.data.name != "own":
        raise UserError(f"data.name: {asked.data.name!r} cannot be a setting here; these are your own images")
    with suppress(UserError):  # told below, in words for a setting
        source.read_as(asked.data.values)
    probe = source.probe()
    if asked.data.values not in (None, source.values):
        held = f"holds {source.values}" if source.values else "has no values to be taken in another way"
        raise UserError(f"data.values: {source.name} {held}, not {asked.data.values}")
    facts = Facts(len(source), probe.side, 1 if probe.grey else 3, device.type)
    place = {"source": source.place or None, "labels": request.labels, "values": source.values or None}
    plan = make_plan(facts, request.clusters, request.balance, merge(request.overrides or {}, {"data": place}))
    if plan.config.heads[0] != request.clusters:
        raise UserError(f"heads: {list(plan.config.heads)} must begin with the {request.clusters} clusters asked for")
    return source, plan


def fit(
    request: Request,
    out: Path,
    *,
    resume: bool = False,
    force: bool = False,
    time_limit: float = float("inf"),
    listener: Listener | None = None,
    progress: Progress | None = None,
    report: bool = True,
) -> tuple[Run, Trained, Results | None]:
    """Cluster the images and leave a run folder; without results if the time limit came first.

    Without ``report`` the tables are written, but not the pictures, which may take longer than training.
    """
    Run.check_free(out, resume=resume, force=force)  # before the images are read, which may take long
    listener, before = listener or Listener(), Run.to_resume(out) if resume else None
    source, plan = plan_for(request if before is None else _as_before(request, before))
    images = decode(source, plan.config, cache=request.cache, allow_bad=request.allow_bad, progress=progress)
    known = remember(source, images) if source.place else {}
    config = with_statistics(plan.config, images)
    if before is None:
        _check(config, images, request.device)
    else:
        _require_same(before, config, known)
    run = Run.start(out, config, resume=resume, force=force)
    if known:
        write_json(run.path / "images.json", known)
    test = images if request.labels else None
    options: dict[str, Any] = {"resume": resume, "time_limit": time_limit, "listener": listener}
    try:
        model = train(config, images, run, test=test, device=request.device, **options)
    except UserError:
        run.discard_unsaved()
        raise
    if not model.finished:
        return run, model, None
    return run, model, write_results(run, model, images, pictures=report, tell=listener.busy)


def _as_before(request: Request, run: Run) -> Request:
    """Ask for images as the run has them, where nothing else is asked for, so that a changed one is found by its id."""
    data = run.config().data.model_dump(include={"image_size", "channels", "values"}, exclude_none=True)
    return replace(request, overrides=merge({"data": data}, request.overrides or {}))


def _require_same(run: Run, config: Config, now: Known) -> None:
    before = run.images()
    if before is None or config.data.shape != run.config().data.shape:
        return  # what differs is a setting, which will be named
    if told := changes(before, now):
        raise UserError(f"resume: the images changed since {run.path} began: {told}; restore them, or begin a new run")


def _check(config: Config, images: OwnImages, device: str) -> None:
    """Raise what would stop the training before it costs an old run."""
    if len(images) < config.heads[0]:
        raise UserError(f"clusters: {config.heads[0]} clusters need as many images, got {len(images)} that can be read")
    check(config, images, device)


def decode(
    source: Source,
    config: Config,
    *,
    cache: Path | None = None,
    allow_bad: bool = False,
    progress: Progress | None = None,
) -> OwnImages:
    """Decode the images into the cache, or find them there; what lies in no place is decoded into memory."""
    assert config.data.shape is not None
    channels, size, _ = config.data.shape
    if not source.place:
        return decode_all(source, size, channels, progress)
    cache = cache or data_root(None) / "images"
    return prepare(source, size, channels, cache=cache, allow_bad=allow_bad, progress=progress)


def decode_all(source: Source, size: int, channels: int, progress: Progress | None = None) -> OwnImages:
    """Decode every image of a source into memory; a bad one is an error, as each row must have its answer."""
    pixels, done = np.empty((len(source), channels, size, size), np.uint8), 0
    with closing(decoded_in_batches(source, size, channels, BATCH)) as batches:
        for numbers, images, bad in batches:
            for number, image in bad:
                raise UserError(f"source: {printable(source.ids[number])} cannot be read: {image.reason}")
            pixels[numbers] = images
            done += len(numbers)
            if progress:
                progress(done, len(source))
    every = range(len(source))
    return OwnImages(torch.from_numpy(pixels), ids=tuple(source.ids), source=source, numbers=every)


def with_statistics(config: Config, images: OwnImages) -> Config:
    """Return the config with mean and deviation of these images' pixels, a channel each, unless they were asked for."""
    step = -(-len(images) // STATISTICS)
    moments = torch.zeros(2, images.shape[0], dtype=torch.float64)
    for part in images.pixels[::step].split(BATCH):  # large pictures would not fit as floats all at once
        values = part.double() / 255
        moments += torch.stack([values.sum((0, 2, 3)), values.square().sum((0, 2, 3))])
    first, second = moments / (images.pixels[::step, 0].numel())
    mean = [round(value, 4) for value in first.tolist()]
    std = [round(max(value, 0.01), 4) for value in (second - first.square()).clamp(min=0).sqrt().tolist()]
    asked = config.data.model_dump(include=config.data.model_fields_set & {"mean", "std"})
    return resolve(merge(config.model_dump(), {"data": {"mean": mean, "std": std, **asked}}))


def images_of(
    run: Run,
    split: str | None = None,
    data: Path | None = None,
    *,
    tell: Callable[[str], None] = void,
    progress: Progress | None = None,
) -> ImageSource:
    """Return the images that a run was trained on, or another split of its data set.

    Own images that are gone, have changed or came later are left out; ``tell`` hears of those that are missed.
    """
    config = run.config()
    if config.data.name != "own":
        return load(config.data.name, split or config.data.train, data, config.data.image_size)
    if config.data.source is None:
        raise UserError(f"run: {run.path} was trained on images in memory, which it cannot find again")
    known = run.images()
    try:
        source = open_source(config.data.source)
    except UserError as error:
        where = f"put them back, or name their new place as data.source in {run.path / 'config.yaml'}"
        raise UserError(f"run: its images are not where they were: {error}; {where}") from None
    if config.data.labels is not None:
        source.label(config.data.labels)
    source.read_as(config.data.values)
    images = decode(source, config, allow_bad=True, progress=progress)
    if known is None:  # a run of before they were noted
        return images
    return _as_trained(run, known, source, images, tell)


def _as_trained(run: Run, known: Known, source: Source, images: OwnImages, tell: Callable[[str], None]) -> OwnImages:
    """Leave out the images that have changed, and tell of all that are missed."""
    now = remember(source, images)
    same = [i for i, name in enumerate(images.ids) if name in known and now[name] == known[name]]
    if not same:
        raise UserError(f"run: none of the images that {run.path} was trained on is in {source.name} as it was")
    trained = {name: pixels for name, pixels in known.items() if pixels is not None}
    if told := changes(trained, {name: now[name] for name in now if name in trained}):
        tell(f"{len(trained) - len(same):,} of {len(trained):,} images of the run are left out: {told}")
    return images if len(same) == len(images) else images.only(same)
