"""Pictures in one folder per cluster: links or copies, most typical first, and nothing at all when something fails."""

import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from own_images import SHORT, digits, fitted, rows_of, tree, write_folder, write_zip
from secu.apps.originals import put
from secu.apps.sort import sort_run
from secu.base.errors import UserError
from secu.data import Images
from secu.data.sources.archives import TarSource
from secu.settings import merge
from secu.train.listener import Listener

pytestmark = pytest.mark.usefixtures("own_cache")

HOSTILE = [
    "a\nb.png",
    "<img src=x>.png",
    "-rf.png",
    "$(touch x).png",
    "sp ace.png",
    "猫" * 80 + ".png",
    "x" * 251 + ".png",
]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("pictures") / "digits", 60)


@pytest.fixture(scope="module")
def run(tmp_path_factory, pictures):
    made = fitted(tmp_path_factory.mktemp("fitted"), pictures, overrides=merge(SHORT, {"optim": {"epochs": 12}}))
    assert sum(map(bool, best_first(made))) > 1, "one cluster has all images: nothing to sort"
    return made


def best_first(run):
    """Return the ids of each cluster's images by falling cosine."""
    rows = rows_of(run.path / "assignments.csv")
    clusters = [[row for row in rows if row["cluster"] == str(cluster)] for cluster in range(3)]
    return [[row["id"] for row in sorted(c, key=lambda row: -float(row["cosine"]))] for c in clusters]


@pytest.mark.parametrize("copy", [False, True])
def test_every_picture_lies_in_the_folder_of_its_cluster_best_first(run, pictures, tmp_path, copy):
    assert sort_run(run, tmp_path / "sorted", copy=copy) == 60
    assert sorted(path.name for path in (tmp_path / "sorted").iterdir()) == ["cluster-0", "cluster-1", "cluster-2"]
    cosine = {row["id"]: row["cosine"] for row in rows_of(run.path / "assignments.csv")}
    original = {os.path.basename(name): name for name in cosine}
    for cluster, expected in enumerate(best_first(run)):
        files = sorted((tmp_path / "sorted" / f"cluster-{cluster}").iterdir())
        assert [path.name[:7] for path in files] == [f"{rank:06d}-" for rank in range(len(expected))]
        found = [original[path.name[7:]] for path in files]
        assert sorted(found) == sorted(expected)
        assert [cosine[name] for name in found] == [cosine[name] for name in expected]  # equal ones may change places
        for path, name in zip(files, found, strict=True):
            assert path.is_symlink() is not copy
            assert path.read_bytes() == (pictures / name).read_bytes()
            assert copy or path.resolve() == pictures / name


def test_a_compressed_archive_is_read_from_its_start_to_its_end(pictures, tmp_path, monkeypatch):
    """Going back in it means to unpack it from its start."""
    with tarfile.open(tmp_path / "p.tar.gz", "w:gz") as archive:
        archive.add(pictures, "p")
    run = fitted(tmp_path, tmp_path / "p.tar.gz")
    read = []
    usual = TarSource.read

    def noted(source, i, values=None):
        read.append(source.position(i))
        return usual(source, i, values)

    monkeypatch.setattr(TarSource, "read", noted)
    assert sort_run(run, tmp_path / "sorted", copy=True) == 60
    assert len(read) == 120  # decoded, then unpacked
    assert read[60:] == sorted(read)[::2]


def test_links_hold_wherever_one_stands(run, pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sort_run(run, Path("deep/er/sorted"), copy=False)
    links = list((tmp_path / "deep").rglob("*.png"))
    assert len(links) == 60
    assert all(os.path.isabs(os.readlink(link)) and link.exists() for link in links)


def test_copies_do_not_need_the_originals(pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "p")
    run = fitted(tmp_path, tmp_path / "p")
    sort_run(run, tmp_path / "sorted", copy=True)
    shutil.rmtree(tmp_path / "p")
    for path in (tmp_path / "sorted").rglob("*.png"):
        with Image.open(path) as image:
            assert image.size == (8, 8)


def test_copies_are_not_put_where_a_glob_would_find_them(pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "p")
    run = fitted(tmp_path, str(tmp_path / "p" / "**" / "*.png"))
    with pytest.raises(
        UserError, match=r"sort: .*sorted is inside .*p, so the next run would include the sorted files"
    ):
        sort_run(run, tmp_path / "p" / "sorted", copy=True)
    assert sort_run(run, tmp_path / "sorted", copy=True) == 60


@pytest.mark.parametrize("kind", ["folder", "empty folder", "file", "link to a folder", "link to nothing"])
def test_what_exists_is_left_alone(run, tmp_path, kind):
    place = tmp_path / "sorted"
    if kind == "file":
        place.write_text("mine")
    elif kind == "link to nothing":
        place.symlink_to(tmp_path / "nothing")
    else:
        real = tmp_path / "real" if "link" in kind else place
        real.mkdir()
        if kind == "folder":
            (real / "mine.txt").write_text("mine")
        if real != place:
            place.symlink_to(real)
    before = tree(tmp_path)
    with pytest.raises(UserError, match=r"sort: .*sorted already exists; choose a new folder"):
        sort_run(run, place, copy=False)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("copy", [False, True])
def test_hostile_names_become_plain_ones(tmp_path, copy):
    (tmp_path / "p").mkdir()
    names = [*HOSTILE, os.fsdecode(b"\xff\xfe.png")]
    for name, pixels in zip(names, digits(20)[0], strict=False):
        Image.fromarray(pixels).save(tmp_path / "p" / name)
    run = fitted(tmp_path, tmp_path / "p", 2)
    assert sort_run(run, tmp_path / "sorted", copy=copy) == len(names)
    files = list((tmp_path / "sorted").rglob("*.png"))
    assert len(files) == len(names)
    for path in files:
        assert path.exists()
        assert len(os.fsencode(path.name)) <= 255
        assert not set(path.name) & set("\n<> $()/\\&;'\"")
        path.name.encode()
    assert any("猫" in path.name for path in files)


def test_equal_names_from_different_folders_do_not_collide(tmp_path):
    for number, pixels in enumerate(digits(20)[0]):
        (tmp_path / "p" / str(number)).mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / "p" / str(number) / "scan.png")
    assert sort_run(fitted(tmp_path, tmp_path / "p", 2), tmp_path / "sorted", copy=True) == 20
    assert len(list((tmp_path / "sorted").rglob("*.png"))) == 20


@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("kind", ["array", "archive"])
def test_images_that_are_no_files_are_written_as_they_are(tmp_path, kind, color):
    folder = write_folder(tmp_path / "p", 30, color=color)
    pixels = np.stack([np.asarray(Image.open(path)) for path in sorted(folder.rglob("*.png"))])
    if kind == "array":
        source = tmp_path / "a.npy"
        np.save(source, pixels)
    else:
        source = write_zip(tmp_path / "a.zip", folder)
    run = fitted(tmp_path, source)
    assert sort_run(run, tmp_path / "sorted", copy=False) == 30
    files = list((tmp_path / "sorted").rglob("*.png"))
    assert len(files) == 30
    if kind == "array":
        for path in files:
            assert np.array_equal(np.asarray(Image.open(path)), pixels[int(path.stem.split("-")[1])])
    else:
        inside = {path.name: path.read_bytes() for path in folder.rglob("*.png")}
        assert {path.name.partition("-")[2]: path.read_bytes() for path in files} == inside


def write_names(path, run, names, merged, wrong=()):
    """Write what the report downloads."""
    lines = ["id,cluster,name,merged_cluster,marked_wrong"]
    for row in rows_of(run.path / "assignments.csv"):
        cluster = int(row["cluster"])
        marked = "yes" if row["id"] in wrong else "no"
        lines.append(f"{row['id']},{cluster},{names[cluster]},{merged[cluster]},{marked}")
    path.write_text("\r\n".join(lines) + "\r\n", encoding="utf-8")
    return path


def test_names_merges_and_marks_of_the_report_become_folders(run, tmp_path):
    groups = best_first(run)
    wrong = set(max(groups, key=len)[:2])
    table = write_names(tmp_path / "t.csv", run, ["../big <cats>", "", "../big <cats>"], [0, 1, 0], wrong)
    assert sort_run(run, tmp_path / "sorted", copy=False, names=table) == 60
    found = {path.name: sorted(path.iterdir()) for path in (tmp_path / "sorted").iterdir()}
    left = [len(set(group) - wrong) for group in groups]
    sizes = {"big_cats": left[0] + left[2], "cluster-1": left[1], "marked-as-wrong": 2}
    assert {name: len(files) for name, files in found.items()} == {name: sizes[name] for name in found}
    assert sum(map(len, found.values())) == 60
    cosine = {row["id"]: float(row["cosine"]) for row in rows_of(run.path / "assignments.csv")}
    for files in found.values():
        ids = ["/".join(path.resolve().parts[-2:]) for path in files]
        assert [path.name[:7] for path in files] == [f"{rank:06d}-" for rank in range(len(files))]
        assert [cosine[name] for name in ids] == sorted((cosine[name] for name in ids), reverse=True)


HEAD = "id,cluster,name,merged_cluster,marked_wrong\n"


@pytest.mark.parametrize(
    "text", ["", "id,cluster\n1,2\n", HEAD, HEAD + "x,3,a,0,no\n", HEAD + "x,-1,a,0,no\n", HEAD + "x,0,a,x,no\n"]
)
def test_a_table_of_something_else_is_refused(run, tmp_path, text):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UserError, match=r"names: .*t.csv was not downloaded from the report"):
        sort_run(run, tmp_path / "sorted", copy=False, names=tmp_path / "t.csv")
    with pytest.raises(UserError, match=r"names: cannot read .*gone.csv"):
        sort_run(run, tmp_path / "sorted", copy=False, names=tmp_path / "gone.csv")
    assert not (tmp_path / "sorted").exists()


def test_a_table_of_another_run_is_refused(run, tmp_path):
    """Its clusters have other numbers."""
    table = write_names(tmp_path / "t.csv", run, ["a", "b", "c"], [0, 1, 2])
    turned = {"0": "1", "1": "2", "2": "0"}
    head, *rows = [line.split(",") for line in table.read_text().splitlines()]
    table.write_text("\n".join(",".join(row) for row in [head, *([row[0], turned[row[1]], *row[2:]] for row in rows)]))
    with pytest.raises(
        UserError, match=r"belongs to another run: it knows 60 of 60 images, and 0 of those in the same"
    ):
        sort_run(run, tmp_path / "sorted", copy=False, names=table)
    table.write_text(HEAD + "nothing.png,0,cats,0,no\n")
    with pytest.raises(UserError, match=r"belongs to another run: it knows 0 of 60 images"):
        sort_run(run, tmp_path / "sorted", copy=False, names=table)


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_a_table_that_a_spreadsheet_saved(run, tmp_path, delimiter):
    table = write_names(tmp_path / "t.csv", run, ["a", "b", "c"], [0, 1, 2])
    table.write_text(table.read_text().replace(",", delimiter), encoding="utf-8-sig")
    sort_run(run, tmp_path / "sorted", copy=False, names=table)
    assert {path.name for path in (tmp_path / "sorted").iterdir()} <= {"a", "b", "c"}


@pytest.mark.parametrize("name", ["dog!", ""])
def test_names_that_become_one_folder_are_refused(run, tmp_path, name):
    """Two names, or a name and the number of a cluster without one."""
    one, other = [cluster for cluster, group in enumerate(best_first(run)) if group][:2]
    names = ["", "", ""]
    names[one] = "dog?" if name else f"cluster-{other}"
    names[other] = name
    table = write_names(tmp_path / "t.csv", run, names, [0, 1, 2])
    with pytest.raises(UserError, match=r"names: '.*' and '.*' would share the folder (dog|cluster-\d); rename one"):
        sort_run(run, tmp_path / "sorted", copy=False, names=table)
    names[one] = names[other] = "dog"  # wanted so
    write_names(table, run, names, [0, 1, 2])
    sort_run(run, tmp_path / "sorted", copy=False, names=table)
    found = {path.name for path in (tmp_path / "sorted").iterdir()}
    assert "dog" in found
    assert found.isdisjoint({f"cluster-{one}", f"cluster-{other}"})


def test_images_of_an_array_carry_the_number_of_their_row(tmp_path):
    pixels = digits(40)[0].copy()
    np.save(tmp_path / "a.npy", pixels)
    run = fitted(tmp_path, tmp_path / "a.npy")
    pixels[5] = 255 - pixels[5]
    np.save(tmp_path / "a.npy", pixels)
    assert sort_run(run, tmp_path / "sorted", copy=False) == 39
    numbers = {int(path.stem[7:]): path for path in (tmp_path / "sorted").rglob("*.png")}
    assert numbers.keys() == set(range(40)) - {5}
    for number, path in numbers.items():
        assert (np.asarray(Image.open(path)) == pixels[number]).all()


def test_an_id_cannot_lead_out_of_the_folder(tmp_path):
    """A source from outside may give any ids to images that are no files."""
    (tmp_path / "sorted").mkdir()
    images = Images(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), ids=("../a/b c",))
    put(images, 0, tmp_path / "sorted", 7, copy=True, command="sort")
    assert tree(tmp_path) == ["sorted", "sorted/000007-.._a_b_c.png"]


def test_a_data_set_is_sorted_too(tiny_digits, tmp_path):
    assert sort_run(tiny_digits, tmp_path / "sorted", copy=False) == 1797
    cluster = {row["id"]: row["cluster"] for row in rows_of(tiny_digits.path / "assignments.csv")}
    files = list((tmp_path / "sorted").rglob("*.png"))
    assert {path.stem[7:]: path.parent.name.removeprefix("cluster-") for path in files} == cluster
    with Image.open(files[0]) as image:
        assert (image.mode, image.size) == ("L", (8, 8))


def test_bad_files_are_not_sorted(pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "p")
    (tmp_path / "p" / "0" / "1a.png").write_text("x")  # among the others, so that numbers shift
    run = fitted(tmp_path, tmp_path / "p")
    assert sort_run(run, tmp_path / "sorted", copy=False) == 60
    links = {path.resolve() for path in (tmp_path / "sorted").rglob("*.png")}
    assert len(links) == 60
    assert not any(path.name == "1a.png" for path in links)


def test_many_clusters_sort_by_name_as_by_number(tmp_path):
    run = fitted(tmp_path, write_folder(tmp_path / "p", 40), 11)
    sort_run(run, tmp_path / "sorted", copy=False)
    names = sorted(path.name for path in (tmp_path / "sorted").iterdir())
    assert names == [f"cluster-{number:02d}" for number in range(11)]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_after_an_error(run, tmp_path, monkeypatch, error):
    calls = []

    def full(source, target):
        calls.append(target)
        if len(calls) == 10:
            raise error
        target.write_text("x")

    monkeypatch.setattr(shutil, "copy2", full)
    expected = UserError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(
        expected, match=r"sort: cannot write .*sorted: No space left" if expected is UserError else None
    ):
        sort_run(run, tmp_path / "new" / "sorted", copy=True)
    assert len(calls) == 10
    assert tree(tmp_path) == []


def test_a_disk_without_links_is_reported_and_nothing_is_left(run, tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    with pytest.raises(UserError, match=r"sort: this disk has no links \(Operation not permitted\); use --copy"):
        sort_run(run, tmp_path / "new" / "sorted", copy=False)
    assert tree(tmp_path) == []


def test_a_bad_table_of_names_is_refused_before_any_image_is_read(run, tmp_path, monkeypatch):
    monkeypatch.setattr("secu.apps.sort.images_of", None)
    (tmp_path / "t.csv").write_bytes(b"id,cluster\n" + b"x" * 200_000)
    for name, message in (("t.csv", "was not downloaded"), ("gone.csv", "cannot read")):
        with pytest.raises(UserError, match=message):
            sort_run(run, tmp_path / "new" / "sorted", copy=False, names=tmp_path / name)
    assert tree(tmp_path) == ["t.csv"]


def test_a_destination_that_cannot_be_created_is_refused_before_any_image_is_read(run, tmp_path, monkeypatch):
    monkeypatch.setattr("secu.apps.sort.images_of", None)
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "sorted", tmp_path / "new" / ("x" * 300)):
        with pytest.raises(UserError, match=r"cannot create .*(File exists|File name too long)"):
            sort_run(run, place, copy=False)
    assert tree(tmp_path) == ["file"]


@pytest.mark.parametrize("copy", [False, True])
def test_an_original_that_vanishes_meanwhile_is_reported_and_nothing_is_left(run, tmp_path, monkeypatch, copy):
    usual = Images.original

    def moved(images, i):
        found = usual(images, i)
        return found.with_name("gone.png") if i == 7 else found

    monkeypatch.setattr(Images, "original", moved)
    with pytest.raises(UserError, match=r"sort: .*gone.png does not exist any more; restore it"):
        sort_run(run, tmp_path / "sorted", copy=copy)
    assert tree(tmp_path) == []


def test_a_damaged_archive_is_reported_and_nothing_is_left(run, tmp_path, monkeypatch):
    def damaged(images, i):
        raise EOFError("Compressed file ended")

    monkeypatch.setattr(Images, "original", damaged)
    with pytest.raises(UserError, match=r"sort: cannot read .*png: Compressed file ended"):
        sort_run(run, tmp_path / "sorted", copy=True)
    assert tree(tmp_path) == []


def test_a_disk_that_ignores_case_does_not_mix_two_clusters(run, tmp_path, monkeypatch):
    table = write_names(tmp_path / "t.csv", run, ["Cats", "cats", "CATS"], [0, 1, 2])
    usual = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", lambda path, *a, **k: usual(path.with_name(path.name.lower()), *a, **k))
    with pytest.raises(UserError, match=r"names: (Cats|cats|CATS) and another name are the same folder on this disk"):
        sort_run(run, tmp_path / "sorted", copy=False, names=table)
    assert tree(tmp_path) == ["t.csv"]


def test_a_cluster_must_not_have_the_name_of_the_folder_for_wrong_images(run, tmp_path):
    wrong = set(max(best_first(run), key=len)[:1])
    table = write_names(
        tmp_path / "t.csv", run, ["marked as wrong", "marked-as-wrong", "marked-as-wrong"], [0, 1, 1], wrong
    )
    with pytest.raises(UserError, match=r"'images marked as wrong' and 'marked-as-wrong' would share the folder"):
        sort_run(run, tmp_path / "sorted", copy=False, names=table)


def test_an_original_that_vanished_is_reported_and_nothing_is_left(pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "p")
    run = fitted(tmp_path, tmp_path / "p")
    shutil.rmtree(tmp_path / "p")
    with pytest.raises(UserError, match="p does not exist"):
        sort_run(run, tmp_path / "sorted", copy=True)
    assert not (tmp_path / "sorted").exists()


class Notes(Listener):
    """Collects remarks."""

    def __init__(self):
        self.texts = []

    def note(self, text):
        self.texts.append(text)


def test_images_that_are_new_gone_or_changed_are_not_sorted(pictures, tmp_path):
    """New ones are left out silently; those that are gone or changed are reported."""
    shutil.copytree(pictures, tmp_path / "p")
    run = fitted(tmp_path, tmp_path / "p")
    Image.new("RGB", (9, 9), "red").save(tmp_path / "p" / "0" / "00.png")
    names = sorted((tmp_path / "p" / "1").iterdir())
    names[0].unlink()
    Image.new("L", (8, 8), 9).save(names[1])
    notes = Notes()
    assert sort_run(run, tmp_path / "sorted", copy=True, listener=notes) == 58
    (line,) = notes.texts
    assert line.startswith("2 of 60 images of the run are left out: 1 gone (first 1/")
    cluster = {os.path.basename(row["id"]): row["cluster"] for row in rows_of(run.path / "assignments.csv")}
    files = list((tmp_path / "sorted").rglob("*.png"))
    assert {path.name[7:] for path in files} == cluster.keys() - {names[0].name, names[1].name}
    assert all(path.parent.name == f"cluster-{cluster[path.name[7:]]}" for path in files)


def test_others_may_look_into_the_folder(run, tmp_path):
    before = os.umask(0o022)
    try:
        sort_run(run, tmp_path / "sorted", copy=False)
    finally:
        os.umask(before)
    assert (tmp_path / "sorted").stat().st_mode & 0o777 == 0o755
