"""Near-duplicates: hashes against slow oracles, which pictures are found, and what runs and sort make of them."""

import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from PIL import Image, ImageOps

from own_images import SHORT, fit_now, fitted, request_of, rows_of
from secu import SeCu
from secu.apps.fit import SCRATCH
from secu.apps.predict import predict_source
from secu.apps.sort import sort_run
from secu.base.errors import UserError
from secu.config import DataConfig
from secu.data import Images, VectorSource, load, load_images, open_images, open_source
from secu.results import duplicates, hashes
from secu.results.duplicates import MOST_BITS, compare_pictures, is_searched, kept_images, similar_pairs
from secu.results.hashes import BOXES, FREQUENCIES, MIRROR, SIDE, SPANS, differing_bits, hash_pictures
from secu.results.results import write_report
from secu.settings import merge
from secu.train.listener import Listener
from secu.train.run import Run

pytestmark = pytest.mark.usefixtures("own_cache", "quick_map")

PHOTOS = 12
SIZE = (176, 128)


def photo(seed: int, size=SIZE) -> Image.Image:
    """Return a made-up photo: smooth colors with some detail."""
    draw = np.random.default_rng(seed)
    coarse = Image.fromarray(draw.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    fine = Image.fromarray(draw.integers(0, 256, (24, 33, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    return Image.blend(coarse, fine, 0.3)


def cropped(image, right=1.0, down=1.0):
    """Return a picture without 5% of its width and height."""
    width, height = round(0.95 * image.width), round(0.95 * image.height)
    left, top = round(right * (image.width - width)), round(down * (image.height - height))
    return image.crop((left, top, left + width, top + height))


COPIES = {
    "resized": lambda image: image.resize((SIZE[0] // 2, SIZE[1] // 2)),
    "recompressed": lambda image: image,
    "cropped left": lambda image: cropped(image, 0.0, 0.5),
    "cropped right": cropped,
    "mirrored": ImageOps.mirror,
    "combined": lambda image: COPIES["resized"](ImageOps.mirror(cropped(image, 0.2, 0.7))),
}


def write_photos(folder: Path, photos: int = PHOTOS, copies=COPIES) -> Path:
    """Write photos, and the copies of the first few: one for each kind."""
    folder.mkdir()
    for number in range(photos):
        photo(number).save(folder / f"{number}.jpg", quality=95)
    for number, (kind, change) in enumerate(copies.items()):
        change(photo(number)).save(folder / f"{number}-{kind}.jpg", quality=90 if kind == "mirrored" else 50)
    return folder


def vectors_of(images: Images) -> torch.Tensor:
    """Return a vector per image that ignores which way round it is."""
    pixels = images.fetch(torch.arange(len(images))).float()
    coarse = torch.nn.functional.adaptive_avg_pool2d(pixels - pixels.mean((1, 2, 3), keepdim=True), 4)
    return torch.cat([coarse + coarse.flip(-1), (coarse - coarse.flip(-1)).abs()], 1).flatten(1)


def loaded(source, size=64, channels=3) -> Images:
    return load_images(open_source(str(source)) if isinstance(source, Path) else source, (channels, size, size))


def kept_of(images: Images) -> dict[str, str]:
    """Return the id of the image to keep instead of each near-duplicate."""
    kept = kept_images(images, vectors_of(images))
    return {images.ids[i]: images.ids[k] for i, k in enumerate(kept.tolist()) if i != k}


# Hashes


def slow_hash(gray: np.ndarray, top: int, left: int, height: int, width: int) -> list[bool]:
    """Return one bit per frequency of a window, by the definition of the transform."""
    window = gray[top : top + height, left : left + width].astype(float) - gray.mean()
    bits = []
    for u in range(FREQUENCIES):
        for v in range(FREQUENCIES):
            rows = [math.cos(math.pi * u * (2 * y + 1) / (2 * height)) for y in range(height)]
            columns = [math.cos(math.pi * v * (2 * x + 1) / (2 * width)) for x in range(width)]
            bits.append(bool(np.array(rows) @ window @ np.array(columns) > 0) and (u, v) != (0, 0))
    return bits


@pytest.fixture(scope="module")
def grays():
    return np.stack([np.asarray(photo(seed, (SIDE, SIDE)).convert("L"), np.float32) for seed in range(6)])


def test_a_hash_has_the_signs_of_a_cosine_transform_of_each_window(grays):
    found = np.unpackbits(hash_pictures(grays), axis=-1)
    assert found.shape == (6, len(BOXES), FREQUENCIES**2)
    assert len(BOXES) == 26
    for window, (y, x) in enumerate(BOXES):
        expected = slow_hash(grays[1], SPANS[y][0], SPANS[x][0], SPANS[y][1], SPANS[x][1])
        assert found[1, window].tolist() == expected


def test_mirroring_flips_the_bits_of_every_other_frequency(grays):
    whole = hash_pictures(grays)[:, 0]
    mirrored = hash_pictures(np.ascontiguousarray(grays[:, :, ::-1]))[:, 0]
    assert np.array_equal(whole ^ MIRROR, mirrored)


def test_brightness_and_contrast_do_not_count(grays):
    assert np.array_equal(hash_pictures(grays), hash_pictures(0.5 * grays + 40))


def slow_bits(one: np.ndarray, other: np.ndarray, flip: np.ndarray) -> int:
    """Return the least number of bits that differ between a whole picture and a window of the other one."""
    least = FREQUENCIES**2
    for whole, cropped_windows in ((one, other), (other, one)):
        for window in cropped_windows:
            for turned in (whole[0], whole[0] ^ flip):
                least = min(least, sum(bin(byte).count("1") for byte in turned ^ window))
    return least


def test_bits_are_counted_over_windows_both_ways_and_mirrored(monkeypatch):
    draw = np.random.default_rng(0)
    made = draw.integers(0, 256, (8, 26, FREQUENCIES**2 // 8), dtype=np.uint8)
    made[1, 7] = made[0, 0]  # one is a window of the other
    made[3, 4] = made[2, 0] ^ MIRROR
    made[3, 4, 0] ^= 3
    pairs = np.array([(i, j) for i in range(8) for j in range(8) if i != j])
    monkeypatch.setattr(hashes, "FAR", FREQUENCIES**2)
    found = differing_bits(made, *pairs.T)
    assert found.tolist() == [slow_bits(made[i], made[j], MIRROR) for i, j in pairs.tolist()]
    assert found[pairs.tolist().index([1, 0])] == 0
    assert found[pairs.tolist().index([2, 3])] == 2


def test_windows_are_compared_only_if_the_whole_pictures_are_not_too_different():
    made = np.zeros((2, 26, FREQUENCIES**2 // 8), np.uint8)
    made[1] = 0b00110011  # half of the bits differ, also in the mirrored picture
    made[1, 5] = 0
    assert differing_bits(made, np.array([0]), np.array([1])).tolist() == [72]


# Pairs of similar vectors


def slow_pairs(vectors: torch.Tensor) -> set[tuple[int, int]]:
    unit = torch.nn.functional.normalize(vectors.float(), dim=1)
    cosines = unit @ unit.T
    cosines.fill_diagonal_(-2)
    found = set()
    for i in range(len(unit)):
        for j in cosines[i].argsort(descending=True)[: duplicates.NEIGHBORS].tolist():
            if cosines[i, j] >= duplicates.LEAST_COSINE:
                found.add((min(i, j), max(i, j)))
    return found


def test_pairs_are_the_nearest_vectors_above_a_cosine():
    vectors = torch.randn(700, 5, generator=torch.Generator().manual_seed(0))
    found = similar_pairs(vectors)
    assert set(map(tuple, found.tolist())) == slow_pairs(vectors)
    assert len(found) == len(set(map(tuple, found.tolist())))


def test_of_many_vectors_the_very_similar_ones_are_still_found(monkeypatch):
    monkeypatch.setattr(duplicates, "EXACT", 100)
    draw = torch.Generator().manual_seed(1)
    vectors = torch.randn(1500, 12, generator=draw)
    copies = vectors[:500] + 0.02 * torch.randn(500, 12, generator=draw)
    found = set(map(tuple, similar_pairs(torch.cat([vectors, copies]).half()).tolist()))
    assert sum((i, 1500 + i) in found for i in range(500)) >= 499
    assert all(i < j for i, j in found)


@pytest.mark.parametrize("count", [1, 2])
def test_few_vectors_have_few_pairs(count):
    assert similar_pairs(torch.ones(count, 3)).tolist() == ([[0, 1]] if count == 2 else [])


def test_vectors_that_have_collapsed_do_no_harm(monkeypatch):
    """All of them are in the same few cells; the others are empty."""
    monkeypatch.setattr(duplicates, "EXACT", 100)
    vectors = torch.ones(400, 4)
    found = similar_pairs(vectors)
    assert 0 < len(found) <= 400 * (duplicates.NEIGHBORS + 1)


# What is found


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("photos") / "photos")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [40, 64])
def test_copies_are_found_and_the_largest_picture_is_kept(photos, size, channels):
    expected = {f"{number}-{kind}.jpg": f"{number}.jpg" for number, kind in enumerate(COPIES)}
    assert kept_of(loaded(photos, size, channels)) == expected


def test_the_largest_picture_is_kept_even_if_it_comes_last(tmp_path):
    write_photos(tmp_path / "p", 3, {})
    photo(0, (88, 64)).save(tmp_path / "p" / "0.jpg")
    photo(0, (352, 256)).save(tmp_path / "p" / "z.png")
    assert kept_of(loaded(tmp_path / "p")) == {"0.jpg": "z.png"}


def test_arrays_are_pictures_too():
    pixels = np.stack([np.asarray(photo(seed, (48, 48))) for seed in range(5)])
    pixels = np.concatenate([pixels, pixels[1:2, :, ::-1], pixels[3:4]])
    assert kept_of(loaded(open_images(pixels), 48)) == {"5": "1", "6": "3"}
    gray = Images(torch.from_numpy(pixels[..., 0].copy())[:, None])  # no source at all
    assert kept_of(gray) == {"5": "1", "6": "3"}


def test_thousands_of_exact_copies_are_one_group():
    pixels = torch.arange(4 * 64, dtype=torch.uint8).reshape(4, 1, 8, 8).repeat(1000, 1, 1, 1)
    kept = kept_images(Images(pixels), torch.ones(4000, 2))
    assert kept.tolist() == [0, 1, 2, 3] * 1000
    vectors = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).repeat(700, 1)
    assert kept_images(Images(vectors), torch.ones(2100, 2)).tolist() == [0, 1, 2] * 700


def test_of_exact_copies_the_largest_original_is_kept(tmp_path):
    """Blank pictures have the same input, however large they were."""
    (tmp_path / "p").mkdir()
    for number, side in enumerate([64, 300, 100]):
        Image.new("RGB", (side, side), "red").save(tmp_path / "p" / f"{number}.png")
    assert kept_of(loaded(tmp_path / "p")) == {"0.png": "1.png", "2.png": "1.png"}


def test_blank_pictures_of_different_colors_are_different():
    values = torch.tensor([10, 200, 11, 10], dtype=torch.uint8)
    images = Images(values[:, None, None, None].expand(4, 3, 64, 64).clone())
    assert kept_images(images, torch.ones(4, 2)).tolist() == [0, 1, 2, 0]


def test_tiny_pictures_count_only_if_they_are_equal():
    digit = np.asarray(photo(0, (8, 8)).convert("L"))
    images = Images(torch.from_numpy(np.stack([digit, digit, digit[:, ::-1]]))[:, None])
    assert kept_images(images, torch.ones(3, 2)).tolist() == [0, 0, 2]


def test_pictures_that_cannot_be_read_any_more_are_not_compared(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "p")
    images = loaded(tmp_path / "p", 40)
    vectors = vectors_of(images)
    for name in ("0.jpg", "1-recompressed.jpg"):
        (tmp_path / "p" / name).write_bytes(b"damaged")
    kept = kept_images(images, vectors).tolist()
    found = {images.ids[i]: images.ids[k] for i, k in enumerate(kept) if i != k}
    assert "0.jpg" not in found.values()  # its input is still there, but it has no size
    assert found["2-cropped left.jpg"] == "2.jpg"
    shutil.rmtree(tmp_path / "p")
    assert len(kept_images(images, vectors)) == len(images)


def test_vectors_without_pictures_are_compared_only_with_copies(monkeypatch):
    vectors = np.random.default_rng(0).standard_normal((30, 8)).astype(np.float32)
    vectors[20] = vectors[3]
    vectors[21] = 1.001 * vectors[4]
    images = load_images(VectorSource("v", vectors), (8,))
    monkeypatch.setattr(duplicates, "similar_pairs", None)  # not even looked for
    kept = kept_images(images, torch.ones(30, 2)).tolist()
    assert [i for i, k in enumerate(kept) if i != k] == [20]


def test_features_are_compared_instead_of_embeddings(photos):
    """Embeddings that have collapsed would make everything similar, or nothing."""
    images = loaded(photos)
    features = Images(vectors_of(images), ids=images.ids, source=images.source, numbers=images.numbers)
    kept = kept_images(features, torch.zeros(len(images), 2))
    assert kept.tolist() == kept_images(images, vectors_of(images)).tolist()


def test_a_chain_of_similar_pictures_is_no_group(monkeypatch):
    """Each picture is left out only for one that is the same: 2 is like 1 and 3, which are not alike."""
    monkeypatch.setattr(duplicates, "_find_pairs", lambda *_: np.array([[0, 1], [1, 2], [2, 3]]))
    sizes = {0: (9, 0), 1: (8, 0), 2: (7, 0), 3: (6, 0)}
    monkeypatch.setattr(duplicates, "_sizes", lambda images, index: {i: sizes[i] for i in index})
    images = Images(torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 1, 4, 4).clone())
    assert kept_images(images, torch.ones(5, 2)).tolist() == [0, 0, 2, 2, 4]
    sizes[1] = (10, 0)
    assert kept_images(images, torch.ones(5, 2)).tolist() == [1, 1, 1, 3, 4]


def test_pictures_of_different_things_are_far_apart(photos):
    images = loaded(photos)
    originals = [i for i, name in enumerate(images.ids) if "-" not in name]
    pairs = np.array([(i, j) for i in originals for j in originals if i < j])
    assert compare_pictures(images, pairs).min() > 2 * MOST_BITS


def test_named_data_sets_and_images_that_are_decoded_on_demand_are_not_searched(photos):
    assert not is_searched(load(DataConfig(source="dataset:digits")))
    source = open_source(str(photos))
    on_demand = load_images(source, (3, 64, 64), on_demand=True)
    assert not is_searched(on_demand)
    assert is_searched(loaded(photos))


def test_of_very_many_images_only_copies_are_found(monkeypatch, photos):
    monkeypatch.setattr(duplicates, "MOST_IMAGES", 10)
    assert kept_of(loaded(photos)) == {}


# Runs


class Notes(Listener):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


OVERRIDES = merge(SHORT, {"data": {"image_size": 32}})


@pytest.fixture(scope="module")
def run(tmp_path_factory, photos):
    folder = tmp_path_factory.mktemp("run")
    return fitted(folder, photos, encoder=SCRATCH, overrides=OVERRIDES, report=True)


def duplicates_in(run):
    return {row["id"]: row["duplicate_of"] for row in rows_of(run.path / "assignments.csv") if row["duplicate_of"]}


EXPECTED = {f"{number}-{kind}.jpg": f"{number}.jpg" for number, kind in enumerate(COPIES)}


def test_a_run_lists_near_duplicates_in_both_tables(run):
    assert duplicates_in(run) == EXPECTED
    table = parquet.read_table(run.path / "assignments.parquet").to_pydict()
    assert {name: kept for name, kept in zip(table["id"], table["duplicate_of"], strict=True) if kept} == EXPECTED


def test_a_run_says_how_many_there_are_and_a_resumed_one_finds_the_same(run, photos, tmp_path):
    request = request_of(photos, encoder=SCRATCH, overrides=OVERRIDES, cache=tmp_path / "cache")
    listener = Notes()
    made = fit_now(request, tmp_path / "run", listener=listener, report=False).run
    assert f"near-duplicates of other images: {len(EXPECTED)}; see the report" in listener.notes
    before = (made.path / "assignments.csv").read_bytes()
    fit_now(request, tmp_path / "run", resume=True, report=False)
    assert (made.path / "assignments.csv").read_bytes() == before


def test_sort_takes_only_the_largest_picture(run, tmp_path):
    assert sort_run(run, tmp_path / "sorted", copy=False, without_duplicates=True) == PHOTOS
    found = sorted(path.name.partition("-")[2] for path in (tmp_path / "sorted").rglob("*.jpg"))
    assert found == sorted(f"{number}.jpg" for number in range(PHOTOS))
    assert sort_run(run, tmp_path / "all", copy=False) == PHOTOS + len(COPIES)


def test_sort_takes_a_copy_if_the_largest_picture_is_gone(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "p")
    made = fitted(tmp_path, tmp_path / "p", encoder=SCRATCH, overrides=OVERRIDES)
    (tmp_path / "p" / "0.jpg").unlink()
    sort_run(made, tmp_path / "sorted", copy=False, without_duplicates=True)
    found = {path.name.partition("-")[2] for path in (tmp_path / "sorted").rglob("*.jpg")}
    assert "0-resized.jpg" in found
    assert "1-recompressed.jpg" not in found


def without_column(run, folder):
    """Return a copy of a run as an earlier version left it: its tables have no such column."""
    shutil.copytree(run.path, folder)
    lines = [line.split(",") for line in (folder / "assignments.csv").read_text().splitlines()]
    place = lines[0].index("duplicate_of")
    (folder / "assignments.csv").write_text(
        "".join(",".join(line[:place] + line[place + 1 :]) + "\n" for line in lines)
    )
    return Run.open(folder)


def test_a_table_of_an_earlier_version_is_refused_by_sort_in_one_line(run, tmp_path):
    old = without_column(run, tmp_path / "old")
    with pytest.raises(UserError, match=r"without-duplicates: .*assignments\.csv has no column duplicate_of") as caught:
        sort_run(old, tmp_path / "sorted", copy=False, without_duplicates=True)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "sorted").exists()
    assert sort_run(old, tmp_path / "sorted", copy=False) == PHOTOS + len(COPIES)


def test_other_readers_ignore_the_column(run, photos, tmp_path):
    for name, made in (("new", run), ("old", without_column(run, tmp_path / "old"))):
        estimator = SeCu.load(made.path, device="cpu")
        assert len(estimator.labels_) == PHOTOS + len(COPIES)
        predict_source(made, open_source(str(photos)), str(tmp_path / f"{name}.csv"), "cpu")
        assert "duplicate_of" not in rows_of(tmp_path / f"{name}.csv")[0]
    assert (tmp_path / "new.csv").read_bytes() == (tmp_path / "old.csv").read_bytes()


def test_a_column_of_that_name_in_the_source_is_renamed(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "p")
    names = sorted(path.name for path in photos.iterdir())
    lines = ["path,duplicate_of", *(f"p/{name},mine" for name in names)]
    (tmp_path / "list.csv").write_text("\n".join(lines) + "\n")
    made = fitted(tmp_path, tmp_path / "list.csv", encoder=SCRATCH, overrides=OVERRIDES)
    rows = rows_of(made.path / "assignments.csv")
    assert {row["source_duplicate_of"] for row in rows} == {"mine"}
    assert sum(bool(row["duplicate_of"]) for row in rows) == len(COPIES)


def test_the_report_of_an_earlier_run_shows_them_when_it_is_written_again(run, tmp_path):
    from secu.apps.images import images_of
    from secu.results.results import find_results
    from secu.train.checkpoint import load_predictor

    old = without_column(run, tmp_path / "old")
    results = find_results(old, load_predictor(old, torch.device("cpu")), images_of(old, Listener()))
    page = write_report(old, results).read_text()
    assert 'id="duplicates"' in page
    assert f"{len(COPIES)} images are the same picture as another one" in page
