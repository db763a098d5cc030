"""Arrays in files: rows are copies, whatever happens to the file, and a large file is never in memory as a whole."""

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch

from secu.base.errors import UserError
from secu.data import load_images, open_source, remember, rows
from secu.data.rows import FileRows, open_npy


def numbers(*shape, dtype=np.uint8):
    return np.random.default_rng(0).integers(0, 256, shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["uint8", "float16", ">f8", "int32"])
def test_rows_are_those_of_the_array(tmp_path, dtype):
    array = numbers(9, 3, 4, 5, dtype=dtype)
    np.save(tmp_path / "a.npy", array)
    found = open_npy(str(tmp_path / "a.npy"))
    assert isinstance(found, FileRows)
    turned = found.transpose(0, 2, 3, 1)
    pairs = [
        (found, array),
        (turned, array.transpose(0, 2, 3, 1)),
        (found.select([7, 2, 2]), array[[7, 2, 2]]),
        (turned.select([8, 0, 4]).select([2, 0]), array.transpose(0, 2, 3, 1)[[4, 8]]),
    ]
    for ours, theirs in pairs:
        assert (ours.shape, ours.ndim, ours.nbytes, len(ours)) == (theirs.shape, 4, theirs.nbytes, len(theirs))
        for index in (0, -1, slice(1, 2), slice(0, 0), slice(1, 99), np.array([1, 0, 1]), np.array([], int)):
            np.testing.assert_array_equal(ours[index], theirs[index])
        np.testing.assert_array_equal(ours.in_memory(np.float32), theirs.astype(np.float32))
    found[0][:] = 0
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), array)


TRUNCATED = """
import os, sys
from pathlib import Path
import numpy as np
import torch
from secu.data import load_images, open_source, rows
from secu.data.sources import formats
from secu.base.errors import UserError

def expect(path, read):
    os.truncate(path, 10)
    try:
        read()
    except UserError as error:
        print(str(error).replace(str(path), "FILE"))

numbers = np.random.default_rng(0)
np.save("images.npy", numbers.integers(0, 256, (500, 32, 32), np.uint8))
source = open_source("images.npy")
expect("images.npy", lambda: source.decode(400, 32, 1))
np.save("images.npy", numbers.integers(0, 256, (500, 32, 32), np.uint8))
source = open_source("images.npy")
expect("images.npy", lambda: source.ready(slice(300, 400), (1, 32, 32)))
np.save("vectors.npy", numbers.normal(size=(500, 64)).astype(np.float32))
source = open_source("vectors.npy")
expect("vectors.npy", lambda: load_images(source, (64,)))
Path("stl.bin").write_bytes(bytes(27648 * 20))
part = formats.stl10_binary(Path("stl.bin"), None, 10)
expect("stl.bin", lambda: part.pixels[10:12])
rows.MEMORY_SHARE = 0
np.save("images.npy", numbers.integers(0, 256, (500, 32, 32), np.uint8))
images = load_images(open_source("images.npy"), (1, 16, 16), cache=Path("cache"))
file, = Path("cache").glob("*.images")
expect(file, lambda: images.fetch(torch.arange(300, 310)))
"""


def test_a_file_that_is_truncated_while_it_is_read_is_an_error_and_no_signal(tmp_path):
    ended = subprocess.run([sys.executable, "-c", TRUNCATED], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    kinds = ("source", "source", "source", "data", "cache")
    assert ended.stdout.splitlines() == [f"{kind}: cannot read FILE: it is truncated" for kind in kinds]


def test_a_cache_that_does_not_fit_into_memory_is_read_by_rows(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", numbers(30, 12, 12, 3))
    source = open_source(tmp_path / "a.npy")
    expected = load_images(source, (1, 8, 8), cache=tmp_path / "cache")
    assert expected.rows is None
    monkeypatch.setattr(rows, "MEMORY_SHARE", 0)
    images = load_images(source, (1, 8, 8), cache=tmp_path / "cache")
    assert images.tensor is None
    assert (len(images), images.shape, images.dtype) == (30, (1, 8, 8), torch.uint8)
    index = torch.tensor([4, 29, 4, 0])
    assert torch.equal(images.fetch(index), expected.tensor[index])
    assert torch.equal(images.select([9, 3]).fetch(torch.tensor([1, 0])), expected.tensor[[3, 9]])
    assert torch.equal(images.pictures(index, 12), expected.pictures(index, 12))
    assert remember(images) == remember(expected)


def test_a_large_array_is_never_in_memory_as_a_whole(tmp_path):
    size = 300 << 20
    with open(tmp_path / "a.npy", "wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": (300, 1024, 1024)}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + size)
    tracemalloc.start()
    try:
        source = open_source(tmp_path / "a.npy")  # all its values are 0, so that the whole file is read
        assert source.decode(299, 4, 1).max() == 0
        assert tracemalloc.get_traced_memory()[1] < size / 2
    finally:
        tracemalloc.stop()


def test_fortran_order(tmp_path, monkeypatch):
    array = numbers(5, 6, 7)
    np.save(tmp_path / "a.npy", np.asfortranarray(array))
    np.testing.assert_array_equal(open_npy(str(tmp_path / "a.npy")), array)
    monkeypatch.setattr(rows, "MEMORY_SHARE", 0)
    with pytest.raises(UserError, match=r"in Fortran order, and its 0.0 GB do not fit into memory; save np.asconti"):
        open_source(tmp_path / "a.npy")


def test_vectors_that_do_not_fit_into_memory(tmp_path, monkeypatch):
    np.save(tmp_path / "v.npy", np.random.default_rng(0).normal(size=(20, 8)))
    monkeypatch.setattr(rows, "MEMORY_SHARE", 0)
    with pytest.raises(UserError, match="GB of vectors, too many for this machine's memory"):
        load_images(open_source(tmp_path / "v.npy"), (8,))


@pytest.mark.parametrize(
    "header",
    [
        {"shape": (10**18, 5, 5)},
        {"shape": (10**18, 5, 5), "descr": "|V0"},
        {"shape": (10**18, 0, 5)},
        {"shape": (-1, 5, 5)},
        {"shape": (10**18, 0), "descr": "<f4"},
        {"shape": (10**18, 4), "descr": "<f4"},
        {"shape": (), "descr": "<f4"},
        {"shape": (2**62, 2**62, 4)},
    ],
    ids=str,
)
def test_a_header_may_claim_anything(tmp_path, header):
    with open(tmp_path / "a.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False} | header)
        file.write(bytes(100))
    with pytest.raises(UserError, match=r"source: "):
        open_source(tmp_path / "a.npy")
