"""Cluster a person's own images: from what they named to a finished run, and back from a run to its images."""

import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from sklearn.utils import check_array

from secu.checkpoint import Trained
from secu.config import Config, merge, resolve
from secu.data import ImageSource, data_root, load
from secu.data.own import (
    ArraySource,
    BadImage,
    FileSource,
    OwnImages,
    Source,
    decoded,
    open_source,
    prepare,
    printable,
)
from secu.data.own.decode import Raw
from secu.data.own.names import one_line
from secu.errors import UserError
from secu.plan import Facts, Plan, make_plan
from secu.results import Results, write_results
from secu.run import Run
from secu.train import Listener, choose_device, train

Progress = Callable[[int, int], None]
STATISTICS = 2_000  # images that mean and deviation of the pixels are taken from
SHAPES = "(N, H, W), (N, H, W, 3), (N, 3, H, W), or (N, H·H) of grey squares"


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
        for part in reversed(str(key).split(".")):
            plain = {part: plain}
        result = merge(result, plain)
    return result


def plan_for(request: Request) -> tuple[Source, Plan]:
    """List the images, look at a sample of them, and decide everything that was not asked for."""
    device = choose_device(request.device)
    source = request.source if isinstance(request.source, Source) else open_source(request.source, request.labels)
    source.require_images()
    probe = source.probe()
    facts = Facts(len(source), min(probe.width, probe.height), 1 if probe.grey else 3, device.type)
    place = {"data": {"source": source.place or None, "labels": request.labels}}
    plan = make_plan(facts, request.clusters, request.balance, merge(place, request.overrides or {}))
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
    if not resume:
        Run.check_free(out, force=force)  # before the images are read, which may take long
    source, plan = plan_for(request)
    images = decode(source, plan.config, request, progress)
    config = with_statistics(plan.config, images)
    run = Run.start(out, config, resume=resume, force=force)
    try:
        model = train(
            config,
            images,
            run,
            test=images if request.labels else None,
            device=request.device,
            resume=resume,
            time_limit=time_limit,
            listener=listener,
        )
    except UserError:
        run.discard_empty()
        raise
    if not model.finished:
        return run, model, None
    return run, model, write_results(run, model, images, pictures=report)


def decode(source: Source, config: Config, request: Request, progress: Progress | None = None) -> OwnImages:
    """Decode the images into the cache, or find them there; what lies in no place is decoded into memory."""
    size = config.data.image_size
    assert size is not None
    channels = len(config.data.mean) if len(config.data.mean) == 3 else 1 if source.probe().grey else 3
    if not source.place:
        return decode_all(source, size, channels, progress)
    cache = request.cache or data_root(None) / "images"
    images = prepare(source, size, channels, cache=cache, allow_bad=request.allow_bad, progress=progress)
    if len(images) < config.heads[0]:
        raise UserError(f"clusters: {config.heads[0]} clusters need as many images, got {len(images)} that can be read")
    return images


def decode_all(source: Source, size: int, channels: int, progress: Progress | None = None) -> OwnImages:
    """Decode every image of a source into memory; a bad one is an error, as each row must have its answer."""
    pixels = np.empty((len(source), channels, size, size), np.uint8)
    with closing(decoded(source, size, channels)) as images:
        for done, (number, image) in enumerate(images, 1):
            if isinstance(image, BadImage):
                raise UserError(f"source: {printable(source.ids[number])} cannot be read: {image.reason}")
            pixels[number] = image
            if progress:
                progress(done, len(source))
    return OwnImages(torch.from_numpy(pixels), ids=tuple(source.ids), rows=np.arange(len(source)))


def with_statistics(config: Config, images: OwnImages) -> Config:
    """Return the config with mean and deviation of these images' pixels, a channel each, unless they were asked for."""
    step = max(1, len(images) // STATISTICS)
    pixels = images.pixels[::step].float() / 255
    mean = [round(value, 4) for value in pixels.mean((0, 2, 3)).tolist()]
    std = [round(max(value, 0.01), 4) for value in pixels.std((0, 2, 3)).tolist()]
    asked = config.data.model_dump(include=config.data.model_fields_set & {"mean", "std"})
    return resolve(merge(config.model_dump(), {"data": {"mean": mean, "std": std, **asked}}))


def images_of(run: Run, split: str | None = None, data: Path | None = None) -> ImageSource:
    """Return the images that a run was trained on, or another split of its data set."""
    config = run.config()
    if config.data.name != "own":
        return load(config.data.name, split or config.data.train, data, config.data.image_size)
    if config.data.source is None:
        raise UserError(f"run: {run.path} was trained on images in memory, which it cannot find again")
    source = open_source(config.data.source, config.data.labels)
    return decode(source, config, Request(config.data.source, config.heads[0], allow_bad=True))


def open_images(images: Any) -> Source:
    """Return what Python code has or names as a source: an array, a tensor, a list of paths or of PIL images, a path.

    Raises:
        UserError: That is none of these, or not of a valid shape or range.
    """
    if isinstance(images, str | os.PathLike):
        return open_source(os.fspath(images))
    if isinstance(images, torch.Tensor):
        images = (images.float() if images.is_floating_point() else images).detach().cpu().numpy()
    names = getattr(getattr(images, "dtype", None), "kind", "") in ("O", "U", "T")
    items = list(images) if names or isinstance(images, list | tuple) else []
    if items and all(isinstance(item, str | os.PathLike) for item in items):
        paths = [os.fspath(item) for item in items]
        return FileSource("X", "", paths, [os.path.expanduser(path) for path in paths])
    if items and all(isinstance(item, Image.Image) for item in items):
        return PictureSource(items)
    return ArraySource("X", _as_images(images))


def _as_images(values: Any) -> NDArray[Any]:
    """Return an array of three or four dimensions; rows of numbers are taken as grey squares."""
    try:
        with sklearn.config_context(assume_finite=True):  # the source checks that, and says where
            array: NDArray[Any] = check_array(values, allow_nd=True, ensure_2d=False, input_name="X")
    except ValueError as error:
        raise UserError(f"X: {one_line(str(error).splitlines()[0]).rstrip('.')}; valid: {SHAPES}") from None
    if array.ndim < 2:
        raise UserError(f"X: no images in shape {array.shape}. Reshape your data to {SHAPES}")
    side = math.isqrt(array.shape[1])
    if array.ndim == 2 and side**2 != array.shape[1]:
        raise UserError(f"X: {array.shape[1]} features are not a square of grey pixels; valid: {SHAPES}")
    return array.reshape(-1, side, side) if array.ndim == 2 else array


class PictureSource(Source):
    """PIL images in memory."""

    has_folders = False

    def __init__(self, pictures: Sequence[Image.Image]) -> None:
        super().__init__("X", "", [str(i) for i in range(len(pictures))])
        self.pictures = pictures

    def read(self, i: int) -> Raw:
        """Return image ``i`` as a file that loses nothing, so that it is decoded by the same rules as any other."""
        picture = ImageOps.exif_transpose(self.pictures[i])
        if picture.mode in ("P", "PA", "La", "RGBa") or "transparency" in picture.info:
            picture = picture.convert("RGBA")
        elif picture.mode in ("HSV", "YCbCr"):
            picture = picture.convert("RGB")
        file = io.BytesIO()
        picture.save(file, "TIFF")
        return file.getvalue()

    def stamps(self) -> Sequence[str]:
        """Return nothing: what is in memory is never cached."""
        return ()
