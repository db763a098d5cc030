"""What measures near-duplicates: its halves, its copies, and the shares that it counts."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from secu.data import Images, open_source
from secu.results.duplicates import MOST_BITS
from test_duplicates import photo

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import duplicates

    return duplicates


@pytest.fixture
def folder(tmp_path):
    for number in range(12):
        place = tmp_path / "classes" / f"class {number % 4}"
        place.mkdir(parents=True, exist_ok=True)
        photo(number).save(place / f"{number}.jpg", quality=95)
    return tmp_path / "classes"


def test_the_threshold_is_the_one_that_was_measured():
    result = (ROOT / "benchmarks" / "results" / "duplicates.txt").read_text()
    assert f"* MOST_BITS = {MOST_BITS}, chosen on 'choice'" in result
    rows = [line.replace("*", " ").split() for line in result.split("\n\n")[1].splitlines()[2:]]
    enough = [int(row[0]) for row in rows if all(float(share[:-1]) >= 98 for share in row[1:5])]
    assert min(enough) == MOST_BITS  # the first that finds 98% of each kind of change on its own


def test_the_halves_share_no_class_and_have_a_copy_of_each_kind(benchmark, folder, tmp_path):
    halves = [benchmark.half_of(folder, tmp_path, half, copied=2) for half in benchmark.HALVES]
    names = [{path.parent.name for path in (half / "originals").rglob("*.jpg")} for half in halves]
    assert names == [{"class 0", "class 2"}, {"class 1", "class 3"}]
    for half in halves:
        found = {kind: sorted((half / kind).rglob("*.jpg")) for kind in benchmark.KINDS}
        assert {kind: len(files) for kind, files in found.items()} == dict.fromkeys(benchmark.KINDS, 2)
        sizes = {kind: Image.open(files[0]).size for kind, files in found.items()}
        assert sizes["JPEG 50"] == sizes["mirrored"] == (176, 128)
        assert sizes["resized to half"] == (88, 64)
        assert sizes["cropped by 5%"] == (167, 122)
        assert sizes["combined"] == (83, 61)


def test_shares_are_those_of_pairs_below_each_threshold(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "THRESHOLDS", (8, 20))
    kinds = ["originals", *benchmark.KINDS]
    ids = [f"{kind}/a/{number}.jpg" for kind in kinds for number in range(2)]
    images = Images(torch.zeros(len(ids), 3, 4, 4, dtype=torch.uint8), ids=ids)
    pairs = np.array([[0, 1], [0, 2], [1, 3], [0, 5], [2, 4]])  # the last two: another photo's copy, and two copies
    lines = list(benchmark.table(images, pairs, np.array([12, 5, 15, 1, 1])))
    assert [line.split()[1:] for line in lines[1:]] == [
        ["50.0%", "0.0%", "0.0%", "0.0%", "0.0%", "0"],
        ["100.0%", "0.0%", "0.0%", "0.0%", "0.0%", "1"],
    ]


def test_copies_of_a_folder_are_found(benchmark, folder, tmp_path):
    place = benchmark.half_of(folder, tmp_path, "choice", copied=3)
    source = open_source(str(place))
    coarse = torch.stack([torch.from_numpy(_coarse(place / name)) for name in source.ids])
    images = Images(coarse, ids=source.ids, source=source, numbers=range(len(source)))
    last = list(benchmark.table(images, *benchmark.compared(images)))[-1]
    assert last.split()[1:] == ["100.0%"] * 5 + ["0"]


def _coarse(path):
    """Return features of a picture that ignore which way round it is."""
    with Image.open(path) as image:
        pixels = np.asarray(image.resize((6, 6)), np.float32)
    pixels = pixels - pixels.mean()
    return np.concatenate([pixels + pixels[:, ::-1], abs(pixels - pixels[:, ::-1])]).ravel()
