"""Write the features of images under a pretrained network, for use in any other program or in ``secu fit``."""

import os
from pathlib import Path

import numpy as np
import torch

import secu
from secu.apps.feature_plan import PRETRAINED
from secu.apps.images import load_inputs
from secu.base import processes
from secu.base.errors import UserError
from secu.base.files import write_atomically
from secu.base.names import escape
from secu.config import Config
from secu.data import FileSource, Images, Source, VectorSource
from secu.data.sources.vectors import MARK
from secu.nets.pretrained import describe, require_extra
from secu.results.tables import writable
from secu.settings import resolve
from secu.train.listener import Listener

FORMATS = ("npy", "parquet")


def embed_source(
    source: Source,
    output: Path,
    *,
    encoder: str = PRETRAINED,
    device: str = "auto",
    allow_bad: bool = False,
    listener: Listener | None = None,
) -> Images:
    """Write the features of all readable images of a source, and return them.

    ``output`` is an .npy file for a float32 matrix (N, D), or a .parquet file with the columns ``id``, ``path`` (if
    images are files), ``features``, and those of the source that have other names.
    """
    kind = output.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise UserError(f"output: {str(output)!r} must end in .npy or .parquet")
    if not output.parent.is_dir():
        raise UserError(f"output: folder {output.parent} does not exist")
    if source.is_read_from(output):
        raise UserError(f"output: {output} is the source of the images; choose another file")
    if isinstance(source, VectorSource):
        raise UserError(f"source: {source.name} has feature vectors already")
    config = config_for(source, encoder)
    progress = (listener or Listener()).reading
    images = load_inputs(config, source, device=device, allow_bad=allow_bad, progress=progress)
    if processes.is_main():
        write_atomically(output, lambda path: _write(path, kind, images))
    return images


def config_for(source: Source, encoder: str) -> Config:
    """Return the settings under which the images of a source are embedded."""
    known = describe(encoder)
    if known is None:
        raise UserError(f"encoder: {encoder} is not pretrained; valid: lite0, hf:NAME-OR-FOLDER")
    require_extra(encoder)
    probe = source.probe()
    mean, std = known.normalization(probe.channels)
    data = {"image_size": known.size, "channels": probe.channels, "mean": mean, "std": std, "values": probe.values}
    return resolve({"data": data, "encoder": {"backbone": encoder, "trainable": "nothing"}})


def _write(path: Path, kind: str, images: Images) -> None:
    assert images.tensor is not None
    if kind == "npy":
        with path.open("wb") as file:
            np.save(file, images.tensor.to(torch.float32).numpy())
        return
    import pyarrow as pa
    import pyarrow.parquet as parquet

    length = images.shape[0]
    values = pa.array(images.tensor.to(torch.float32).numpy().ravel())
    columns = {"id": [escape(name) for name in images.ids]}
    if isinstance(images.source, FileSource):
        columns["path"] = [escape(os.path.abspath(images.source.paths[i])) for i in images.numbers]
    more = {writable(name): [writable(value) for value in column] for name, column in images.columns.items()}
    table = pa.table({**{name: more[name] for name in more if name not in (*columns, "features")}, **columns})
    vectors = pa.FixedSizeListArray.from_arrays(values, length)
    table = table.append_column("features", vectors).replace_schema_metadata({MARK: secu.__version__})
    with path.open("wb") as file:  # pyarrow cannot open a path that is not UTF-8
        parquet.write_table(table, file)
