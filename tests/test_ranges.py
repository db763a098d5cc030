"""What may be asked for as the number of clusters, and the heads of a run that chooses it."""

import itertools

import pytest

from secu.apps.feature_plan import Facts
from secu.apps.plan import make_plan
from secu.apps.ranges import Range, parse_clusters, range_for
from secu.base.errors import UserError

FEATURES = Facts(images=500, side=0, channels=3, device="cpu", features=20)
PIXELS = Facts(images=500, side=8, channels=1, device="cpu")


@pytest.mark.parametrize(
    ("asked", "found"),
    [(None, None), ("auto", None), ("8", 8), (8, 8), (" 8 ", 8), ("-1", -1), ("5..40", Range(5, 40))],
)
def test_what_may_be_asked_for(asked, found):
    assert parse_clusters(asked) == found


@pytest.mark.parametrize(
    "text", ["", "x", "5..", "..5", "5...9", "5..3", "1..4", "0..4", "4..4", "5-9", "٥", "2..9999999"]
)
def test_anything_else_is_refused_in_one_line_that_says_what_is_valid(text):
    with pytest.raises(UserError, match=r"^clusters: .* must be a .*5\.\.40[^\n]*$"):
        parse_clusters(text)


@pytest.mark.parametrize("wanted", [Range(3, 40), Range(5, 40), Range(2, 3), Range(2, 1000), Range(39, 40)])
def test_sizes_rise_from_one_end_to_the_other_in_nearly_equal_ratios(wanted):
    sizes = wanted.sizes()
    assert (sizes[0], sizes[-1]) == wanted
    for size, following in itertools.pairwise(sizes):
        assert size + 1 <= following <= max(size + 1, 1.25 * size * 1.15 + 1)
    middle = sizes[wanted.middle()]
    assert wanted.low <= middle <= wanted.high


def test_the_default_range_is_that_of_the_measured_runs():
    assert range_for(10_000) == (3, 40)
    assert Range(3, 40).sizes() == [3, 4, 5, 6, 7, 9, 11, 14, 17, 21, 26, 32, 40]
    assert Range(3, 40).heads(10_000)[-1] == 80
    assert Range(3, 40).heads(300)[-1] == 60  # five images per cluster
    assert Range(3, 40).heads(40)[-1] == 41  # the tree needs more clusters than any choice


def test_few_images_narrow_the_default_range():
    assert range_for(200) == (3, 20)
    with pytest.raises(UserError, match="auto needs at least 40 images, got 39; give a number"):
        range_for(39)


@pytest.mark.parametrize("facts", [FEATURES, PIXELS])
def test_the_plan_has_a_head_for_every_size_and_one_for_the_tree(facts):
    plan = make_plan(facts, Range(3, 12), None, {})
    config = plan.config
    assert list(config.heads) == Range(3, 12).heads(500)
    assert config.answer == "number"
    assert config.clusters == 6
    assert plan.most_clusters == 12
    assert any("chosen at the end, from 3 to 12" in reason for reason in plan.reasons)


@pytest.mark.parametrize("facts", [FEATURES, PIXELS])
def test_everything_but_the_heads_is_as_for_the_middle_of_the_range(facts):
    several = make_plan(facts, Range(3, 12), None, {}).config
    one = make_plan(facts, several.clusters, None, {}).config
    same = {"heads": one.heads, "head": one.head, "answer": one.answer}
    assert several.model_copy(update=same) == one


@pytest.mark.parametrize(
    ("balance", "overrides", "name"),
    [(0.5, {}, "balance: 0.5"), (None, {"heads": [3]}, "heads: "), (None, {"answer": "tree"}, "answer: tree")],
)
def test_what_needs_one_number_is_refused_with_a_range(balance, overrides, name):
    with pytest.raises(UserError, match=rf"^{name}.* needs one number of clusters, got 3\.\.12"):
        make_plan(FEATURES, Range(3, 12), balance, overrides)
