"""ACC, NMI and ARI against their definitions."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secu.metrics import accuracy, calibration_error, confusion, matched, score

LABELINGS = st.integers(1, 30).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 4), min_size=n, max_size=n), st.lists(st.integers(0, 5), min_size=n, max_size=n)
    )
)


def accuracy_oracle(targets: list[int], clusters: list[int]) -> float:
    """Try every one-to-one matching: clusters take different names, of classes or of nothing."""
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
    """Hubert and Arabie over all pairs of images: together in both, expected by chance, at most."""
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
def test_names_of_clusters_do_not_matter(labelings, names):
    targets, clusters = np.array(labelings[0]), np.array(labelings[1])
    assert score(targets, np.array(names)[clusters]) == pytest.approx(score(targets, clusters))


@settings(deadline=None)
@given(LABELINGS.filter(lambda pair: len(set(pair[0])) > 1 and 1 < len(set(pair[1])) < len(pair[1])))
def test_nmi_and_ari_follow_their_definitions(labelings):
    targets, clusters = labelings
    scores = score(np.array(targets), np.array(clusters))
    assert scores.nmi == pytest.approx(nmi_oracle(targets, clusters), abs=1e-9)
    assert scores.ari == pytest.approx(ari_oracle(targets, clusters), abs=1e-9)


def test_values_worked_out_by_hand():
    """Two classes of three, one image on the wrong side: NMI and ARI from paper and pencil."""
    targets, clusters = np.array([0, 0, 0, 1, 1, 1]), np.array([1, 1, 0, 0, 0, 0])
    scores = score(targets, clusters)
    assert scores.acc == pytest.approx(5 / 6)
    information = math.log(2) - 4 / 6 * (-0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    spread = (math.log(2) + math.log(3) / 3 + 2 / 3 * math.log(1.5)) / 2
    assert scores.nmi == pytest.approx(information / spread)
    assert scores.ari == pytest.approx((4 - 6 * 7 / 15) / ((6 + 7) / 2 - 6 * 7 / 15))


def test_perfect_clusters_score_one_and_a_single_cluster_nothing():
    targets = np.array([0, 1, 2, 0, 1, 2])
    assert score(targets, (targets + 1) % 3) == pytest.approx((1, 1, 1))
    assert score(targets, np.zeros(6, int)) == pytest.approx((1 / 3, 0, 0))


def test_clusters_left_over_count_as_wrong():
    assert accuracy(np.array([0, 0, 0, 0]), np.array([0, 1, 2, 3])) == 0.25  # more clusters than classes
    assert accuracy(np.array([0, 1, 2, 3]), np.array([0, 0, 0, 0])) == 0.25  # more classes than clusters
    assert accuracy(np.array([0, 0, 1, 1, 2, 2]), np.array([0, 0, 0, 1, 1, 1])) == pytest.approx(4 / 6)


def test_unknown_targets_are_ignored():
    targets, clusters = np.array([-1, 0, 0, 1, -1, 1, 1]), np.array([7, 0, 0, 1, 0, 1, 0])
    known = targets >= 0
    assert score(targets, clusters) == score(targets[known], clusters[known])
    assert score(targets, clusters).acc == pytest.approx(4 / 5)


def test_confusion_counts_classes_in_rows_and_clusters_in_columns():
    table = confusion(np.array([0, 0, 1, 1, 1]), np.array([2, 2, 0, 2, 0]))
    assert table.tolist() == [[0, 0, 2], [2, 0, 1]]
    assert confusion(np.array([0, 0, 1]), np.array([1, 1, 1])).tolist() == [[0, 2], [0, 1]]


@settings(deadline=None)
@given(LABELINGS)
def test_matched_images_are_those_that_accuracy_counts_one_class_a_cluster(labelings):
    targets, clusters = np.array(labelings[0]), np.array(labelings[1])
    right = matched(targets, clusters)
    assert right.mean() == pytest.approx(accuracy_oracle(*labelings))
    pairs = {(cluster, target) for cluster, target in zip(clusters[right], targets[right], strict=True)}
    assert len({cluster for cluster, _ in pairs}) == len({target for _, target in pairs}) == len(pairs)
    for cluster, target in pairs:  # a cluster's class is right wherever it stands
        assert right[(clusters == cluster) & (targets == target)].all()


# Calibration


def calibration_oracle(confidence: list[float], right: list[bool], bins: int) -> float:
    """Bin by bin: the share of images in it, times how far their mean confidence is from the share of right ones."""
    total = 0.0
    for number in range(bins):
        last = number == bins - 1  # which holds 1 itself
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


def test_calibration_error_is_nothing_for_a_model_that_is_right_as_often_as_it_is_sure():
    confidence = np.repeat(np.array([0.25, 0.5, 0.75, 1.0], np.float32), 40)
    right = np.concatenate([np.arange(40) < 40 * share for share in (0.25, 0.5, 0.75, 1.0)])
    assert calibration_error(confidence, right) == 0
    assert calibration_error(confidence, ~right) == pytest.approx((0.5 + 0 + 0.5 + 1) / 4)
    assert calibration_error(np.ones(8, np.float32), np.arange(8) < 6) == pytest.approx(0.25)


def test_errors_of_opposite_bins_do_not_cancel_and_those_within_a_bin_do():
    right = np.array([True, False])
    assert calibration_error(np.array([0.4, 0.6], np.float32), right) == pytest.approx(0.6)
    assert calibration_error(np.array([0.51, 0.52], np.float32), right) == pytest.approx(0.015, abs=1e-6)
