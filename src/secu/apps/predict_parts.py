"""Predictions for new images as a folder of Parquet files, written by any number of processes.

Each file holds the next ``PART`` images of the source. A file appears when it is complete, so the same command, also
with another number of processes, continues where an interrupted one stopped.
"""

import hashlib
from pathlib import Path
from typing import Any

from secu.apps.predict import Stream
from secu.base import processes
from secu.base.errors import UserError
from secu.base.files import is_temporary, read_json, write_json
from secu.base.names import printable
from secu.data import Skipped, Source
from secu.data.broken import IN_A_ROW
from secu.results.tables import ParquetWriter, Table, Writer, write_table
from secu.train.device import choose_device
from secu.train.listener import Listener
from secu.train.place import MODEL
from secu.train.run import Run

PART = 20_000  # images in a file
MANIFEST = "predictions.json"  # what the files were computed from


def is_folder(output: str) -> bool:
    """Return whether predictions are to be written to a folder: one that exists, or a name that ends with a slash."""
    return output.endswith(("/", "\\")) or Path(output).is_dir()


def predict_parts(
    run: Run,
    source: Source,
    folder: Path,
    device: str = "auto",
    listener: Listener | None = None,
    *,
    level: int | None = None,
) -> list[Skipped]:
    """Write a run's predictions for all images of a source that are not in the folder yet.

    Returns id and reason of the images that this process skipped. See ``predict_source`` for the level.
    """
    source.require_images()
    stream = Stream(run, source, choose_device(device), listener or Listener(), level)
    if processes.is_main():
        _open_folder(run, source, folder, level)
    processes.barrier()
    parts = [range(start, min(start + PART, len(source))) for start in range(0, len(source), PART)]
    names = [f"{number:0{max(5, len(str(len(parts))))}}" for number in range(len(parts))]
    mine = list(zip(names, parts, strict=True))[processes.rank() :: processes.world()]
    missing = [(name, part) for name, part in mine if not (folder / f"part-{name}.parquet").is_file()]
    stream.total = sum(len(part) for _, part in missing)
    for name, part in missing:
        _write_part(stream, folder, name, part)
    return [*stream.skipped, *source.repeated] if processes.is_main() else stream.skipped[len(source.skipped) :]


def _open_folder(run: Run, source: Source, folder: Path, level: int | None) -> None:
    """Create the folder, or check that its files were computed from the same run and source."""
    if not folder.parent.is_dir():
        raise UserError(f"output: folder {folder.parent} does not exist")
    facts: dict[str, Any] = {
        "run": str(run.path.resolve()),
        "model_sha256": hashlib.sha256((run.folder / MODEL).read_bytes()).hexdigest(),
        "source": printable(source.place),
        "fingerprint": source.fingerprint,
        "images": len(source),
        "images_per_part": PART,
        "level": level,
    }
    manifest = folder / MANIFEST
    if not manifest.is_file():
        # A process that was killed here leaves a temporary file, which write_json removes.
        if folder.is_dir() and not all(is_temporary(path.name) for path in folder.iterdir()):
            raise UserError(f"output: {folder} holds other files; choose a new folder")
        folder.mkdir(exist_ok=True)
        write_json(manifest, facts)
    same = ("model_sha256", "fingerprint", "images", "images_per_part", "level")
    known = read_json(manifest, dict)
    if any(known.get(key) != facts[key] for key in same):
        raise UserError(f"output: {folder} holds predictions of another run or of other images; choose a new folder")


def _write_part(stream: Stream, folder: Path, name: str, part: range) -> None:
    """Write one file, and before it a list of the images that cannot be read, if any."""
    before = len(stream.skipped)

    def fill(writer: Writer) -> None:
        assert isinstance(writer, ParquetWriter)
        stream.write_part(writer, part)
        if writer.writer is None:
            _require_some(stream, part)
            stream.write_nothing(writer)
        if skipped := stream.skipped[before:]:
            reasons: Table = {
                "id": [printable(name) for name, _ in skipped],
                "reason": [reason for _, reason in skipped],
            }
            write_table(folder / f"skipped-{name}.csv", lambda table: table.write(reasons))

    write_table(folder / f"part-{name}.parquet", fill)


def _require_some(stream: Stream, part: range) -> None:
    """Raise if many images in a row cannot be read: a disk may be missing."""
    if len(part) >= IN_A_ROW or len(part) == len(stream.source):
        last = ": ".join(map(printable, stream.skipped[-1]))
        raise UserError(f"source: none of {len(part):,} images in a row can be read; the last: {last}")
