"""The choice of the number of clusters: its score against slow oracles, and made-up groups whose number is known."""

import json

import numpy as np
import pytest
import torch
from sklearn.cluster import AgglomerativeClustering, KMeans
from sklearn.metrics import silhouette_score
from torch import Tensor

from own_images import digits
from secu import SeCu
from secu.base.errors import UserError
from secu.cluster.tree import grow_tree
from secu.methods import number as module
from secu.methods.number import Choice, candidates, compare_sizes, principal, silhouette
from secu.settings import resolve


def unit(images: int, dim: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(images, dim, generator=generator, dtype=torch.float64), dim=-1)


def slow_silhouette(points: Tensor, labels: list[int]) -> float:
    total = 0.0
    for i, own in enumerate(labels):
        distances: dict[int, list[float]] = {}
        for j, other in enumerate(labels):
            if i != j:
                distances.setdefault(other, []).append(1 - float(points[i] @ points[j]))
        if own in distances:  # otherwise it is alone
            within = sum(distances[own]) / len(distances[own])
            between = min(sum(values) / len(values) for label, values in distances.items() if label != own)
            total += (between - within) / max(between, within)
    return total / len(labels)


# The score


@pytest.mark.parametrize("seed", range(3))
def test_silhouette_agrees_with_loops_and_with_scikit_learn(seed):
    points = unit(40, 5, seed)
    labels = torch.randint(4, (40,), generator=torch.Generator().manual_seed(seed)) * 3  # some numbers are unused
    labels[0] = 1  # alone
    assert silhouette(points, labels) == pytest.approx(slow_silhouette(points, labels.tolist()), abs=1e-9)
    expected = silhouette_score(points.numpy(), labels.numpy(), metric="cosine")
    assert silhouette(points, labels) == pytest.approx(expected, abs=1e-6)


def test_one_cluster_has_no_silhouette():
    assert silhouette(unit(5, 3), torch.zeros(5, dtype=torch.long)) == 0


def test_principal_components_are_those_of_a_singular_value_decomposition(monkeypatch):
    monkeypatch.setattr(module, "COMPONENTS", 3)
    points = unit(30, 8) * torch.arange(1, 9)
    left, values, _ = np.linalg.svd((points - points.mean(0)).numpy(), full_matrices=False)
    expected = left[:, :3] * values[:3]
    found = principal(points).numpy()
    assert found.shape == (30, 3)
    assert np.allclose(found @ found.T, expected @ expected.T)
    assert torch.equal(principal(points[:, :3]), points[:, :3] - points[:, :3].mean(0))


# The range


def test_the_limits_are_those_that_were_measured():
    assert (module.PLAUSIBLE, module.PLAUSIBLE_CUT, module.COMPONENTS) == (0.85, 0.9, 64)


SIZES = (3, 5, 8, 12, 20)


@pytest.mark.parametrize(
    ("scores", "cuts", "recommended", "plausible"),
    [
        ((0.1, 0.2, 0.5, 0.2, 0.1), (0.1, 0.2, 0.5, 0.2, 0.1), 8, (7, 9)),  # halfway to 5 and to 12
        ((0.1, 0.43, 0.5, 0.2, 0.1), (0.1, 0.2, 0.5, 0.2, 0.1), 8, (4, 9)),  # at least 85%
        ((0.1, 0.42, 0.5, 0.2, 0.1), (0.1, 0.2, 0.5, 0.2, 0.1), 8, (7, 9)),
        ((0.1, 0.2, 0.5, 0.2, 0.1), (0.1, 0.2, 0.2, 0.46, 0.5), 8, (7, 20)),  # the cuts extend it, down to 90%
        ((0.1, 0.2, 0.5, 0.2, 0.1), (0.46, 0.5, 0.2, 0.4, 0.44), 8, (3, 9)),
        ((-0.5, -0.1, -0.2, -0.3, -0.4), (-0.5, -0.1, -0.2, -0.3, -0.4), 5, (4, 6)),
        ((0.5, 0.1, 0.1, 0.1, 0.1), (0.5, 0.1, 0.1, 0.1, 0.1), 3, (3, 3)),
    ],
)
def test_the_range_holds_what_is_nearly_as_good(scores, cuts, recommended, plausible):
    choice = Choice(SIZES, scores, cuts)
    assert choice.recommended == recommended
    assert choice.plausible == plausible
    assert plausible[0] <= recommended <= plausible[1]


def test_reasons_are_sentences_that_name_the_range():
    choice = Choice(SIZES, (0.1, 0.43, 0.5, 0.2, 0.1), (0.1, 0.2, 0.5, 0.2, 0.1))
    assert choice.reasons()[0] == "4 to 9 clusters are plausible; 8 is recommended"
    assert "silhouette 0.500" in choice.reasons()[1]
    assert len(choice.reasons()) == 3
    weak = Choice(SIZES, (0.01, 0.02, 0.03, 0.04, 0.04), (0.0,) * 5).reasons()
    assert any("overlap" in reason for reason in weak)
    end = Choice(SIZES, (0.5, 0.1, 0.1, 0.1, 0.1), (0.5, 0.1, 0.1, 0.1, 0.1)).reasons()
    assert "no other number from 3 to 20 comes close" in end[0]
    assert "3 is an end of the range" in end[-1]


def test_the_summary_can_be_written_as_json():
    choice = Choice((3, 5), (0.25, 0.5), (0.5, 0.25))
    summary = json.loads(json.dumps(choice.summary()))
    assert (summary["recommended"], summary["low"], summary["high"]) == (5, 3, 5)
    assert summary["scores"] == {"3": 0.25, "5": 0.5}
    assert summary["cuts"] == {"3": 0.5, "5": 0.25}
    assert summary["reasons"] == list(choice.reasons())


# Made-up groups


def groups(*sizes: int, dim: int = 10) -> Tensor:
    centers = 3 * torch.eye(dim, dtype=torch.float64)[: len(sizes)]
    rows = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return centers[rows] + 0.4 * torch.randn(len(rows), dim, generator=torch.Generator().manual_seed(1)).double()


def by_kmeans(points: Tensor, size: int) -> Tensor:
    return torch.from_numpy(KMeans(size, n_init=3, random_state=0).fit_predict(points.numpy())).long()


@pytest.mark.parametrize("true", [3, 5, 8])
def test_the_true_number_of_clear_groups_is_recommended(true):
    points = groups(*[30] * true)
    heads = (2, 3, 4, 5, 6, 8, 10, 16)
    labels = [by_kmeans(points, size) for size in heads]
    choice = compare_sizes(heads, labels, grow_tree(points, labels[-1], 7), points)
    assert choice.sizes == heads[:-1]
    assert choice.recommended == true
    assert choice.plausible[0] <= true <= choice.plausible[1]


def test_cuts_of_the_tree_show_groups_that_heads_of_equal_size_cannot():
    points = groups(60, 15, 15, 15)
    heads = (2, 3, 4, 5, 12)
    equal = [torch.arange(len(points)) * size // len(points) for size in heads[:-1]]  # in order: large groups split
    fine = by_kmeans(points, 12)
    choice = compare_sizes(heads, [*equal, fine], grow_tree(points, fine, 4), points)
    assert choice.sizes[int(np.argmax(choice.cuts))] == 4
    assert choice.plausible[0] <= 4 <= choice.plausible[1]
    alone = Choice(choice.sizes, choice.scores, choice.scores)
    assert alone.plausible != choice.plausible


def test_a_tree_with_few_or_no_leaves_is_cut_no_further():
    points = groups(20, 20)
    labels = [by_kmeans(points, 2), by_kmeans(points, 3), torch.zeros(40, dtype=torch.long)]
    choice = compare_sizes((2, 3, 9), labels, None, points)
    assert choice.cuts == (0.0, 0.0)
    assert choice.plausible == (2, 2)  # cuts that separate nothing do not count
    labels[2] = labels[0]
    choice = compare_sizes((2, 3, 9), labels, grow_tree(points, labels[2], 2), points)
    assert choice.cuts == pytest.approx((choice.scores[0],) * 2)


def test_a_head_with_empty_clusters_is_not_recommended():
    points = groups(20, 20)
    two = by_kmeans(points, 2)
    choice = compare_sizes((2, 3, 9), [by_kmeans(points, 2), two * 2, by_kmeans(points, 9)], None, points)
    assert choice.scores[1] == module.EMPTY
    assert choice.recommended == 2


def test_if_all_heads_have_empty_clusters_no_number_is_said_to_separate_the_images():
    points = groups(20, 20)
    one = torch.zeros(40, dtype=torch.long)
    choice = compare_sizes((2, 3, 9), [one, one, one], None, points)
    assert choice.recommended == 2
    assert choice.reasons() == (
        "no number of clusters can be recommended; 2 is reported",
        "of 2 numbers tried from 2 to 3, every one left clusters without images",
    )


def test_many_images_are_sampled(monkeypatch):
    points = groups(*[60] * 4)
    labels = [AgglomerativeClustering(size).fit_predict(points.numpy()) for size in (3, 4, 6, 9)]
    labels = [torch.from_numpy(label).long() for label in labels]
    tree = grow_tree(points, labels[-1], 3)
    whole = compare_sizes((3, 4, 6, 9), labels, tree, points)
    monkeypatch.setattr(module, "SAMPLE", 80)
    sample = compare_sizes((3, 4, 6, 9), labels, tree, points, seed=1)
    assert sample.recommended == whole.recommended == 4
    assert sample.scores != whole.scores
    assert sample == compare_sizes((3, 4, 6, 9), labels, tree, points, seed=1)


def test_the_finest_head_is_no_candidate():
    assert candidates((3, 5, 9, 9)) == [0, 1]


def test_a_choice_needs_heads_of_two_sizes():
    with pytest.raises(UserError, match="answer: number needs heads of at least two sizes"):
        resolve({"heads": [3, 3], "answer": "number"})


# Whole runs


@pytest.fixture(scope="module")
def five_digits() -> tuple[SeCu, np.ndarray]:
    """Return an estimator that was fitted to the pixels of five digits as vectors, and these."""
    pixels, _ = digits(400, (0, 1, 4, 6, 7))
    vectors = pixels.reshape(len(pixels), -1).astype(np.float32)
    return SeCu("3..12", epochs=25, device="cpu").fit(vectors), vectors


def test_the_number_of_digits_is_in_the_range(five_digits):
    model, vectors = five_digits
    choice = model.choice_
    assert choice["low"] <= 5 <= choice["high"]
    assert model.n_clusters_ == choice["recommended"] == model.config_.clusters
    assert model.config_.answer in ("head", "tree")
    assert model.n_clusters == "3..12"
    assert set(model.labels_) <= set(range(model.n_clusters_))
    assert (model.predict(vectors) == model.labels_).mean() > 0.99


def test_a_saved_choice_is_loaded(five_digits, tmp_path):
    model, vectors = five_digits
    model.save(tmp_path / "run")
    loaded = SeCu.load(tmp_path / "run", device="cpu")
    assert loaded.choice_ == model.choice_
    assert loaded.n_clusters == "3..12"
    assert (loaded.predict(vectors, level=7) == model.predict(vectors, level=7)).all()


@pytest.mark.parametrize("level", [2, 5, 9])
def test_any_level_is_a_clustering_and_finer_ones_refine_it(five_digits, level):
    model, vectors = five_digits
    coarse = model.predict(vectors, level=level)
    fine = model.predict(vectors, level=level + 1)
    assert len(set(coarse)) == level
    assert len(set(zip(coarse, fine, strict=True))) == level + 1


@pytest.mark.parametrize("level", ["5", 2.5, True, 1, 99])
def test_a_wrong_level_is_one_line(five_digits, level):
    model, vectors = five_digits
    with pytest.raises(UserError, match=r"^level: .* must be a (whole number|number of groups from 2 to \d+)"):
        model.predict(vectors, level=level)


def test_a_given_number_has_no_choice():
    vectors = np.random.default_rng(0).standard_normal((60, 4)).astype(np.float32)
    model = SeCu(3, epochs=1, device="cpu").fit(vectors)
    assert (model.n_clusters_, model.choice_) == (3, None)


def test_self_labeling_needs_a_number():
    with pytest.raises(UserError, match="self_label: needs one number of clusters, got n_clusters='auto'"):
        SeCu("auto", self_label=True, encoder="scratch", device="cpu").fit(digits(60)[0])
