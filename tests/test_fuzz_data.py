"""Damaged and hostile files: every reader of data works or raises UserError, in bounded memory and time.

Valid files are changed by flipped, removed and inserted bytes and by numbers in headers; a reader must not notice
everything, but whatever it does notice is one line. Examples are the same every time (conftest.py).
"""

import bz2
import gzip
import io
import lzma
import os
import re
import struct
import sys
import tarfile
import time
import warnings
import zipfile
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from secu.base.errors import UserError
from secu.data import load_images, open_source
from secu.data.cache import cached
from secu.data.decoding.decode import decode
from secu.data.decoding.probe import read_header
from secu.settings import load_config
from secu.train.run import Run
from test_embedding import embed, paint, use_tiny

MEMORY = 1 << 30  # bytes of address space that a reader may add
SECONDS = 20  # for one file; generous, since other programs may keep the machine busy
EXAMPLES = 60
HUGE = (0, 1, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62)


# Strategies


@st.composite
def damage(draw):
    """Return a function that changes bytes in one to three places."""
    steps = draw(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1), st.integers(0, 2**32)), min_size=1, max_size=3))
    return lambda content: _damaged(content, steps)


def _damaged(content, steps):
    for kind, where, seed in steps:
        # Half of all places are near the beginning, where headers are.
        place = int(where * 2 * len(content)) if where < 0.5 else int((where - 0.5) * 2 * min(len(content), 200))
        random = np.random.default_rng(seed)
        if kind == 0:
            content = content[:place]
        elif kind == 1:
            content = content[:place] + random.bytes(1 + seed % 4) + content[place + 1 + seed % 4 :]
        elif kind == 2:
            content = content[:place] + random.bytes(1 + seed % 40) + content[place:]
        elif kind == 3:
            content = content[:place] + content[place + 1 + seed % 40 :]
        elif kind == 4 and (numbers := list(re.finditer(rb"\d+", content))):
            chosen = numbers[seed % min(len(numbers), 12)]
            content = content[: chosen.start()] + b"%d" % HUGE[seed % len(HUGE)] + content[chosen.end() :]
        else:
            size, order = ((2, "<H"), (2, ">H"), (4, "<I"), (4, ">I"), (8, "<Q"))[seed % 5]
            number = HUGE[seed // 5 % len(HUGE)] % 256**size
            content = content[:place] + struct.pack(order, number) + content[place + size :]
    return content


@pytest.fixture(autouse=True)
def _bounded():
    """Limit the address space, and silence libraries that warn about odd files."""
    if sys.platform != "linux":
        yield
        return
    import resource

    tables()  # pyarrow reserves address space when it is first used
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def survives(read):
    """Run a reader; whatever it raises must be a single line for the user, and not a lack of memory."""
    begin = time.monotonic()
    try:
        return read()
    except UserError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < 2500
        assert "not enough memory" not in message
        return None
    finally:
        assert time.monotonic() - begin < SECONDS


def use(path):
    """Do with a source what a run does: list, probe, decode, label."""
    source = open_source(path)
    source.require_images()
    assert len(source) < 100_000
    source.probe()
    for i in range(min(len(source), 3)):
        survives(lambda i=i: source.decode(i, 8, 3))
    if source.place and hasattr(source, "vectors"):
        return load_images(source, source.vectors.shape[1:])
    survives(lambda: source.label(next(iter(source.columns), "folder")))
    return source


# Valid files


def noise(*shape, dtype=np.uint8):
    return np.random.default_rng(0).integers(0, 256, shape).astype(dtype)


def image(format, mode="RGB", **options):
    pixels = Image.fromarray(noise(20, 24, 4), "RGBA").convert("L" if mode.startswith("I") else mode)
    content = io.BytesIO()
    (Image.fromarray(noise(20, 24, dtype=np.uint16)) if mode == "I;16" else pixels).save(content, format, **options)
    return content.getvalue()


@cache
def images():
    kinds = {
        "jpg": ("JPEG",),
        "progressive.jpg": ("JPEG", "CMYK"),
        "png": ("PNG", "RGBA"),
        "palette.png": ("PNG", "P"),
        "deep.png": ("PNG", "I;16"),
        "webp": ("WEBP",),
        "bmp": ("BMP",),
        "tif": ("TIFF",),
        "gif": ("GIF", "P"),
        "ppm": ("PPM",),
    }
    more = {"progressive.jpg": {"progressive": True}, "tif": {"compression": "tiff_lzw"}}
    found = {name: image(*kind, **more.get(name, {})) for name, kind in kinds.items()}
    turned = Image.Exif()
    turned[274] = 6
    found["turned.jpg"] = image("JPEG", exif=turned)
    found["text.png"] = _with_chunk(image("PNG"), b"zTXt", b"a\0\0" + zlib.compress(bytes(10_000)))
    return found


def _with_chunk(png, kind, body):
    chunk = struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return png[:33] + chunk + png[33:]


@cache
def arrays():
    found = {}
    for name, array in {
        "bytes": noise(9, 8, 8, 3),
        "floats": noise(9, 3, 8, 8) / 255,
        "order": noise(8, 8, 9).T,
    }.items():
        found[f"{name}.npy"] = _saved(np.save, array)
    found["plain.npz"] = _saved(np.savez, images=noise(9, 8, 8), labels=np.arange(9), names=np.array(["a"] * 9))
    found["packed.npz"] = _saved(np.savez_compressed, noise(9, 8, 8))
    found["vectors.npy"] = _saved(np.save, np.random.default_rng(0).normal(size=(30, 6)).astype(np.float32))
    return found


def _saved(save, *values, **named):
    content = io.BytesIO()
    save(content, *values, **named)
    return content.getvalue()


@cache
def archives():
    members = {f"class{i % 2}/{i}.png": image("PNG", "L") for i in range(4)} | {"readme.txt": b"hello" * 50}
    zips = {}
    for name, method in {"plain.zip": zipfile.ZIP_STORED, "packed.zip": zipfile.ZIP_DEFLATED}.items():
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", method) as file:
            for member, body in members.items():
                file.writestr(member, body)
        zips[name] = content.getvalue()
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as file:
        for member, body in {**members, "ü" * 120 + ".png": image("PNG", "L")}.items():
            info = tarfile.TarInfo(member)
            info.size = len(body)
            file.addfile(info, io.BytesIO(body))
    tar = content.getvalue()
    return zips | {
        "a.tar": tar,
        "a.tar.gz": gzip.compress(tar, mtime=0),
        "a.tar.bz2": bz2.compress(tar),
        "a.tar.xz": lzma.compress(tar),
    }


@cache
def tables():
    lines = ["path,label,width", *(f"{i}.png,{'ab'[i % 2]},{i * 7}" for i in range(20))]
    text = "\n".join(lines)
    vectors = np.random.default_rng(0).normal(size=(30, 6)).astype(np.float32)
    columns = {"features": list(vectors), "label": [str(i % 3) for i in range(30)]}
    listed = {"path": [f"{i}.png" for i in range(30)], "label": [i % 3 for i in range(30)]}
    found = {"a.csv": text.encode(), "a.tsv": text.replace(",", "\t").encode()}
    for name, table, packing in [
        ("list.parquet", listed, "snappy"),
        ("vectors.parquet", columns, "zstd"),
        ("plain.parquet", listed, "none"),
    ]:
        content = pa.BufferOutputStream()
        parquet.write_table(pa.table(table), content, compression=packing)
        found[name] = content.getvalue().to_pybytes()
    return found


FILES = {"arrays": arrays, "archives": archives, "tables": tables}


# Properties


@settings(max_examples=8 * EXAMPLES)
@given(st.sampled_from(sorted(images())), damage())
def test_images(name, change):
    content = change(images()[name])
    survives(lambda: read_header(content))
    pixels = survives(lambda: decode(content, 8, 3))
    assert pixels is None or (pixels.shape == (3, 8, 8) and pixels.dtype == np.uint8)


@pytest.mark.parametrize("kind", FILES)
def test_files(tmp_path_factory, kind):
    folder = tmp_path_factory.mktemp("fuzz")
    contents = FILES[kind]()
    for i in range(30):
        (folder / f"{i}.png").write_bytes(image("PNG", "L"))  # what tables name
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        assert use(folder / name) is not None, name
        (folder / name).unlink()

    @settings(max_examples=(6 if kind == "archives" else 8) * EXAMPLES // 2)
    @given(st.sampled_from(sorted(contents)), damage())
    def check(name, change):
        (folder / name).write_bytes(change(contents[name]))
        survives(lambda: use(folder / name))

    check()


@pytest.mark.parametrize("kind", ["arrays", "archives", "tables"])
def test_files_that_are_something_else(tmp_path, kind):
    for name in FILES[kind]():
        for other in (*images().values(), *(content for files in FILES.values() for content in files().values())):
            (tmp_path / name).write_bytes(other)
            survives(lambda name=name: use(tmp_path / name))


# Caches


def test_the_cache_of_decoded_images(tmp_path):
    for i in range(6):
        Image.new("L", (8, 8), i).save(tmp_path / f"{i}.png")
    (tmp_path / "bad.png").write_bytes(b"no")
    source = open_source(tmp_path)
    cached(source, (1, 4, 4), None, tmp_path / "cache")
    (file,) = (tmp_path / "cache").glob("*.images")
    content = file.read_bytes()

    @settings(max_examples=2 * EXAMPLES)
    @given(damage())
    def check(change):
        file.write_bytes(change(content))
        stored = survives(lambda: cached(source, (1, 4, 4), None, tmp_path / "cache"))
        assert stored.inputs.shape == (7 - len(stored.bad), 1, 4, 4)

    check()


def test_the_cache_of_features(tmp_path, monkeypatch):
    use_tiny(monkeypatch)
    source = open_source(paint(tmp_path / "pictures", 6))
    embed(source, tmp_path / "cache")
    (file,) = (tmp_path / "cache").glob("*.features")
    content = file.read_bytes()

    @settings(max_examples=EXAMPLES)
    @given(damage())
    def check(change):
        file.write_bytes(change(content))
        found = survives(lambda: embed(source, tmp_path / "cache"))
        assert found is None or (len(found) == 6 and torch.isfinite(found.tensor).all())

    check()


# YAML

RECIPE = """\
data: {source: 'dataset:digits', mean: &m [0.5], std: [0.25]}
heads: [10, 20]
optim: &o
  lr: 0.1
  epochs: 5
centers: {lr: 1.2, schedule: rising}
seed: 0x10
description: >-
  2024-01-01, "quoted" and é
"""
PARTS = (
    "&a ",
    "*a",
    "<<: ",
    "!!int ",
    "!!timestamp ",
    "!!set ",
    "? ",
    "- ",
    "[",
    "{",
    "]",
    "}",
    ": ",
    ", ",
    "|",
    "2024-13-45",
)
WORDS = st.sampled_from(
    [*PARTS, "9" * 5000, "0x" + "f" * 5000, "1:2", "~", "seed", "data", "\n", "\n  ", "\0", ".inf", "x"]
)


def test_recipes(tmp_path):
    file = tmp_path / "config.yaml"

    @settings(max_examples=2 * EXAMPLES)
    @given(damage(), st.lists(WORDS, max_size=8), st.floats(0, 1))
    def check(change, words, where):
        place = int(where * len(RECIPE))
        text = RECIPE[:place] + "".join(words) + RECIPE[place:]
        for content in (text.encode(), change(RECIPE.encode())):
            file.write_bytes(content)
            survives(lambda: load_config(str(file)))
            survives(lambda: Run(tmp_path).config())

    file.write_text(RECIPE, encoding="utf-8")
    assert load_config(str(file)).seed == 16
    check()


@settings(max_examples=5 * EXAMPLES)
@given(
    st.sampled_from(["seed", "optim.lr", "heads", "data", "data.values", "encoder.backbone", "answer", "a.b"]),
    st.data(),
)
def test_overrides(key, data):
    text = data.draw(st.lists(WORDS, max_size=10).map("".join) | st.text(max_size=20))
    survives(lambda: load_config("digits", [f"{key}={text}"]))
