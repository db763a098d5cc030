"""ACC, NMI, ARI, calibration, mutual information and temperature against their definitions."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import mutual_info_score
from torch import Tensor

from secu.cluster.metrics import (
    accuracy,
    calibration_error,
    calibration_known,
    confusion,
    find_temperature,
    matched,
    mutual_information,
    score,
    score_known,
)

LABELINGS = st.integers(1, 30).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 4), min_size=n, max_size=n), st.lists(st.integers(0, 5), min_size=n, max_size=n)
    )
)


def accuracy_oracle(targets: list[int], clusters: list[int]) -> float:
    """Try every one-to-one matching of clusters to classes or to nothing."""
    size = max(*targets, *clusters) + 1
    pairs = list(zip(targets, clusters, strict=True))
    hits = [sum(names[c] == t for t, c in pairs) for names in itertools.permutations(range(size))]
    return max(hits) / len(targets)


def entropy_of(labels: list) -> float:
    shares = [labels.count(value) / len(labels) for value in set(labels)]
    return -sum(share * math.log(share) for share in shares)


def nmi_oracle(targets: list[int], clusters: list[int]) -> float:
    """Mutual information H(t) + H(c) − H(t, c) over the arithmetic mean of H(t) and H(c)."""
    h_targets, h_clusters = entropy_of(targets), entropy_of(clusters)
    both = entropy_of(list(zip(targets, clusters, strict=True)))
    return (h_targets + h_clusters - both) / ((h_targets + h_clusters) / 2)


def ari_oracle(targets: list[int], clusters: list[int]) -> float:
    """Hubert and Arabie over all pairs of images: those together in both, compared with chance and the maximum."""
    pairs = list(itertools.combinations(range(len(targets)), 2))
    in_targets = [targets[i] == targets[j] for i, j in pairs]
    in_clusters = [clusters[i] == clusters[j] for i, j in pairs]
    both = sum(a and b for a, b in zip(in_targets, in_clusters, strict=True))
    expected = sum(in_targets) * sum(in_clusters) / len(pairs)
    return (both - expected) / ((sum(in_targets) + sum(in_clusters)) / 2 - expected)


@settings(deadline=None)
@given(LABELINGS)
def test_accuracy_is_the_best_of_all_matchings(labelings):
    targets, clusters = labelings
    assert accuracy(np.array(targets), np.array(clusters)) == pytest.approx(accuracy_oracle(targets, clusters))


@settings(deadline=None)
@given(LABELINGS, st.permutations(range(6)))
def test_the_numbering_of_clusters_does_not_matter(labelings, names):
    targets = np.array(labelings[0])
    clusters = np.array(labelings[1])
    assert score(targets, np.array(names)[clusters]) == pytest.approx(score(targets, clusters))


@settings(deadline=None)
@given(LABELINGS.filter(lambda pair: len(set(pair[0])) > 1 and 1 < len(set(pair[1])) < len(pair[1])))
def test_nmi_and_ari_follow_their_definitions(labelings):
    targets, clusters = labelings
    scores = score(np.array(targets), np.array(clusters))
    assert scores.nmi == pytest.approx(nmi_oracle(targets, clusters), abs=1e-9)
    assert scores.ari == pytest.approx(ari_oracle(targets, clusters), abs=1e-9)


def test_values_computed_by_hand():
    """Two classes of three images, one image in the wrong cluster."""
    targets = np.array([0, 0, 0, 1, 1, 1])
    clusters = np.array([1, 1, 0, 0, 0, 0])
    scores = score(targets, clusters)
    assert scores.acc == pytest.approx(5 / 6)
    information = math.log(2) - 4 / 6 * (-0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    spread = (math.log(2) + math.log(3) / 3 + 2 / 3 * math.log(1.5)) / 2
    assert scores.nmi == pytest.approx(information / spread)
    assert scores.ari == pytest.approx((4 - 6 * 7 / 15) / ((6 + 7) / 2 - 6 * 7 / 15))


def test_perfect_clusters_score_one_and_a_single_cluster_scores_zero():
    targets = np.array([0, 1, 2, 0, 1, 2])
    assert score(targets, (targets + 1) % 3) == pytest.approx((1, 1, 1))
    assert score(targets, np.zeros(6, int)) == pytest.approx((1 / 3, 0, 0))


def test_surplus_clusters_count_as_wrong():
    assert accuracy(np.array([0, 0, 0, 0]), np.array([0, 1, 2, 3])) == 0.25  # more clusters than classes
    assert accuracy(np.array([0, 1, 2, 3]), np.array([0, 0, 0, 0])) == 0.25  # more classes than clusters
    assert accuracy(np.array([0, 0, 1, 1, 2, 2]), np.array([0, 0, 0, 1, 1, 1])) == pytest.approx(4 / 6)


def test_unknown_targets_are_ignored():
    targets = np.array([-1, 0, 0, 1, -1, 1, 1])
    clusters = np.array([7, 0, 0, 1, 0, 1, 0])
    known = targets >= 0
    assert score(targets, clusters) == score(targets[known], clusters[known])
    assert score(targets, clusters).acc == pytest.approx(4 / 5)


def test_confusion_counts_classes_in_rows_and_clusters_in_columns():
    table = confusion(np.array([0, 0, 1, 1, 1]), np.array([2, 2, 0, 2, 0]))
    assert table.tolist() == [[0, 0, 2], [2, 0, 1]]
    assert confusion(np.array([0, 0, 1]), np.array([1, 1, 1])).tolist() == [[0, 2], [0, 1]]


@settings(deadline=None)
@given(LABELINGS)
def test_matched_images_are_those_that_accuracy_counts_with_one_class_per_cluster(labelings):
    targets = np.array(labelings[0])
    clusters = np.array(labelings[1])
    right = matched(targets, clusters)
    assert right.mean() == pytest.approx(accuracy_oracle(*labelings))
    pairs = {(cluster, target) for cluster, target in zip(clusters[right], targets[right], strict=True)}
    assert len({cluster for cluster, _ in pairs}) == len({target for _, target in pairs}) == len(pairs)
    for cluster, target in pairs:  # a matched pair is right for all its images
        assert right[(clusters == cluster) & (targets == target)].all()


# Calibration


def calibration_oracle(confidence: list[float], right: list[bool], bins: int) -> float:
    """Sum over bins: the share of images in it, times the gap between their mean confidence and accuracy."""
    total = 0.0
    for number in range(bins):
        last = number == bins - 1  # includes 1 itself
        inside = [i for i, c in enumerate(confidence) if number <= c * bins and (last or c * bins < number + 1)]
        if inside:
            mean, share = (sum(values[i] for i in inside) / len(inside) for values in (confidence, right))
            total += len(inside) / len(confidence) * abs(mean - share)
    return total


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_calibration_error_is_a_loop_over_bins(bins):
    numbers = np.random.default_rng(0)
    confidence = np.concatenate([numbers.random(300), [0.0, 1.0, 1.0, 0.25, 0.5]]).astype(np.float32)
    right = numbers.random(305) < confidence**2
    expected = calibration_oracle(confidence.tolist(), right.tolist(), bins)
    assert calibration_error(confidence, right, bins) == pytest.approx(expected, abs=1e-6)
    assert expected > 0.1


def test_calibration_error_is_zero_if_accuracy_equals_confidence():
    confidence = np.repeat(np.array([0.25, 0.5, 0.75, 1.0], np.float32), 40)
    right = np.concatenate([np.arange(40) < 40 * share for share in (0.25, 0.5, 0.75, 1.0)])
    assert calibration_error(confidence, right) == 0
    assert calibration_error(confidence, ~right) == pytest.approx((0.5 + 0 + 0.5 + 1) / 4)
    assert calibration_error(np.ones(8, np.float32), np.arange(8) < 6) == pytest.approx(0.25)


def test_gaps_cancel_within_a_bin_but_not_between_bins():
    right = np.array([True, False])
    assert calibration_error(np.array([0.4, 0.6], np.float32), right) == pytest.approx(0.6)
    assert calibration_error(np.array([0.51, 0.52], np.float32), right) == pytest.approx(0.015, abs=1e-6)


# Images whose true class may be unknown


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_scores_and_calibration_are_those_of_known_images_or_none(kind):
    numbers = np.random.default_rng(0)
    targets = numbers.integers(0, 4, 90)
    clusters = numbers.integers(0, 4, 90)
    confidence = numbers.random(90).astype(np.float32)
    assert score_known(kind(targets), kind(clusters)) == score(targets, clusters)
    half = np.where(np.arange(90) % 2, targets, -1)
    assert score_known(kind(half), kind(clusters)) == score(targets[1::2], clusters[1::2])
    found = calibration_known(kind(half), kind(clusters), kind(confidence))
    assert found == calibration_error(confidence[1::2], matched(targets[1::2], clusters[1::2]))
    for unknown in (None, kind(np.full(90, -1))):
        assert score_known(unknown, kind(clusters)) is None
        assert calibration_known(unknown, kind(clusters), kind(confidence)) is None


# Mutual information


def information_oracle(table: list[list[int]]) -> float:
    """Sum p(a, b)·log(p(a, b)/(p(a)·p(b))) over all cells, as a share of log K."""
    total = sum(map(sum, table))
    rows = [sum(row) / total for row in table]
    columns = [sum(column) / total for column in zip(*table, strict=True)]
    cells = [(n / total, a, b) for row, a in zip(table, rows, strict=True) for n, b in zip(row, columns, strict=True)]
    return sum(p * math.log(p / (a * b)) for p, a, b in cells if p > 0) / math.log(len(table))


@settings(deadline=None)
@given(
    st.integers(2, 6).flatmap(
        lambda k: st.lists(st.lists(st.integers(0, 20), min_size=k, max_size=k), min_size=k, max_size=k)
    )
)
def test_mutual_information_follows_its_definition(table):
    if any(map(any, table)):
        assert mutual_information(torch.tensor(table)) == pytest.approx(information_oracle(table), abs=1e-12)


def test_mutual_information_is_that_of_scikit_learn_over_log_k():
    numbers = np.random.default_rng(0)
    for clusters in (2, 5, 9):
        weak = numbers.integers(0, clusters, 500)
        strong = np.where(numbers.random(500) < 0.6, weak, numbers.integers(0, clusters, 500))
        table = torch.zeros(clusters, clusters)
        for a, b in zip(weak, strong, strict=True):
            table[a, b] += 1
        assert mutual_information(table) == pytest.approx(mutual_info_score(weak, strong) / math.log(clusters))


def test_mutual_information_is_one_for_a_diagonal_and_zero_for_collapsed_or_independent_labels():
    assert mutual_information(7 * torch.eye(6)) == pytest.approx(1)
    assert mutual_information(torch.eye(6).flip(0)) == pytest.approx(1)
    collapsed = torch.zeros(6, 6)
    collapsed[2, 2] = 300
    independent = torch.outer(torch.arange(1, 7.0), torch.arange(2, 8.0))
    for table in (collapsed, independent, torch.zeros(6, 6)):
        assert mutual_information(table) == pytest.approx(0, abs=1e-12)
    lost = torch.diag(torch.tensor([50.0, 50, 0, 0]))  # all labels agree, but two clusters are empty
    assert mutual_information(lost) == pytest.approx(0.5)


# Temperature


def random_cosines(images: int, clusters: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.nn.functional.normalize(torch.randn(images, 5, generator=generator), dim=1)
    centers = torch.nn.functional.normalize(torch.randn(clusters, 5, generator=generator), dim=1)
    return embeddings @ centers.T


def mean_confidence(cosines: Tensor, temperature: float) -> float:
    return float(torch.softmax(cosines / temperature, -1).amax(-1).mean())


@pytest.mark.parametrize("wanted", [0.35, 0.6, 0.8, 0.95])
def test_the_mean_confidence_at_the_temperature_found_is_the_one_wanted(wanted):
    cosines = random_cosines(300, 7)
    assert mean_confidence(cosines, find_temperature(cosines, wanted)) == pytest.approx(wanted, abs=1e-5)


def test_temperatures_are_limited_to_a_range():
    cosines = random_cosines(300, 7)
    assert find_temperature(cosines, 1.0) == 0.003
    assert find_temperature(cosines, 0.0) == 1.0
    assert find_temperature(cosines, mean_confidence(cosines, 1.0)) == 1.0
    assert find_temperature(torch.full((5, 3), 0.2), 0.9) == 0.003  # no temperature changes equal cosines
