"""Feature vectors from .npy and Parquet files and from memory: ids, labels, columns and pictures; and all bad input."""

import os
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from PIL import Image

from secu.base.errors import UserError
from secu.data import BadImage, VectorSource, load_images, open_images, open_source, remember
from secu.data.rows import FileRows
from secu.data.sources import vectors as module
from secu.data.sources.arrays import ArraySource
from secu.data.sources.base import FileSource
from secu.data.sources.vectors import looks_like_picture

LISTS = {
    "list": pa.list_,
    "large_list": pa.large_list,
    "fixed_size_list": lambda kind: pa.list_(kind, 5),
}
FLOATS = {"float16": pa.float16(), "float32": pa.float32(), "float64": pa.float64()}


def matrix(count=12, features=5, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=(count, features)).astype(dtype)


def save(path, vectors):
    np.save(path, vectors)
    return path


def column(vectors, kind=None):
    """Return a list column; rows may be None."""
    return pa.array([row if row is None else list(row) for row in vectors], kind or pa.list_(pa.float32()))


def write(file, vectors, kind=None, name="features", **columns):
    parquet.write_table(pa.table({**columns, name: column(vectors, kind)}), file)
    return file


def paint(folder, count=12, size=20):
    """Write gray pictures of a different level each; return their paths relative to the folder's parent."""
    names = []
    for i in range(count):
        path = folder / f"class{i % 3}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (size, size), 10 * i).save(path)
        names.append(path.relative_to(folder.parent).as_posix())
    return names


def load(source):
    return load_images(source, source.vectors.shape[1:])


def refusal(use):
    """Return the one line with which something is refused, without any warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserError) as caught:
            use()
    text = str(caught.value)
    assert text.startswith("source: ")
    assert "\n" not in text
    return text


# Files


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4", "longdouble"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_float_matrix_in_npy(tmp_path, dtype, order):
    vectors = np.asarray(matrix(dtype=dtype), order=order)
    source = open_source(save(tmp_path / "v.npy", vectors))
    assert isinstance(source, VectorSource)
    assert source.ids == tuple(map(str, range(12)))
    images = load(source)
    assert images.shape == (5,)
    assert images.tensor.dtype == (torch.float16 if dtype == "float16" else torch.float32)
    np.testing.assert_array_equal(images.tensor.numpy(), vectors.astype(np.float32))
    assert images.ids == source.ids
    assert images.targets is None
    assert images.skipped == ()


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("suffix", ["parquet", "pq"])
def test_a_list_column_in_parquet(tmp_path, kind, dtype, suffix):
    vectors = matrix(dtype=dtype)
    path = write(tmp_path / f"v.{suffix}", vectors, LISTS[kind](FLOATS[dtype]), name="anything")
    source = open_source(path)
    assert isinstance(source, VectorSource)
    assert source.ids == tuple(map(str, range(12)))
    assert dict(source.columns) == {}
    images = load(source)
    assert images.tensor.dtype == (torch.float16 if dtype == "float16" else torch.float32)
    np.testing.assert_array_equal(images.tensor.numpy(), vectors.astype(np.float32))


def test_a_column_of_many_pieces(tmp_path):
    vectors = matrix(100)
    pieces = pa.chunked_array([column(vectors[:30]), column(vectors[30:31]), column(vectors[31:])])
    parquet.write_table(pa.table({"features": pieces}), tmp_path / "v.parquet", row_group_size=7)
    np.testing.assert_array_equal(load(open_source(tmp_path / "v.parquet")).tensor.numpy(), vectors)


def test_other_columns_are_kept_and_stay_with_their_rows(tmp_path):
    path = write(tmp_path / "v.parquet", matrix(), when=list(range(12)), who=[f"p{i}" for i in range(12)])
    source = open_source(path)
    assert dict(source.columns) == {"when": list(range(12)), "who": [f"p{i}" for i in range(12)]}
    chosen = load(source).select([7, 2])
    assert chosen.columns == {"when": [7, 2], "who": ["p7", "p2"]}
    np.testing.assert_array_equal(chosen.tensor.numpy(), matrix()[[7, 2]])


@pytest.mark.parametrize("name", module.COLUMNS)
def test_of_several_list_columns_a_usual_name_is_taken(tmp_path, name):
    path = tmp_path / "v.parquet"
    write(path, matrix(), name=name, a=column(matrix(features=2)), z=column(matrix(features=3)))
    source = open_source(path)
    np.testing.assert_array_equal(source.vectors, matrix())
    assert set(source.columns) == {"a", "z"}


@pytest.mark.parametrize("name", ["b", "b\nc"])
def test_several_list_columns_without_a_usual_name(tmp_path, name):
    path = write(tmp_path / "v.parquet", matrix(), name=name, a=column(matrix(features=2)))
    text = refusal(lambda: open_source(path))
    assert "several columns hold vectors (a, b" in text
    assert "'features'" in text


def test_lists_of_integers_and_of_words_are_not_vectors(tmp_path):
    tags = pa.array([["x", "y"]] * 12)
    boxes = pa.array([[1, 2, 3, 4]] * 12)
    source = open_source(write(tmp_path / "v.parquet", matrix(), name="any", tags=tags, boxes=boxes))
    assert isinstance(source, VectorSource)
    assert source.columns["boxes"][3] == [1, 2, 3, 4]
    names = paint(tmp_path / "pictures")
    parquet.write_table(pa.table({"path": names, "tags": tags, "boxes": boxes}), tmp_path / "m.parquet")
    assert isinstance(open_source(tmp_path / "m.parquet"), FileSource)


def test_labels_of_a_column(tmp_path):
    path = write(tmp_path / "v.parquet", matrix(), kind=None, digit=[i % 4 for i in range(11)] + [None])
    images = load(open_source(path, "digit"))
    assert images.targets.tolist() == [i % 4 for i in range(11)] + [-1]
    assert images.class_names == ("0", "1", "2", "3")
    with pytest.raises(UserError, match=r"did you mean digit\?"):
        open_source(path, "digits")


def test_labels_of_folders(tmp_path):
    path = write(tmp_path / "v.parquet", matrix(), path=paint(tmp_path / "pictures"))
    images = load(open_source(path, "folder"))
    assert images.targets.tolist() == [i % 3 for i in range(12)]
    assert images.class_names == ("class0", "class1", "class2")


def test_without_paths_there_are_no_folders(tmp_path):
    path = write(tmp_path / "v.parquet", matrix())
    with pytest.raises(UserError, match=r"labels: .* has no 'folder'"):
        open_source(path, "folder")
    with pytest.raises(UserError, match=r"labels: .* has no 'folder'"):
        open_source(save(tmp_path / "v.npy", matrix()), "folder")


def test_ids_are_paths(tmp_path):
    names = paint(tmp_path / "pictures")
    source = open_source(write(tmp_path / "v.parquet", matrix(), path=names))
    assert source.ids == tuple(names)
    assert "path" not in source.columns
    assert [source.read(i) for i in range(12)] == [str(tmp_path / name) for name in names]


def test_ids_are_unique_however_often_a_picture_is_named(tmp_path):
    paths = ["a.png", "a.png#2", "a.png", "a.png", "b.png", "a.png#3", "b.png"]
    source = open_source(write(tmp_path / "v.parquet", matrix(7), path=paths))
    assert len(set(source.ids)) == 7
    assert [source.ids[i] for i in (0, 1, 4)] == ["a.png", "a.png#2", "b.png"]
    assert [os.path.basename(source.read(i)) for i in range(7)] == paths


def test_the_fingerprint_follows_the_file(tmp_path):
    path = save(tmp_path / "v.npy", matrix())
    before = open_source(path)
    assert before.cacheable
    assert open_source(path).fingerprint == before.fingerprint
    save(path, matrix(seed=1))
    os.utime(path, ns=(1, 1))
    assert open_source(path).fingerprint != before.fingerprint


def test_changed_vectors_are_noticed(tmp_path):
    path = save(tmp_path / "v.npy", matrix())
    known = remember(load(open_source(path)))
    assert list(known) == [str(i) for i in range(12)]
    vectors = matrix()
    vectors[4, 3] += 1
    now = remember(load(open_source(save(path, vectors))))
    assert [name for name in known if now[name] != known[name]] == ["4"]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_file_is_read_by_rows_and_never_changed(tmp_path, dtype):
    path = save(tmp_path / "v.npy", matrix(dtype=dtype))
    content = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images = load(open_source(path))
    assert isinstance(open_source(path).vectors, FileRows)
    images.tensor[0] = 77
    assert images.fetch(torch.tensor([0])).unique().tolist() == [77]
    assert path.read_bytes() == content
    np.testing.assert_array_equal(load(open_source(path)).tensor.numpy(), matrix(dtype=dtype))


@pytest.mark.parametrize("kind", ["npy", "parquet"])
def test_inputs_can_be_written_to_without_a_warning(tmp_path, kind):
    path = tmp_path / f"v.{kind}"
    (save if kind == "npy" else write)(path, matrix(dtype=np.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images = load(open_source(path))
    images.tensor[0] = 77
    assert images.tensor[0].tolist() == [77] * 5


def test_vectors_of_another_length_than_a_run_was_trained_on(tmp_path):
    source = open_source(save(tmp_path / "v.npy", matrix()))
    text = refusal(lambda: load_images(source, (6,)))
    assert "has vectors of 5 features, but the run was trained on vectors of 6" in text
    text = refusal(lambda: load_images(source, (3, 32, 32)))
    assert "has vectors of 5 features, but the run was trained on images of 32 pixels" in text


def test_a_batch_is_a_copy_in_single_precision():
    vectors = matrix(dtype=np.float16)
    batch = VectorSource("X", vectors).ready(slice(2, 5), (5,))
    assert batch.dtype == np.float32
    np.testing.assert_array_equal(batch, vectors[2:5])
    batch[:] = 0
    np.testing.assert_array_equal(vectors, matrix(dtype=np.float16))


def test_vectors_in_memory():
    vectors = matrix()
    for given in (vectors, torch.from_numpy(vectors), vectors.tolist()):
        source = open_images(given)
        assert isinstance(source, VectorSource)
        assert not source.cacheable
        assert source.ids == tuple(map(str, range(12)))
        np.testing.assert_array_equal(load(source).tensor.numpy(), vectors)
    vectors.flags.writeable = False
    load(open_images(vectors)).tensor[0] = 5
    np.testing.assert_array_equal(vectors, matrix())


# Pictures


def test_pictures_are_shown_where_there_are_paths(tmp_path):
    source = open_source(write(tmp_path / "v.parquet", matrix(), path=paint(tmp_path / "pictures")))
    assert source.probe()[:2] == (20, 1)
    images = load(source)
    shown = images.pictures(torch.tensor([3, 0, 11, 3]), 16)
    assert shown.shape == (4, 1, 16, 16)
    assert shown.flatten(1).unique(dim=1).tolist() == [[30], [0], [110], [30]]
    assert images.select([5, 9]).pictures(torch.tensor([1, 0]), 16)[:, 0, 0, 0].tolist() == [90, 50]
    assert str(images.original(4)) == str(tmp_path / "pictures" / "class1" / "4.png")


def test_pictures_that_are_gone_are_white(tmp_path):
    names = paint(tmp_path / "pictures")
    path = write(tmp_path / "v.parquet", matrix(), path=names)
    (tmp_path / names[3]).unlink()
    (tmp_path / names[5]).write_bytes(b"damaged")
    shown = load(open_source(path)).pictures(torch.tensor([3, 4, 5]), 16)
    assert shown[:, 0].flatten(1).unique(dim=1).tolist() == [[255], [40], [255]]
    for name in names:
        (tmp_path / name).unlink(missing_ok=True)
    source = open_source(path)
    assert source.probe()[:2] == (0, 0)
    images = load(source)
    assert len(images) == 12
    shown = images.pictures(torch.tensor([3, 4]), 16)
    assert shown.dtype == torch.uint8
    assert len(shown) == 2
    assert shown.unique().tolist() == [255]


def test_without_paths_pictures_are_white(tmp_path):
    source = open_source(save(tmp_path / "v.npy", matrix()))
    assert source.probe() == (0, 0, None)
    with pytest.raises(BadImage, match="there are only feature vectors, no pictures"):
        source.read(0)
    shown = load(source).pictures(torch.tensor([3, 4, 4]), 16)
    assert len(shown) == 3
    assert shown.unique().tolist() == [255]


def test_pictures_that_are_gone_do_not_keep_vectors_from_being_read(tmp_path):
    path = write(tmp_path / "v.parquet", matrix(), path=[f"nowhere/{i}.png" for i in range(12)])
    images = load(open_source(path))
    assert len(images) == 12
    assert images.skipped == ()
    np.testing.assert_array_equal(images.tensor.numpy(), matrix())


# Bad input


def changed(row, value, dtype=np.float32):
    vectors = matrix(dtype=dtype)
    vectors[row] = value
    return vectors


BAD = {
    "nan": (changed((7, 2), np.nan), "has NaN, infinite or too large values, first in row 7"),
    "infinite": (changed((0, 0), -np.inf), "has NaN, infinite or too large values, first in row 0"),
    "half": (changed((4, 1), np.inf, np.float16), "has NaN, infinite or too large values, first in row 4"),
    "too large": (changed((11, 4), 1e39, np.float64), "has NaN, infinite or too large values, first in row 11"),
    "zeros": (changed(5, 0), "has vectors of zeros, which have no direction, first in row 5"),
    "too small": (changed(5, 1e-60, np.float64), "has vectors of zeros, which have no direction, first in row 5"),
    "one feature": (matrix(features=1), "has vectors of 1 feature"),
}


@pytest.mark.parametrize("block", [1, 2**24])
@pytest.mark.parametrize("case", BAD)
def test_vectors_that_cannot_be_clustered(tmp_path, monkeypatch, case, block):
    """Wherever they come from, and however many are checked at a time."""
    monkeypatch.setattr(module, "BLOCK", block)
    vectors, message = BAD[case]
    kind = pa.list_(FLOATS[str(vectors.dtype)])
    for use in (
        lambda: open_source(save(tmp_path / "v.npy", vectors)),
        lambda: open_source(write(tmp_path / "v.parquet", vectors, kind)),
        lambda: VectorSource("X", vectors),
    ):
        assert message in refusal(use)


@pytest.mark.parametrize("kind", LISTS)
def test_rows_without_a_vector(tmp_path, kind):
    vectors = [None if i in (2, 9) else row for i, row in enumerate(matrix())]
    path = write(tmp_path / "v.parquet", vectors, LISTS[kind](pa.float32()))
    assert refusal(lambda: open_source(path)).endswith("has no vector in 2 of 12 rows")


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_missing_value_in_a_vector(tmp_path, dtype):
    vectors = [list(row) for row in matrix(dtype=dtype)]
    vectors[3][1] = None
    path = write(tmp_path / "v.parquet", vectors, pa.list_(FLOATS[dtype]))
    assert refusal(lambda: open_source(path)).endswith("first in row 3")


@pytest.mark.parametrize("length", [0, 4, 6])
def test_vectors_of_different_lengths(tmp_path, length):
    vectors = [*matrix(), np.ones(length)]
    path = write(tmp_path / "v.parquet", vectors)
    text = refusal(lambda: open_source(path))
    assert text.endswith(f"vectors in 'features' have different lengths, from {min(5, length)} to {max(5, length)}")


@pytest.mark.parametrize("kind", LISTS)
def test_nothing_at_all(tmp_path, kind):
    path = write(tmp_path / "v.parquet", [], LISTS[kind](pa.float32()))
    assert "v.parquet" in refusal(lambda: open_source(path).require_images())
    path = save(tmp_path / "v.npy", np.zeros((0, 5), np.float32))
    assert "v.npy" in refusal(lambda: load(open_source(path)))
    path = save(tmp_path / "v.npy", np.zeros((3, 0), np.float32))
    assert "v.npy" in refusal(lambda: load(open_source(path)))


@pytest.mark.parametrize("value", [None, ""])
def test_rows_without_a_path(tmp_path, value):
    path = write(tmp_path / "v.parquet", matrix(3), path=["a.png", value, "b.png"])
    assert "has rows without a path" in refusal(lambda: open_source(path))


def test_paths_that_are_numbers(tmp_path):
    path = write(tmp_path / "v.parquet", matrix(3), path=[1, 2, 3])
    assert "has rows without a path" in refusal(lambda: open_source(path))


def test_a_damaged_parquet_file(tmp_path):
    """Wherever the damage is, it is one line, or the vectors can still be read."""
    good = write(tmp_path / "good.parquet", matrix(200)).read_bytes()
    path = tmp_path / "v.parquet"
    refused = 0
    for start in range(0, len(good), 97):
        path.write_bytes(good[:start] + b"\xff" * 40 + good[start + 40 :])
        try:
            open_source(path)
        except UserError as error:
            assert "\n" not in str(error)  # noqa: PT017
            refused += 1
    assert refused > 5
    path.write_bytes(good[:4] + b"\xff" * 40 + good[44:])
    assert "cannot read" in refusal(lambda: open_source(path))
    for size in (0, 10, len(good) // 2, len(good) - 5):
        path.write_bytes(good[:size])
        assert "cannot read" in refusal(lambda: open_source(path))


def test_two_columns_of_the_same_name(tmp_path):
    both = pa.table([column(matrix()), column(matrix())], names=["features", "features"])
    parquet.write_table(both, tmp_path / "v.parquet")
    assert "cannot read" in refusal(lambda: open_source(tmp_path / "v.parquet"))


def test_a_damaged_npy_file(tmp_path):
    path = save(tmp_path / "v.npy", matrix())
    good = path.read_bytes()
    for content in (b"", good[:20], good[:-1], b"\xff" * 200):
        path.write_bytes(content)
        assert "cannot read" in refusal(lambda: open_source(path))


class Bomb:
    exploded = False

    def __reduce__(self):
        return setattr, (Bomb, "exploded", True)


def test_pickled_objects_are_never_loaded(tmp_path):
    objects = np.empty((20, 20), object)
    objects[:] = Bomb()
    np.save(tmp_path / "v.npy", objects, allow_pickle=True)
    assert "pickled Python objects, which are never loaded" in refusal(lambda: open_source(tmp_path / "v.npy"))
    assert not Bomb.exploded


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, bool])
def test_a_matrix_of_integers_is_not_vectors(tmp_path, dtype):
    path = save(tmp_path / "v.npy", np.ones((20, 30), dtype))
    assert "has shape (20, 30); valid: (N, H, W)" in refusal(lambda: open_source(path))
    path = save(tmp_path / "v.npy", np.ones((20, 8, 8), dtype))
    assert isinstance(open_source(path), ArraySource)


def test_other_arrays_of_floats_are_images(tmp_path):
    assert isinstance(open_source(save(tmp_path / "v.npy", np.ones((20, 8, 8), np.float32))), ArraySource)
    assert "has shape (20,)" in refusal(lambda: open_source(save(tmp_path / "v.npy", np.ones(20, np.float32))))


def test_a_source_of_something_else_than_a_float_matrix():
    assert "must be floats of shape (N, D), got int64 of shape (3, 4)" in refusal(
        lambda: VectorSource("X", np.ones((3, 4), np.int64))
    )
    assert "must be floats of shape (N, D)" in refusal(lambda: VectorSource("X", np.ones((3, 4, 5))))


# One picture instead of vectors


def photograph(name, size):
    from sklearn.datasets import load_sample_image

    picture = Image.fromarray(load_sample_image(name)).convert("L").resize(size, Image.Resampling.BILINEAR)
    return np.asarray(picture, np.float32) / 255 + 0.001


@pytest.mark.parametrize("name", ["china.jpg", "flower.jpg"])
@pytest.mark.parametrize("size", [(64, 64), (224, 224), (600, 400), (300, 900)])
def test_a_photograph_is_refused(tmp_path, name, size):
    path = save(tmp_path / "v.npy", photograph(name, size))
    assert "looks like one picture; vectors have shape (N, D)" in refusal(lambda: open_source(path))


def test_a_smooth_surface_is_refused():
    x = np.linspace(0, 3, 40, dtype=np.float32)
    assert looks_like_picture(np.sin(x)[:, None] * np.cos(x), len(x))


def test_a_grainy_photograph_is_refused(tmp_path):
    """Many photographs are rougher than scikit-learn's two, at the scale of their pixels."""
    pixels = photograph("china.jpg", (300, 200))
    scale = pixels.max()
    grainy = np.clip(pixels / scale + np.random.default_rng(0).normal(0, 0.1, pixels.shape), 0, 1).astype(np.float32)
    for factor in (1, 255):
        path = save(tmp_path / "v.npy", factor * grainy)
        assert "looks like one picture" in refusal(lambda path=path: open_source(path))
    centered = grainy - grainy.mean()  # no longer pixels
    np.testing.assert_array_equal(load(open_source(save(tmp_path / "v.npy", centered))).tensor.numpy(), centered)


def features_of(kind):
    generator = np.random.default_rng(0)
    noise = generator.normal(size=(300, 64)).astype(np.float32)
    groups = generator.normal(size=(3, 64)).astype(np.float32) * 3
    if kind == "groups in order":
        return groups[np.repeat(range(3), 100)] + noise
    if kind == "almost the same":
        return groups[:1] + 0.01 * noise
    if kind == "smooth along time":
        return np.cumsum(noise, 0)
    if kind == "two kinds put together":
        noise[:, 32:] += 10
        return noise
    if kind == "one large feature":
        noise[:, 0] += 1000
        return noise
    if kind == "spectra in order":  # as smooth as a grainy picture, but of other proportions
        smooth = np.sin(np.linspace(0, 3, 400))[:, None] * np.cos(np.linspace(0, 3, 64))
        return (smooth + 2 + 0.2 * generator.normal(size=smooth.shape)).astype(np.float32)
    if kind == "sparse":
        return np.maximum(noise - 1, 0) + 1e-6
    if kind == "constant":
        return np.ones((300, 64), np.float32)
    if kind == "digits":
        from sklearn.datasets import load_digits

        return load_digits().data.astype(np.float32)
    if kind == "few":
        return np.outer(np.arange(1, 11), np.arange(1, 65)).astype(np.float32)
    return noise


@pytest.mark.parametrize(
    "kind",
    [
        "random",
        "groups in order",
        "almost the same",
        "smooth along time",
        "two kinds put together",
        "one large feature",
        "spectra in order",
        "sparse",
        "constant",
        "digits",
        "few",
    ],
)
def test_vectors_are_not_taken_for_a_picture(tmp_path, kind):
    vectors = features_of(kind)
    images = load(open_source(save(tmp_path / "v.npy", vectors)))
    np.testing.assert_array_equal(images.tensor.numpy(), vectors)
