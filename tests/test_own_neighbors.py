"""Neighbors in a run's own embeddings: when they are searched and used, resuming, and views of pairs of images."""

from pathlib import Path
from typing import Any

import pytest
import torch

from own_images import write_folder
from secu.config import AugmentConfig
from secu.data import Images, open_source
from secu.data.loading import combine
from secu.methods import secu as module
from secu.methods.predictor import BATCH_IMAGES
from secu.train.feed import HostFeed, ResidentFeed
from secu.train.listener import Listener
from secu.train.session import Session
from secu.views.augment import Augmentation
from small_runs import Interrupting, assert_same, config_of, digits, open_session, trained

COUNT = 97  # batches of 48 and 49 images
EPOCHS = 8
NEIGHBORS = 5


def settings(*more: str, every: int = 3, start: float = 0.5):
    chosen = (f"neighbors.count={NEIGHBORS}", f"neighbors.start={start}", f"neighbors.every={every}")
    return config_of("optim.epochs=7", "optim.batch_size=48", "encoder.dim=8", *chosen, *more)


class Watching(Listener):
    """Notes the partners of every epoch and what was searched; checks them before the next epoch begins."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.session: Session | None = None
        self.epochs: list[dict[str, Any]] = []
        self.searched: list[torch.Tensor] = []
        usual = module.find_neighbors

        def search(vectors, count, **more):
            self.searched.append(vectors.clone())
            return usual(vectors, count, **more)

        patch.setattr(module, "find_neighbors", search)

    def epoch_ended(self, record, losses) -> None:
        step = self.session.step
        self.epochs.append(
            {
                "partners": step.partners.clone() if step.has_partners else None,
                "order": step.order.clone(),
                "searches": len(self.searched),
                "table": self.session.method.own_neighbors.clone(),
            }
        )


def watch(path: Path, config, monkeypatch, images: Images | None = None) -> Watching:
    from secu.train.clock import Clock
    from secu.train.loop import train

    listener = Watching(monkeypatch)
    session = open_session(path, config, images or digits(COUNT), listener=listener)
    listener.session = session
    session.begin()
    train([session], Clock(1e9), None)
    return listener


def slow_neighbors(vectors: torch.Tensor, i: int, count: int) -> set[int]:
    """Return the nearest others, with those that are as near but for rounding."""
    cosines = torch.nn.functional.cosine_similarity(vectors[i].double(), vectors.double(), dim=-1).tolist()
    others = [j for j in range(len(vectors)) if j != i]
    limit = sorted(cosines[j] for j in others)[-count] - 1e-6
    return {j for j in others if cosines[j] >= limit}


# When


@pytest.mark.parametrize(
    ("every", "start", "used", "searched"),
    [
        (3, 0.5, [4, 5, 6, 7], [4, 6]),
        (2, 0.5, [4, 5, 6, 7], [4, 6]),
        (1, 0.75, [6, 7], [6, 7]),
        (10, 0.5, [4, 5, 6, 7], [4]),
        (10, 0.501, [5, 6, 7], [5]),
        (4, 0.0, list(range(8)), [0, 4]),
    ],
)
def test_partners_come_from_the_start_on_and_are_searched_again(tmp_path, monkeypatch, every, start, used, searched):
    epochs = watch(tmp_path / "run", settings(every=every, start=start), monkeypatch).epochs
    assert len(epochs) == EPOCHS
    assert [number for number, epoch in enumerate(epochs) if epoch["partners"] is not None] == used
    before = [0, *[epoch["searches"] for epoch in epochs]]
    assert [number for number in range(EPOCHS) if before[number + 1] > before[number]] == searched


def test_partners_are_neighbors_in_the_embeddings_of_the_last_search(tmp_path, monkeypatch):
    found = watch(tmp_path / "run", settings(), monkeypatch)
    numbers: list[int] = []
    for epoch in found.epochs[4:]:
        vectors = found.searched[epoch["searches"] - 1]
        assert vectors.shape == (COUNT, 8)
        assert sorted(epoch["order"].tolist()) == list(range(COUNT))
        for i, partner in zip(epoch["order"].tolist(), epoch["partners"].tolist(), strict=True):
            wanted = slow_neighbors(vectors, i, NEIGHBORS)
            assert partner in wanted
            row = set(epoch["table"][i].tolist())
            assert len(row) == NEIGHBORS
            assert row <= wanted
            numbers.append(len(wanted))
    assert sum(numbers) / len(numbers) < 2 * NEIGHBORS  # nearly all of the 96 others are further away
    drawn = [epoch["partners"][epoch["order"].argsort()] for epoch in found.epochs[4:6]]
    assert not torch.equal(*drawn)  # the same table, other draws


def test_without_neighbors_nothing_is_searched(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "find_neighbors", lambda *_: pytest.fail("searched"))
    session = trained(tmp_path / "run", config_of("neighbors.start=0.0"), digits(COUNT))
    assert not session.step.has_partners
    assert not hasattr(session.method, "own_neighbors")


def test_neighbors_change_the_training_from_the_start_on_alone(tmp_path):
    """Up to then, the numbers drawn are the same as without neighbors."""
    with_them = trained(tmp_path / "a", settings(), digits(COUNT)).run.metrics()
    without = trained(tmp_path / "b", settings("neighbors.count=0"), digits(COUNT)).run.metrics()
    losses = [[record["loss"] for record in records] for records in (with_them, without)]
    assert losses[0][:4] == losses[1][:4]
    assert losses[0][4] != losses[1][4]


# Batches


def test_a_step_gets_images_and_their_partners(tmp_path, monkeypatch):
    images = digits(COUNT)
    session = open_session(tmp_path / "run", settings(start=0.0), images)
    seen = []
    monkeypatch.setattr(session.method, "losses", lambda batch, index: seen.append((batch, index)) or stop())
    session.step.start_epoch(0)
    for size in session.step.sizes:
        session.step.feed.next()
        with pytest.raises(Stopped):
            session.step.run(size)
        session.step.images_done += size
        session.step.steps_done += 1
    assert [batch.shape for batch, _ in seen] == [(2, 48, 1, 8, 8), (2, 49, 1, 8, 8)]
    done = 0
    for batch, index in seen:
        places = slice(done, done + len(index))
        assert torch.equal(index, session.step.order[places])
        assert torch.equal(batch[0], images.tensor[index])
        assert torch.equal(batch[1], images.tensor[session.step.partners[places]])
        done += len(index)


class Stopped(Exception):
    """The batch has been seen."""


def stop():
    raise Stopped


@pytest.fixture(scope="module")
def streamed(tmp_path_factory) -> Images:
    """Images that are decoded on demand."""
    source = open_source(write_folder(tmp_path_factory.mktemp("streamed") / "p", COUNT))
    return combine(source, None, None, (1, 8, 8))


def test_images_on_demand_train_the_same_model_as_resident_ones(tmp_path, streamed):
    assert streamed.tensor is None
    resident = Images(streamed.fetch(torch.arange(len(streamed))))
    sessions = [trained(tmp_path / name, settings(), images) for name, images in {"a": streamed, "b": resident}.items()]
    assert [type(session.step.feed) for session in sessions] == [HostFeed, ResidentFeed]
    assert sessions[0].step.has_partners
    assert_same(sessions[0].run, sessions[1].run)


# Resuming


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("whole") / "run", settings(), digits(COUNT)).run


@pytest.mark.parametrize("epoch", [3, 4, 5, 6, 7])
def test_resuming_equals_not_stopping(tmp_path, whole, epoch):
    """Stops before the first use of neighbors, after it, between two searches, and in the last epoch."""
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "run", settings(), digits(COUNT), listener=Interrupting(epoch=epoch))
    resumed = trained(tmp_path / "run", settings(), digits(COUNT), resume=True)
    assert_same(resumed.run, whole)
    assert "own_neighbors" in resumed.run.load_state()["tensors"]
    assert "own_neighbors" not in resumed.run.load_model()


def test_resuming_in_the_middle_of_an_epoch_of_streamed_images(tmp_path, streamed):
    once = trained(tmp_path / "whole", settings(), streamed)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "run", settings(), streamed, listener=Interrupting(step=11))  # of two in each epoch
    resumed = trained(tmp_path / "run", settings(), streamed, resume=True)
    assert_same(resumed.run, once.run)


# Few and repeated images


def test_fewer_images_than_neighbors(tmp_path, monkeypatch):
    found = watch(tmp_path / "run", settings("neighbors.count=50"), monkeypatch, digits(20))
    assert found.epochs[-1]["table"].shape == (20, 19)
    for i, partner in zip(found.epochs[-1]["order"].tolist(), found.epochs[-1]["partners"].tolist(), strict=True):
        assert i != partner


@pytest.mark.parametrize("different", [2, 4, 6])
def test_images_with_many_copies(tmp_path, monkeypatch, different):
    images = Images(digits(different).tensor.repeat(12, 1, 1, 1))
    monkeypatch.setitem(BATCH_IMAGES, "cpu", 10**6)
    found = watch(tmp_path / "run", settings("heads=[2]", "neighbors.count=9"), monkeypatch, images)
    last = found.epochs[-1]
    assert len({tuple(row) for row in last["table"].tolist()}) >= 2
    for i, partner in zip(last["order"].tolist(), last["partners"].tolist(), strict=True):
        assert 0 <= partner < len(images)
        assert i % different != partner % different or different > 2  # never a copy, where copies are embedded alike


def test_embeddings_that_are_all_the_same(tmp_path, monkeypatch):
    """No image has a neighbor; a run that has collapsed must not end in an error of tensors."""
    images = Images(torch.full((30, 1, 8, 8), 7, dtype=torch.uint8))
    monkeypatch.setitem(BATCH_IMAGES, "cpu", 10**6)
    session = trained(tmp_path / "run", settings("heads=[2]"), images)
    assert session.finished


# Views of pairs


FULL = AugmentConfig(affine={}, solarize_prob=(0.3, 0.6), blur_prob=(0.9, 0.4))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [None, 6])
def test_a_pair_is_rendered_as_each_view_is_from_its_own_image(channels, size):
    config = FULL.model_copy(update={"size": size})
    views = Augmentation(config, (0.4,), (0.2,), channels, (10, 10))
    numbers = torch.Generator().manual_seed(0)
    first, second = torch.randint(256, (2, 7, channels, 10, 10), dtype=torch.uint8, generator=numbers)
    draws = views.draw(7, numbers)
    pairs = views.render(torch.stack([first, second]), draws)
    assert pairs.shape == (2, 7, channels, size or 10, size or 10)
    assert torch.equal(pairs[0], views.render(first, draws)[0])
    assert torch.equal(pairs[1], views.render(second, draws)[1])
    assert not torch.equal(pairs[1], views.render(first, draws)[1])
    assert torch.equal(views.render(torch.stack([first, first]), draws), views.render(first, draws))
