"""Merged clusters: the tree against a slow average linkage, its cuts, and the model that answers with them."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from secu.cluster.clustering import Clustering
from secu.cluster.tree import Tree, grow_tree
from secu.data import Images
from secu.methods.predictor import Predictor, members_of
from secu.nets.encoder import Encoder
from secu.settings import resolve
from secu.views.features import FeatureViews


def points(images: int, clusters: int, dim: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return embeddings and the cluster of each; the numbers 0 and 2, and a few others, are those of nobody."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.nn.functional.normalize(torch.randn(images, dim, generator=generator), dim=-1)
    used = torch.tensor([c for c in range(clusters) if c not in (0, 2)])
    labels = used[torch.randint(len(used), (images,), generator=generator)]
    labels[: len(used)] = used
    return embeddings, labels


def mean_of(embeddings: Tensor, labels: Tensor, cluster: int) -> list[float]:
    rows = [row for row, label in zip(embeddings.tolist(), labels.tolist(), strict=True) if label == cluster]
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))


def slow_cuts(embeddings: Tensor, labels: Tensor) -> dict[int, list[int]]:
    """Merge the two groups of clusters with the smallest mean distance, again and again; return all partitions."""
    leaves = sorted(set(labels.tolist()))
    means = [mean_of(embeddings, labels, leaf) for leaf in leaves]
    groups = [[number] for number in range(len(leaves))]
    cuts = {}
    while True:
        order = sorted(groups)  # by the first leaf of each
        cuts[len(groups)] = [next(i for i, group in enumerate(order) if leaf in group) for leaf in range(len(leaves))]
        if len(groups) == 1:
            return cuts
        mean_distance = {
            (i, j): sum(1 - cosine(means[a], means[b]) for a in groups[i] for b in groups[j])
            / (len(groups[i]) * len(groups[j]))
            for i, j in itertools.combinations(range(len(groups)), 2)
        }
        i, j = min(mean_distance, key=mean_distance.__getitem__)
        groups[i] = sorted(groups[i] + groups.pop(j))


# The tree


@pytest.mark.parametrize(("images", "clusters", "seed"), [(30, 5, 0), (60, 12, 1), (200, 16, 2), (40, 30, 3)])
def test_every_cut_equals_slow_average_linkage(images, clusters, seed):
    embeddings, labels = points(images, clusters, seed=seed)
    tree = grow_tree(embeddings, labels, 1)
    for groups, expected in slow_cuts(embeddings, labels).items():
        assert tree.cut(groups).tolist() == expected, groups


def test_empty_clusters_are_left_out():
    embeddings, labels = points(50, 9)
    tree = grow_tree(embeddings, labels, 4)
    assert tree.leaves.tolist() == [1, 3, 4, 5, 6, 7, 8]
    assert tree.linkage.shape == (6, 4)
    assert (tree.linkage.dtype, int(tree.head), tree.head.shape) == (torch.float64, 4, ())


def test_clusters_weigh_the_same_whatever_their_size():
    embeddings, labels = points(60, 8, seed=5)
    tree = grow_tree(embeddings, labels, 0)
    many = labels == 3  # repeating every image of a cluster keeps its mean
    repeated = grow_tree(
        torch.cat([embeddings, *[embeddings[many]] * 20]), torch.cat([labels, *[labels[many]] * 20]), 0
    )
    assert all(torch.equal(tree.cut(groups), repeated.cut(groups)) for groups in range(1, 7))


def test_the_length_of_embeddings_matters_within_a_cluster_alone():
    """The mean of a cluster has any length; only its direction counts."""
    embeddings, labels = points(60, 8, seed=6)
    longer = embeddings * (1.0 + labels[:, None])
    cuts = [grow_tree(x, labels, 0).cut(3) for x in (embeddings, longer)]
    assert torch.equal(cuts[0], cuts[1])


def ties() -> list[Tensor]:
    """Return means with many equal distances: axes, axes with copies of each, and all the same."""
    eye = torch.eye(9)
    return [eye, eye.repeat_interleave(3, 0), eye.repeat(3, 1), torch.ones(11, 4), torch.cat([eye, -eye])]


@pytest.mark.parametrize("case", range(5))
def test_every_number_of_groups_is_possible_even_with_equal_distances(case):
    means = ties()[case]
    tree = grow_tree(means, torch.arange(len(means)), 0)
    before = None
    for groups in range(len(means), 0, -1):
        cut = tree.cut(groups)
        assert sorted(set(cut.tolist())) == list(range(groups))
        first = [cut.tolist().index(group) for group in range(groups)]
        assert first == sorted(first)  # numbered by the first leaf of each
        if before is not None:  # one merge more: who was together still is
            together = (before[:, None] == before) & (cut[:, None] != cut)
            assert not together.any()
        before = cut


def test_a_tree_of_two_leaves():
    embeddings = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
    tree = grow_tree(embeddings, torch.tensor([5, 5, 2]), 0)
    assert tree.leaves.tolist() == [2, 5]
    assert tree.cut(1).tolist() == [0, 0]
    assert tree.cut(2).tolist() == [0, 1]
    mean = [0.95, 0.05]
    assert float(tree.linkage[0, 2]) == pytest.approx(1 - cosine(mean, [0.0, 1.0]), abs=1e-6)


# The clustering


def make_clustering(answer: str, head: int = 1) -> tuple[Clustering, Tree]:
    clustering = Clustering(resolve({"heads": [2, 3, 7], "head": head, "answer": answer}), 40, 6)
    with torch.no_grad():
        clustering.centers.weight.normal_(generator=torch.Generator().manual_seed(0))
    embeddings, labels = points(40, 7)
    return clustering, grow_tree(embeddings, labels, 2)


@pytest.mark.parametrize("answer", ["head", "auto", "tree"])
def test_without_a_tree_the_main_head_answers(answer):
    clustering, _ = make_clustering(answer)
    assert clustering.groups() is None
    assert torch.equal(clustering.answer_centers(), clustering.head(1))


@pytest.mark.parametrize("answer", ["head", "auto"])
def test_a_tree_that_does_not_answer_changes_nothing(answer):
    clustering, clustering.tree = make_clustering(answer)
    assert clustering.groups() is None
    assert torch.equal(clustering.answer_centers(), clustering.head(1))


@pytest.mark.parametrize(("head", "groups"), [(0, 2), (1, 3)])
def test_a_tree_answers_with_as_many_groups_as_the_main_head_has_clusters(head, groups):
    clustering, tree = make_clustering("tree", head)
    clustering.tree = tree
    assert torch.equal(clustering.groups(), tree.cut(groups))
    expected = torch.stack([clustering.centers.unit()[2, leaf] for leaf in (1, 3, 4, 5, 6)])
    assert torch.equal(clustering.answer_centers(), expected)
    assert not clustering.answer_centers().requires_grad


# The model


@pytest.mark.parametrize("groups", [[0, 1], [0, 1, 1, 0, 2, 1, 1], [0, 0, 0, 1], [0, 1, 2, 0]])
def test_members_are_all_centers_of_a_group_and_no_other(groups):
    members = members_of(torch.tensor(groups))
    assert members.shape == (max(groups) + 1, max(map(groups.count, groups)))
    for group, row in enumerate(members.tolist()):
        assert set(row) == {center for center, own in enumerate(groups) if own == group}


GROUPS = [0, 1, 1, 0, 2, 1]


def make_predictor(groups: list[int] | None) -> Predictor:
    torch.manual_seed(0)
    config = resolve({"encoder": {"dim": 6, "backbone": "none", "projection_layers": 1}})
    centers = torch.nn.functional.normalize(torch.randn(6, 6), dim=-1)
    encoder = Encoder(config.encoder, 0, vectors=5).eval()
    found = None if groups is None else torch.tensor(groups)
    return Predictor(FeatureViews(5, config.features), encoder, centers, 0.1, groups=found)


def test_the_cosine_to_a_group_is_that_to_its_nearest_center():
    predictor = make_predictor(GROUPS)
    embeddings, _ = points(20, 3)
    cosines = predictor.compare(embeddings)
    assert cosines.shape == (20, 3)
    for x, row in zip(embeddings.tolist(), cosines.tolist(), strict=True):
        all_cosines = [cosine(x, center) for center in predictor.all_centers.tolist()]
        for group in range(3):
            nearest = max(c for c, own in zip(all_cosines, GROUPS, strict=True) if own == group)
            assert row[group] == pytest.approx(nearest, abs=1e-5)


def test_the_center_of_a_group_is_the_mean_direction_of_its_centers():
    predictor = make_predictor(GROUPS)
    for group, center in enumerate(predictor.centers.tolist()):
        members = [c for c, own in zip(predictor.all_centers.tolist(), GROUPS, strict=True) if own == group]
        mean = [sum(column) for column in zip(*members, strict=True)]
        length = math.hypot(*mean)
        assert center == pytest.approx([value / length for value in mean], abs=1e-6)


def test_groups_of_one_center_each_are_the_same_as_no_groups():
    plain, grouped = make_predictor(None), make_predictor(list(range(6)))
    embeddings, _ = points(20, 3)
    assert plain.members is None
    assert torch.equal(plain.centers, plain.all_centers)
    assert torch.equal(plain.compare(embeddings), grouped.compare(embeddings))
    torch.testing.assert_close(plain.centers, grouped.centers)


def test_predictions_with_groups_equal_a_loop():
    predictor = make_predictor(GROUPS)
    vectors = torch.randn(30, 5, generator=torch.Generator().manual_seed(2))
    found = predictor.predict(Images(vectors))
    embeddings = predictor.embed(Images(vectors))
    for i, x in enumerate(embeddings.tolist()):
        best = [-2.0] * 3
        for center, group in zip(predictor.all_centers.tolist(), GROUPS, strict=True):
            best[group] = max(best[group], cosine(x, center))
        order = sorted(range(3), key=best.__getitem__, reverse=True)
        weights = [math.exp(value / 0.1) for value in best]
        assert (int(found.cluster[i]), int(found.second[i])) == tuple(order[:2])
        assert float(found.confidence[i]) == pytest.approx(weights[order[0]] / sum(weights), abs=1e-4)
        assert float(found.second_confidence[i]) == pytest.approx(weights[order[1]] / sum(weights), abs=1e-4)
        assert float(found.cosine[i]) == pytest.approx(best[order[0]], abs=1e-5)
