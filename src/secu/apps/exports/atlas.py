"""Embedding Atlas: one Parquet file with small pictures, the map, and the nearest neighbors of each image.

The file is loaded into a browser, so its pictures are small: the squares that the report shows as well.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from secu.apps.exports.content import Content, Row, has_pictures
from secu.apps.exports.parquet import schema_of, write_file
from secu.apps.exports.writing import MARK, Format
from secu.apps.originals import encoded
from secu.results.pictures import shrink, to_tile
from secu.results.tables import DIGITS
from secu.views.neighbors import find_neighbors

SIDE = 128  # of a picture in pixels
LOSSLESS = 64  # side up to which a picture is stored as PNG
QUALITY = 80  # of a larger one, as JPEG
NEIGHBORS = 10
NEAREST = pa.struct([("ids", pa.list_(pa.int64())), ("distances", pa.list_(pa.float64()))])


def write(content: Content, path: Path) -> None:
    """Write the file."""
    rows = _with_neighbors(content)
    if has_pictures(content.images):
        rows = _with_pictures(content, rows)
    write_file(path, schema_of(content, {"neighbors": NEAREST}, {MARK: content.title}), rows)


def _with_neighbors(content: Content) -> Iterator[Row]:
    """Yield the rows with their embeddings and their nearest neighbors by cosine distance; ids are row numbers."""
    embeddings_ND = content.embeddings
    neighbors = find_neighbors(embeddings_ND, NEIGHBORS)
    for index, row in enumerate(content.rows()):
        nearest = neighbors.of(torch.tensor(index))
        distances = 1 - embeddings_ND[nearest].double() @ embeddings_ND[index].double()
        found = {"ids": nearest.tolist(), "distances": distances.clamp(min=0).round(decimals=DIGITS).tolist()}
        yield {**row, "embedding": embeddings_ND[index].numpy(), "neighbors": found}


def _with_pictures(content: Content, rows: Iterator[Row]) -> Iterator[Row]:
    pictures = content.images.iter_pictures(dict.fromkeys(range(len(content.images)), SIDE))
    for number, (row, (index, pixels_CHW)) in enumerate(zip(rows, pictures, strict=True)):
        assert index == number, "the images are in the order in which they are read"
        tile = np.ascontiguousarray(shrink(to_tile(pixels_CHW), SIDE))
        quality = None if max(tile.shape[:2]) <= LOSSLESS else QUALITY
        ending = "png" if quality is None else "jpg"
        yield {"image": {"bytes": encoded(tile, quality=quality), "path": f"{index}.{ending}"}, **row}


FORMAT = Format(
    write,
    opening="embedding-atlas {quoted} --image image --x x --y y --neighbors neighbors",
    suffix=".parquet",
)
