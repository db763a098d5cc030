"""Folders, patterns, manifests and arrays → a list of images."""

import csv
import os
import pickle
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from PIL import Image

from secu.base.errors import UserError
from secu.base.names import printable
from secu.data import ArraySource, BadImage, decoded, decoded_in_batches, load_images, open_source
from secu.data.text import natural


def put(folder, *names, size=(6, 4), mode="RGB"):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, size).save(path, "PNG")


def test_a_nested_folder_in_natural_order(tmp_path):
    put(tmp_path, "img10.png", "img2.png", "b/1.jpg", "a b/2.JPG", "a/x/3.jpeg", "01.png", "1.png")
    wanted = ("01.png", "1.png", "a/x/3.jpeg", "a b/2.JPG", "b/1.jpg", "img2.png", "img10.png")
    assert open_source(str(tmp_path)).ids == wanted


def test_hidden_and_other_files_are_passed_over(tmp_path):
    put(tmp_path, "a.png", ".b.png", ".git/c.png")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "Thumbs.db").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.jpg").mkdir()
    source = open_source(tmp_path)
    assert list(source.ids) == ["a.png"]
    assert list(source.skipped) == []


def test_no_images(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match=r"source: no images in .*looked for \.jpeg.*1 files there are of other kinds"):
        open_source(tmp_path)


def test_photos_of_a_phone_do_not_vanish(tmp_path):
    put(tmp_path, "a.png")
    (tmp_path / "b.HEIC").write_bytes(b"\0\0\0\x18ftypheic" + bytes(50))
    source = open_source(tmp_path)
    assert list(source.ids) == ["a.png", "b.HEIC"]
    with pytest.raises(BadImage, match=r"not an image of a kind that can be read"):
        source.decode(1, 8, 3)


def test_what_does_not_exist(tmp_path):
    with pytest.raises(UserError, match=r"source: .*none does not exist; expected a folder"):
        open_source(tmp_path / "none")
    (tmp_path / "a.xyz").write_text("x")
    with pytest.raises(UserError, match=r"a\.xyz has an unsupported type; expected a folder"):
        open_source(tmp_path / "a.xyz")
    with pytest.raises(UserError, match=r"is not a folder"):
        open_source(f"{tmp_path}/none/*.jpg")


def test_a_single_image_can_be_opened(tmp_path):
    put(tmp_path, "a.png")
    assert list(open_source(tmp_path / "a.png").ids) == ["a.png"]


def test_loops_of_links_end_and_no_file_counts_twice(tmp_path):
    put(tmp_path, "real/a.png", "real/deep/b.png")
    (tmp_path / "real" / "deep" / "up").symlink_to(tmp_path)
    (tmp_path / "a_link_to_real").symlink_to(tmp_path / "real")
    (tmp_path / "self").symlink_to(tmp_path / "self")
    (tmp_path / "self.png").symlink_to(tmp_path / "self.png")
    (tmp_path / "again.png").symlink_to(tmp_path / "real" / "a.png")
    source = open_source(tmp_path)
    assert list(source.ids) == ["real/a.png", "real/deep/b.png", "self.png"]
    with pytest.raises(BadImage):
        source.decode(2, 4, 3)
    assert open_source(f"{tmp_path}/**/*.png").ids == source.ids


def test_links_that_lead_elsewhere_are_followed(tmp_path):
    put(tmp_path, "elsewhere/a.png", "elsewhere/b.png", "elsewhere/c/d.png")
    top = tmp_path / "top"
    top.mkdir()
    (top / "x.png").symlink_to("../elsewhere/a.png")
    (top / "y.png").symlink_to("../elsewhere/a.png")
    (top / "z").symlink_to("../elsewhere/c")
    (top / "gone.png").symlink_to("nowhere.png")
    assert list(open_source(top).ids) == ["gone.png", "x.png", "z/d.png"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_skipped(tmp_path):
    put(tmp_path, "a.png")
    os.mkfifo(tmp_path / "b.png")
    assert list(open_source(tmp_path).skipped) == [("b.png", "not a file")]


@pytest.fixture
def unprivileged():
    """A folder, and a user to whom permissions apply even where the tests run as root."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        put(folder, "a.png", "closed/b.png", "secret.png")
        (folder / "closed").chmod(0)
        (folder / "secret.png").chmod(0)
        root = os.geteuid() == 0
        if root:
            try:
                os.seteuid(65534)
            except OSError as error:
                pytest.skip(f"cannot be anybody else here: {error}")
        try:
            if os.access(folder / "closed", os.R_OK, effective_ids=True):
                pytest.skip("permissions do not apply here")
            yield folder
        finally:
            if root:
                os.seteuid(0)
            (folder / "closed").chmod(0o755)


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of another kind")
def test_a_folder_without_permission(unprivileged):
    source = open_source(unprivileged)
    assert list(source.ids) == ["a.png", "secret.png"]
    assert list(source.skipped) == [("closed/", "folder cannot be read: Permission denied")]
    with pytest.raises(BadImage, match=r"^Permission denied$"):
        source.decode(1, 4, 3)
    with pytest.raises(UserError, match=r"source: cannot read the folder .*closed: Permission denied"):
        open_source(unprivileged / "closed")


def test_a_folder_that_cannot_be_listed(tmp_path, monkeypatch):
    """The same without help of the system."""
    put(tmp_path, "a.png", "closed/b.png")
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert list(open_source(tmp_path).skipped) == [("closed/", "folder cannot be read: Permission denied")]
    with pytest.raises(UserError, match=r"source: cannot read the folder .*closed: Permission denied"):
        open_source(tmp_path / "closed")


def test_patterns(tmp_path):
    put(tmp_path, "a.png", "x/b.png", "x/c.jpg", "x/y/d.png", "z/e.png")
    (tmp_path / "x" / "f.txt").write_text("x")

    def ids(pattern):
        return list(open_source(f"{tmp_path}/{pattern}").ids)

    assert ids("*.png") == ["a.png"]
    assert ids("**/*.png") == ["a.png", "x/b.png", "x/y/d.png", "z/e.png"]
    assert ids("**") == ["a.png", "x/b.png", "x/c.jpg", "x/y/d.png", "z/e.png"]
    assert ids("x/*") == ["b.png", "c.jpg"]
    assert ids("x/**/*.png") == ["b.png", "y/d.png"]
    assert ids("[xz]/?.png") == ["x/b.png", "z/e.png"]
    assert ids("*/y/*") == ["x/y/d.png"]
    with pytest.raises(UserError, match=r"no images in"):
        ids("*.gif")


def test_a_pattern_looks_only_where_it_leads(tmp_path, monkeypatch):
    put(tmp_path, "a/1.png", "b/2.png")
    seen = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: seen.append(os.path.basename(path)) or scandir(path))
    assert list(open_source(f"{tmp_path}/a*/*.png").ids) == ["a/1.png"]
    assert "b" not in seen


def test_a_pattern_relative_to_here(tmp_path, monkeypatch):
    put(tmp_path, "p/a.png", "b.png")
    monkeypatch.chdir(tmp_path)
    assert list(open_source("*.png").ids) == ["b.png"]
    assert list(open_source("p/*.png").ids) == ["a.png"]
    assert open_source("./p/*.png").decode(0, 4, 1).shape == (1, 4, 4)


def test_a_folder_whose_name_looks_like_a_pattern(tmp_path):
    put(tmp_path, "[2024] *best*/a.png")
    assert list(open_source(tmp_path / "[2024] *best*").ids) == ["a.png"]


HOSTILE = ["new\nline.png", "<script>alert(1)</script>.png".replace("/", "∕"), 'a",b;=1.png', "‮gnp.png", "tab\t.png"]


def test_strange_names_survive_and_can_be_printed(tmp_path):
    put(tmp_path, *HOSTILE)
    bytes_name = os.fsencode(tmp_path) + b"/\xff\xfe.png"
    with open(bytes_name, "wb") as file:
        Image.new("L", (2, 2)).save(file, "PNG")
    source = open_source(tmp_path)
    assert len(source) == 6
    assert set(HOSTILE) < set(source.ids)
    for i, name in enumerate(source.ids):
        assert source.decode(i, 2, 3).shape == (3, 2, 2)
        shown = printable(name)
        assert shown.isprintable()
        shown.encode("utf-8")
    assert "\\xff\\xfe.png" in map(printable, source.ids)
    assert "new\\x0aline.png" in map(printable, source.ids)
    assert "<script>alert(1)<∕script>.png" in map(printable, source.ids)
    assert len(source.fingerprint) == 64


def test_natural_order_has_no_limit_on_digits():
    assert sorted(["x" + "9" * 5000, "x" + "1" * 5001, "x2", "x10"], key=natural)[:2] == ["x2", "x10"]


def test_labels_of_folders(tmp_path):
    put(tmp_path, "train/cat/1.png", "train/dog/2.png", "test/cat/3.png", "4.png")
    source = open_source(tmp_path, labels="folder")
    assert source.class_names == ("cat", "dog")
    assert dict(zip(source.ids, source.targets.tolist(), strict=True)) == {
        **{"4.png": -1, "test/cat/3.png": 0, "train/cat/1.png": 0, "train/dog/2.png": 1}
    }
    assert source.targets.dtype == np.int64
    with pytest.raises(UserError, match=r"labels: .* has no labels in 'folder': no image is in a subfolder"):
        open_source(f"{tmp_path}/*.png", labels="folder")
    with pytest.raises(UserError, match=r"labels: .* has no 'foldr'; did you mean folder"):
        open_source(tmp_path, labels="foldr")


def write_csv(path, rows, **options):
    with path.open("w", newline="", encoding=options.pop("encoding", "utf-8")) as file:
        csv.writer(file, **options).writerows(rows)


def test_a_csv_manifest_keeps_order_and_carries_columns(tmp_path):
    put(tmp_path, "pictures/b.png", "pictures/a.png", "c.png")
    manifest = tmp_path / "lists" / "m.csv"
    manifest.parent.mkdir()
    absolute = str(tmp_path / "c.png")
    rows = [
        ["kind", "path", "price"],
        ["x", "../pictures/b.png", "1"],
        ["", "../pictures/a.png", "2, or 3"],
        ["y", absolute],
    ]
    write_csv(manifest, rows)
    source = open_source(manifest, labels="kind")
    assert list(source.ids) == ["../pictures/b.png", "../pictures/a.png", absolute]
    assert source.columns == {"kind": ["x", "", "y"], "price": ["1", "2, or 3", ""]}
    assert source.targets.tolist() == [0, -1, 1]
    assert source.class_names == ("x", "y")
    assert source.decode(2, 4, 3).shape == (3, 4, 4)
    with pytest.raises(UserError, match=r"labels: .* has no 'prise'; did you mean price"):
        open_source(manifest, labels="prise")
    assert open_source(manifest, labels="folder").class_names == ("pictures", tmp_path.name)


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_manifests_of_spreadsheets(tmp_path, delimiter):
    put(tmp_path, "a.png")
    write_csv(
        tmp_path / "m.csv", [["path", "note"], ["a.png", "größer, besser"]], delimiter=delimiter, encoding="utf-8-sig"
    )
    assert open_source(tmp_path / "m.csv").columns == {"note": ["größer, besser"]}


def test_rows_that_name_no_file_or_one_twice(tmp_path):
    put(tmp_path, "a.png")
    write_csv(tmp_path / "m.csv", [["path"], ["a.png"], ["./a.png"], [""], [" "], ["gone.png"]])
    source = open_source(tmp_path / "m.csv")
    assert list(source.ids) == ["a.png", " ", "gone.png"]
    assert list(source.skipped) == [("row 3", "no path")]
    assert list(source.repeated) == [("./a.png", "row 2 names the same file as row 1")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column 'path', .*; it is empty"),
        ("file,label\na.png,1\n", "has no column 'path', which names the file of each image; it has file, label"),
        ("paths,label\na.png,1\n", "did you mean paths"),
        ("path,a,a\nx,1,2\n", "has two columns 'a'"),
        ("path,a\nx,1,2\n", "line 2 of .* has 3 values for 2 columns"),
        ('path,a\n"x', "cannot read"),
        ("path\nx\0y\n", "cannot read|no path"),
    ],
)
def test_wrong_manifests(tmp_path, text, message):
    (tmp_path / "m.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        open_source(tmp_path / "m.csv").require_images()


def test_a_manifest_of_names_that_are_not_utf8(tmp_path):
    name = os.fsdecode(b"\xff.png")
    with open(tmp_path / name, "wb") as file:
        Image.new("L", (2, 2)).save(file, "PNG")
    (tmp_path / "m.csv").write_bytes(b"path\n\xff.png\n")
    assert open_source(tmp_path / "m.csv").decode(0, 2, 1).shape == (1, 2, 2)


def test_a_parquet_manifest(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    put(tmp_path, "a.png", "b.png")
    columns = {
        "path": ["b.png", None, "a.png"],
        "score": [0.5, 1.0, None],
        "tags": [["x"], [], ["y", "z"]],
        "y": [7, 7, 12],
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "m.parquet")
    source = open_source(tmp_path / "m.parquet", labels="y")
    assert list(source.ids) == ["b.png", "a.png"]
    assert source.columns == {"score": [0.5, None], "tags": [["x"], ["y", "z"]], "y": [7, 12]}
    assert list(source.skipped) == [("row 2", "no path")]
    assert source.class_names == ("7", "12")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(UserError, match=r"source: cannot read .*bad.parquet"):
        open_source(tmp_path / "bad.parquet")


def pixels(shape, dtype=np.uint8, high=256):
    return np.random.default_rng(0).integers(0, high, shape).astype(dtype)


@pytest.mark.parametrize("shape", [(5, 8, 8), (5, 8, 8, 1), (5, 1, 8, 8), (5, 8, 8, 3), (5, 3, 8, 8)])
@pytest.mark.parametrize("kind", ["npy", "npz", "compressed", "fortran"])
def test_arrays_of_every_shape(tmp_path, shape, kind):
    array = pixels(shape)
    path = tmp_path / ("a.npy" if kind in ("npy", "fortran") else "a.npz")
    match kind:
        case "npy":
            np.save(path, array)
        case "fortran":
            np.save(path, np.asfortranarray(array))
        case "npz":
            np.savez(path, whatever=array)
        case _:
            np.savez_compressed(path, array)
    source = open_source(path)
    assert list(source.ids) == ["0", "1", "2", "3", "4"]
    channels = 3 if 3 in shape else 1
    first = array.reshape(5, 8, 8, channels) if shape[1] == 8 else array.transpose(0, 2, 3, 1)
    assert np.array_equal(source.decode(3, 8, channels), first[3].transpose(2, 0, 1))
    assert source.decode(3, 4, 4 - channels).shape == (4 - channels, 4, 4)
    assert source.probe() == (8, channels, "int 0..255")


@pytest.mark.parametrize(
    ("array", "wanted", "note"),
    [
        (np.array([0, 1, 0.5, 0.25], np.float32), [0, 255, 128, 64], "float 0..1"),
        (np.array([0, 255, 0.6, 17.2], np.float64), [0, 255, 1, 17], "float 0..255"),
        (np.array([0, 1.00001, -0.00001, 1], np.float32), [0, 255, 0, 255], "float 0..1"),
        (np.array([0, 1, 0.5, 0], np.float16), [0, 255, 128, 0], "float 0..1"),
        (np.array([0, 255, 3, 4], np.int64), [0, 255, 3, 4], "int 0..255"),
        (np.array([0, 16, 8, 3.5], np.float64), [0, 255, 128, 56], "float 0..16"),
        (np.array([0, 16, 8, 4], np.int64), [0, 255, 128, 64], "int 0..16"),
        (np.array([0, 1, 1, 0], np.int32), [0, 255, 255, 0], "int 0..1"),
        (np.array([0, 1023, 4, 511], np.uint16), [0, 255, 1, 127], "int 0..1023"),
        (np.array([0, 4095, 16, 2047], np.uint16), [0, 255, 1, 127], "int 0..4095"),
        (np.array([0, 16383, 64, 4096], np.int32), [0, 255, 1, 64], "int 0..16383"),
        (np.array([0, 65535, 256, 511], np.uint16), [0, 255, 1, 1], "int 0..65535"),
        (np.array([0, 65535, 256, 511], ">u2"), [0, 255, 1, 1], "int 0..65535"),
        (np.array([True, False, True, True]), [255, 0, 255, 255], "booleans are read as 255"),
        (np.array([0, 16, 8, 4], np.uint8), [0, 255, 128, 64], "int 0..16"),
        (np.array([0, 1, 1, 0], np.uint8), [0, 255, 255, 0], "int 0..1"),
        (np.array([0, 1.04, -0.04, 0.5], np.float32), [0, 255, 0, 128], "float 0..1"),
    ],
)
def test_values_go_by_the_range_of_the_whole_array(tmp_path, array, wanted, note):
    np.save(tmp_path / "a.npy", array.reshape(1, 2, 2))
    source = open_source(tmp_path / "a.npy")
    assert source.decode(0, 2, 1).ravel().tolist() == wanted
    probe = source.probe()
    assert note in source.note(probe.values)
    assert probe.values == source.values_of(None) == (note if ".." in note else None)


def test_bytes_are_what_they_are_and_need_no_word():
    source = ArraySource("new", np.array([1, 2, 3, 17], np.uint8).reshape(1, 2, 2))
    assert source.read(0).ravel().tolist() == [1, 2, 3, 17]
    assert (source.probe().values, source.note("int 0..255")) == ("int 0..255", "")


@pytest.mark.parametrize(
    ("array", "values", "wanted"),
    [
        (np.array([0, 200, 100], np.uint16), "int 0..65535", [0, 0, 0]),
        (np.array([0, 700, 100], np.uint16), "int 0..65535", [0, 2, 0]),
        (np.array([0, 1, 16], np.uint16), "int 0..4095", [0, 0, 1]),
        (np.array([0, 1, 12], np.int64), "int 0..255", [0, 1, 12]),
        (np.array([0.0, 12.0, 3.6]), "float 0..255", [0, 12, 4]),
        (np.array([0.0, 0.0, 0.0]), "float 0..255", [0, 0, 0]),
        (np.array([0.0, 1.0, 0.2]), "float 0..1", [0, 255, 51]),
        (np.array([0, 200, 100], np.uint8), "float 0..1", [0, 200, 100]),
        (np.array([0, 12, 1], np.uint8), "float 0..1", [0, 12, 1]),
        (np.array([0, 12, 1], np.uint8), "int 0..255", [0, 12, 1]),
        (np.array([0, 16, 8], np.uint8), "float 0..16", [0, 255, 128]),
        (np.array([0, 1, 0], np.uint8), "float 0..16", [0, 16, 0]),
        (np.array([0.0, 16.0, 8.0]), "int 0..16", [0, 255, 128]),
        (np.array([0.0, 16.0, 32.0]), "int 0..4095", [0, 1, 2]),
        (np.array([0.0, 12.0, 1.5]), "int 0..255", [0, 12, 2]),
        (np.array([0.0, 1.0, 0.2]), "int 0..255", [0, 255, 51]),
        (np.array([0.0, 1.0, 0.2]), None, [0, 255, 51]),
    ],
)
def test_new_values_are_read_as_a_run_has_read_its_own(array, values, wanted):
    source = ArraySource("new", array.reshape(1, 1, 3, 1))
    for new in (False, True):
        assert source.read(0, source.values_of(values, new=new)).ravel().tolist() == wanted
    understood = source.values_of(values)
    assert source.values_of(understood) == understood


@pytest.mark.parametrize(
    ("array", "values", "found"),
    [
        (np.array([0, 200.0]), "float 0..1", "0 to 200, which are taken as float 0..255"),
        (np.array([0, 0.5]), "float 0..255", "0 to 0.5, which are taken as float 0..1"),
        (np.array([0, 0.5]), "float 0..16", "0 to 0.5, which are taken as float 0..1"),
        (np.array([0, 200.0]), "float 0..16", "0 to 200, which are taken as float 0..255"),
        (np.array([0, 200], np.uint8), "float 0..16", "0 to 255, which are taken as int 0..255"),
        (np.array([0, 300]), "int 0..255", "0 to 300, which are taken as int 0..1023"),
        (np.array([0, 5000]), "int 0..4095", "0 to 5000, which are taken as int 0..16383"),
    ],
)
def test_new_values_on_another_scale_are_refused(array, values, found):
    source = ArraySource("new", array.reshape(1, 2, 1))
    with pytest.raises(UserError, match=f"new contains values from {found}; the run was trained on {values}: scale"):
        source.values_of(values)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 64), int), r"has shape \(4, 64\); valid: \(N, H, W\)"),
        (np.zeros((4, 8, 8, 5)), r"has shape \(4, 8, 8, 5\)"),
        (np.zeros((64, 64, 3)), "looks like one color image"),
        (np.zeros((4, 0, 8)), r"has shape \(4, 0, 8\)"),
        (np.full((2, 2, 2), -1.0), "float64 values from -1 to -1; valid: 0 to 1, 0 to 16 or 0 to 255"),
        (np.full((2, 2, 2), 256.0), "values from 256 to 256; valid: 0 to 1, 0 to 16 or 0 to 255"),
        (np.full((2, 2, 2), -1), "int64 values from -1 to -1; valid: 0 to 1, 0 to 16, .* or 0 to 65535"),
        (np.full((2, 2, 2), 1j), "values of type complex128"),
        (np.full((2, 2, 2), "a"), "values of type <U1"),
    ],
)
def test_arrays_that_are_no_images(tmp_path, array, message):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(UserError, match=message):
        open_source(tmp_path / "a.npy")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_are_counted(tmp_path, value, monkeypatch):
    monkeypatch.setattr("secu.data.sources.arrays.BLOCK", 4 * 16 * 3)
    array = np.zeros((9, 4, 4), np.float32)
    array[[4, 7], 0, 1] = value
    array[7, 3, 3] = value
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(UserError, match=r"NaN or infinite values in 2 of 9 images, first in 4"):
        open_source(tmp_path / "a.npy")


class Trap:
    def __reduce__(self):
        return (os.mkdir, (str(Trap.place),))


@pytest.mark.parametrize("kind", ["npy", "npz", "npz_beside", "pickle"])
def test_nothing_is_unpickled(tmp_path, kind):
    Trap.place = tmp_path / "unpickled"
    objects = np.array([Trap(), Trap()], object)
    path = tmp_path / ("a.npz" if kind.startswith("npz") else "a.npy")
    match kind:
        case "npy":
            np.save(path, objects.reshape(2, 1, 1), allow_pickle=True)
        case "npz":
            np.savez(path, x=objects.reshape(2, 1, 1))
        case "npz_beside":
            np.savez(path, x=np.zeros((2, 4, 4), np.uint8), y=objects)
        case _:
            path.write_bytes(pickle.dumps(Trap()))
    if kind == "npz_beside":
        assert open_source(path).columns == {}
        with pytest.raises(UserError, match=r"labels: .* has no 'y'; it has no labels at all"):
            open_source(path, labels="y")
    else:
        reason = "magic string" if kind == "pickle" else "it contains pickled Python objects, which are never loaded"
        with pytest.raises(UserError, match=reason):
            open_source(path)
    assert not Trap.place.exists()


def test_an_npz_with_labels(tmp_path):
    y = np.array([10, 9, 10, 2])
    np.savez(tmp_path / "a.npz", x=pixels((4, 8, 8)), y=y, other=np.zeros(7), name=np.array(["a", "b", "c", ""]))
    source = open_source(tmp_path / "a.npz", labels="y")
    assert source.class_names == ("2", "9", "10")
    assert source.targets.tolist() == [2, 1, 2, 0]
    assert source.columns == {"y": [10, 9, 10, 2], "name": ["a", "b", "c", ""]}
    assert open_source(tmp_path / "a.npz", labels="name").targets.tolist() == [0, 1, 2, -1]
    with pytest.raises(UserError, match=r"labels: .* has no 'folder'; valid: name, y"):
        open_source(tmp_path / "a.npz", labels="folder")


def test_which_array_of_an_npz(tmp_path):
    np.savez(tmp_path / "a.npz", masks=pixels((4, 8, 8)), Images=pixels((4, 9, 9)))
    assert open_source(tmp_path / "a.npz").probe().side == 9
    np.savez(tmp_path / "b.npz", x_train=pixels((4, 8, 8)), x_test=pixels((4, 9, 9)))
    with pytest.raises(UserError, match=r"several arrays of images \(x_train, x_test\)"):
        open_source(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", y=np.zeros(4))
    with pytest.raises(UserError, match=r"contains no images; it has y \(4,\)"):
        open_source(tmp_path / "c.npz")


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
@pytest.mark.parametrize("content", [b"", b"nothing", b"\x93NUMPY\x01\x00", b"PK\x03\x04 nothing"])
def test_damaged_arrays(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=r"source: cannot read"):
        open_source(tmp_path / name)


def test_a_truncated_array(tmp_path):
    np.save(tmp_path / "a.npy", pixels((50, 8, 8)))
    content = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(content[:-100])
    with pytest.raises(UserError, match=r"source: cannot read"):
        open_source(tmp_path / "a.npy")


def test_probe(tmp_path, monkeypatch):
    put(tmp_path, *(f"{i}.png" for i in range(7)), size=(30, 20), mode="L")
    put(tmp_path, "big.png", size=(90, 80), mode="L")
    (tmp_path / "bad.png").write_bytes(b"")
    assert open_source(tmp_path).probe() == (20, 1, None)
    put(tmp_path, "color.png")
    assert open_source(tmp_path).probe().channels == 3
    monkeypatch.setattr("secu.data.decoding.probe.SAMPLE", 1)
    assert open_source(tmp_path).probe().channels == 1


@pytest.mark.parametrize(
    ("highest", "values", "white"),
    [(900, "int 0..1023", 225), (4095, "int 0..4095", 255), (9000, "int 0..16383", 140), (65_535, "int 0..65535", 255)],
)
@pytest.mark.parametrize("kind", ["png", "tiff"])
def test_files_of_16_bits_are_taken_for_what_they_hold(tmp_path, highest, values, white, kind):
    for number in range(5):
        ramp = np.linspace(0, highest, 64).reshape(8, 8).astype(np.uint16)
        Image.fromarray(ramp).save(tmp_path / f"{number}.{kind}")
    source = open_source(tmp_path)
    probe = source.probe()
    assert probe.values == values
    assert (f"of 5 tried none holds more than {highest:,}" in source.note(values)) == (highest < 65_535)
    assert source.decode(0, 8, 1, values).max() == white
    assert [int(image.max()) for _, image in decoded(source, (1, 8, 8), values)] == [white] * 5
    for run in (None, "int 0..65535", "float 0..1"):  # an old run, a setting, a run on arrays
        assert source.decode(0, 8, 1, source.values_of(run)).max() == highest // 256
    assert source.values_of("float 0..1", new=True) == source.values_of(None, new=True) == values


def test_new_files_of_16_bits_may_not_hold_more_than_the_run_knows(tmp_path):
    Image.new("I;16", (2, 2), 4080).save(tmp_path / "a.png")
    source = open_source(tmp_path)
    assert source.values_of("int 0..4095", new=True) == "int 0..4095"
    assert source.values_of("int 0..65535", new=True) == "int 0..65535"
    with pytest.raises(
        UserError, match=r"hold values up to 4,080; the run was trained on int 0..1023: scale them to the same range"
    ):
        source.values_of("int 0..1023", new=True)


def test_probing_changes_nothing(tmp_path):
    """Whoever looks first, or never: the same pixels and the same key of the cache."""
    for number in range(5):
        Image.new("I;16", (8, 8), 900 + number).save(tmp_path / f"{number}.png")
    probed = open_source(tmp_path)
    before = dict(vars(probed))
    assert probed.probe() == probed.probe() == open_source(tmp_path).probe()
    assert {name: value for name, value in vars(probed).items() if name != "sample"} == before
    untouched = open_source(tmp_path)
    assert probed.fingerprint == untouched.fingerprint
    files = {}
    for values in (None, "int 0..1023", "int 0..65535"):
        sources = (probed, untouched) if values else (untouched, probed)
        caches = [tmp_path.with_name(f"{tmp_path.name}-{values}-{number}") for number in range(2)]
        first, second = (
            load_images(s, (1, 8, 8), values=values, cache=c) for s, c in zip(sources, caches, strict=True)
        )
        assert torch.equal(first.tensor, second.tensor)
        names = [[file.name for file in cache.glob("*.images")] for cache in caches]
        assert names[0] == names[1]
        files[values] = (names[0], int(first.tensor.max()))
    assert [white for _, white in files.values()] == [3, 226, 3]
    assert len({name for names, _ in files.values() for name in names}) == 3


def test_labeling_makes_another_source(tmp_path):
    put(tmp_path, "cat/1.png", "dog/2.png")
    source = open_source(tmp_path)
    labeled = source.label("folder")
    assert source.targets is None
    assert labeled.targets.tolist() == [0, 1]
    assert labeled.fingerprint == source.fingerprint


def test_the_depth_of_files_is_looked_for_all_over_the_source(tmp_path):
    """A series whose exposure grows: its first tenth holds less than the others."""
    for number in range(300):
        Image.new("I;16", (2, 2), 4000 if number >= 60 else 800).save(tmp_path / f"{number:03d}.png")
    source = open_source(tmp_path)
    assert source.probe().values == "int 0..4095"


def test_the_side_is_the_median_of_the_shorter_sides(tmp_path):
    for number, size in enumerate([(10, 40), (40, 10), (40, 40)]):
        put(tmp_path, f"{number}.png", size=size)
    assert open_source(tmp_path).probe().side == 10


def test_probe_of_nothing_that_can_be_read(tmp_path):
    (tmp_path / "bad\n.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"none of 1 images tried in .* can be read; bad\\x0a.png: empty file"):
        open_source(tmp_path).probe()


@pytest.mark.parametrize("batch", [1, 7, 40])
@pytest.mark.parametrize("kind", ["uint8", "float32", "uint16", "bool"])
@pytest.mark.parametrize("shape", [(20, 6, 6), (20, 6, 6, 1), (20, 6, 6, 3), (20, 3, 6, 6), (20, 6, 9), (20, 9, 9, 3)])
@pytest.mark.parametrize("channels", [1, 3])
def test_batches_of_an_array_are_what_its_images_are_one_by_one(shape, kind, channels, batch):
    """Whether it is cut into slices, being of the right size and color, or decoded."""
    numbers = np.random.default_rng(0)
    values = numbers.integers(0, 65_536, shape) if kind == "uint16" else numbers.integers(0, 256, shape)
    array = (values / 255 if kind == "float32" else values > 100 if kind == "bool" else values).astype(kind)
    source = ArraySource("X", array)
    found, order = [], []
    for rows, pixels, bad in decoded_in_batches(source, (channels, 6, 6), None, batch):
        assert len(rows) == len(pixels) <= batch
        assert bad == []
        order += rows
        found += list(pixels)
    assert order == list(range(20))
    for (number, expected), pixels in zip(decoded(source, (channels, 6, 6)), found, strict=True):
        assert np.array_equal(pixels, expected), number
    square, depth = 9 not in shape, 3 if 3 in shape[1:] else 1
    assert (source.ready(slice(0, 2), (channels, 6, 6)) is not None) == (square and depth == channels)


def test_batches_of_files_name_the_bad_ones(tmp_path):
    for i in range(5):
        Image.new("L", (6, 6), 10 * i).save(tmp_path / f"{i}.png")
    (tmp_path / "2.png").write_bytes(b"no picture")
    batches = list(decoded_in_batches(open_source(str(tmp_path)), (1, 6, 6), None, 3))
    assert [rows for rows, _, _ in batches] == [[0, 1], [3, 4]]
    assert [pixels[:, 0, 0, 0].tolist() for _, pixels, _ in batches] == [[0, 10], [30, 40]]
    assert [[i for i, _ in bad] for _, _, bad in batches] == [[2], []]


def test_a_table_with_many_columns_and_empty_lines_is_refused(tmp_path):
    """A header of 20,000 columns and as many short lines would make 400 million values."""
    header = ",".join(["path", *map(str, range(20_000))])
    (tmp_path / "a.csv").write_text(header + "\nx.png" * 20_000)
    with pytest.raises(UserError, match=r"has lines with fewer values than its 20001 columns"):
        open_source(tmp_path / "a.csv")


def test_a_header_of_very_many_equal_columns(tmp_path):
    (tmp_path / "a.csv").write_text("path," + ",".join(map(str, range(200_000))) + ",7\n")
    with pytest.raises(UserError, match=r"has two columns '7'"):
        open_source(tmp_path / "a.csv")


@pytest.mark.parametrize("column", ["path", "features"])
def test_a_parquet_file_that_unpacks_to_too_much(tmp_path, monkeypatch, column):
    """Equal values are stored once: 100,000 rows in a few kilobytes."""
    monkeypatch.setattr("secu.data.sources.archives.ANY_RATIO", 1 << 20)
    value = pa.array(["x" * 100]) if column == "path" else pa.array([[1.0] * 50])
    parquet.write_table(pa.table({column: value.take(pa.array(np.zeros(100_000, int)))}), tmp_path / "a.parquet")
    tracked = pa.total_allocated_bytes()
    with pytest.raises(UserError, match=r"source: cannot read .*: it unpacks to more than 200 times its size"):
        open_source(tmp_path / "a.parquet")
    assert pa.total_allocated_bytes() - tracked < 30 << 20
