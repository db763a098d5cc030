"""Features of all images of a source under a frozen backbone, computed once and kept in a cache.

A cache file holds one row per image, in the source's reading order: a checksum of the decoded pixels and the features
in half precision, all NaN if the image cannot be read. Its name contains the state of the source, the weights and the
preprocessing. It grows under a temporary name, so that an interrupted or killed process loses only the images in
progress; a lock keeps two commands from writing the same file. If torchrun started several processes, each of them
writes a part of its own, and the main one joins the parts.
"""

import hashlib
import os
import zlib
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray

from secu.base import processes
from secu.base.errors import UserError
from secu.base.threads import finish
from secu.data import BadImage, Images, Progress, Shape, Source, data_root
from secu.data.broken import unreadable
from secu.data.cache import Stored, cannot_write, forget_earlier_states, state_of
from secu.data.decoding.decode import Raw, quiet
from secu.data.decoding.workers import Decoder, Task
from secu.data.loading import combine, require_few_bad
from secu.data.rows import FileRows
from secu.data.stream import cores, read_raw
from secu.nets.front import Front
from secu.nets.pretrained import weights_id

VERSION = 1  # increment it whenever the same image would get different features
ENDING = f".v{VERSION}.features"
CHUNK = {"cpu": 8, "mps": 32, "cuda": 64}  # images that a thread decodes and embeds at a time
AHEAD = 3  # chunks read ahead for each thread
LARGEST = float(np.finfo(np.float16).max)

Rows = NDArray[Any]  # of row_type


def row_type(features: int) -> np.dtype[Any]:
    """Return the type of a row: checksum and features."""
    return np.dtype([("checksum", "<u4"), ("features", "<f2", (features,))])


def default_feature_cache() -> Path:
    """Return the default cache folder for features."""
    return data_root() / "features"


def embed_images(
    source: Source,
    front: Front,
    shape: Shape,
    *,
    values: str | None = None,
    cache: Path | None = None,
    allow_bad: bool = False,
    strict: bool = False,
    progress: Progress | None = None,
) -> Images:
    """Return the features of a source's images as the inputs of a model; the pictures are still those of the source.

    Args:
        source: The images.
        front: Preprocessing and frozen backbone.
        shape: The shape that images are decoded to.
        values: How the run interprets values; if None, the source decides.
        cache: Folder of the cache; by default ``default_feature_cache()``.
        allow_bad: Continue when more than 5% of the images cannot be read.
        strict: Raise if an image cannot be read, and do not use the cache; always the case for images in memory.
        progress: Called with the number of images embedded so far and in total.

    Raises:
        UserError: The weights are missing, too many images cannot be read, or the cache cannot be written.
    """
    source.require_images()
    values = source.values_of(values)
    work = Embedding(source, front, shape, values, progress)
    strict = strict or not source.place
    if strict or not source.cacheable:
        rows = np.concatenate(list(work.rows(range(len(source)))))
    else:
        rows = _cached(work, cache or default_feature_cache())
    stored = _stored(work, rows, strict=strict)
    images = combine(source, stored, values, stored.inputs.shape[1:])
    if not allow_bad:
        require_few_bad(source, images)
    return images


class Embedding:
    """Decodes and embeds the images of a source in threads, in its reading order."""

    def __init__(
        self, source: Source, front: Front, shape: Shape, values: str | None, progress: Progress | None
    ) -> None:
        self.source = source
        self.front = front
        self.shape = shape
        self.values = values
        self.progress = progress
        self.features = int(front.load().features)  # type: ignore[arg-type]
        on_cpu = front.mean.device.type == "cpu"  # there, the network keeps the cores busy
        self.decoder = Decoder(len(source), 1 if on_cpu else cores(), values, source.max_pixels)

    def rows(self, part: range, done: int = 0) -> Generator[Rows]:
        """Yield the rows of a part of all images but the first ``done`` of it, a chunk at a time."""
        device = self.front.mean.device.type
        total = len(part)
        workers = cores()
        order = list(self.source.order[part.start : part.stop])[done:]
        size = CHUNK.get(device, CHUNK["cpu"])
        waiting: deque[Future[Rows]] = deque()
        pool = ThreadPoolExecutor(workers, "secu-embed")
        try:
            with quiet(), single_threaded(device):
                for start in range(0, len(order), size):
                    raws = [read_raw(self.source, i, self.values) for i in order[start : start + size]]
                    waiting.append(pool.submit(self.embed, raws))
                    ahead = AHEAD * workers if start + size < len(order) else 0
                    while len(waiting) > ahead:
                        rows = waiting[0].result()
                        waiting.popleft()
                        done += len(rows)
                        yield rows
                        if self.progress:  # other processes are about as fast
                            self.progress(done * len(self.source) // total, len(self.source))
        except BaseException:
            self.decoder.stop()
            raise
        finally:
            finish(pool, waiting)

    @torch.inference_mode()
    def embed(self, raws: Sequence[Raw | BadImage]) -> Rows:
        """Return the rows of some images."""
        rows = np.zeros(len(raws), row_type(self.features))
        rows["features"] = np.nan
        channels, size, _ = self.shape
        tasks = enumerate(Task(raw, size, channels) for raw in raws)
        outcomes = [image for _, part in self.decoder.parts(tasks) for image in self.decoder(part)]
        decoded = {number: image for number, image in enumerate(outcomes) if not isinstance(image, BadImage)}
        if decoded:
            pixels = torch.from_numpy(np.stack(list(decoded.values())))
            features = self.front(pixels.to(self.front.mean.device)).clamp(-LARGEST, LARGEST)
            rows["features"][list(decoded)] = features.half().cpu().numpy()
            rows["checksum"][list(decoded)] = [zlib.crc32(image.data) for image in decoded.values()]
        return rows


@contextmanager
def single_threaded(device: str) -> Iterator[None]:
    """On a CPU, let every thread compute alone: that is faster than all of them sharing the cores in every layer."""
    threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _stored(work: Embedding, rows: Rows, *, strict: bool) -> Stored:
    """Bring rows into the order of the source, and find out why some images cannot be read."""
    ordered = np.empty_like(rows)
    ordered[list(work.source.order)] = rows
    bad: dict[int, str] = {}
    missing = np.flatnonzero(np.isnan(ordered["features"]).all(1)).tolist()
    for i in sorted(missing, key=work.source.position):  # a .tar.gz can only be read forward
        try:
            work.source.decode(i, work.shape[1], work.shape[0], work.values)
        except BadImage as error:
            bad[i] = error.reason
        else:  # it was unreadable only for a while
            ordered[i] = work.embed([work.source.read(i, work.values)])[0]
    name = work.source.name
    if bad and strict:
        raise unreadable(work.source, min(bad), BadImage(bad[min(bad)]))
    if len(bad) == len(rows):
        raise UserError(f"source: none of the {len(bad)} images in {name} can be read; first: {bad[min(bad)]}")
    good = np.delete(ordered, list(bad)) if bad else ordered
    if not np.isfinite(good["features"]).all():
        raise UserError(f"encoder.backbone: the features of {name} are not finite; are its weights damaged?")
    return Stored(np.ascontiguousarray(good["features"]), bad, np.ascontiguousarray(good["checksum"]))


def _cached(work: Embedding, folder: Path) -> Rows:
    """Return the rows of a source from the cache, computing those that are missing."""
    path = folder / _file_name(work)
    kind = row_type(work.features)
    size = len(work.source) * kind.itemsize
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_name(f".{path.name}.lock")) if processes.is_main() else nullcontext()
        with lock:
            if not processes.agree(path.is_file() and path.stat().st_size == size):
                forget_earlier_states(folder, work.source, ENDING)
                _build(path, work, kind.itemsize)
        return FileRows(path, kind, (len(work.source),), what="cache").in_memory()
    except OSError as error:
        raise UserError(cannot_write(path, error, size, "features")) from None


def _build(path: Path, work: Embedding, row: int) -> None:
    """Write a cache file in parts, one for each process, which stay if they are interrupted."""
    world = processes.world()
    ends = [f"-{rank}-of-{world}" for rank in range(world)] if world > 1 else [""]
    parts = [path.with_name(f".{path.name}.part{end}") for end in ends]
    with open(parts[processes.rank()], "ab") as file:
        _complete(file, work, row)
    processes.barrier()
    if processes.is_main():
        _join(parts)
        parts[0].replace(path)
        for left in path.parent.glob(f".{path.name}.part*"):  # of another number of processes
            left.unlink()
    processes.barrier()


def _join(parts: Sequence[Path]) -> None:
    """Append all other parts to the first one."""
    if not all(part.is_file() for part in parts):
        raise UserError(f"cache: {parts[0].parent} must be a folder shared by all machines; set SECU_DATA")
    with open(parts[0], "ab") as file:
        for other in parts[1:]:
            file.write(other.read_bytes())
        os.fsync(file.fileno())


def _complete(file: IO[bytes], work: Embedding, row: int) -> None:
    """Append the missing rows to this process's part, which may hold the first ones."""
    part = processes.parts_of(len(work.source))[processes.rank()]
    done = min(file.seek(0, os.SEEK_END) // row, len(part))
    file.truncate(done * row)
    file.seek(done * row)
    with closing(work.rows(part, done)) as chunks:  # after Ctrl-C, no thread may outlive the program
        for rows in chunks:
            file.write(rows.tobytes())
            file.flush()  # a killed process loses only the images in progress
    os.fsync(file.fileno())


def _file_name(work: Embedding) -> str:
    """Return a name that changes with the state of the source, the weights and the preprocessing."""
    front = work.front
    preprocessing = (front.mean.flatten().tolist(), front.std.flatten().tolist(), work.shape, work.values)
    content = f"{weights_id(front.config.backbone)} {preprocessing}"
    return f"{state_of(work.source)}-{hashlib.sha256(content.encode()).hexdigest()[:16]}{ENDING}"
