"""Load the inputs of a run: its training images or their features, and the images to score it on."""

from functools import partial
from pathlib import Path
from typing import TypedDict, Unpack

from secu.base.errors import UserError
from secu.config import Config
from secu.data import (
    Images,
    Known,
    Progress,
    Source,
    changes,
    load_images,
    open_data,
    remember,
    shape_of,
    splits_of,
)
from secu.nets.embedding import embed_images
from secu.nets.front import Front, needs_front
from secu.train.device import choose_device
from secu.train.listener import Listener
from secu.train.run import Run


class Loading(TypedDict, total=False):
    """Options of ``load_images`` and ``embed_images``."""

    cache: Path | None
    allow_bad: bool
    strict: bool
    progress: Progress | None


def load_inputs(config: Config, source: Source, *, device: str = "auto", **options: Unpack[Loading]) -> Images:
    """Return what a run is trained on: the images of a source, or their features under a frozen backbone."""
    source = source.limited(config.data.max_pixels)
    shape = shape_of(config.data)
    if needs_front(config):
        read = partial(embed_images, source, Front(config, shape[0]).to(choose_device(device)), shape)
    else:
        read = partial(load_images, source, shape, on_demand=config.data.on_demand)
    return read(values=config.data.values, **options)


def open_inputs(
    config: Config, split: str | None = None, root: Path | None = None, *, device: str, **options: Unpack[Loading]
) -> Images:
    """Open the source in a run's settings and load its inputs; see ``open_data`` and ``load_inputs``."""
    return load_inputs(config, open_data(config.data, split, root), device=device, **options)


def images_to_score(config: Config, images: Images, root: Path | None = None, device: str = "auto") -> Images | None:
    """Return the images to score a run on: the test split, or the training images if they have labels."""
    source = config.data.source
    if source is not None and splits_of(source):
        return open_inputs(config, config.data.test, root, device=device)
    return images if images.targets is not None else None


def images_of(
    run: Run, listener: Listener, split: str | None = None, root: Path | None = None, device: str = "auto"
) -> Images:
    """Return the images that a run was trained on, or another split of its data set.

    Images that were removed, changed or added since then are left out; the listener is notified of missing ones.
    """
    config = run.config()
    data = config.data
    if data.source is None:
        raise UserError(f"run: {run.path} was trained on images in memory, which cannot be reloaded")
    known = run.images()
    try:
        images = open_inputs(config, split, root, device=device, progress=listener.reading, allow_bad=True)
    except UserError as error:
        if splits_of(data.source):
            raise
        where = f"restore them, or set data.source in {run.path / 'config.yaml'} to their new location"
        raise UserError(f"run: its images cannot be found: {error}; {where}") from None
    if known is None:  # a data set, or a run made before images were recorded
        return images
    return _as_trained(run, known, images, listener)


def _as_trained(run: Run, known: Known, images: Images, listener: Listener) -> Images:
    """Return only the unchanged training images, and report how many are missing or changed."""
    now = remember(images)
    same = [i for i, name in enumerate(images.ids) if name in known and now[name] == known[name]]
    if not same:
        raise UserError(f"run: all training images of {run.path} are missing or have changed")
    trained = {name: pixels for name, pixels in known.items() if pixels is not None}
    if missing := changes(trained, {name: now[name] for name in now if name in trained}):
        listener.note(f"{len(trained) - len(same):,} of {len(trained):,} images of the run are left out: {missing}")
    return images if len(same) == len(images) else images.select(same)


def require_unchanged(run: Run, now: Known) -> None:
    """Refuse to resume a run whose images have changed."""
    if different := changes(run.images() or now, now):
        raise UserError(
            f"resume: the images changed since {run.path} began: {different}; restore them, or start a new run"
        )
