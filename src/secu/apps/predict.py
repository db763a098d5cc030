"""Predictions for new images, streamed to a table; memory use does not depend on the number of images."""

import sys
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from secu.base import processes
from secu.base.errors import UserError
from secu.base.threads import finish
from secu.data import Skipped, Source, VectorSource, decoded_in_batches, input_shape, needs_decoding, shape_of
from secu.methods.predictor import Predictions, batch_size, best_two
from secu.results.reading import read_limits
from secu.results.tables import CsvWriter, Writer, format_of, make_table, write_table
from secu.train.checkpoint import load_predictor
from secu.train.device import choose_device
from secu.train.listener import Listener
from secu.train.run import Run

IN_FLIGHT = 2  # batches queued on the device before the results of the first are read

Batch = tuple[list[int], Tensor]  # indices of images in their source, and their pixels


def predict_source(
    run: Run,
    source: Source,
    output: str,
    device: str = "auto",
    listener: Listener | None = None,
    *,
    raw: bool = False,
    level: int | None = None,
) -> list[Skipped]:
    """Write a run's predictions for all images of a source; return id and reason of images that were skipped.

    The output is a .csv, .jsonl or .parquet file; ``-`` prints CSV. With ``raw``, text in CSV is left as it is, even if
    a spreadsheet would read it as a formula. With a ``level``, images are assigned to this many groups of the tree
    instead of the run's own clusters; outliers, which are only known for the latter, are then left out.
    """
    if processes.world() > 1:
        raise UserError(f"output: several processes write a folder, for example out/, got {output!r}")
    format_of(output)  # fail early
    if not Path(output).parent.is_dir():
        raise UserError(f"output: folder {Path(output).parent} does not exist")
    if output != "-" and source.is_read_from(output):
        raise UserError(f"output: {output} is the source of the images; choose another file")
    source.require_images()
    stream = Stream(run, source, choose_device(device), listener or Listener(), level)
    if output == "-":
        stream.write(CsvWriter(sys.stdout, raw=raw))
        sys.stdout.flush()  # flush here, so that a closed pipe is reported by this command
    else:
        write_table(Path(output), stream.write, raw=raw)
    return [*stream.skipped, *source.repeated]


class Stream:
    """Streams the images of a source through a run's model."""

    def __init__(
        self, run: Run, source: Source, device: torch.device, listener: Listener, level: int | None = None
    ) -> None:
        self.source = source.limited(run.config().data.max_pixels)
        self.device = device
        self.listener = listener
        data = run.config().data
        self.shape = input_shape(data) if isinstance(source, VectorSource) else shape_of(data)
        if len(self.shape) == 1 and not isinstance(source, VectorSource):
            raise UserError(f"source: {source.name} has images, but the run was trained on given feature vectors")
        self.values = self.source.values_of(data.values, new=True)
        self.batch = batch_size(self.shape, device)
        self.predictor = load_predictor(run, device, level)
        if self.predictor.front is not None and len(self.shape) == 3:
            self.predictor.front.load()  # raises here if its weights are missing
        self.limits = limits_of(run) if level is None else None
        self.skipped = list(source.skipped)
        self.done = 0
        self.total = len(source)  # images that are counted as progress

    def write(self, writer: Writer) -> None:
        """Write the table of all images."""
        self.write_part(writer)
        total = len(self.source.ids)
        if len(self.skipped) == len(self.source.skipped) + total:
            raise UserError(f"source: none of the {total} images in {self.source.name} can be read")

    def write_part(self, writer: Writer, part: range | None = None) -> None:
        """Write the table of a part of the images, overlapping reading, prediction and writing of batches."""
        waiting: deque[tuple[list[int], Predictions, torch.cuda.Event | None]] = deque()
        decoding = needs_decoding(self.source, self.shape, self.values)  # decoding already runs in threads
        batches = self._batches(part) if decoding else ahead(self._batches(part))
        with torch.inference_mode(), closing(batches):
            for numbers, pixels in batches:
                waiting.append((numbers, *self._predict(pixels)))
                if len(waiting) > IN_FLIGHT:
                    self._write_one(writer, *waiting.popleft())
            while waiting:
                self._write_one(writer, *waiting.popleft())

    def _predict(self, pixels: Tensor) -> tuple[Predictions, torch.cuda.Event | None]:
        """Run the model; on CUDA results are copied asynchronously, and the event is recorded after the copy."""
        cosines_BK = self.predictor(pixels.to(self.device, non_blocking=pixels.is_pinned()))
        found = self.predictor.best_two(cosines_BK).to_host()
        if self.device.type != "cuda":
            return found, None
        event = torch.cuda.Event()
        event.record()
        return found, event

    def _write_one(
        self, writer: Writer, numbers: list[int], found: Predictions, arrival: torch.cuda.Event | None
    ) -> None:
        if arrival is not None:
            arrival.synchronize()
        outlier = None if self.limits is None else found.cosine < self.limits[found.cluster]
        columns = {name: [column[i] for i in numbers] for name, column in self.source.columns.items()}
        writer.write(make_table([self.source.ids[i] for i in numbers], found, outlier, columns))

    def write_nothing(self, writer: Writer) -> None:
        """Write a table without rows."""
        nothing = best_two(torch.zeros(0, len(self.predictor.centers)), 1.0)
        self._write_one(writer, [], nothing, None)

    def _batches(self, part: range | None) -> Generator[Batch]:
        with closing(decoded_in_batches(self.source, self.shape, self.values, self.batch, part)) as batches:
            for numbers, pixels, bad in batches:
                self.skipped += [(self.source.ids[i], image.reason) for i, image in bad]
                self.done += len(numbers) + len(bad)
                self.listener.reading(self.done, self.total)
                if numbers:
                    images = torch.from_numpy(pixels)
                    yield numbers, images.pin_memory() if self.device.type == "cuda" else images


def ahead(batches: Iterator[Batch]) -> Generator[Batch]:
    """Prepare the next batch in a thread while the current one is used.

    Only for iterators that are fast and hold no resources: on an interruption this waits for the batch in progress,
    and ``batches`` is never closed because the thread may still be using it.
    """
    thread = ThreadPoolExecutor(1)
    pending = thread.submit(next, batches, None)
    try:
        while (batch := pending.result()) is not None:
            pending = thread.submit(next, batches, None)
            yield batch
    finally:
        finish(thread, [pending])


def limits_of(run: Run) -> Tensor:
    """Return each cluster's outlier threshold, a cosine, as determined on the run's own images (K,)."""
    try:
        return torch.tensor(read_limits(run.path / "clusters.csv", run.config().clusters))
    except FileNotFoundError:
        raise UserError(f"run: {run.path} has no clusters.csv; {run.unfinished() or 'was it stopped early?'}") from None
