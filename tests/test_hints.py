"""Hints: tables and names become groups, groups are placed in clusters, and runs follow them."""

import itertools
import json
import random

import numpy as np
import pytest
import torch
from PIL import Image

from feature_runs import SHORT, blobs
from own_images import fit_now, request_of, write_folder
from secu import SeCu
from secu.apps import hints as module
from secu.apps.hints import read_hints
from secu.apps.selflabel import second_config
from secu.base.errors import UserError
from secu.cluster.guide import MOST_WEIGHT, Guide, place_groups
from secu.config import Config
from secu.data import open_images, open_source
from secu.data.hints import NO_GROUP, join_hints
from secu.settings import merge

pytestmark = pytest.mark.usefixtures("own_cache", "quick_map")
IDS = [f"{number}.png" for number in range(9)]
TWO = merge(SHORT, {"optim": {"epochs": 10}, "heads": [2, 2, 6]})


class Names:
    """Stands in for a source of which only names matter."""

    ids = IDS
    skipped = (("torn.png", "it is cut off"),)
    repeated = (("twin.png", "the same as 1.png"),)


# Groups


def slow_groups(count, names, must):
    """Return the set of things that each image is linked to, by merging sets until nothing changes."""
    sets = [{image} for image in range(count)]
    links = [*must, *((a, b) for a, b in itertools.combinations(names, 2) if names[a] == names[b])]
    for _ in range(count):
        for one, other in links:
            sets[one] = sets[other] = sets[one] | sets[other]
            for image in sets[one]:
                sets[image] = sets[one]
    return sets


def slow_contradiction(count, names, must, cannot):
    sets = slow_groups(count, names, must)
    two_names = any(len({names[image] for image in group if image in names}) > 1 for group in sets)
    return two_names or any(other in sets[one] for one, other in cannot)


def test_groups_are_those_of_a_slow_search():
    numbers = random.Random(0)
    pairs = list(itertools.combinations(range(len(IDS)), 2))
    refused = 0
    for _ in range(300):
        names = {image: numbers.choice("abc") for image in numbers.sample(range(9), numbers.randint(0, 4))}
        must = numbers.sample(pairs, numbers.randint(0, 4))
        cannot = numbers.sample(pairs, numbers.randint(0, 3))
        if slow_contradiction(len(IDS), names, must, cannot):
            refused += 1
            with pytest.raises(UserError, match=r"^hints: .*(cannot be in the same cluster|are different names)"):
                join_hints(IDS, names, must, cannot)
        else:
            require_groups(join_hints(IDS, names, must, cannot), names, must, cannot)
    assert 50 < refused < 250


def require_groups(hints, names, must, cannot):
    sets = slow_groups(len(IDS), names, must)
    mentioned = {*names, *itertools.chain(*must), *itertools.chain(*cannot)}
    assert set(np.flatnonzero(hints.group != NO_GROUP)) == mentioned
    for one, other in itertools.combinations(sorted(mentioned), 2):
        assert (hints.group[one] == hints.group[other]) == (other in sets[one])
    assert hints.names == tuple(dict.fromkeys(names.values()))
    assert all(hints.names[hints.group[image]] == name for image, name in names.items())
    kept_apart = {frozenset((int(hints.group[one]), int(hints.group[other]))) for one, other in cannot}
    named = range(len(hints.names))
    assert {frozenset(pair) for pair in hints.apart} == {pair for pair in kept_apart if not pair <= {*named}}
    groups = {*hints.group.tolist()} - {NO_GROUP}
    assert groups == set(range(len(groups)))


def test_the_checksum_depends_on_names_groups_and_ids():
    plain = join_hints(IDS, {0: "a", 1: "b"}, [(2, 3)], [(3, 4)])
    others = [
        join_hints(IDS, {0: "a", 1: "c"}, [(2, 3)], [(3, 4)]),
        join_hints(IDS, {0: "a", 5: "b"}, [(2, 3)], [(3, 4)]),
        join_hints(IDS, {0: "a", 1: "b"}, [(2, 3)], [(1, 4)]),
    ]
    checksums = {hints.checksum(IDS) for hints in (plain, *others)} | {plain.checksum(IDS[::-1])}
    assert len(checksums) == 5
    assert plain.checksum(IDS) == join_hints(IDS, {0: "a", 1: "b"}, [(3, 2)], [(4, 3)]).checksum(IDS)


# Places


@pytest.mark.parametrize("seed", range(20))
def test_names_are_placed_one_to_one_as_well_as_possible(seed):
    cosines = torch.rand(3, 5, generator=torch.Generator().manual_seed(seed))
    found = place_groups(cosines, 3, ())
    best = max(float(cosines[range(3), list(chosen)].sum()) for chosen in itertools.permutations(range(5), 3))
    assert float(cosines[range(3), found].sum()) == pytest.approx(best)
    assert len(set(found.tolist())) == 3


def test_groups_without_names_take_the_nearest_cluster_that_is_left():
    cosines = torch.tensor([[0.9, 0.1, 0.0], [0.8, 0.5, 0.1], [0.9, 0.2, 0.7], [0.6, 0.9, 0.1]])
    assert place_groups(cosines, 1, ()).tolist() == [0, 0, 0, 1]
    assert place_groups(cosines, 1, ((0, 1), (1, 2), (0, 2))).tolist() == [0, 1, 2, 1]
    assert place_groups(cosines, 0, ((0, 1),)).tolist() == [0, 1, 0, 1]
    everyone = tuple(itertools.combinations(range(4), 2))
    assert place_groups(cosines, 0, everyone).tolist() == [0, 1, 2, 1]  # the fourth has no cluster of its own


def test_only_heads_of_the_requested_size_are_guided():
    guide = Guide(torch.tensor([0, -1, 1, 1]), 2, (), heads := (2, 4, 2), 2, 5)
    centers = [torch.eye(4)[:size] for size in heads]
    guide.place(torch.eye(4)[[1, 0, 0]], centers)
    assert guide.cluster.tolist() == [[1, -1, 1], [0, -1, 0], [-1, -1, -1]]
    labels = torch.tensor([[0, 3, 0], [1, 2, 1], [1, 1, 1]])
    assert guide.labels(torch.tensor([0, 1, 2]), labels).tolist() == [[1, 3, 1], [1, 2, 1], [0, 1, 0]]
    assert guide.followed(0, torch.tensor([[0.1, 0.2], [0.3, 0.1], [0.0, 0.3]])) == 2


def test_the_loss_is_that_of_a_loop():
    group = torch.tensor([0, -1, 1, 1, 0, 0])
    guide = Guide(group, 2, (), (2, 3), 2, 1.2)
    guide.place(torch.eye(2)[[0, 1, 1, 0, 0]], [torch.eye(2), torch.eye(3, 2)])
    log_p = torch.log_softmax(torch.randn(2, 4, 2, 3, generator=torch.Generator().manual_seed(0)), -1)
    index = torch.tensor([3, 1, 0, 5])
    total = 0.0
    for view, place in itertools.product(range(2), range(4)):
        if (number := int(group[index[place]])) >= 0:  # head 1 is finer
            total -= 1.2 / int((group == number).sum()) * float(log_p[view, place, 0, number])
    assert float(guide.loss(index, log_p)) == pytest.approx(total / (2 * 4 * 2))


def test_the_weight_of_few_images_is_limited():
    guide = Guide(torch.tensor([0, *[-1] * 999]), 1, (), (2,), 2, 100)
    assert guide.weight.tolist() == [MOST_WEIGHT, 0]
    guide = Guide(torch.tensor([0, 1, 1, *[-1] * 17]), 2, (), (2,), 2, 100)
    assert guide.weight.tolist() == [5, 2.5, 0]  # all groups together weigh as much as half of the images


def test_an_image_that_is_only_kept_apart_has_no_weight():
    guide = Guide(torch.tensor([0, 1, 1, 2, *[-1] * 16]), 1, ((0, 2),), (2,), 2, 4)
    assert guide.weight.tolist() == [4, 2, 0, 0]


# Tables


def read(tmp_path, text, source=Names, name="hints.csv"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_hints(path, source)


def test_a_table_of_names(tmp_path):
    table = "\ufeffid;size; label \r\n2.png;9; cat \r\n3.png;9;\r\n\r\n0.png;7;dog\r\n5.png;7;cat\r\n"
    hints = read(tmp_path, table)
    assert hints.names == ("cat", "dog")
    assert hints.group.tolist() == [1, -1, 0, -1, -1, 0, -1, -1, -1]


def test_a_table_of_links_and_names(tmp_path):
    table = "id,label,other,link\n2.png,cat,,\n2.png,,3.png,must\n4.png,,2.png,cannot\n5.png,,6.png,must\n"
    hints = read(tmp_path, table)
    assert hints.group.tolist() == [-1, -1, 0, 0, 1, 2, 2, -1, -1]
    assert (hints.names, hints.apart) == (("cat",), ((0, 1),))


def test_ids_and_names_are_read_as_tables_write_them(tmp_path):
    class Odd(Names):
        ids = ("=1+1.png", "a\nb.png", " c.png")

    hints = read(tmp_path, "id,label\n'=1+1.png,'=x\na\\x0ab.png,y\n c.png,y\n", Odd)
    assert hints.names == ("=x", "y")
    assert hints.group.tolist() == [0, 1, 1]


EDITS = "id,cluster,name,merged_cluster,marked_wrong\n"


def test_the_table_of_a_report(tmp_path):
    rows = ["0.png,0,cats,0,no", "1.png,0,cats,0,yes", "2.png,1,cats,0,no", "3.png,2,,2,no", "4.png,2,,2,no"]
    hints = read(tmp_path, EDITS + "\n".join([*rows, "5.png,3,,3,no", "6.png,3,,3,yes"]))
    assert hints.names == ("cats", "cluster 3")
    assert hints.group.tolist() == [0, 2, 0, -1, -1, 1, 3, -1, -1]
    assert hints.apart == ((0, 2), (1, 3))


def test_a_sample_of_the_images_of_a_report_stands_for_a_cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PER_CLUSTER", 3)
    rows = [f"{name},{number // 7},{'x' if number < 7 else ''},{number // 7},no" for number, name in enumerate(IDS)]
    hints = read(tmp_path, EDITS + "\n".join(rows))
    assert (hints.group[:7] == 0).sum() == 3
    assert (hints.group[7:] == NO_GROUP).all()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("", "needs columns id and label, .*; it has nothing"),
        ("id,label\n", "has no hints; valid: columns id and label"),
        ("id,label\n1.png,\n", "has no hints"),
        (EDITS + "1.png,0,,0,no\n", "has no hints"),
        ("path,label\n1.png,a\n", "needs columns id and label.*; it has path, label"),
        ("id,other\n1.png,2.png\n", "needs columns"),
        ("id,label,label\n1.png,a,b\n", "two columns with the same name"),
        ("id,label\n1.png,a,b\n", "line 2 of .* has 3 values for 2 columns"),
        ("id,label\n99.png,a\n", "line 2 of .*: there is no image '99.png'; valid: an id such as '0.png'"),
        ("id,label\ntorn.png,a\n", "line 2 of .*: 'torn.png' is left out: it is cut off"),
        ("id,label\ntwin.png,a\n", "line 2 of .*: 'twin.png' is left out: the same as 1.png"),
        ("id,label\n1.png,a\n1.png,b\n", "line 3 of .*: '1.png' is named 'a' and 'b'"),
        ("id,other,link\n1.png,2.png,maybe\n", "line 2 of .*: link: 'maybe' must be must or cannot"),
        ("id,other,link\n1.png,2.png,\n", "line 2 of .*: link: '' must be must or cannot"),
        ("id,other,link\n1.png,,must\n", "line 2 of .*: there is no image ''"),
        ("id,other,link\n1.png,1.png,cannot\n", "'1.png' and '1.png' cannot be in the same cluster"),
        ("id,label,other,link\n1.png,a,2.png,must\n2.png,b,,\n", "'a' and 'b' are different names, but links put"),
        (b"id,label\n\xff.png,a\n", "is not a CSV table"),
        ('id,label\n"1.png,a\n', "is not a CSV table"),
    ],
)
def test_a_wrong_table_is_refused_in_one_line(tmp_path, table, message):
    with pytest.raises(UserError, match=rf"^hints: .*{message}") as caught:
        read(tmp_path, table)
    assert "\n" not in str(caught.value)


def test_a_table_of_links_may_have_a_column_of_the_report(tmp_path):
    hints = read(tmp_path, "id,other,link,marked_wrong\n1.png,2.png,must,no\n")
    assert np.flatnonzero(hints.group != NO_GROUP).tolist() == [Names.ids.index("1.png"), Names.ids.index("2.png")]


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"^hints: cannot read .*none.csv: No such file"):
        read_hints(tmp_path / "none.csv", Names)
    with pytest.raises(UserError, match=r"^hints: cannot read .*: Is a directory"):
        read_hints(str(tmp_path), Names)
    with (tmp_path / "large.csv").open("wb") as file:
        file.truncate(module.LARGEST + 1)
    with pytest.raises(UserError, match=r"^hints: .*large.csv is larger than 128 MB"):
        read_hints(tmp_path / "large.csv", Names)


# Names in Python


@pytest.mark.parametrize("unknown", [None, float("nan"), np.nan, "", -1, np.int64(-1), -1.0])
def test_unknown_values_are_no_hints(unknown):
    values = np.array([unknown] * 7 + [3, 4], dtype=object)
    hints = read_hints(values, Names)
    assert hints.names == ("3", "4")
    assert hints.group.tolist() == [-1] * 7 + [0, 1]


def test_the_missing_value_of_pandas_is_no_hint():
    pandas = pytest.importorskip("pandas")
    hints = read_hints(pandas.Series([*"ab", *[None] * 7], dtype="string"), Names)
    assert hints.group.tolist() == [0, 1, *[-1] * 7]


def test_a_mapping_of_ids():
    hints = read_hints({"2.png": "a", "1.png": None, "3.png": 7}, Names)
    assert hints.names == ("a", "7")
    with pytest.raises(UserError, match=r"^hints: there is no image 'x'; valid: "):
        read_hints({"x": "a"}, Names)


@pytest.mark.parametrize("wrong", [[1, 2], 5, np.zeros((9, 2)), object()])
def test_anything_else_is_refused(wrong):
    with pytest.raises(UserError, match=r"^hints: expected a file, a mapping of ids to names, or one name per image"):
        read_hints(wrong, Names)


@pytest.mark.parametrize("nothing", [{}, {"1.png": ""}, [None] * 9, np.full(9, -1)])
def test_names_that_are_all_unknown_are_refused(nothing):
    with pytest.raises(UserError, match=r"^hints: expected at least one name, got none$"):
        read_hints(nothing, Names)


# Runs


@pytest.mark.parametrize("pair", [(0, 1), (1, 2), (0, 2)])
def test_a_run_puts_together_what_the_hints_put_together(pair):
    vectors, groups = blobs()
    names = np.where(np.isin(groups, pair), "both", "other")
    names[20:] = ""
    estimator = SeCu(2, settings=TWO).fit(vectors, hints=names)
    rest = slice(20, None)
    assert (estimator.labels_[rest] == estimator.labels_[groups == pair[0]][0]).tolist() == np.isin(
        groups[rest], pair
    ).tolist()
    assert estimator.hints_["images"] == estimator.hints_["followed"] == 20
    assert {estimator.hints_["names"][str(estimator.labels_[row])] for row in range(20)} == {"both", "other"}
    assert estimator.config_.answer == "head"
    assert "hint_loss" in estimator.history_[-1]


def test_links_steer_a_run_as_names_do(tmp_path):
    vectors, groups = blobs()
    first = [int(np.flatnonzero(groups == group)[0]) for group in range(3)]
    more = [row for row in range(20) if groups[row] < 2 and row not in first]
    links = [f"{row},{first[0]},must" for row in [first[1], *more]] + [f"{first[2]},{first[0]},cannot"]
    (tmp_path / "links.csv").write_text("id,other,link\n" + "\n".join(links))
    estimator = SeCu(2, settings=TWO).fit(vectors, hints=tmp_path / "links.csv")
    together = estimator.labels_ == estimator.labels_[first[0]]
    assert together.tolist() == (groups < 2).tolist()
    assert estimator.hints_["names"] == {}


def test_without_hints_there_is_nothing_about_them():
    vectors, _ = blobs()
    estimator = SeCu(2, settings=TWO).fit(vectors)
    assert estimator.hints_ is None
    assert "hint_loss" not in estimator.history_[-1]
    assert estimator.config_.hints.checksum is None


def test_hints_that_images_contradict_are_a_warning():
    vectors, groups = blobs()
    names = np.full(len(groups), "", dtype=object)
    names[:40] = np.arange(40) % 2  # by chance, not by the groups
    estimator = SeCu(2, settings=merge(TWO, {"hints": {"weight": 0}})).fit(vectors, hints=names)
    assert any("hinted images are not in the cluster of their hint" in line for line in estimator.warnings_)


def test_a_run_on_pixels_follows_hints_and_its_second_stage_starts_from_it(tmp_path):
    folder = write_folder(tmp_path / "digits", 120)
    ids = open_source(str(folder)).ids
    hints = tmp_path / "hints.csv"
    hints.write_text("id,label\n" + "".join(f"{name},digit {name[0]}\n" for name in ids[::4]))
    request = request_of(folder, clusters=3, hints=hints, overrides=merge(SHORT, {"neighbors": {"count": 3}}))
    finished = fit_now(request, tmp_path / "run", report=False)
    summary = finished.run.outcome()["hints"]
    assert sorted(summary["names"].values()) == ["digit 0", "digit 1", "digit 4"]
    assert summary["images"] == len(ids[::4])
    config = second_config(finished.run.config(), tmp_path / "run", 120, {})
    assert (config.hints.checksum, config.heads) == (None, (3,))


def test_a_finished_run_is_resumed_only_with_the_same_hints(tmp_path):
    np.save(tmp_path / "features.npy", blobs()[0])
    hints = tmp_path / "hints.csv"
    hints.write_text("id,label\n0,a\n1,b\n")
    request = request_of(tmp_path / "features.npy", clusters=2, hints=hints, overrides=SHORT)
    run = fit_now(request, tmp_path / "run", report=False).run
    before = (run.path / "outcome.json").read_text()
    fit_now(request, tmp_path / "run", resume=True, report=False)
    assert (run.path / "outcome.json").read_text() == before
    hints.write_text("id,label\n0,a\n2,b\n")
    with pytest.raises(UserError, match=r"^resume: .* was started with hints.checksum=\w+, got hints.checksum=\w+;"):
        fit_now(request, tmp_path / "run", resume=True, report=False)


def test_a_hint_about_an_image_that_cannot_be_read_is_refused(tmp_path):
    folder = write_folder(tmp_path / "digits", 40)
    Image.new("L", (8, 8)).save(folder / "0" / "bad.png")
    content = (folder / "0" / "bad.png").read_bytes()
    (folder / "0" / "bad.png").write_bytes(content[:40])
    hints = {"0/bad.png": "a"}
    with pytest.raises(UserError, match=r"^hints: '0/bad.png' is left out: "):
        fit_now(request_of(folder, clusters=3, hints=hints, overrides=SHORT), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_more_names_than_clusters_and_a_range_are_refused():
    vectors, _ = blobs()
    names = [*"abc", *[""] * (len(vectors) - 3)]
    with pytest.raises(ValueError, match=r"^hints: 3 names need at least 3 clusters, got 2"):
        SeCu(2, settings=TWO).fit(vectors, hints=names)
    with pytest.raises(ValueError, match=r"^hints: need one number of clusters, got 3\.\.12"):
        SeCu("auto").fit(vectors, hints=names)


def test_the_checksum_of_hints_cannot_be_set():
    vectors, _ = blobs()
    with pytest.raises(ValueError, match=r"^hints.checksum: 'x' cannot be set here; use the hints argument"):
        SeCu(2, settings={"hints.checksum": "x"}).fit(vectors)
    with pytest.raises(ValueError, match="need method=secu and answer=head, got method=secu and answer=auto"):
        Config.model_validate({"hints": {"checksum": "x"}, "answer": "auto"})


def test_hints_are_ids_of_an_array_too():
    source = open_images(blobs()[0])
    assert read_hints({0: "a", "3": "b"}, source).group[:4].tolist() == [0, -1, -1, 1]


def test_the_outcome_is_plain_json(tmp_path):
    np.save(tmp_path / "features.npy", blobs()[0])
    request = request_of(tmp_path / "features.npy", clusters=2, hints={"0": "a", "1": "b"}, overrides=SHORT)
    run = fit_now(request, tmp_path / "run", report=False).run
    summary = json.loads((run.path / "outcome.json").read_text())["hints"]
    assert summary["groups"] == 2
    assert set(summary["names"].values()) == {"a", "b"}
