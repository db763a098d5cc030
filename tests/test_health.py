"""Each warning comes when it should, and only then."""

import pytest
import torch

from secu.methods.predictor import Predictions
from secu.results import health
from secu.results.health import warnings_of
from secu.settings import resolve


def predictions(sizes, confidence=0.95):
    """Return predictions with the given number of images in each cluster."""
    cluster = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    same = torch.full((len(cluster),), float(confidence))
    return Predictions(cluster, same, cluster, 1 - same, same)


def config(clusters, balance=0.9):
    return resolve({"heads": [clusters], "constraint": {"lower": balance}})


def warnings(sizes=(20, 20, 20, 20, 20), confidence=0.95, changed=0.0, balance=0.9):
    metrics = [{"changed": 1.0}, {"changed": changed}]  # only the last epoch counts
    return warnings_of(metrics, predictions(sizes, confidence), config(len(sizes), balance))


def only(found, *words):
    """Check that there is one warning, a single line that contains these words and says what to do."""
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
    ("crowded", "balance", "warned"),
    [(0.05, 0.9, False), (0.5, 0.9, False), (0.51, 0.9, True), (1.0, 0.9, True), (0.7, 0.2, False), (1.0, 0.2, True)],
)
def test_a_finer_head_that_collapsed_is_reported(crowded, balance, warned):
    metrics = [{"changed": 0.0, "crowded": 1.0}, {"changed": 0.0, "crowded": crowded}]
    found = warnings_of(metrics, predictions((20,) * 5), config(5, balance))
    if warned:
        only(found, f"finer head put {crowded:.0%} of all images into one cluster", "raise balance", "single head")
    else:
        assert found == ()


@pytest.mark.parametrize("kind", ["entropy", "none"])
def test_a_collapse_is_reported_where_the_constraint_has_no_balance(kind):
    unbound = resolve({"heads": [5], "constraint": {"kind": kind}})
    metrics = [{"changed": 0.0, "crowded": 0.99}]
    found = warnings_of(metrics, predictions((960, 10, 10, 10, 10)), unbound)
    assert len(found) == 2
    assert all(word in " ".join(found) for word in ("99% of all images", "contains 96%", "raise balance if"))
    assert warnings_of([{"changed": 0.0}], predictions((50, 20, 10, 10, 10)), unbound) == ()


def test_a_run_without_epochs_has_no_warning():
    assert warnings_of([], predictions((5, 5)), config(2)) == ()


def test_empty_clusters_are_counted_and_named():
    only(warnings((30, 30, 0, 40, 0)), "2 of 5 clusters are empty (2, 4)", "fewer clusters", "raise balance")
    only(warnings((100, 0)), "1 of 2 clusters are empty (1)")


def test_of_many_empty_clusters_ten_are_named():
    sizes = (1,) * 100 + (0,) * 50
    only(warnings(sizes), "50 of 150", "(100, 101, 102, 103, 104, 105, 106, 107, 108, 109)")


@pytest.mark.parametrize(
    ("sizes", "dominant"),
    [
        ((50, 10, 10, 10, 20), None),
        ((51, 10, 10, 9, 20), "cluster 0 contains 51%"),
        ((10, 10, 60, 20), "cluster 2 contains 60%"),
        ((40,) + (10,) * 9, None),  # K = 10: four equal shares are 40%
        ((20,) + (10,) * 17 + (60, 8), "cluster 18 contains 23%"),
        ((4,) + (1,) * 96, None),
        ((14,) + (1,) * 99, "cluster 0 contains 12%"),
        ((99, 1), "cluster 0 contains 99%"),
        ((9, 91), "cluster 1 contains 91%"),
        ((82, 20), None),
    ],
)
def test_a_dominant_cluster_is_named(sizes, dominant):
    found = warnings(sizes)
    if dominant is None:
        assert found == ()
    else:
        only(found, dominant, "raise balance if your groups should be more equal in size")


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
def test_a_cluster_far_below_its_guaranteed_size_is_named(sizes, balance, starved):
    found = warnings(sizes, balance=balance)
    if starved is None:
        assert found == ()
    else:
        only(found, starved, "fewer clusters", "lower balance if your groups differ widely in size")


@pytest.mark.parametrize("sizes", [(99, 1), (1, 49, 50, 50, 50), (96, 1, 1, 1, 1), (60, 10, 10, 10, 10)])
def test_no_size_is_wrong_where_any_size_was_asked_for(sizes):
    assert warnings(sizes, balance=0) == ()


def test_what_balance_allows_is_not_reported():
    assert warnings((54, 12, 12, 12, 10), balance=0.5) == ()
    only(warnings((64, 9, 9, 9, 9), balance=0.5), "cluster 0 contains 64%")


@pytest.mark.parametrize(
    ("clusters", "confidence", "warned"),
    [
        (2, 0.59, True),
        (2, 0.61, False),
        (5, 0.59, True),
        (5, 0.61, False),
        (10, 0.29, True),
        (10, 0.31, False),
        (100, 0.029, True),
        (100, 0.031, False),
    ],
)
def test_clusters_that_are_barely_distinguishable(clusters, confidence, warned):
    found = warnings((10,) * clusters, confidence)
    assert bool(found) is warned
    if warned:
        only(found, f"barely distinguishable (mean confidence {confidence:.2f})", "optim.epochs", "optim.batch_size")


@pytest.mark.parametrize(("changed", "warned"), [(0.0, False), (0.1, False), (0.11, True), (0.6, True)])
def test_clusters_that_still_change_at_the_end(changed, warned):
    found = warnings(changed=changed)
    assert bool(found) is warned
    if warned:
        only(found, f"{changed:.0%} of the images still changed", "train longer (optim.epochs)")


def test_all_at_once_in_a_fixed_order():
    metrics = [{"changed": 0.5, "crowded": 0.9}]
    found = warnings_of(metrics, predictions((80, 0, 10, 10), 0.3), config(4))
    words = ("empty", "contains", "distinguishable", "finer head", "changed")
    assert [next(word for word in words if word in text) for text in found] == list(words)


# Advice


def second_stage(kind="none", init_from="runs/first"):
    return resolve({"heads": [5], "constraint": {"kind": kind}, "init_from": init_from})


@pytest.mark.parametrize("kind", ["none", "entropy"])
def test_a_run_that_has_no_balance_to_raise_is_advised_to_keep_the_previous_run(kind):
    found = warnings_of([], predictions((90, 0, 0, 5, 5)), second_stage(kind))
    assert len(found) == 2
    assert found[0].endswith(": ask for fewer clusters, or keep the previous run")
    assert found[1].endswith(": keep the previous run if your groups should be more equal in size")


@pytest.mark.parametrize("asked", [second_stage("size"), second_stage("none", None)])
def test_other_runs_are_advised_to_raise_balance(asked):
    found = warnings_of([], predictions((90, 0, 0, 5, 5)), asked)
    assert len(found) == 2
    assert not any("previous run" in text for text in found)
    assert all("raise balance" in text for text in found)


def test_a_run_over_a_range_is_not_advised_to_raise_what_it_refuses():
    """The option is refused: `secu fit photos -k 3..20 --balance 0.9`."""
    asked = resolve({"heads": [5, 10], "answer": "number", "constraint": {"kind": "entropy"}})
    found = warnings_of([{"changed": 0.0, "crowded": 0.95}], predictions((90, 0, 0, 5, 5)), asked)
    assert len(found) == 3
    assert all("choose one number of clusters (-k) and raise balance" in text for text in found)


def test_the_head_that_answers_is_judged():
    """Of its clusters, not of those of the first head."""
    asked = resolve({"heads": [3, 5], "head": 1})
    only(warnings_of([], predictions((25, 25, 25, 25, 0)), asked), "1 of 5 clusters are empty (4)")
    assert warnings_of([], predictions((20,) * 5), asked) == ()


def test_a_method_that_records_neither_changes_nor_crowding_has_no_warning_about_them():
    assert warnings_of([{"epoch": 0, "loss": 1.0}], predictions((20,) * 5), config(5)) == ()


# Constants


def warned(word, found):
    return any(word in text for text in found)


@pytest.mark.parametrize(
    ("name", "value", "word", "below", "above"),
    [
        # Sizes just within and just beyond each limit, of 1,000 or 10,000 images.
        ("DOMINANT", 4.0, "contains", ((399, 601, 10), 0.0), ((401, 599, 10), 0.0)),
        ("DOMINANT_OF_TWO", 0.9, "contains", ((899, 101, 2), 0.0), ((901, 99, 2), 0.0)),
        ("STARVED", 0.4, "far smaller", ((722, 9278, 5), 0.9), ((718, 9282, 5), 0.9)),
    ],
)
def test_a_limit_of_sizes_is_where_it_is(name, value, word, below, above):
    assert getattr(health, name) == value
    for (first, rest, clusters), balance in (below, above):
        others = [rest // (clusters - 1)] * (clusters - 1)
        others[-1] += rest - sum(others)
        kind = {"kind": "size", "lower": balance} if balance else {"kind": "none"}
        asked = resolve({"heads": [clusters], "constraint": kind})
        found = warnings_of([], predictions((first, *others)), asked)
        assert warned(word, found) is ((first, rest, clusters) == above[0])


@pytest.mark.parametrize(
    ("name", "value", "key", "word"),
    [("UNSETTLED", 0.1, "changed", "still changed"), ("CROWDED", 0.5, "crowded", "finer head")],
)
def test_a_limit_of_the_last_epoch_is_where_it_is(name, value, key, word):
    assert getattr(health, name) == value
    for share, expected in ((value - 0.001, False), (value + 0.001, True)):
        assert warned(word, warnings_of([{key: share}], predictions((20,) * 5), config(5))) is expected


@pytest.mark.parametrize(
    ("name", "value", "clusters", "limit"), [("UNCERTAIN", 3.0, 10, 0.3), ("CONFIDENT", 0.6, 4, 0.6)]
)
def test_a_limit_of_the_confidence_is_where_it_is(name, value, clusters, limit):
    assert getattr(health, name) == value
    for confidence, expected in ((limit - 0.001, True), (limit + 0.001, False)):
        found = warnings_of([], predictions((10,) * clusters, confidence), config(clusters))
        assert warned("distinguishable", found) is expected
