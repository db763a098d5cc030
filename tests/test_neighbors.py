"""Nearest neighbors against a full sort of all cosines, copies that share a row, and random draws from them."""

import numpy as np
import pytest
import torch
from torch import Tensor

from secu.views import neighbors as module
from secu.views.neighbors import Neighbors, distinct, find_neighbors


def vectors(count: int, features: int = 8, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, features, generator=torch.Generator().manual_seed(seed)).to(dtype)


def slow_distinct(vectors_ND: Tensor) -> tuple[list[int], list[int]]:
    """Return the first copy of each distinct vector, and the number of each vector."""
    number_of: dict[tuple[float, ...], int] = {}
    first = []
    number = []
    for i, row in enumerate(vectors_ND.tolist()):
        if tuple(row) not in number_of:
            number_of[tuple(row)] = len(first)
            first.append(i)
        number.append(number_of[tuple(row)])
    return first, number


def slow_neighbors(vectors_ND: Tensor, count: int) -> list[list[int]]:
    """Return the nearest other vectors of each vector by a full sort of cosines in double precision."""
    first, number = slow_distinct(vectors_ND)
    rows = vectors_ND.numpy().astype(np.float64)
    unit = rows / np.sqrt((rows * rows).sum(1, keepdims=True))
    table = []
    for i in first:
        others = [(-float(unit[i] @ unit[j]), j) for j in first if j != i]
        table.append([j for _, j in sorted(others)[:count]])
    return [table[n] for n in number]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("count", [1, 3, 10])
def test_neighbors_are_those_of_a_full_sort(count, dtype):
    vectors_ND = vectors(40, dtype=dtype)
    found = find_neighbors(vectors_ND, count)
    assert found.of(torch.arange(40)).tolist() == slow_neighbors(vectors_ND, count)


def test_a_few_by_hand():
    angles = torch.tensor([0.0, 0.1, 0.3, 2.0])
    vectors_ND = torch.stack([angles.cos(), angles.sin()], 1)
    found = find_neighbors(vectors_ND, 2)
    assert found.of(torch.arange(4)).tolist() == [[1, 2], [0, 2], [1, 0], [2, 1]]
    assert found.of(torch.tensor([3, 0, 3])).tolist() == [[2, 1], [1, 2], [2, 1]]
    assert found.of(torch.tensor([1])).dtype == torch.int64


def test_the_length_of_a_vector_does_not_matter():
    vectors_ND = vectors(30)
    lengths = torch.rand(30, 1, generator=torch.Generator().manual_seed(1)) * 50 + 0.01
    assert torch.equal(find_neighbors(vectors_ND * lengths, 5).table, find_neighbors(vectors_ND, 5).table)


def test_opposite_vectors_are_the_last_neighbors_and_none_is_its_own():
    """A vector's own cosine is left out even where every other one is -1."""
    vectors_ND = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert find_neighbors(vectors_ND, 5).table.tolist() == [[1], [0]]


@pytest.mark.parametrize("block", [1, 7, 50, 10**6])
def test_blocks_give_the_same(block, monkeypatch):
    vectors_ND = vectors(50)
    expected = slow_neighbors(vectors_ND, 4)
    monkeypatch.setattr(module, "BLOCK", block)
    assert find_neighbors(vectors_ND, 4).of(torch.arange(50)).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_copies_share_a_row_and_are_not_their_own_neighbors(dtype):
    """However often a vector is repeated, its neighbors are other vectors."""
    few = vectors(6, dtype=dtype)
    copies = torch.tensor([2, 0, 0, 1, 5, 0, 3, 2, 4, 0, 0, 1])
    found = find_neighbors(few[copies], 3)
    assert found.table.shape == (6, 3)
    assert found.of(torch.arange(12)).tolist() == slow_neighbors(few[copies], 3)
    for i in range(12):
        mine = found.of(torch.tensor([i]))[0]
        assert copies[i] not in copies[mine]
        assert len(set(copies[mine].tolist())) == 3


@pytest.mark.parametrize("count", [9, 10, 11, 1000])
def test_all_of_them_if_there_are_fewer(count):
    vectors_ND = vectors(10)
    found = find_neighbors(torch.cat([vectors_ND, vectors_ND]), count)
    assert found.table.shape == (10, 9)
    for i in range(20):
        assert sorted(found.of(torch.tensor([i]))[0].tolist()) == [j for j in range(10) if j != i % 10]


def test_one_distinct_vector_has_no_neighbors():
    found = find_neighbors(torch.ones(5, 3), 4)
    assert found.table.shape == (1, 0)
    assert found.row_of.tolist() == [0] * 5
    assert found.of(torch.arange(5)).shape == (5, 0)


def test_a_part_of_another_tensor_is_read_in_its_own_order():
    wide = vectors(30, 16)
    assert torch.equal(find_neighbors(wide[:, ::2], 3).table, find_neighbors(wide[:, ::2].clone(), 3).table)
    assert torch.equal(find_neighbors(wide.T, 3).table, find_neighbors(wide.T.contiguous(), 3).table)


def test_the_vectors_stay_as_they_are():
    vectors_ND = vectors(20)
    before = vectors_ND.clone()
    find_neighbors(vectors_ND, 3)
    assert torch.equal(vectors_ND, before)


# Random neighbors


def test_draws_are_neighbors():
    found = find_neighbors(vectors(30), 4)
    index = torch.arange(30).repeat(20)
    drawn = found.draw(index, torch.Generator().manual_seed(0))
    assert drawn.dtype == torch.int64
    assert (found.of(index) == drawn[:, None]).any(1).all()
    assert (drawn != index).all()


def test_draws_are_uniform():
    found = find_neighbors(vectors(12), 4)
    times = 4_000
    drawn = found.draw(torch.full((times,), 7), torch.Generator().manual_seed(0))
    counts = [int((drawn == j).sum()) for j in found.of(torch.tensor([7]))[0]]
    assert sum(counts) == times
    deviation = (times * 0.25 * 0.75) ** 0.5
    assert max(abs(count - times / 4) for count in counts) < 4 * deviation


def test_images_of_a_batch_draw_independently():
    """Two images with the same neighbors draw the same one in a quarter of all cases."""
    found = Neighbors(torch.tensor([[1, 2, 3, 4]]), torch.zeros(2000, dtype=torch.int64))
    drawn = found.draw(torch.arange(2000), torch.Generator().manual_seed(0))
    same = (drawn[:1000] == drawn[1000:]).float().mean()
    assert abs(same - 0.25) < 4 * (0.25 * 0.75 / 1000) ** 0.5


def test_draws_are_a_function_of_the_generator():
    found = find_neighbors(vectors(30), 5)
    index = torch.arange(30)
    one, same, other = (torch.Generator().manual_seed(seed) for seed in (1, 1, 2))
    first = found.draw(index, one)
    assert torch.equal(first, found.draw(index, same))
    assert not torch.equal(first, found.draw(index, other))
    assert not torch.equal(first, found.draw(index, one))
    torch.manual_seed(5)
    again = torch.Generator().manual_seed(1)
    assert torch.equal(first, found.draw(index, again))


# Distinct vectors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("hashed", [1, 7, 10_000])
def test_distinct_vectors_keep_their_order(dtype, hashed, monkeypatch):
    monkeypatch.setattr(module, "HASHED", hashed)
    few = vectors(20, 3, dtype=dtype)
    vectors_ND = few[torch.randint(20, (60,), generator=torch.Generator().manual_seed(3))]
    first, number = distinct(vectors_ND)
    assert (first.tolist(), number.tolist()) == slow_distinct(vectors_ND)
    assert torch.equal(vectors_ND[first][number], vectors_ND)


def test_the_smallest_difference_counts():
    one = torch.ones(1, 50)
    other = one.clone()
    other[0, 49] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    first, number = distinct(torch.cat([one, other, one]))
    assert (first.tolist(), number.tolist()) == ([0, 1], [0, 1, 0])


def test_swapped_features_make_another_vector():
    first, _ = distinct(torch.tensor([[1.0, 2.0, 3.0], [1.0, 3.0, 2.0], [3.0, 2.0, 1.0]]))
    assert first.tolist() == [0, 1, 2]


def test_hashes_differ_for_numbers_with_few_bits():
    """Counts and indicators, whose lower bits are all zero, are as distinct as any other vectors."""
    bits = np.random.default_rng(0).integers(2, size=(2**18, 64), dtype=np.uint8)
    assert len(np.unique(np.packbits(bits, axis=1).view(np.uint64))) == 2**18
    first, number = distinct(torch.from_numpy(bits).float() * 2)
    assert len(first) == 2**18
    assert torch.equal(number, torch.arange(2**18))


# Many vectors on a CPU


def few_lists(monkeypatch, probes=16):
    pytest.importorskip("faiss")
    monkeypatch.setattr(module, "MANY", 100)
    monkeypatch.setattr(module, "PROBES", probes)
    assert module.uses_faiss(100, "cpu")
    assert not module.uses_faiss(99, "cpu")
    assert not module.uses_faiss(10**9, "cuda")


def test_faiss_finds_the_same_neighbors_if_it_searches_all_lists(monkeypatch):
    vectors_ND = torch.cat([vectors(400), vectors(400)[:50]])
    expected = find_neighbors(vectors_ND, 5)
    few_lists(monkeypatch, probes=80)
    found = find_neighbors(vectors_ND, 5)
    assert torch.equal(found.row_of, expected.row_of)
    assert torch.equal(found.table, expected.table)


def test_faiss_finds_neighbors_for_every_vector(monkeypatch):
    """Even if the lists that it searches have too few."""
    few_lists(monkeypatch, probes=1)
    found = find_neighbors(vectors(400), 30)
    assert found.table.shape == (400, 30)
    for i, row in enumerate(found.table.tolist()):
        assert len(set(row) - {i}) == 30
        assert min(row) >= 0


def test_without_faiss_and_in_several_processes_the_search_is_exact(monkeypatch):
    monkeypatch.setattr(module, "MANY", 100)
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(module.processes._Group, "world", 2)
    assert not module.uses_faiss(100, "cpu")
    monkeypatch.setattr(module.processes._Group, "world", 1)
    assert module.uses_faiss(100, "cpu")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert not module.uses_faiss(100, "cpu")
