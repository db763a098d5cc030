"""New images through a trained model: a table, written while it is made; memory does not grow with their number."""

import csv
import sys
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from secu.checkpoint import load_trained
from secu.data.own import Skipped, Source, decoded_in_batches, needs_decoding
from secu.data.own.cache import Progress
from secu.errors import UserError
from secu.evaluate import Predictions, Predictor, best_two
from secu.files import write_atomically
from secu.run import Run
from secu.tables import CsvWriter, Writer, format_of, make_table, table_writer
from secu.train import choose_device

BATCH_PIXELS = 2**21  # of a batch, so that small images come in large batches: 2,048 of 32 pixels, 41 of 224
Batch = tuple[list[int], Tensor]  # the numbers of images in their source, and their pixels
IN_FLIGHT = 2  # batches handed to the device before the first one's answer is read


def predict_source(
    run: Run, source: Source, output: str, device: str = "auto", progress: Progress | None = None
) -> list[Skipped]:
    """Write what the run's model says of each image; return id and reason of those that are left out."""
    kind = format_of(output)
    if not Path(output).parent.is_dir():
        raise UserError(f"output: there is no folder {Path(output).parent} for {Path(output).name}")
    if output != "-" and Path(output).resolve() == Path(source.place).resolve():
        raise UserError(f"output: {output} holds the images to predict; name another file")
    source.require_images()
    stream = Stream(run, source, choose_device(device), progress)
    if output == "-":
        stream.write(CsvWriter(sys.stdout))
        sys.stdout.flush()  # here, where a reader that went away is still an error of this command
    else:
        write_atomically(Path(output), lambda path: _to_file(stream, path, kind))
    return [*stream.skipped, *source.repeated]


def _to_file(stream: "Stream", path: Path, kind: str) -> None:
    with table_writer(path, kind) as writer:
        stream.write(writer)


class Stream:
    """One pass over a source."""

    def __init__(self, run: Run, source: Source, device: torch.device, progress: Progress | None = None) -> None:
        self.config, self.source, self.device, self.progress = run.config(), source, device, progress
        shape = self.config.data.shape
        if shape is None:
            raise UserError(f"run: {run.path} was trained on {self.config.data.name}; predict needs a run of secu fit")
        source.read_new_as(self.config.data.values)
        self.shape, self.batch = shape, max(1, BATCH_PIXELS // (shape[1] * shape[2]))
        model = load_trained(run, shape, device)
        self.predictor = Predictor(model.augmentation, model.encoder.eval(), model.clustering.head())
        self.limits = read_limits(run)
        self.skipped = list(source.skipped)

    def write(self, writer: Writer) -> None:
        """Write the table; meanwhile the device works on the next batches, and threads read those after them."""
        waiting: deque[tuple[list[int], Predictions, torch.cuda.Event | None]] = deque()
        channels, size, _ = self.shape
        decoded = needs_decoding(self.source, size, channels)  # in threads of its own
        with torch.inference_mode(), closing(self._batches() if decoded else ahead(self._batches())) as batches:
            for numbers, pixels in batches:
                waiting.append((numbers, *self._answer(pixels)))
                if len(waiting) > IN_FLIGHT:
                    self._write_one(writer, *waiting.popleft())
            while waiting:
                self._write_one(writer, *waiting.popleft())
        if len(self.skipped) == len(self.source.skipped) + len(self.source):
            raise UserError(f"source: none of the {len(self.source)} images in {self.source.name} can be read")

    def _answer(self, pixels: Tensor) -> tuple[Predictions, torch.cuda.Event | None]:
        """Ask the model; on CUDA the answer is only on its way, and the event says when it is there."""
        cosines_BK = self.predictor(pixels.to(self.device, non_blocking=pixels.is_pinned()))
        found = best_two(cosines_BK, self.config.loss.prediction_temperature).to_host()
        if self.device.type != "cuda":
            return found, None
        event = torch.cuda.Event()
        event.record()
        return found, event

    def _write_one(
        self, writer: Writer, numbers: list[int], found: Predictions, there: torch.cuda.Event | None
    ) -> None:
        if there is not None:
            there.synchronize()
        outlier = found.cosine < self.limits[found.cluster]
        columns = {name: [column[i] for i in numbers] for name, column in self.source.columns.items()}
        writer.write(make_table([self.source.ids[i] for i in numbers], found, outlier, columns))

    def _batches(self) -> Generator[Batch]:
        channels, size, _ = self.shape
        done = 0
        with closing(decoded_in_batches(self.source, size, channels, self.batch)) as batches:
            for numbers, pixels, bad in batches:
                self.skipped += [(self.source.ids[i], image.reason) for i, image in bad]
                done += len(numbers) + len(bad)
                if self.progress:
                    self.progress(done, len(self.source))
                if numbers:
                    images = torch.from_numpy(pixels)
                    yield numbers, images.pin_memory() if self.device.type == "cuda" else images


def ahead(batches: Iterator[Batch]) -> Generator[Batch]:
    """Make the next batch in a thread while the current one is used.

    For what is made in a moment and holds nothing open: an interruption waits for the batch in the making, and as the
    thread may be at work even then, nobody closes ``batches``.
    """
    thread = ThreadPoolExecutor(1)
    try:
        pending = thread.submit(next, batches, None)
        while (batch := pending.result()) is not None:
            pending = thread.submit(next, batches, None)
            yield batch
    finally:
        thread.shutdown()


def read_limits(run: Run) -> Tensor:
    """Return under which cosine an image is an outlier of each cluster, as the run's own images had it (K,)."""
    try:
        with (run.path / "clusters.csv").open(newline="", encoding="utf-8") as file:
            limits = torch.tensor([float(row["outlier_below"]) for row in csv.DictReader(file)])
    except OSError:
        raise UserError(f"run: {run.path} has no clusters.csv; {run.unfinished() or 'was it stopped early?'}") from None
    except (KeyError, TypeError, ValueError):
        limits = torch.empty(0)
    clusters = run.config().heads[0]
    if len(limits) != clusters:
        raise UserError(f"run: {run.path / 'clusters.csv'} does not hold outlier_below of {clusters} clusters")
    return limits
