"""The tree of a run's finest clusters: as text, and cut at any level by predict and sort."""

import json
from pathlib import Path

import pytest
import torch

from own_images import fitted, rows_of, write_folder
from secu.apps.images import load_inputs
from secu.apps.predict import predict_source
from secu.apps.ranges import Range
from secu.apps.sort import sort_run
from secu.apps.trees import newick, nodes_of, write_tree
from secu.base.errors import UserError
from secu.cluster.clustering import Clustering
from secu.cluster.tree import Tree, grow_tree
from secu.data import Images, open_source
from secu.settings import resolve
from secu.train.checkpoint import FINEST, load_method, load_predictor, method_of
from secu.train.run import Run

CPU = torch.device("cpu")


def random_tree(leaves: int, seed: int = 0) -> Tree:
    points = torch.randn(leaves, 6, generator=torch.Generator().manual_seed(seed))
    return grow_tree(points, 2 * torch.arange(leaves) + 1, 0)  # the leaves are clusters 1, 3, 5, …


def leaves_under(nodes: list[dict], number: int) -> set[int]:
    node = nodes[number]
    if "cluster" in node:
        return {node["cluster"]}
    return set.union(*(leaves_under(nodes, child) for child in node["children"]))


def parsed(text: str) -> tuple[set[frozenset[str]], dict[str, float]]:
    """Read Newick without recursion: the set of leaves of each bracket, and the distance of each leaf from the root."""
    assert text.endswith(";")
    open_brackets: list[list[str]] = []
    brackets: set[frozenset[str]] = set()
    depth: dict[str, float] = {}
    last: list[str] = []
    word = ""
    for letter in text[:-1] + ",":
        if letter in "(),":
            name, _, length = word.partition(":")
            if name:
                last = [name]
            for leaf in last if length else ():
                depth[leaf] = depth.get(leaf, 0.0) + float(length)
            word = ""
        if letter == "(":
            open_brackets.append([])
        elif letter in "),":
            if open_brackets:
                open_brackets[-1] += last
            last = []
            if letter == ")":
                last = open_brackets.pop()
                brackets.add(frozenset(last))
        else:
            word += letter
    return brackets, depth


# As text


@pytest.mark.parametrize("leaves", [2, 3, 9, 30])
def test_newick_has_the_groups_and_heights_of_the_tree(leaves):
    nodes = nodes_of(random_tree(leaves))
    brackets, depth = parsed(newick(nodes))
    inner = [leaves_under(nodes, n) for n, node in enumerate(nodes) if "children" in node]
    assert brackets == {frozenset(f"c{leaf}" for leaf in group) for group in inner}
    assert depth == pytest.approx(dict.fromkeys(depth, nodes[-1]["height"]), abs=1e-4)
    assert len(depth) == leaves


@pytest.mark.parametrize("seed", range(3))
def test_children_are_apart_in_cuts_from_the_stated_number_of_groups_on(seed):
    tree = random_tree(12, seed)
    nodes = nodes_of(tree)
    position = {cluster: n for n, cluster in enumerate(tree.leaves.tolist())}
    for level in range(2, 13):
        group_of = tree.cut(level).tolist()
        for node in nodes[12:]:
            sides = [{group_of[position[leaf]] for leaf in leaves_under(nodes, child)} for child in node["children"]]
            assert (not sides[0] & sides[1]) is (level >= node["apart_from"])


# Which tree


def test_without_a_stored_tree_that_of_the_centers_is_used():
    clustering = Clustering(resolve({"heads": [3, 6, 5]}), 20, 4)
    tree = clustering.finest_tree()
    assert int(tree.head) == 1
    assert tree.leaves.tolist() == list(range(6))
    assert torch.equal(tree.linkage, grow_tree(clustering.head(1), torch.arange(6), 1).linkage)


def test_a_tree_grown_on_images_is_better_than_one_of_centers():
    clustering = Clustering(resolve({"heads": [3, 6, 5]}), 20, 4)
    clustering.tree = random_tree(3)._replace(head=torch.tensor(2), leaves=torch.tensor([0, 1, 2]))
    assert clustering.finest_tree() is clustering.tree
    clustering.finest = random_tree(3)._replace(head=torch.tensor(1))
    assert clustering.finest_tree() is clustering.finest


# A run


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("pictures"), 90)


@pytest.fixture(scope="module")
def run(pictures, tmp_path_factory) -> Run:
    """Return a short run that chose its number of clusters; every test reads it and none changes it."""
    careful = {  # so that so short a run has clusters in all heads
        "optim": {"epochs": 6, "warmup_epochs": 0, "lr": 0.02},
        "encoder": {"dim": 16},
        "constraint": {"kind": "entropy"},
        "centers": {"kind": "closed_form"},
    }
    place = tmp_path_factory.mktemp("runs")
    return fitted(place, pictures, Range(2, 5), encoder="scratch", overrides=careful, report=True)


def test_the_run_chose_one_of_the_sizes_and_says_why(run):
    number = run.outcome()["number"]
    assert run.config().clusters == number["recommended"] in (2, 3, 4, 5)
    assert number["low"] <= number["recommended"] <= number["high"]
    assert run.number_reasons() == tuple(number["reasons"])
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert "How many clusters?" in page
    assert number["reasons"][0] in page


def test_damaged_reasons_are_one_line(run, tmp_path):
    path = tmp_path / "outcome.json"
    path.write_text(json.dumps({"number": {"reasons": [1]}}))
    with pytest.raises(UserError, match="number must have reasons"):
        Run(tmp_path).outcome()


def test_the_tree_is_written_and_printed(run, tmp_path, capsys):
    tree = write_tree(run, "-")
    printed = capsys.readouterr().out
    write_tree(run, str(tmp_path / "a.nwk"))
    write_tree(run, str(tmp_path / "a.json"))
    assert (tmp_path / "a.nwk").read_text() == printed
    content = json.loads((tmp_path / "a.json").read_text())
    assert content == {"clusters": len(tree.leaves), "nodes": nodes_of(tree)}


@pytest.mark.parametrize(
    ("output", "message"), [("a.png", "must end in .nwk or .json"), ("no/a.nwk", "does not exist")]
)
def test_a_bad_output_is_refused(run, tmp_path, monkeypatch, output, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        write_tree(run, output)


def test_predict_at_a_level_cuts_the_tree_of_the_finest_head(run, pictures, tmp_path):
    predict_source(run, open_source(str(pictures)), str(tmp_path / "a.csv"), "cpu", level=4)
    rows = rows_of(tmp_path / "a.csv")
    assert "outlier" not in rows[0]
    method = load_method(run, CPU)
    tree = method.clustering.finest_tree()
    assert method.clustering.heads[int(tree.head)] == max(run.config().heads)
    images = load_images(run, pictures)
    cosines = method.predictor().embed(images) @ method.clustering.head(int(tree.head))[tree.leaves].T
    expected = tree.cut(4)[cosines.argmax(-1)]
    assert [int(row["cluster"]) for row in rows] == expected.tolist()


def load_images(run: Run, pictures: Path) -> Images:
    return load_inputs(run.config(), open_source(str(pictures)), device="cpu")


@pytest.mark.parametrize("level", [-1, 0, 1, 99])
def test_an_impossible_level_is_refused(run, level):
    with pytest.raises(UserError, match=rf"level: {level} must be a number of groups from 2 to \d+"):
        load_predictor(run, CPU, level)


def test_sort_at_a_level_has_a_folder_for_each_group(run, tmp_path):
    sort_run(run, tmp_path / "sorted", copy=False, level=4, device="cpu")
    assert len(list((tmp_path / "sorted").iterdir())) == 4
    with pytest.raises(UserError, match="not those of --level 4"):
        sort_run(run, tmp_path / "other", copy=False, level=4, names=tmp_path / "names.csv", device="cpu")
    with pytest.raises(UserError, match="level: 99"):
        sort_run(run, tmp_path / "other", copy=False, level=99, device="cpu")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sorted"]


@pytest.mark.parametrize("key", FINEST)
def test_a_damaged_tree_is_one_line(run, key):
    tensors = run.load_model()
    assert key in tensors
    with pytest.raises(UserError, match="the tree of clusters in this model is damaged"):
        method_of(run.config(), {**tensors, key: torch.zeros(3)}, CPU, "this model")
