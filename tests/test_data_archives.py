"""Images in a .zip or .tar, friendly and hostile."""

import io
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest
from PIL import Image

import secu.data.sources.archives as archives
from secu.base.errors import UserError
from secu.data import BadImage, decoded, load_images, open_source

TARS = {"tar": "w", "tar.gz": "w:gz", "tgz": "w:gz", "tar.bz2": "w:bz2", "tar.xz": "w:xz"}


def picture(value=0, format="PNG"):
    buffer = io.BytesIO()
    Image.new("L", (6, 4), value).save(buffer, format)
    return buffer.getvalue()


def make_tar(path, members, mode="w"):
    """Write members: (name, content) or a TarInfo, which has none."""
    with tarfile.open(path, mode) as tar:
        for member in members:
            info, content = (
                (member, b"") if isinstance(member, tarfile.TarInfo) else (tarfile.TarInfo(member[0]), member[1])
            )
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def make_zip(path, members, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members:
            file.writestr(name, content)


FRIENDLY = [
    ("cats/10.png", picture(10)),
    ("cats/2.JPG", picture(2)),
    ("notes.txt", b"x"),
    ("cats/.hidden.png", picture()),
    ("__MACOSX/cats/._2.png", b"x"),
    ("./dogs/a/../3.png", picture(3)),
    ("cats/2.JPG", picture(20)),
]


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("suffix", [*TARS, "zip"])
def test_an_archive_is_read_in_place(tmp_path, suffix):
    path = tmp_path / f"pictures.{suffix}"
    make_zip(path, FRIENDLY) if suffix == "zip" else make_tar(path, FRIENDLY, TARS[suffix])
    source = open_source(path, labels="folder")
    assert list(source.ids) == ["cats/2.JPG", "cats/10.png", "dogs/3.png"]
    assert source.class_names == ("cats", "dogs")
    assert source.targets.tolist() == [0, 0, 1]
    assert [int(source.decode(i, 4, 1)[0, 0, 0]) for i in (2, 0, 1)] == [3, 20, 10]  # of two 2.JPG the later
    assert source.probe() == (4, 1, None)
    images = load_images(source, (1, 4, 4), cache=tmp_path / "cache")
    assert images.ids == ("cats/2.JPG", "cats/10.png", "dogs/3.png")
    assert images.tensor[:, 0, 0, 0].tolist() == [20, 10, 3]
    assert {p.name for p in tmp_path.iterdir()} == {path.name, "cache"}


def test_a_compressed_tar_is_read_forwards_only(tmp_path, monkeypatch):
    """Going back would unpack it from the start for every image."""
    names = [f"{i}.png" for i in np.random.default_rng(0).permutation(60)]
    make_tar(tmp_path / "a.tar.gz", [(name, picture(int(name[:-4]))) for name in names], "w:gz")
    source = open_source(tmp_path / "a.tar.gz")
    assert list(source.ids) == [f"{i}.png" for i in range(60)]
    assert [source.ids[i] for i in source.order] == names
    rewinds = []
    rewind = source.file._buffer.raw._rewind
    monkeypatch.setattr(source.file._buffer.raw, "_rewind", lambda: rewinds.append(1) or rewind(), raising=False)
    found = dict(decoded(source, (1, 4, 4), workers=4))
    assert [int(found[i][0, 0, 0]) for i in range(60)] == list(range(60))
    assert len(rewinds) == 1


def link(name, target, kind=tarfile.SYMTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_hostile_members_of_a_tar(tmp_path):
    outside = ["/etc/abs.png", "../up.png", "a/../../up.png", "C:\\win.png", "..\\win.png"]
    others = [
        link("soft.png", "/etc/passwd"),
        link("hard.png", "good.png", tarfile.LNKTYPE),
        link("dev.png", "", tarfile.CHRTYPE),
        link("pipe.png", "", tarfile.FIFOTYPE),
    ]
    members = [(name, picture()) for name in ["good.png", *outside, "new\nline.png"]]
    make_tar(tmp_path / "a.tar", [*members, ("../../passwd", b"x"), *others])
    source = open_source(tmp_path / "a.tar")
    assert source.ids == ("good.png", "new\nline.png")
    reasons = [(name, "its path leads out of the archive") for name in outside]
    reasons += [(info.name, "a link or a device") for info in others]
    assert list(source.skipped) == reasons


def test_hostile_members_of_a_zip(tmp_path):
    soft = zipfile.ZipInfo("soft.png")
    soft.external_attr = 0o120777 << 16
    members = [("good.png", picture()), ("/abs.png", picture()), ("../up.png", picture()), (soft, "/etc/passwd")]
    make_zip(tmp_path / "a.zip", [*members, ("folder.png/", b"")])
    source = open_source(tmp_path / "a.zip")
    assert list(source.ids) == ["good.png"]
    assert [reason.split()[0] for _, reason in source.skipped] == ["its", "its", "a"]


def test_a_member_that_unpacks_to_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_MEMBER", 1 << 20)
    members = [("good.png", picture()), ("bomb.png", bytes(2 << 20))]
    make_zip(tmp_path / "a.zip", members)
    make_tar(tmp_path / "a.tar.gz", members, "w:gz")
    for name in ("a.zip", "a.tar.gz"):
        source = open_source(tmp_path / name)
        assert list(source.ids) == ["good.png"]
        assert list(source.skipped) == [("bomb.png", "2 MB unpacked; the limit is 1 MB")]


def test_a_zip_that_lies_about_a_size(tmp_path):
    """The size in the directory is believed for reading, so a bomb gives no more than it claimed."""
    make_zip(tmp_path / "a.zip", [("good.png", picture()), ("bomb.png", bytes(50 << 20))])
    content = (tmp_path / "a.zip").read_bytes()
    (tmp_path / "a.zip").write_bytes(content.replace((50 << 20).to_bytes(4, "little"), (99).to_bytes(4, "little")))
    source = open_source(tmp_path / "a.zip")
    tracemalloc.start()
    with pytest.raises(BadImage):
        source.decode(source.ids.index("bomb.png"), 4, 1)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_a_tar_that_unpacks_to_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "ANY_RATIO", 1 << 20)
    make_tar(tmp_path / "a.tar.bz2", [("notes.txt", bytes(8 << 20)), ("good.png", picture())], "w:bz2")
    with pytest.raises(UserError, match=r"unpacks to more than 200 times its size"):
        open_source(tmp_path / "a.tar.bz2")


def test_a_zip_that_unpacks_to_too_much(tmp_path, monkeypatch):
    """Members that are no images are never unpacked, so that their size does not matter."""
    monkeypatch.setattr(archives, "ANY_RATIO", 1 << 20)
    make_zip(tmp_path / "a.zip", [("notes.txt", bytes(8 << 20)), ("good.png", picture())])
    assert list(open_source(tmp_path / "a.zip").ids) == ["good.png"]
    make_zip(tmp_path / "a.zip", [(f"{i}.bmp", bytes(1 << 20)) for i in range(8)])
    with pytest.raises(UserError, match=r"source: cannot read .*: it unpacks to more than 200 times its size"):
        open_source(tmp_path / "a.zip")


@pytest.mark.parametrize("name", ["images", "labels"])
def test_an_npz_that_unpacks_to_too_much(tmp_path, monkeypatch, name):
    monkeypatch.setattr(archives, "ANY_RATIO", 1 << 20)
    arrays = {"images": np.zeros((8, 2, 2), np.uint8), "labels": np.zeros(8, "S1")}
    arrays[name] = np.zeros((8, 1 << 10, 1 << 10), np.uint8) if name == "images" else np.zeros(8, "S1000000")
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    with pytest.raises(UserError, match=r"source: cannot read .*: it unpacks to more than 200 times its size"):
        open_source(tmp_path / "a.npz")


@pytest.mark.parametrize("order", ["C", "F"])
def test_an_npz_is_in_memory_only_once(tmp_path, order):
    array = np.zeros((64, 512, 1024), np.uint8, order=order)
    array[3, 4, 5] = 200
    np.savez_compressed(tmp_path / "a.npz", array)
    tracemalloc.start()
    try:
        source = open_source(tmp_path / "a.npz")
        assert tracemalloc.get_traced_memory()[1] < 1.2 * array.nbytes
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(source.array, array)


def test_headers_of_a_tar_that_claim_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_MEMBER", 1 << 20)
    info = tarfile.TarInfo("long")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 3 << 20
    (tmp_path / "a.tar").write_bytes(info.tobuf() + bytes(4 << 20))
    with pytest.raises(UserError, match=r"source: cannot read .*a header of"):
        open_source(tmp_path / "a.tar")


def test_a_tar_with_a_negative_size_does_not_go_round_in_circles(tmp_path):
    info = tarfile.TarInfo("a.png")
    info.size = -1024
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    (tmp_path / "a.tar").write_bytes(bytes(block) * 2 + bytes(1024))
    with pytest.raises(UserError, match=r"source: cannot read|no images"):
        open_source(tmp_path / "a.tar").require_images()


@pytest.mark.parametrize("suffix", [*TARS, "zip"])
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.95])
def test_damaged_archives(tmp_path, suffix, keep):
    path = tmp_path / f"a.{suffix}"
    noise = np.random.default_rng(0).integers(0, 256, 50_000, dtype=np.uint8).tobytes()
    members = [("a.png", noise), ("b.png", noise), ("c.png", noise)]
    make_zip(path, members) if suffix == "zip" else make_tar(path, members, TARS[suffix])
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(UserError, match=r"source: (cannot read|no images)"):
        open_source(path).require_images()


def test_one_damaged_or_locked_member_is_bad_alone(tmp_path):
    make_zip(
        tmp_path / "a.zip", [("a.png", picture(1)), ("b.png", picture(2)), ("c.png", picture(3))], zipfile.ZIP_STORED
    )
    content = bytearray((tmp_path / "a.zip").read_bytes())
    content[content.index(picture(2)) + 50] ^= 255
    locked = content.rindex(b"PK\x01\x02")  # the directory's entry of c.png
    content[locked + 8] |= 1
    (tmp_path / "a.zip").write_bytes(content)
    source = open_source(tmp_path / "a.zip")
    source.decode(0, 4, 1)
    with pytest.raises(BadImage, match=r"CRC"):
        source.decode(1, 4, 1)
    with pytest.raises(BadImage, match=r"encrypted|password|differ"):
        source.decode(2, 4, 1)


def test_an_archive_that_changed_has_another_fingerprint(tmp_path):
    make_zip(tmp_path / "a.zip", [("a.png", picture(1))])
    before = open_source(tmp_path / "a.zip").fingerprint
    make_zip(tmp_path / "a.zip", [("a.png", picture(2))])
    assert open_source(tmp_path / "a.zip").fingerprint != before
