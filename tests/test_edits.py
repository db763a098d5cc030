"""The table that the report downloads becomes folders, and a table of anything else is refused."""

import os

import pytest

from secu.base.errors import UserError
from secu.results import edits
from secu.results.edits import Edits, ranked, read_edits

HEADER = "id,cluster,name,merged_cluster,marked_wrong"
CLUSTER_OF = {f"{number}.png": number % 3 for number in range(60)}


def rows_of(names=("", "", ""), merged=(0, 1, 2), wrong=()):
    """Return the rows of a download."""
    return [
        [name, str(cluster), names[cluster], str(merged[cluster]), "yes" if name in wrong else "no"]
        for name, cluster in CLUSTER_OF.items()
    ]


def write(path, rows, header=HEADER):
    path.write_text("\r\n".join([header, *(",".join(row) for row in rows)]) + "\r\n", encoding="utf-8")
    return path


@pytest.fixture
def table(tmp_path):
    return tmp_path / "names.csv"


def test_without_a_table_folders_have_numbers_that_sort():
    assert read_edits(None, 3, {}) == Edits(["cluster-0", "cluster-1", "cluster-2"], set())
    folders = read_edits(None, 101, {}).folders
    assert folders == sorted(folders) == [f"cluster-{number:03d}" for number in range(101)]
    assert read_edits(None, 10, {}).folders[9] == "cluster-9"


def test_names_merges_and_marks_become_folders(table):
    write(table, rows_of(["../big <cats>", "", "../big <cats>"], [0, 1, 0], {"4.png", "5.png"}))
    found = read_edits(table, 3, CLUSTER_OF)
    assert found == Edits(["big_cats", "cluster-1", "big_cats"], {"4.png", "5.png"})


def test_merged_clusters_without_a_name_share_the_number_of_the_whole(table):
    assert read_edits(write(table, rows_of(merged=[2, 1, 2])), 3, CLUSTER_OF).folders == [
        "cluster-2",
        "cluster-1",
        "cluster-2",
    ]


def test_a_cluster_that_the_table_does_not_mention_keeps_its_number(table):
    rows = [row for row in rows_of(["a", "b", "c"]) if row[1] != "1"]
    assert read_edits(write(table, rows), 3, CLUSTER_OF).folders == ["a", "cluster-1", "c"]


def test_columns_are_found_by_name(table):
    rows = [[*reversed(row)] for row in rows_of(["a", "b", "c"], wrong={"7.png"})]
    write(table, rows, ",".join(reversed(HEADER.split(","))))
    assert read_edits(table, 3, CLUSTER_OF) == Edits(["a", "b", "c"], {"7.png"})


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("sp ace/..", "sp_ace"),
        ("..hidden..", "hidden"),
        ("$(rm -rf)", "rm_-rf"),
        ("猫", "猫"),
        ("猫" * 80, "猫" * 66),  # 200 bytes hold 66 of three
        ("x" * 251, "x" * 200),
        ("?!", "cluster-0"),  # nothing is left of it
    ],
)
def test_names_become_safe_folders(table, name, folder):
    assert read_edits(write(table, rows_of([name, "b", "c"])), 3, CLUSTER_OF).folders[0] == folder


def test_a_disarmed_formula_is_the_same_id(table):
    """The report puts an apostrophe before what a spreadsheet would compute."""
    ids = {"=1+1.png": 0, "-x.png": 1, "'quoted.png": 1}
    rows = [
        ["'=1+1.png", "0", "a", "0", "yes"],
        ["'-x.png", "1", "b", "1", "yes"],
        ["'quoted.png", "1", "b", "1", "no"],
    ]
    assert read_edits(write(table, rows), 2, ids) == Edits(["a", "b"], {"=1+1.png", "-x.png"})


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_a_table_that_a_spreadsheet_saved(table, delimiter):
    write(table, rows_of(["a", "b", "c"]))
    table.write_text(table.read_text().replace(",", delimiter), encoding="utf-8-sig")
    assert read_edits(table, 3, CLUSTER_OF).folders == ["a", "b", "c"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "id,cluster\n1,2\n",
        f"{HEADER}\n",
        f"{HEADER}\nx,3,a,0,no\n",
        f"{HEADER}\nx,-1,a,0,no\n",
        f"{HEADER}\nx,00,a,0,no\n",
        f"{HEADER}\nx,0,a,x,no\n",
        f"{HEADER}\nx,0,a\n",
        "id,cluster,merged_cluster,marked_wrong,name\nx,0,0,no\n",
    ],
)
def test_a_table_of_something_else_is_refused(table, text):
    table.write_text(text)
    with pytest.raises(UserError, match=r"names: .*names.csv was not downloaded from the report of this run"):
        read_edits(table, 3, CLUSTER_OF)


def test_bytes_that_are_no_text_are_refused(table):
    table.write_bytes(HEADER.encode() + b"\n\xff\xfe,0,a,0,no\n")
    with pytest.raises(UserError, match="was not downloaded from the report"):
        read_edits(table, 3, CLUSTER_OF)


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(UserError, match=r"names: cannot read .*gone.csv: No such file"):
        read_edits(tmp_path / "gone.csv", 3, CLUSTER_OF)


def test_a_table_of_another_run_is_refused(table):
    """Its clusters have other numbers."""
    rows = [[row[0], str((int(row[1]) + 1) % 3), *row[2:]] for row in rows_of(["a", "b", "c"])]
    counts = r"it knows 60 of 60 images, and 0 of those in the same cluster"
    with pytest.raises(UserError, match=rf"names: .*names.csv belongs to another run: {counts}"):
        read_edits(write(table, rows), 3, CLUSTER_OF)
    with pytest.raises(UserError, match=r"belongs to another run: it knows 0 of 60 images"):
        read_edits(write(table, [["nothing.png", "0", "cats", "0", "no"]]), 3, CLUSTER_OF)


@pytest.mark.parametrize(("moved", "accepted"), [(3, True), (4, False)])
def test_a_few_images_may_be_in_other_clusters(table, moved, accepted):
    """On another device; five in a hundred, and three of sixty are that many."""
    rows = rows_of(["a", "b", "c"])
    for row in rows[:moved]:
        row[1] = str((int(row[1]) + 1) % 3)
        row[2] = "abc"[int(row[1])]
        row[3] = row[1]
    write(table, rows)
    if accepted:
        assert read_edits(table, 3, CLUSTER_OF).folders == ["a", "b", "c"]
    else:
        with pytest.raises(UserError, match="56 of those in the same cluster"):
            read_edits(table, 3, CLUSTER_OF)


def test_images_that_the_run_does_not_know_do_not_count(table):
    rows = [*rows_of(["a", "b", "c"]), *([f"new-{number}.png", "0", "a", "0", "no"] for number in range(500))]
    assert read_edits(write(table, rows), 3, CLUSTER_OF).folders == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("names", "shared"),
    [
        (["dog?", "dog!", "c"], "'dog?' and 'dog!' would share the folder dog; rename one"),
        (["cluster-1", "", "c"], "'cluster-1' and 'cluster 1' would share the folder cluster-1; rename one"),
    ],
)
def test_different_names_that_become_one_folder_are_refused(table, names, shared):
    with pytest.raises(UserError) as caught:
        read_edits(write(table, rows_of(names)), 3, CLUSTER_OF)
    assert str(caught.value) == f"names: {shared}"


def test_equal_names_share_a_folder_on_purpose(table):
    assert read_edits(write(table, rows_of(["dog", "dog", "c"])), 3, CLUSTER_OF).folders == ["dog", "dog", "c"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.png", "000007-a.png"),
        ("sp ace\n<b>.png", "000007-sp_ace_b_.png"),
        ("-rf.png", "000007--rf.png"),
        ("$(touch x).png", "000007-_touch_x_.png"),
        (os.fsdecode(b"\xff.png"), "000007-_.png"),
        ("猫" * 80 + ".png", "000007-" + "猫" * 65 + ".png"),
        ("x" * 251 + ".png", "000007-" + "x" * 196 + ".png"),
    ],
)
def test_a_ranked_name_is_safe_and_keeps_its_suffix(name, expected):
    assert ranked(7, name) == expected
    assert len(os.fsencode(expected)) <= 255


def test_the_constants_are_what_users_rely_on():
    assert edits.WRONG == "marked-as-wrong"
    assert (edits.LONGEST, edits.SAME) == (200, 0.95)
