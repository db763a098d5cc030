"""The choice between heads and the tree: its measures against loops, and made-up groups whose answer is known."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import cohen_kappa_score
from torch import Tensor

from secu.cluster.clustering import Clustering
from secu.cluster.metrics import accuracy
from secu.cluster.tree import grow_tree
from secu.config import Config
from secu.methods import answer as module
from secu.methods.answer import (
    LIMIT,
    LIMIT_WITH_WITNESS,
    Answer,
    choose_answer,
    disagreement,
    find_answer,
    information,
    relabeled,
    unconstrained,
)
from secu.settings import resolve
from secu.views.neighbors import Neighbors, find_neighbors

DIM = 12
NOISE = slice(8, 12)  # dimensions that say nothing about the group


def blobs(*sizes: int, spread: float = 0.15) -> tuple[Tensor, Tensor]:
    """Return unit vectors around one axis for each group, and the group of each."""
    generator = torch.Generator().manual_seed(0)
    groups_N = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    vectors_ND = spread * torch.randn(len(groups_N), DIM, generator=generator)
    vectors_ND[torch.arange(len(groups_N)), groups_N] += 1
    return torch.nn.functional.normalize(vectors_ND, dim=-1), groups_N


def at(axis: int, *, toward: int | None = None, sign: float = 1.0) -> list[float]:
    """Return a center at the axis of a group, to one side of it if there is another axis."""
    center = [0.0] * DIM
    center[axis] = 1.0
    if toward is not None:
        center[toward] += 0.3 * sign
    return center


def noise(number: int) -> list[float]:
    """Return a center that has nothing to do with the groups."""
    center = [0.0] * DIM
    center[NOISE.start + number // 2] = 1.0 if number % 2 == 0 else -1.0
    return center


def halves(*axes: int) -> list[list[float]]:
    """Return two centers for each group, one on each side of it."""
    return [at(axis, toward=NOISE.start, sign=sign) for axis in axes for sign in (1, -1)]


def quarters(axis: int) -> list[list[float]]:
    """Return four centers for a group."""
    return [at(axis, toward=NOISE.start + side, sign=sign) for side in (0, 1) for sign in (1, -1)]


def make(*heads: list[list[float]], **settings) -> tuple[Config, Clustering]:
    """Return settings and a clustering with these centers."""
    config = resolve({"heads": [len(head) for head in heads], "answer": "auto", **settings})
    clustering = Clustering(config, 100, DIM)
    with torch.no_grad():
        for number, head in enumerate(heads):
            clustering.centers.weight[number, : len(head)] = torch.tensor(head)
    return config, clustering


TRUE = [at(0), at(1), at(2)]
SPLIT = [*halves(0), at(1)]  # the first group twice; those of the third go anywhere
RANDOM = [noise(0), noise(1), noise(2)]
EVEN = (40, 40, 40)
UNEVEN = (200, 16, 16)


def found_for(vectors: Tensor, *heads: list[list[float]], **settings) -> tuple[Clustering, Answer]:
    config, clustering = make(*heads, **settings)
    return clustering, find_answer(clustering, config, vectors, find_neighbors(vectors, 8))


# The measures


def random_case(seed: int, images: int, count: int, clusters: int) -> tuple[Tensor, Neighbors]:
    """Return labels that agree with those of the neighbors more often than by chance, and neighbors with copies."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(clusters, (images,), generator=generator)
    rows = images // 2
    table = torch.randint(images, (rows, count), generator=generator)
    row_of = torch.randint(rows, (images,), generator=generator)
    return labels, Neighbors(table.int(), row_of)


def pairs_of(labels: Tensor, neighbors: Neighbors) -> list[tuple[int, int]]:
    """Return the labels of every image and of each of its neighbors."""
    pairs = []
    for image, label in enumerate(labels.tolist()):
        others = neighbors.table[int(neighbors.row_of[image])].tolist()
        pairs += [(label, int(labels[other])) for other in others]
    return pairs


def slow_information(pairs: list[tuple[int, int]], clusters: int) -> float:
    joint, mine, theirs = Counter(pairs), Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    total = 0.0
    for (a, b), count in joint.items():
        total += count / len(pairs) * math.log(count * len(pairs) / (mine[a] * theirs[b]))
    return total / math.log(clusters)


@pytest.mark.parametrize(("seed", "images", "count", "clusters"), [(0, 50, 4, 3), (1, 33, 1, 2), (2, 80, 7, 10)])
def test_information_equals_a_loop_over_all_pairs(seed, images, count, clusters):
    labels, neighbors = random_case(seed, images, count, clusters)
    expected = slow_information(pairs_of(labels, neighbors), clusters)
    assert information(labels, neighbors, clusters) == pytest.approx(expected, abs=1e-9)


def test_information_is_one_for_equal_clusters_of_neighbors_and_zero_for_one_cluster():
    vectors, groups = blobs(*EVEN)
    neighbors = find_neighbors(vectors, 5)
    assert information(groups, neighbors, 3) == pytest.approx(1)
    assert information(torch.zeros_like(groups), neighbors, 3) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("seed", "images", "count", "clusters"), [(0, 50, 4, 3), (1, 33, 1, 2), (2, 80, 7, 10)])
def test_disagreement_is_one_minus_cohens_kappa(seed, images, count, clusters):
    labels, neighbors = random_case(seed, images, count, clusters)
    pairs = pairs_of(labels, neighbors)
    mine, theirs = zip(*pairs, strict=True)
    differ = sum(a != b for a, b in pairs) / len(pairs)
    # Each image has as many neighbors as any other, so its label counts equally often.
    same_by_chance = sum(mine.count(c) * theirs.count(c) for c in range(clusters)) / len(pairs) ** 2
    assert disagreement(labels, neighbors) == pytest.approx(differ / (1 - same_by_chance), abs=1e-9)
    assert disagreement(labels, neighbors) == pytest.approx(1 - cohen_kappa_score(mine, theirs), abs=1e-9)


def test_disagreement_of_perfect_labels_and_of_labels_by_chance():
    vectors, groups = blobs(*EVEN)
    neighbors = find_neighbors(vectors, 5)
    assert disagreement(groups, neighbors) == 0
    assert disagreement(torch.zeros_like(groups), neighbors) == 0
    by_chance = torch.randint(3, (120,), generator=torch.Generator().manual_seed(1))
    assert disagreement(by_chance, neighbors) == pytest.approx(1, abs=0.1)


def test_relabeled_gives_each_image_the_group_of_its_cluster():
    vectors, groups = blobs(30, 30, 30)
    _, answer = found_for(vectors, TRUE, [*halves(0, 1, 2), noise(7), noise(6)])
    labels = 2 * groups + (vectors[:, NOISE.start] < 0)
    slow = [int(answer.tree.cut(3)[answer.tree.leaves.tolist().index(label)]) for label in labels.tolist()]
    assert relabeled(labels, answer.tree, 3).tolist() == slow
    assert torch.equal(relabeled(labels, answer.tree, 3), groups)


# The choice


def test_the_constants():
    assert (module.LIMIT, module.LIMIT_WITH_WITNESS, module.FINEST) == (1.15, 0.955, 3)
    assert module.LIMIT_OF_OFFSETS == 0.87
    assert (module.WITNESS_IMAGES, module.WITNESS_STARTS) == (10_000, 10)


@pytest.mark.parametrize("witness", [False, True])
def test_even_groups_are_those_of_the_head(witness):
    vectors, groups = blobs(*EVEN)
    config, clustering = make(TRUE, halves(0, 1, 2))
    given = vectors if witness else None
    conclusion = choose_answer(clustering, config, vectors, find_neighbors(vectors, 8), given)
    assert conclusion.settings == {"head": 0, "answer": "head"}
    assert conclusion.summary["answer"]["evidence"] < LIMIT_WITH_WITNESS
    assert conclusion.summary["answer"]["limit"] == (LIMIT_WITH_WITNESS if witness else LIMIT)
    assert (clustering.main, clustering.answer) == (0, "head")
    assert torch.equal((vectors @ clustering.answer_centers().T).argmax(-1), groups)


@pytest.mark.parametrize("witness", [False, True])
def test_uneven_groups_are_merged_clusters(witness):
    vectors, groups = blobs(*UNEVEN)
    config, clustering = make(SPLIT, [*quarters(0), at(1), at(2)])
    given = vectors if witness else None
    conclusion = choose_answer(clustering, config, vectors, find_neighbors(vectors, 8), given)
    assert conclusion.settings == {"head": 0, "answer": "tree"}
    assert conclusion.summary["answer"]["evidence"] > LIMIT
    assert conclusion.summary["answer"]["limit"] == (LIMIT_WITH_WITNESS if witness else LIMIT)
    assert int(clustering.tree.head) == 1
    nearest = (vectors @ clustering.answer_centers().T).argmax(-1)
    assert torch.equal(clustering.groups()[nearest], groups)


def test_the_ratios_are_those_of_the_disagreements():
    vectors, _ = blobs(*UNEVEN, spread=0.35)
    fine = [*quarters(0), at(1), at(2)]
    config, clustering = make(SPLIT, fine, seed=5)
    neighbors = find_neighbors(vectors, 8)
    answer = find_answer(clustering, config, vectors, neighbors)
    head = (vectors @ clustering.head(0).T).argmax(-1)
    cut = relabeled((vectors @ clustering.head(1).T).argmax(-1), answer.tree, 3)
    assert disagreement(cut, neighbors) > 0
    assert answer.ratios == (pytest.approx(disagreement(head, neighbors) / disagreement(cut, neighbors)),)
    assert answer.witness is None
    answer = find_answer(clustering, config, vectors, neighbors, vectors)
    free = unconstrained(vectors, 3, 5)
    assert disagreement(free, neighbors) > 0
    assert answer.witness == pytest.approx(disagreement(head, neighbors) / disagreement(free, neighbors))


@pytest.mark.parametrize("order", [1, -1])
def test_all_trees_must_agree_better_and_the_finest_one_answers(order):
    vectors, _ = blobs(*UNEVEN)
    good = [*quarters(0), at(1), at(2)]
    finer = [*good, at(1, toward=NOISE.start), at(2, toward=NOISE.start)]
    useless = [noise(i) for i in range(8)] + [at(1)]
    both = [good, finer][::order]
    clustering, answer = found_for(vectors, SPLIT, *both)
    assert len(answer.ratios) == 2
    assert answer.evidence == (min(answer.ratios), LIMIT)
    assert min(answer.ratios) > LIMIT
    assert clustering.heads[int(answer.tree.head)] == len(finer)
    _, answer = found_for(vectors, SPLIT, *[good, useless][::order])
    assert answer.evidence[0] < LIMIT < max(answer.ratios)


@pytest.mark.parametrize(
    ("wanted", "expected"), [("head", "head"), ("shifted", "shifted"), ("tree", "tree"), ("auto", "head")]
)
def test_what_was_asked_for_is_the_answer_for_even_groups(wanted, expected):
    vectors, _ = blobs(*EVEN)
    config, clustering = make(TRUE, halves(0, 1, 2), answer=wanted)
    conclusion = choose_answer(clustering, config, vectors, find_neighbors(vectors, 8))
    assert (conclusion.settings["answer"], clustering.answer) == (expected, expected)
    assert (clustering.groups() is not None) is (expected == "tree")
    assert (clustering.answer_offsets() is not None) is (expected == "shifted")


@pytest.mark.parametrize(("wanted", "expected"), [("head", "head"), ("tree", "tree"), ("auto", "tree")])
def test_what_was_asked_for_is_the_answer_for_uneven_groups(wanted, expected):
    vectors, _ = blobs(*UNEVEN)
    config, clustering = make(SPLIT, [*quarters(0), at(1), at(2)], answer=wanted)
    conclusion = choose_answer(clustering, config, vectors, find_neighbors(vectors, 8))
    assert (conclusion.settings["answer"], clustering.answer) == (expected, expected)
    assert len(clustering.answer_centers()) == (6 if expected == "tree" else 3)


@pytest.mark.parametrize(
    ("ratios", "witness", "expected"),
    [
        ((0.0,), None, "head"),
        ((1.15,), None, "head"),
        ((1.1501,), None, "tree"),
        ((9.0, 1.15), None, "head"),  # both must agree
        ((9.0, 1.19), None, "tree"),
        ((0.87,), 1.0, "head"),
        ((0.8701,), 1.0, "shifted"),
        ((0.955,), 1.0, "shifted"),
        ((0.9551,), 1.0, "tree"),
        ((1.2, 0.7), 1.0, "shifted"),  # the mean is 0.95
        ((1.3, 0.7), 1.0, "tree"),
        ((1.3, 0.7), 0.95, "shifted"),
        ((1.3, 0.7), 0.86, "head"),
        ((0.5, 0.5), 2.0, "tree"),
        ((5.0, 5.0), 0.1, "head"),  # k-means disagrees far more often
    ],
)
def test_offsets_and_the_tree_need_evidence_above_their_limits(monkeypatch, ratios, witness, expected):
    vectors, _ = blobs(*EVEN)
    neighbors = find_neighbors(vectors, 8)
    config, clustering = make(TRUE, halves(0, 1, 2))
    answer = find_answer(clustering, config, vectors, neighbors)
    monkeypatch.setattr(module, "find_answer", lambda *_: answer._replace(ratios=ratios, witness=witness))
    assert choose_answer(clustering, config, vectors, neighbors).settings["answer"] == expected


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 10_000), (torch.float16, 10_000), (torch.float32, 50)])
def test_the_witness_is_k_means_of_a_sample(monkeypatch, dtype, most):
    monkeypatch.setattr(module, "WITNESS_IMAGES", most)
    vectors, groups = blobs(60, 40, 30, spread=0.3)
    vectors = vectors.to(dtype)
    found = unconstrained(vectors, 3, 7)
    assert (found.shape, found.dtype) == ((130,), torch.int64)
    rows = sorted(np.random.default_rng(7).permutation(130)[:most].tolist())
    slow = KMeans(3, n_init=10, random_state=7).fit(np.stack([vectors[row].float().numpy() for row in rows]))
    expected = [int(slow.predict(vector.float().numpy()[None])[0]) for vector in vectors]
    assert found.tolist() == expected
    assert accuracy(groups.numpy(), found.numpy()) > 0.9


@pytest.mark.parametrize("best", [0, 1, 2])
def test_the_best_of_several_heads_is_chosen(best):
    vectors, _ = blobs(*EVEN)
    heads = [RANDOM, SPLIT]
    heads.insert(best, TRUE)
    config, clustering = make(*heads, halves(0, 1, 2))
    conclusion = choose_answer(clustering, config, vectors, find_neighbors(vectors, 8))
    assert conclusion.settings["head"] == clustering.main == best


def test_a_finer_head_is_never_the_main_one():
    vectors, _ = blobs(*EVEN)
    _, answer = found_for(vectors, halves(0, 1, 2), RANDOM, head=1)
    assert answer.head == 1


def test_heads_with_an_empty_cluster_are_passed_over():
    vectors, groups = blobs(60, 60)
    empty = [at(0), at(1), [-1.0] * DIM]  # far from everything
    neighbors = find_neighbors(vectors, 8)
    random = (vectors @ torch.tensor(RANDOM).T).argmax(-1)
    assert information(groups, neighbors, 3) > information(random, neighbors, 3)  # else it would not be passed over
    _, answer = found_for(vectors, empty, RANDOM, empty)
    assert answer.head == 1
    _, answer = found_for(vectors, [noise(0), noise(1), [-1.0] * DIM], empty)
    assert answer.head == 1  # all have one, so the best of them


def test_without_a_finer_head_the_head_answers():
    vectors, _ = blobs(*EVEN)
    config, clustering = make(RANDOM, TRUE)
    conclusion = choose_answer(clustering, config, vectors, find_neighbors(vectors, 8))
    assert conclusion.settings == {"head": 1, "answer": "head"}
    assert conclusion.summary["answer"]["evidence"] == 0
    assert clustering.tree is None


@pytest.mark.parametrize(("more", "grown"), [(6, True), (7, False)])
def test_trees_grow_on_heads_of_up_to_three_times_the_clusters(more, grown):
    vectors, _ = blobs(*EVEN)
    fine = [*halves(0, 1), at(2), *(noise(i) for i in range(more - 2))]
    _, answer = found_for(vectors, TRUE, fine)
    assert (answer.tree is not None) is grown


def test_a_finer_head_with_too_few_clusters_in_use_has_no_tree():
    vectors, _ = blobs(*EVEN)
    collapsed = [*TRUE, *([[-1.0] * DIM] * 3)]
    _, answer = found_for(vectors, TRUE, collapsed)
    assert answer == Answer(0, None, (), None)
    assert answer.evidence == (0.0, LIMIT)


@pytest.mark.parametrize("fine", [[*TRUE, *([[-1.0] * DIM] * 3)], [noise(i % 8) for i in range(10)]])
def test_a_tree_that_cannot_be_grown_is_not_reported_as_the_answer(fine):
    vectors, _ = blobs(*EVEN)
    config, clustering = make(TRUE, fine, answer="tree")
    conclusion = choose_answer(clustering, config, vectors, find_neighbors(vectors, 8))
    assert clustering.tree is None
    assert conclusion.settings["answer"] == clustering.answer == "head"


@pytest.mark.parametrize(
    ("witness", "auto", "number"),
    [(0.8, "head", "head"), (0.9, "shifted", "head"), (1.1, "tree", "head"), (1.2, "tree", "tree")],
)
def test_a_run_that_chose_its_number_needs_more_evidence(monkeypatch, witness, auto, number):
    vectors, _ = blobs(*EVEN)
    for wanted, expected in (("auto", auto), ("number", number)):
        config, clustering = make(TRUE, [*halves(0, 1, 2)], answer=wanted)
        found = Answer(0, grow_tree(vectors, torch.arange(120) // 20, 1), (1.0,), witness)
        monkeypatch.setattr(module, "find_answer", lambda *_, found=found: found)
        conclusion = choose_answer(clustering, config, vectors, find_neighbors(vectors, 8), vectors)
        assert conclusion.settings == {"head": 0, "answer": expected}
        assert clustering.answer == expected
