"""The tree of the report without a browser: its numbers against slow oracles, its size, and what may be left out."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from secu.base.errors import UserError
from secu.results.edits import WRONG, read_edits, read_rows
from secu.results.leaves import find_leaves
from secu.results.reading import read_assignments
from secu.results.report import build, center_map, page, tree
from secu.results.report.values import ints
from secu.results.results import find_results
from secu.train.checkpoint import load_method, load_predictor
from test_report import content_of, make_data, make_noise, render, write_page
from tree_reports import own_leaves, tree_data, with_empty_leaves, with_leaves

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def without_tsne():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secu.results.report.layout.LEAST_POINTS", 10**9)
        yield


@pytest.fixture(scope="module")
def data():
    return tree_data()


@pytest.fixture(scope="module")
def content(data):
    return content_of(render(data))


def test_a_leaf_belongs_to_the_cluster_that_most_of_its_images_are_in(data):
    results = data.results
    split = tree.split_clusters(results.leaves, ints(results.predictions.cluster), 5)
    for leaf, parent in enumerate(split.parent_L.tolist()):
        counts = Counter(results.predictions.cluster[results.leaves.leaf == leaf].tolist())
        assert counts[parent] == max(counts.values())


def test_an_image_is_in_the_part_of_its_leaf_or_of_the_nearest_leaf_of_its_cluster(data):
    results = data.results
    found = results.leaves
    split = tree.split_clusters(found, ints(results.predictions.cluster), 5)
    moved = 0
    for image, (cluster, leaf) in enumerate(
        zip(results.predictions.cluster.tolist(), found.leaf.tolist(), strict=True)
    ):
        own = [place for place, parent in enumerate(split.parent_L.tolist()) if parent == cluster]
        home = leaf if leaf in own else max(own, key=lambda place: float(found.centers[place] @ found.centers[leaf]))
        assert split.home_N[image] == (home if len(own) > 1 else -1)
        moved += home != leaf
    assert moved > 5
    assert len(split.strays) == len({tuple(row[:2]) for row in split.strays}) > 0


def test_the_parts_of_a_cluster_add_up_to_it(data, content):
    parts = content["tree"]["parts"]
    for cluster, card in enumerate(content["clusters"]):
        own = [leaf for leaf, parent in enumerate(content["tree"]["parent"]) if parent == cluster]
        if len(own) < 2:
            assert [parts["size"][leaf] for leaf in own] == [0] * len(own)
            continue
        assert sum(parts["size"][leaf] for leaf in own) == card["size"]
        assert sum(parts["outliers"][leaf] for leaf in own) == card["outliers"]
        confidence = sum(parts["size"][leaf] * parts["confidence"][leaf] for leaf in own) / card["size"]
        assert confidence == pytest.approx(card["confidence"], abs=1e-3)


def test_leaves_have_the_statistics_of_their_images(data, content):
    results = data.results
    leaves = content["tree"]["leaves"]
    for leaf in range(len(results.leaves.centers)):
        members = [i for i, place in enumerate(results.leaves.leaf.tolist()) if place == leaf]
        cosines = [float(results.embeddings[i] @ results.leaves.centers[leaf]) for i in members]
        assert leaves["size"][leaf] == len(members)
        assert leaves["cohesion"][leaf] == pytest.approx(sum(cosines) / len(cosines), abs=1e-4)
        best = sorted(zip(cosines, members, strict=True), reverse=True)[: tree.EXEMPLARS]
        assert leaves["typical"][leaf] == [i for _, i in best]


def test_the_page_knows_the_leaf_of_every_image(data, content):
    assert decode(content) == data.results.leaves.leaf.tolist()
    shown = content["pictures"]
    assert shown["leaf"] == [data.results.leaves.leaf[i] for i in shown["index"]]
    for leaves in (64, 65, 4096, 4097):
        assert 64 ** tree.digits_for(leaves) >= leaves > 64 ** (tree.digits_for(leaves) - 1) - 1


def decode(content):
    width = len(content["leaf"]) // content["images"]
    digits = [content["leaf"][row * width : (row + 1) * width] for row in range(content["images"])]
    return [sum(tree.DIGITS.index(digit) * 64**place for place, digit in enumerate(row)) for row in digits]


def test_many_leaves_show_images_that_are_shown_anyway_and_at_least_one():
    data = tree_data(3000, 40, leaves=200)
    shown = content_of(render(data))
    cards = {i for card in shown["clusters"] for kind in ("typical", "uncertain", "outlying") for i in card[kind]}
    anyway = cards | set(shown["map"]["index"])
    typical = shown["tree"]["leaves"]["typical"]
    assert all(1 <= len(row) <= tree.OTHERS for row in typical)
    assert sum(not set(row) <= anyway for row in typical) < 0.2 * len(typical)
    assert [leaf for leaf, row in enumerate(typical) if {decode(shown)[i] for i in row} != {leaf}] == []


def test_leaves_without_images_belong_to_no_cluster_and_show_nothing():
    data = with_empty_leaves(tree_data())
    found = content_of(render(data))["tree"]
    empty = [leaf for leaf in range(len(found["numbers"])) if not (data.results.leaves.leaf == leaf).any()]
    assert empty
    for leaf in empty:
        assert found["parent"][leaf] == -1
        assert (found["leaves"]["size"][leaf], found["leaves"]["typical"][leaf]) == (0, [])
        assert found["leaves"]["cohesion"][leaf] is None


def test_double_precision_is_left_as_it_is():
    data = tree_data()
    exact = replace(data.results.leaves, cosine=data.results.leaves.cosine.double())
    before = exact.cosine.clone()
    tree.tree_content(replace(data.results, leaves=exact), [])
    assert torch.equal(exact.cosine, before)


def test_leaves_that_are_the_clusters_themselves_split_nothing():
    data = own_leaves(make_data())
    content = content_of(render(data))
    assert content["leaf"] is None
    assert content["tree"]["isOwn"]
    assert content["tree"]["parts"]["size"] == [0] * 4
    assert content["centers"]["leafX"] == []


def test_a_report_without_leaves_has_no_tree():
    html = render(make_data())
    assert content_of(html)["tree"] is None
    assert 'id="tree"' not in html
    assert "#tree" not in html.partition("<body>")[2].partition("<script")[0]


def test_clusters_that_have_nothing_to_do_with_the_leaves_are_not_split(monkeypatch, data):
    monkeypatch.setattr(tree, "MOST_STRAYS", 3)
    found = content_of(render(data))["tree"]
    assert set(found["parent"]) == {-1}
    assert (found["strays"], set(found["parts"]["size"])) == ([], {0})


def test_the_map_of_clusters_is_deterministic_and_keeps_leaves_near_their_cluster(data):
    places = center_map.center_map(data.results)
    assert places == center_map.center_map(data.results)
    assert len(places["x"]) == 5
    assert len(places["leafX"]) == len(data.results.leaves.centers)
    every = [*places["x"], *places["y"], *places["leafX"], *places["leafY"]]
    assert min(every) >= 0
    assert max(every) <= 1


def test_very_many_centers_are_laid_out_by_principal_components(monkeypatch, data):
    def fail(_):
        raise AssertionError("t-SNE takes too long here")

    monkeypatch.setattr(center_map, "MOST_CENTERS", 3)
    monkeypatch.setattr(center_map, "lay_out", fail)
    assert len(center_map.center_map(data.results)["x"]) == 5


def test_a_thousand_clusters_with_a_tree_stay_under_ten_megabytes(tmp_path):
    ids = [f"a/rather/long/folder/name/for/pictures/{i:032d}.jpeg" for i in range(20_000)]
    data = make_data(20_000, 1000, dim=16, labels=False, images=make_noise(ids, 32))
    write_page(tmp_path / "report.html", with_leaves(data, 3000))
    assert 1_000_000 < (tmp_path / "report.html").stat().st_size <= 10_000_000
    content = content_of((tmp_path / "report.html").read_text())
    assert len(content["tree"]["numbers"]) > 2500
    assert content["ids"] == ids
    assert len(content["leaf"]) == 2 * 20_000


def test_leaves_are_left_out_with_the_names(monkeypatch, data):
    monkeypatch.setattr(page, "NAMES", 1000)
    content = content_of(render(data))
    assert (content["ids"], content["leaf"]) == (None, None)


def test_the_page_without_a_tree_is_as_before():
    """But for the map of clusters."""
    content = build.content(make_data())
    assert (content["tree"], content["leaf"], content["pictures"]["leaf"]) == (None, None, [])
    assert list(content["centers"]) == ["x", "y", "leafX", "leafY"]


# A run


@pytest.fixture(scope="module")
def digits_run(tiny_digits):
    from secu.apps.images import images_of
    from secu.train.listener import Listener

    return tiny_digits, images_of(tiny_digits, Listener())


@pytest.mark.parametrize("level", [2, 7, 13, 20])
def test_a_cut_of_the_leaves_is_what_the_program_predicts_at_that_level(digits_run, level):
    run, images = digits_run
    method = load_method(run, CPU)
    leaves = find_leaves(method.clustering, method.predictor().embed(images))
    groups = leaves.tree.cut(level)[leaves.leaf]
    expected = load_predictor(run, CPU, level).predict(images).cluster
    assert (groups == expected).float().mean() > 0.999  # of two nearly equal cosines, another one may win


def test_very_large_and_very_small_trees_are_left_out(digits_run, monkeypatch):
    run, images = digits_run
    method = load_method(run, CPU)
    embeddings = method.predictor().embed(images)
    whole = find_leaves(method.clustering, embeddings)
    monkeypatch.setattr("secu.results.leaves.AT_ONCE", 20 * 100)  # in parts
    assert torch.equal(find_leaves(method.clustering, embeddings).leaf, whole.leaf)
    monkeypatch.setattr("secu.results.leaves.MOST_LEAVES", 19)
    assert find_leaves(method.clustering, embeddings) is None
    monkeypatch.setattr("secu.results.leaves.MOST_LEAVES", 20)
    monkeypatch.setattr("secu.results.leaves.LEAST_LEAVES", 21)
    assert find_leaves(method.clustering, embeddings) is None


def test_the_table_of_a_run_has_the_leaf_of_every_image(digits_run):
    run, images = digits_run
    table = read_assignments(run.path / "assignments.csv", 10)
    method = load_method(run, CPU)
    results = find_results(run, method.predictor(), images, clustering=method.clustering)
    numbers = results.leaves.tree.leaves[results.leaves.leaf].tolist()
    assert list(map(int, table["leaf"])) == numbers
    content = content_of((run.path / "report.html").read_text())
    assert content["tree"]["numbers"] == results.leaves.tree.leaves.tolist()
    assert find_results(run, method.predictor(), images).leaves is None


def test_a_run_without_a_finer_head_has_no_column_of_leaves(digits_run, tmp_path):
    run, images = digits_run
    method = load_method(run, CPU)
    results = find_results(run, method.predictor(), images, clustering=method.clustering)
    same = own_leaves(replace_results(results))
    assert same.results.leaves.column(results.predictions.cluster) is None


def replace_results(results):
    return replace(make_data(), results=results)


# The table, read back

HEADER = "id,cluster,name,merged_cluster,marked_wrong,leaf"


def write_names(path, rows):
    path.write_text("\n".join([HEADER, *(",".join(row) for row in rows)]) + "\n")
    return path


CLUSTER_OF = {"a": 0, "b": 0, "c": 1, "d": 2}
ROWS = [
    ["a", "0", "", "0a", "no", "4"],
    ["b", "0", "stripes", "0b", "no", "5"],
    ["c", "1", "stripes", "0b", "no", "6"],
    ["d", "2", "", "2", "yes", "7"],
]


def test_images_of_a_split_cluster_go_into_different_folders(tmp_path):
    edits = read_edits(write_names(tmp_path / "names.csv", ROWS), 3, CLUSTER_OF)
    assert [edits.folder(name, cluster) for name, cluster in CLUSTER_OF.items()] == [
        "cluster-0a",
        *["stripes"] * 2,
        WRONG,
    ]
    with pytest.raises(UserError, match=r"names: there is no row for new\.png; download the table again"):
        edits.folder("new.png", 0)


def test_groups_of_a_cut_have_the_folders_of_that_level(tmp_path):
    rows = [["a", "0", "", "3", "no", "1"], ["b", "0", "", "10", "no", "2"], ["c", "1", "", "3", "no", "1"]]
    edits = read_edits(write_names(tmp_path / "names.csv", rows), 3, CLUSTER_OF)
    assert [edits.folder(name, 0) for name in "abc"] == ["cluster-03", "cluster-10", "cluster-03"]


@pytest.mark.parametrize("merged", ["", "3c", "a", "-1", "0a0", "1234567890", "٣"])
def test_a_table_with_other_labels_is_refused(tmp_path, merged):
    table = write_names(tmp_path / "names.csv", [["a", "0", "", merged, "no", "4"]])
    with pytest.raises(UserError, match="was not downloaded from the report"):
        read_rows(table, 3)


def test_a_part_and_a_name_that_become_one_folder_are_refused(tmp_path):
    rows = [["a", "0", "", "0a", "no", "4"], ["b", "0", "cluster-0a", "0b", "no", "5"]]
    table = write_names(tmp_path / "names.csv", rows)
    with pytest.raises(UserError, match="'cluster 0a' and 'cluster-0a' would share the folder cluster-0a"):
        read_edits(table, 3, CLUSTER_OF)


def test_a_table_of_a_cut_belongs_to_its_run(tmp_path):
    table = write_names(tmp_path / "names.csv", ROWS)
    with pytest.raises(UserError, match="belongs to another run"):
        read_edits(table, 3, dict.fromkeys("abcd", 1))
