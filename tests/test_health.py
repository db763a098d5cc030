"""Each warning comes when it should, and only then."""

import pytest
import torch

from secu.evaluate import Predictions
from secu.health import warnings_of
from secu.settings import resolve


def predictions(sizes, confidence=0.95):
    """Return predictions with so many images in each cluster."""
    cluster = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    same = torch.full((len(cluster),), float(confidence))
    return Predictions(cluster, same, cluster, 1 - same, same)


def config(clusters, balance=0.9):
    return resolve({"heads": [clusters], "constraint": {"lower": balance}})


def warnings(sizes=(20, 20, 20, 20, 20), confidence=0.95, changed=0.0, balance=0.9):
    metrics = [{"changed": 1.0}, {"changed": changed}]  # only the last epoch counts
    return warnings_of(metrics, predictions(sizes, confidence), config(len(sizes), balance))


def only(found, *words):
    """Check that there is one warning, a single line that names these and says what to do."""
    (text,) = found
    assert "\n" not in text
    assert ": " in text
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    "sizes",
    [(20,) * 5, (30, 10, 20, 20, 20), (50, 20, 10, 10, 10), (20, 49, 50, 50, 50), (80, 20), (34, 33, 33), (10,) * 100],
)
def test_a_healthy_run_has_no_warning(sizes):
    assert warnings(sizes) == ()


@pytest.mark.parametrize(
    ("crowded", "balance", "told"),
    [(0.05, 0.9, False), (0.5, 0.9, False), (0.51, 0.9, True), (1.0, 0.9, True), (0.7, 0.2, False), (1.0, 0.2, True)],
)
def test_a_finer_clustering_that_collapsed_is_told(crowded, balance, told):
    metrics = [{"changed": 0.0, "crowded": 1.0}, {"changed": 0.0, "crowded": crowded}]
    found = warnings_of(metrics, predictions((20,) * 5), config(5, balance))
    if told:
        only(found, f"{crowded:.0%} of all images into one cluster", "raise balance")
    else:
        assert found == ()


@pytest.mark.parametrize("kind", ["entropy", "none"])
def test_a_collapse_is_told_where_no_balance_was_asked_for(kind):
    unbound = resolve({"heads": [5], "constraint": {"kind": kind}})
    metrics = [{"changed": 0.0, "crowded": 0.99}]
    found = warnings_of(metrics, predictions((960, 10, 10, 10, 10)), unbound)
    assert len(found) == 2
    assert all(word in " ".join(found) for word in ("99% of all images", "swallowed 96%"))
    assert warnings_of([{"changed": 0.0}], predictions((50, 20, 10, 10, 10)), unbound) == ()


def test_nothing_is_said_of_a_run_without_epochs():
    assert warnings_of([], predictions((5, 5)), config(2)) == ()


def test_empty_clusters_are_counted_and_named():
    only(warnings((30, 30, 0, 40, 0)), "2 of 5 clusters are empty (2, 4)", "fewer clusters", "raise balance")
    only(warnings((100, 0)), "1 of 2 clusters are empty (1)")


def test_of_many_empty_clusters_ten_are_named():
    sizes = (1,) * 100 + (0,) * 50
    only(warnings(sizes), "50 of 150", "(100, 101, 102, 103, 104, 105, 106, 107, 108, 109)")


@pytest.mark.parametrize(
    ("sizes", "swallowed"),
    [
        ((50, 10, 10, 10, 20), None),
        ((51, 10, 10, 9, 20), "cluster 0 has swallowed 51%"),
        ((10, 10, 60, 20), "cluster 2 has swallowed 60%"),
        ((40,) + (10,) * 9, None),  # K = 10: four equal shares are 40%
        ((20,) + (10,) * 17 + (60, 8), "cluster 18 has swallowed 23%"),
        ((4,) + (1,) * 96, None),
        ((14,) + (1,) * 99, "cluster 0 has swallowed 12%"),
        ((99, 1), "cluster 0 has swallowed 99%"),
        ((9, 91), "cluster 1 has swallowed 91%"),
        ((82, 20), None),
    ],
)
def test_a_swallowing_cluster_is_named(sizes, swallowed):
    found = warnings(sizes)
    if swallowed is None:
        assert found == ()
    else:
        only(found, swallowed, "raise balance")


@pytest.mark.parametrize(
    ("sizes", "balance", "starved"),
    [
        ((1, 49, 50, 50, 50), 0.9, "1 of 5 clusters are far smaller than balance asks for (0)"),
        ((49, 2, 50, 3, 46), 0.5, "2 of 5 clusters are far smaller than balance asks for (1, 3)"),
        ((49, 4, 50, 4, 43), 0.3, None),
        ((15, 49, 50, 50, 50), 0.9, "1 of 5 clusters are far smaller than balance asks for (0)"),
        ((11, 89), 0.9, "1 of 2 clusters are far smaller than balance asks for (0)"),
    ],
)
def test_a_cluster_far_below_what_balance_promises_is_named(sizes, balance, starved):
    found = warnings(sizes, balance=balance)
    if starved is None:
        assert found == ()
    else:
        only(found, starved, "fewer clusters", "lower balance")


@pytest.mark.parametrize("sizes", [(99, 1), (1, 49, 50, 50, 50), (96, 1, 1, 1, 1), (60, 10, 10, 10, 10)])
def test_who_lets_groups_be_of_any_size_is_not_warned_of_it(sizes):
    assert warnings(sizes, balance=0) == ()


def test_what_balance_allows_is_no_reason_to_warn():
    assert warnings((54, 12, 12, 12, 10), balance=0.5) == ()
    only(warnings((64, 9, 9, 9, 9), balance=0.5), "cluster 0 has swallowed 64%")


@pytest.mark.parametrize(
    ("clusters", "confidence", "warned"),
    [(2, 0.59, True), (2, 0.61, False), (5, 0.59, True), (10, 0.29, True), (10, 0.31, False), (100, 0.04, False)],
)
def test_clusters_that_are_hardly_told_apart(clusters, confidence, warned):
    found = warnings((10,) * clusters, confidence)
    assert bool(found) is warned
    if warned:
        only(found, f"mean confidence {confidence:.2f}", "optim.epochs", "optim.batch_size")


@pytest.mark.parametrize(("changed", "warned"), [(0.0, False), (0.1, False), (0.11, True), (0.6, True)])
def test_clusters_that_still_change_at_the_end(changed, warned):
    found = warnings(changed=changed)
    assert bool(found) is warned
    if warned:
        only(found, f"{changed:.0%} of the images still changed", "train longer (optim.epochs)")


def test_all_at_once_in_a_fixed_order():
    found = warnings((80, 0, 10, 10), confidence=0.3, changed=0.5)
    assert [
        next(word for word in ("empty", "swallowed", "told apart", "changed") if word in text) for text in found
    ] == [*("empty", "swallowed", "told apart", "changed")]
