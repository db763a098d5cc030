"""Folders of millions of files: their listing is kept in a file, sorted and stored in little memory."""

import os
import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from secu.data import Images, open_source
from secu.data.loading import combine
from secu.data.sources.base import FileSource
from secu.data.sources.listing import Listing
from secu.data.strings import Names, PathsBelow
from secu.data.text import natural

LATER = 10.0  # seconds since a folder was changed


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder of a few files, whose listing is kept although it is short."""
    monkeypatch.setenv("SECU_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("secu.data.sources.listing.LEAST", 3)
    for name in ("a/1.png", "a/2.png", "b/c/3.png"):
        path = tmp_path / "p" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    age(tmp_path / "p")
    return tmp_path / "p"


def age(folder):
    """Make folders look as if they had not been changed for a while."""
    for place, _, _ in os.walk(folder):
        before = os.stat(place).st_mtime - LATER
        os.utime(place, (before, before))


@pytest.fixture
def walks(monkeypatch):
    """Return a list that grows when a folder is listed."""
    import secu.data.sources.folders as folders

    found: list[str] = []
    real = folders.walk
    monkeypatch.setattr(folders, "walk", lambda top, *more, **options: found.append(top) or real(top, *more, **options))
    return found


def kept(folder):
    return list((folder.parent / "data").rglob("*.npz"))


def test_a_folder_is_listed_once(folder, walks):
    first = open_source(folder)
    second = open_source(folder)
    assert second.ids == first.ids == ("a/1.png", "a/2.png", "b/c/3.png")
    assert list(second.paths) == [str(folder / name) for name in first.ids]
    assert len(walks) == 1
    assert len(kept(folder)) == 1
    assert open_source(str(folder / "a" / "*.png")).ids == ("1.png", "2.png")


@pytest.mark.parametrize("change", ["add", "remove", "rename", "new folder", "no folder"])
def test_a_changed_folder_is_listed_again(folder, walks, change):
    open_source(folder)
    if change == "add":
        (folder / "b" / "c" / "4.png").touch()
    elif change == "remove":
        (folder / "a" / "1.png").unlink()
    elif change == "rename":
        (folder / "a" / "1.png").rename(folder / "a" / "9.png")
    elif change == "new folder":
        (folder / "b" / "d").mkdir()
        (folder / "b" / "d" / "5.png").touch()
    else:
        (folder / "b" / "c" / "3.png").unlink()
        (folder / "b" / "c").rmdir()
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.png"))
    assert sorted(open_source(folder).ids) == found
    assert len(walks) == 2


def test_a_listing_is_not_kept_where_changes_would_be_missed(folder):
    (folder / "fresh").mkdir()  # changed a moment ago, and perhaps again in the same tick of the clock
    open_source(folder)
    assert kept(folder) == []
    (folder / "link.png").symlink_to(folder.parent / "elsewhere.png")  # a link may break without its folder
    age(folder)
    open_source(folder)
    assert kept(folder) == []


def test_small_folders_are_always_listed(folder, walks, monkeypatch):
    monkeypatch.setattr("secu.data.sources.listing.LEAST", 4)
    open_source(folder)
    open_source(folder)
    assert len(walks) == 2
    assert kept(folder) == []


def test_a_damaged_or_foreign_listing_is_ignored(folder, walks):
    open_source(folder)
    for content in (b"", b"PK damaged", kept(folder)[0].read_bytes()[:200]):
        kept(folder)[0].write_bytes(content)
        assert len(open_source(folder)) == 3
    np.savez(kept(folder)[0], other=np.zeros(3))
    assert len(open_source(folder)) == 3
    assert len(walks) == 5


def test_a_cache_that_cannot_be_written_is_no_error(folder, monkeypatch):
    (folder.parent / "file").touch()
    monkeypatch.setenv("SECU_DATA", str(folder.parent / "file"))
    assert len(open_source(folder)) == 3


# The order of names


def slow_natural(name):
    """Return the key as nested lists, which take ten times the memory."""

    def chunk(text):
        if not text[:1].isdecimal() or not text.isascii():
            return (0, text)
        number = text.lstrip("0")
        return (1 + len(number), number)

    return [[chunk(text) for text in re.split(r"([0-9]+)", part)] for part in name.split("/")], name


@given(st.lists(st.text(st.sampled_from("ab1209 ./_-~\x01é١\udc80"), max_size=9)))
def test_natural_order_is_that_of_nested_lists(names):
    assert sorted(names, key=natural) == sorted(names, key=slow_natural)


# Memory


BUDGET = 220  # bytes per image for ids, paths, targets and the rows of a run; 1.28 million images: 282 MB


def test_memory_of_a_long_listing():
    """The labels of ten heads add 80 bytes per image, in training and again in the copy for a checkpoint."""
    count = 20_000
    tracemalloc.start()
    try:
        names = Names.of(f"n{i % 1000:08}/n{i % 1000:08}_{i}.JPEG" for i in range(count))
        before = tracemalloc.get_traced_memory()[0]
        assert before < 50 * count
        listing = Listing(names, [], 0, Names.of(["/x"]), np.zeros(1, np.int64), False)
        source = FileSource("x", "", listing.ids, PathsBelow("/data/train", listing.ids)).label("folder")
        images = combine(source, None, None, (3, 224, 224))
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(images, Images)
    assert images.ids is source.ids
    assert held < 80 * count
    assert peak < BUDGET * count


def test_sorting_takes_little_memory():
    count = 20_000
    names = [f"n{i % 1000:08}/n{i % 1000:08}_{i}.JPEG" for i in range(count)]
    tracemalloc.start()
    try:
        names.sort(key=natural)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 300 * count  # nested lists: 1,900
