"""A cache that was interrupted, or whose process was killed, continues where it stopped."""

import numpy as np
import pytest

from secu.base.errors import UserError
from secu.data import load_images, open_source
from secu.data.stream import decoded
from shard_files import pictures, write_files

SHAPE = (3, 12, 12)


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Return pictures, one of which is bad."""
    monkeypatch.setattr("secu.data.cache.EVERY", 4)
    folder = write_files(tmp_path / "p", pictures())
    (folder / "cat" / "003.jpg").write_bytes(b"no image")
    return open_source(folder)


@pytest.fixture
def tried(monkeypatch):
    """Return the numbers of images that were decoded."""
    numbers: list[int] = []

    def counted(*arguments, **options):
        for i, outcome in decoded(*arguments, **options):
            numbers.append(i)
            yield i, outcome

    monkeypatch.setattr("secu.data.cache.decoded", counted)
    return numbers


def stop_at(limit, error=KeyboardInterrupt):
    def progress(done, total):
        if done == limit:
            raise error

    return progress


def test_an_interrupted_cache_continues(tmp_path, source, tried):
    cache = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        load_images(source, SHAPE, cache=cache, progress=stop_at(14))
    assert any(path.name.endswith(".part") for path in cache.iterdir())
    tried.clear()
    seen: list[int] = []
    images = load_images(source, SHAPE, cache=cache, progress=lambda done, total: seen.append(done))
    assert tried == list(range(12, 24))
    assert seen == list(range(13, 25))
    whole = load_images(source, SHAPE, cache=tmp_path / "whole")
    assert np.array_equal(images.tensor, whole.tensor)
    assert images.skipped == whole.skipped
    assert [name for name, _ in images.skipped] == ["cat/003.jpg"]
    assert [path.suffix for path in sorted(cache.iterdir()) if path.suffix != ".lock"] == [".images"]


def test_a_part_without_a_note_starts_over(tmp_path, source, tried):
    cache = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        load_images(source, SHAPE, cache=cache, progress=stop_at(14))
    next(cache.glob(".*.json")).write_text("{damaged")
    tried.clear()
    assert len(load_images(source, SHAPE, cache=cache)) == 23
    assert len(tried) == 24


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), UserError("no")])
def test_an_error_leaves_nothing(tmp_path, source, error):
    cache = tmp_path / "cache"
    with pytest.raises(UserError):
        load_images(source, SHAPE, cache=cache, progress=stop_at(14, error))
    assert [path.suffix for path in cache.iterdir()] in ([], [".lock"])
