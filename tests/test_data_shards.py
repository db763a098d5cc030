"""Sources in many files: tar shards, Parquet files and data sets of the hub hold the same images as a plain folder."""

import os
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from secu.base.errors import UserError
from secu.data import BadImage, load_images, open_source
from secu.data.sources.parquet import ParquetImages
from secu.data.sources.patterns import matching_files
from secu.data.sources.shards import ShardSource
from secu.data.strings import Names, pick
from shard_files import NAMES, pictures, suffix, write_files, write_parquet, write_shards, write_tar

SHAPE = (3, 12, 12)


@pytest.fixture(autouse=True)
def own_data(tmp_path, monkeypatch):
    monkeypatch.setenv("SECU_DATA", str(tmp_path / "data"))


@pytest.fixture(scope="module")
def images():
    return pictures()


def numbers_in(source):
    """Return the number of each picture, from its id."""
    return [int(name.rpartition("/")[2].partition(".")[0]) for name in source.ids]


def pixels_by_number(source):
    loaded = load_images(source, SHAPE)
    return dict(zip(numbers_in(source), loaded.tensor.numpy(), strict=True))


def open_all(tmp_path, images):
    """Return the same pictures as each kind of source."""
    write_shards(tmp_path / "tar", images)
    write_parquet(tmp_path / "parquet", images)
    kinds = {
        "braces": tmp_path / "tar" / "shard-{00..02}.tar",
        "glob": tmp_path / "tar" / "*.tar",
        "folder of shards": tmp_path / "tar",
        "parquet folder": tmp_path / "parquet",
        "parquet glob": tmp_path / "parquet" / "train-*.parquet",
    }
    return {kind: open_source(name) for kind, name in kinds.items()}


def test_every_kind_holds_the_pixels_and_classes_of_a_folder(tmp_path, images):
    folder = open_source(write_files(tmp_path / "files", images), "folder")
    pixels = pixels_by_number(folder)
    classes = dict(zip(numbers_in(folder), folder.targets.tolist(), strict=True))
    for kind, source in open_all(tmp_path, images).items():
        assert sorted(numbers_in(source)) == list(range(len(images))), kind
        for number, picture in pixels_by_number(source).items():
            assert np.array_equal(picture, pixels[number]), (kind, number)
        assert dict(zip(numbers_in(source), source.targets.tolist(), strict=True)) == classes, kind
        assert source.cacheable


def test_ids_columns_and_classes_of_shards(tmp_path, images):
    source = open_source(write_shards(tmp_path / "tar", images))
    assert isinstance(source, ShardSource)
    assert source.ids[:2] == ("shard-00.tar/000.png", "shard-00.tar/003.jpg")
    assert source.class_names == ("0", "1", "2")
    assert set(source.columns) == {"cls", "name"}
    assert source.columns["name"][4] == NAMES[numbers_in(source)[4] % 3]
    assert open_source(source.place, "name").class_names == NAMES


def test_ids_and_classes_of_parquet_files(tmp_path, images):
    source = open_source(write_parquet(tmp_path / "p", images))
    assert source.ids[:3] == ("000.png", "002.png", "004.png")
    assert source.class_names == NAMES
    assert source.columns["label"][1] == NAMES[2]
    unnamed = open_source(write_parquet(tmp_path / "q", images, paths=False))
    assert unnamed.ids[:2] == ("train-00000-of-00002.parquet/0", "train-00000-of-00002.parquet/1")
    assert unnamed.read(1) == images[2]


def test_a_single_parquet_file_with_images_is_not_a_manifest(tmp_path, images):
    source = open_source(write_parquet(tmp_path / "p", images, files=1) / "train-00000-of-00001.parquet")
    assert isinstance(source, ParquetImages)
    assert len(source) == len(images)


def test_few_row_groups_stay_in_memory(tmp_path, images, monkeypatch):
    source = open_source(write_parquet(tmp_path / "p", images))
    monkeypatch.setattr("secu.data.sources.parquet.KEPT_BYTES", 2 * max(map(len, images)) * 4)
    for i in np.random.default_rng(0).permutation(len(images)).tolist():
        assert source.read(i) == images[numbers_in(source)[i]]
        assert 1 <= len(source.kept) <= 3


def test_labels_that_are_partly_unknown(tmp_path, images):
    members = [("a.jpg", images[1]), ("a.cls", b"7"), ("b.jpg", images[3]), ("c.json", b'{"x": 1}')]
    source = open_source(str(write_tar(tmp_path / "s-0.tar", members).with_name("s-*.tar")))
    assert source.targets.tolist() == [0, -1]
    assert source.skipped == (("s-0.tar/c", "sample has no image"),)


def test_masks_beside_images_are_left_out(tmp_path, images):
    members = [("a.jpg", images[1]), ("a.mask.png", images[0]), ("b.2024.png", images[2]), ("._a.jpg", b"x")]
    source = open_source(str(write_tar(tmp_path / "s-0.tar", members).with_name("s-*.tar")))
    assert source.ids == ("s-0.tar/a.jpg", "s-0.tar/b.2024.png")
    assert source.targets is None


def test_shards_of_the_same_name_in_different_folders(tmp_path, images):
    for folder in ("a", "b"):
        write_tar(tmp_path / folder / "0.tar", [("x.jpg", images[1])])
    assert open_source(str(tmp_path / "{a,b}" / "0.tar")).ids == ("a/0.tar/x.jpg", "b/0.tar/x.jpg")


def test_a_shard_is_indexed_once_and_again_if_it_changes(tmp_path, images, monkeypatch):
    pattern = write_shards(tmp_path / "tar", images)
    first = open_source(pattern)
    indexed = []
    real = __import__("secu.data.sources.shards", fromlist=["_index"])._index
    monkeypatch.setattr("secu.data.sources.shards._index", lambda path: indexed.append(path) or real(path))
    assert open_source(pattern).ids == first.ids
    assert indexed == []
    write_tar(tmp_path / "tar" / "shard-01.tar", [("new.jpg", images[1])])
    assert "shard-01.tar/new.jpg" in open_source(pattern).ids
    assert [os.path.basename(path) for path in indexed] == ["shard-01.tar"]
    for path in (tmp_path / "data" / "listings").iterdir():
        path.write_bytes(path.read_bytes()[:-40])  # damaged, so indexed again
    assert len(open_source(pattern)) == len(first) - 7


# Errors


def test_a_broken_member_is_one_bad_image(tmp_path, images):
    members = [("a.jpg", images[1]), ("b.jpg", b"no image"), ("c.jpg", images[3])]
    source = open_source(str(write_tar(tmp_path / "s-0.tar", members).with_name("s-?.tar")))
    with pytest.raises(BadImage, match="not an image"):
        source.decode(1, 12, 3)
    assert load_images(source, SHAPE, allow_bad=True).ids == ("s-0.tar/a.jpg", "s-0.tar/c.jpg")


def test_a_shard_that_shrinks_later_is_bad_images(tmp_path, images):
    source = open_source(write_shards(tmp_path / "tar", images))
    os.truncate(tmp_path / "tar" / "shard-00.tar", 3000)
    with pytest.raises(BadImage, match=r"shard-00.tar was truncated after"):
        source.decode(7, 12, 3)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("tar/shard-{00..04}.tar", r"expands to 5 files, but .*shard-03.tar and 1 more does not exist"),
        ("tar/none-*.tar", r"no file matches .*none-\*.tar"),
        ("nowhere/{0..3}.parquet", r"nowhere/0.parquet and 3 more does not exist"),
        ("tar/{0..9999999}.tar", r"too many files; the limit is 1,000,000"),
        ("tar/{a,b}.png", r"braces in .* are only for .tar and .parquet"),
    ],
)
def test_patterns_without_files(tmp_path, images, pattern, message):
    write_shards(tmp_path / "tar", images)
    with pytest.raises(UserError, match=message) as error:
        open_source(str(tmp_path / pattern))
    assert "\n" not in str(error.value)


def damaged(folder, images, how):
    path = write_tar(folder / "s-0.tar", [(f"{i}{suffix(i)}", image) for i, image in enumerate(images)])
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "text":
        path.write_text("no archive" * 100)
    elif how == "empty":
        write_tar(path, [("readme.md", b"hello")])
    else:
        write_tar(path, [("a.png", images[0])], "w:gz")
    return str(folder / "s-*.tar")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", r"cannot read the shard .*s-0.tar: (it is truncated in|unexpected end)"),
        ("text", r"cannot read the shard .*s-0.tar: "),
        ("empty", r"no images in the 1 shards of .*s-\*.tar"),
        ("gzip", r"s-0.tar is compressed, .*: unpack it with gzip -d"),
    ],
)
def test_damaged_shards(tmp_path, images, how, message):
    with pytest.raises(UserError, match=message) as error:
        open_source(damaged(tmp_path, images, how))
    assert "\n" not in str(error.value)


def test_a_header_that_claims_a_huge_size(tmp_path, images):
    path = write_tar(tmp_path / "s-0.tar", [("a.png", images[0])])
    content = bytearray(path.read_bytes())
    info = tarfile.TarInfo("pax")
    info.type = tarfile.XHDTYPE
    info.size = 1 << 33
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + content)
    with pytest.raises(UserError, match="cannot read the shard"):
        open_source(str(tmp_path / "s-*.tar"))


def test_parquet_files_with_other_columns(tmp_path, images):
    folder = write_parquet(tmp_path / "p", images)
    parquet.write_table(pa.table({"text": ["a"]}), folder / "z.parquet")
    with pytest.raises(UserError, match=r"z.parquet has the columns text \(string\), unlike train-00000"):
        open_source(folder)
    with pytest.raises(UserError, match=r"z.parquet has no column of images; it has text \(string\)"):
        open_source(str(folder / "z*.parquet"))
    (folder / "z.parquet").write_bytes(b"PAR1 damaged PAR1")
    with pytest.raises(UserError, match=r"cannot read .*z.parquet"):
        open_source(str(folder / "*.parquet"))


def test_an_image_without_bytes_is_a_bad_image(tmp_path):
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array([{"bytes": None, "path": "a.png"}, None], kind)})
    parquet.write_table(table, tmp_path / "x.parquet")
    source = open_source(tmp_path / "x.parquet")
    for i in range(2):
        with pytest.raises(BadImage, match="this row has no image data"):
            source.decode(i, 12, 3)


def test_braces(tmp_path):
    for name in ("a1", "a2", "a10", "b1"):
        (tmp_path / f"{name}.tar").touch()
    found = [os.path.basename(name) for name in matching_files(str(tmp_path / "{a,b}1.tar"))]
    assert found == ["a1.tar", "b1.tar"]
    assert [os.path.basename(name) for name in matching_files(str(tmp_path / "a*.tar"))] == [
        "a1.tar",
        "a2.tar",
        "a10.tar",
    ]
    assert [os.path.basename(name) for name in matching_files(str(tmp_path / "a{1..2}.tar"))] == ["a1.tar", "a2.tar"]


# Strings in one buffer


def test_names_are_a_sequence():
    texts = ["", "a", "ä/b", "\udcff.png", "z" * 300]
    names = Names.of(texts)
    assert list(names) == texts
    assert names == tuple(texts)
    assert names != tuple(texts[1:])
    assert names[-1] == texts[-1]
    assert names[1:3] == texts[1:3]
    assert "ä/b" in names
    assert names.index("a") == 1
    assert pick(names, [3, 0]) == Names.of(["\udcff.png", ""])
    assert pick(names, range(5)) is names
    with pytest.raises(IndexError):
        names[5]
