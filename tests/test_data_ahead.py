"""Images that are decoded on demand, ahead of the model that uses them."""

import threading
import time

import numpy as np
import pytest
import torch

from secu.base.errors import UserError
from secu.data import BadImage, Images, Source, stream
from secu.data.loading import combine


class Slow(Source):
    """Images whose pixels are their index; lists what was read, and holds up some images until it is opened."""

    def __init__(self, count: int) -> None:
        super().__init__("slow", "slow", map(str, range(count)), on_demand=True)
        self.done: list[int] = []
        self.bad: set[int] = set()
        self.held = range(0)
        self.open = threading.Event()

    def read(self, i, values=None):
        if i in self.bad:
            raise BadImage("torn")
        assert i not in self.held or self.open.wait(60)
        self.done.append(i)
        return np.full((4, 4), i, np.uint8)


def wait_for(condition) -> None:
    """Wait until a thread has done something; on a busy machine that may take a while."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def images_of(source: Source) -> Images:
    return combine(source, None, None, (1, 4, 4))


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(stream, "cores", lambda: 2)


@pytest.mark.parametrize("size", [1, 3, 16, 100])
def test_batches_ahead_are_those_of_fetch(two_cores, size):
    images = images_of(Slow(50))
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    parts = order.split(size)
    for index, batch in zip(parts, images.fetch_ahead(parts), strict=True):
        assert torch.equal(batch, images.fetch(index))
        assert batch[:, 0, 0, 0].tolist() == index.tolist()


def test_images_in_memory_are_sliced():
    images = Images(torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1))
    found = list(images.fetch_ahead(torch.tensor([3, 1, 2, 9]).split(3)))
    assert [batch.flatten().tolist() for batch in found] == [[3, 1, 2], [9]]


def test_decoding_goes_on_while_a_batch_is_used_but_not_without_limit(two_cores):
    source = Slow(1000)
    batches = images_of(source).fetch_ahead(torch.arange(1000).split(4))
    next(batches)
    most = 4 + 2 * stream.AHEAD + 4
    wait_for(lambda: len(source.done) >= 4 + 2 * stream.AHEAD)
    assert len(source.done) <= most
    next(batches)
    wait_for(lambda: len(source.done) >= 8 + 2 * stream.AHEAD)
    assert len(source.done) <= most + 4
    batches.close()


def test_the_next_image_takes_the_place_of_one_that_cannot_be_read(two_cores):
    source = Slow(40)
    source.bad = {9}
    images = images_of(source)
    batches = images.fetch_ahead(torch.arange(40).split(5))
    first, second = next(batches), next(batches)
    assert first.shape == (5, 1, 4, 4)
    assert torch.equal(second[4], images.fetch(torch.tensor([10]))[0])
    assert images.broken.new() == [("9", "torn")]


def test_too_many_images_that_cannot_be_read_end_the_epoch(two_cores):
    source = Slow(40)
    source.bad = {9, 10, 30}
    with pytest.raises(UserError, match=r"3 of 40 images in .* cannot be read, more than 5%; the last: 30: torn"):
        list(images_of(source).fetch_ahead(torch.arange(40).split(5)))


def test_leaving_early_decodes_nothing_more(two_cores):
    """The threads persist, so images that are still waiting must not keep them busy."""
    source = Slow(1000)
    source.held = range(200, 1000)
    batches = images_of(source).fetch_ahead(torch.arange(1000).split(200))
    next(batches)
    batches.close()
    source.open.set()
    pool = stream._lasting_pool()
    pool.submit(lambda: None).result(60)  # its turn is after all that were waiting before
    assert len(source.done) <= 200 + pool._max_workers
