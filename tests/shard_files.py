"""The same pictures as files, as tar shards, as Parquet files and as a data set of the hub, for tests."""

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from PIL import Image

NAMES = ("cat", "dog", "emu")  # of the classes


def pictures(count: int = 24, side: int = 12) -> list[bytes]:
    """Return small files, PNG and JPEG in turn; the class of number ``i`` is ``i % 3``, its main color."""
    numbers = np.random.default_rng(0)
    files = []
    for i in range(count):
        pixels = numbers.integers(0, 60, (side, side + i % 4, 3), np.uint8)
        pixels[..., i % 3] += 180
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, ("PNG", "JPEG")[i % 2])
        files.append(file.getvalue())
    return files


def suffix(i: int) -> str:
    return (".png", ".jpg")[i % 2]


def write_files(folder: Path, images: list[bytes]) -> Path:
    """Write one folder per class."""
    for i, image in enumerate(images):
        place = folder / NAMES[i % 3]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{i:03}{suffix(i)}").write_bytes(image)
    return folder


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def write_shards(folder: Path, images: list[bytes], count: int = 3) -> str:
    """Write shards with .cls and .json beside every image; return their pattern with braces."""
    for number in range(count):
        members = []
        for i in range(number, len(images), count):
            members.append((f"{i:03}{suffix(i)}", images[i]))
            members.append((f"{i:03}.cls", str(i % 3).encode()))
            members.append((f"{i:03}.json", json.dumps({"name": NAMES[i % 3], "deep": {"x": 1}}).encode()))
        write_tar(folder / f"shard-{number:02}.tar", members)
    return str(folder / f"shard-{{00..{count - 1:02}}}.tar")


def write_parquet(folder: Path, images: list[bytes], files: int = 2, group: int = 4, *, paths: bool = True) -> Path:
    """Write Parquet files as the hub has them: image{bytes, path}, label, and names of classes in the schema."""
    folder.mkdir(parents=True, exist_ok=True)
    features = {"image": {"_type": "Image"}, "label": {"names": list(NAMES), "_type": "ClassLabel"}}
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("image", kind), ("label", pa.int64())])
    schema = schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    for number in range(files):
        rows = range(number, len(images), files)
        column = [{"bytes": images[i], "path": f"{i:03}{suffix(i)}" if paths else None} for i in rows]
        table = pa.table({"image": column, "label": [i % 3 for i in rows]}, schema)
        path = folder / f"train-{number:05}-of-{files:05}.parquet"
        parquet.write_table(table, path, row_group_size=group)
    return folder
