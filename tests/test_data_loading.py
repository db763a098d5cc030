"""Decoding all images once into a cache, and what happens when something goes wrong on the way."""

import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import secu.data.cache as data_cache
import secu.data.stream as data_stream
from secu.base.errors import UserError
from secu.data import Images, decoded, load_images, open_source
from secu.data.decoding import workers
from secu.train.feed import ResidentFeed, build_feed


def complete(cache: Path) -> list[Path]:
    """Return the complete files in a cache."""
    return sorted(cache.glob("*.images"))


def unfinished(cache: Path) -> list[Path]:
    """Return the files in a cache that are being written, or that a later call continues."""
    return sorted(cache.glob(".*.part"))


def fill(folder, count, start=0):
    """Write pictures of one gray each, of different sizes."""
    folder.mkdir(exist_ok=True)
    for i in range(start, start + count):
        Image.new("RGB", (5 + i % 7, 4 + i % 5), (i, i, i)).save(folder / f"{i}.png")
    return folder


@pytest.fixture
def pictures(tmp_path):
    return fill(tmp_path / "pictures", 30)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def decodes(monkeypatch):
    """Count the images that are decoded."""
    calls = []
    decode = workers.decode
    monkeypatch.setattr(workers, "decode", lambda *a: calls.append(a) or decode(*a))
    return calls


def firsts(images):
    return images.tensor[:, 0, 0, 0].tolist()


def test_images_are_ready_for_training(pictures, cache):
    images = load_images(open_source(pictures), (3, 8, 8), cache=cache)
    assert isinstance(images, Images)
    assert images.tensor.dtype == torch.uint8
    assert images.shape == (3, 8, 8)
    assert len(images) == 30
    assert firsts(images) == list(range(30))
    assert images.targets is None
    assert images.skipped == ()
    assert images.fetch(torch.tensor([4, 4, 2]))[:, 0, 0, 0].tolist() == [4, 4, 2]
    assert isinstance(build_feed(images, 8, torch.device("cpu")), ResidentFeed)


def test_no_warning_about_memory_that_cannot_be_written(pictures, cache):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images = load_images(open_source(pictures), (3, 8, 8), cache=cache)
    images.tensor[0] = 77  # changes this copy, not the cache
    assert firsts(load_images(open_source(pictures), (3, 8, 8), cache=cache))[0] == 0


def test_progress_counts_to_the_end(pictures, cache):
    seen = []
    load_images(open_source(pictures), (3, 8, 8), cache=cache, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 30) for i in range(1, 31)]


def test_the_second_time_nothing_is_decoded(pictures, cache, decodes):
    first = load_images(open_source(pictures), (3, 8, 8), cache=cache)
    assert len(decodes) == 30
    again = load_images(open_source(str(pictures) + "/"), (3, 8, 8), cache=cache)
    assert len(decodes) == 30
    assert torch.equal(first.tensor, again.tensor)
    load_images(open_source(pictures), (3, 9, 9), cache=cache)
    load_images(open_source(pictures), (1, 8, 8), cache=cache)
    assert len(decodes) == 90
    load_images(open_source(pictures), (3, 8, 8), cache=cache)
    assert len(decodes) == 90
    assert len(complete(cache)) == 3


@pytest.mark.parametrize("change", ["content", "added", "removed", "renamed", "touched"])
def test_the_cache_is_rebuilt_when_a_file_changes(pictures, cache, change, decodes):
    load_images(open_source(pictures), (3, 8, 8), cache=cache)
    load_images(open_source(pictures), (3, 9, 9), cache=cache)
    decodes.clear()
    match change:
        case "content":
            Image.new("RGB", (9, 9), (200, 200, 200)).save(pictures / "3.png")
        case "added":
            fill(pictures, 1, 90)
        case "removed":
            (pictures / "3.png").unlink()
        case "renamed":
            (pictures / "3.png").rename(pictures / "3a.png")
        case _:
            os.utime(pictures / "3.png", ns=(1, 1))
    images = load_images(open_source(pictures), (3, 8, 8), cache=cache)
    assert len(decodes) == len(images)
    assert firsts(images)[3] == {"content": 200, "removed": 4}.get(change, 3)
    assert len(complete(cache)) == 1  # those of the former state are gone


def test_sources_do_not_disturb_each_other(pictures, cache, tmp_path, decodes):
    others = fill(tmp_path / "others", 5)
    load_images(open_source(pictures), (3, 8, 8), cache=cache)
    load_images(open_source(others), (3, 8, 8), cache=cache)
    decodes.clear()
    load_images(open_source(pictures), (3, 8, 8), cache=cache)
    load_images(open_source(others), (3, 8, 8), cache=cache)
    assert not decodes


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_cache_is_rebuilt(pictures, cache, damage):
    load_images(open_source(pictures), (3, 8, 8), cache=cache)
    gc.collect()
    (file,) = complete(cache)
    file.write_bytes(file.read_bytes()[:-30] if damage is None else damage)
    assert firsts(load_images(open_source(pictures), (3, 8, 8), cache=cache)) == list(range(30))


def spoil(folder, *numbers):
    for number in numbers:
        (folder / f"{number}.png").write_bytes(b"spoiled")


def test_bad_images_leave_every_list(tmp_path, cache, decodes):
    folder = tmp_path / "many"
    for name in ("a", "b"):
        fill(folder if folder.exists() else folder.parent / "many", 0)
        fill(folder / name, 30, 0 if name == "a" else 30)
    spoil(folder / "a", 0, 7)
    spoil(folder / "b", 59)
    source = open_source(folder, labels="folder").replaced(columns={"number": list(range(60))})
    for _ in range(2):
        images = load_images(source, (3, 8, 8), cache=cache)
        good = [i for i in range(60) if i not in (0, 7, 59)]
        assert firsts(images) == good
        assert images.ids == tuple(f"{'a' if i < 30 else 'b'}/{i}.png" for i in good)
        assert images.targets.tolist() == [int(i >= 30) for i in good]
        assert images.columns == {"number": good}
        assert [images.original(i) for i in range(57)] == [folder / name for name in images.ids]
        assert [name for name, _ in images.skipped] == ["a/0.png", "a/7.png", "b/59.png"]
        assert {reason.split()[0] for _, reason in images.skipped} == {"not"}
    assert len(decodes) == 60


def test_more_than_5_percent_bad_stops(tmp_path, cache, decodes):
    folder = fill(tmp_path / "pictures", 40)
    spoil(folder, 10, 11)
    assert len(load_images(open_source(folder), (3, 8, 8), cache=cache)) == 38  # 5% is not more than 5%
    spoil(folder, 12)
    message = r"source: 3 of 40 images in .* cannot be read, more than 5%; the first: 10.png: not an image.*--allow-bad"
    with pytest.raises(UserError, match=message):
        load_images(open_source(folder), (3, 8, 8), cache=cache)
    decodes.clear()
    images = load_images(open_source(folder), (3, 8, 8), cache=cache, allow_bad=True)
    assert len(images) == 37
    assert not decodes  # the work of the run that stopped is not lost


def test_what_was_refused_while_listing_counts_as_bad(tmp_path, cache):
    folder = fill(tmp_path / "pictures", 3)
    (tmp_path / "m.csv").write_text('path\npictures/0.png\npictures/1.png\n""\n')
    with pytest.raises(UserError, match=r"1 of 3 images .* the first: row 3: no path"):
        load_images(open_source(tmp_path / "m.csv"), (3, 8, 8), cache=cache)
    assert folder.exists()
    assert len(load_images(open_source(tmp_path / "m.csv"), (3, 8, 8), cache=cache, allow_bad=True).skipped) == 1


def test_images_that_a_table_names_twice_are_no_bad_ones(tmp_path, cache):
    """As it does with a row for each box around something in a picture."""
    fill(tmp_path / "pictures", 3)
    (tmp_path / "m.csv").write_text("path\n" + "pictures/0.png\npictures/1.png\npictures/2.png\n" * 4)
    images = load_images(open_source(tmp_path / "m.csv"), (3, 8, 8), cache=cache)
    assert len(images) == 3
    assert images.skipped == ()
    assert len(images.repeated) == 9
    assert images.repeated[0] == ("pictures/0.png", "row 4 names the same file as row 1")


def test_too_few(tmp_path, cache):
    folder = fill(tmp_path / "pictures", 1)
    assert len(load_images(open_source(folder), (3, 8, 8), cache=cache)) == 1
    spoil(folder, 0)
    with pytest.raises(UserError, match=r"source: none of the 1 images in .* can be read; first: not an image"):
        load_images(open_source(folder), (3, 8, 8), cache=cache, allow_bad=True)
    np.save(tmp_path / "a.npy", np.zeros((0, 8, 8), np.uint8))
    with pytest.raises(UserError, match=r"source: no images in"):
        load_images(open_source(tmp_path / "a.npy"), (3, 8, 8), cache=cache)
    assert not unfinished(cache)


@pytest.mark.parametrize("shape", [(3, 0, 0), (3, 100_000, 100_000), (3, 8, 9), (2, 8, 8)])
def test_wrong_shapes(pictures, cache, shape):
    with pytest.raises(UserError, match=r"image_size: |channels: "):
        load_images(open_source(pictures), shape, cache=cache)


def test_a_mended_file_is_found_again(pictures, cache):
    """Permission and content are part of the fingerprint."""
    (pictures / "5.png").chmod(0o644)
    before = open_source(pictures).fingerprint
    (pictures / "5.png").chmod(0o600)
    assert open_source(pictures).fingerprint != before


def test_errors_that_may_pass_are_not_remembered(pictures, cache, monkeypatch, decodes):
    original = workers.decode

    def flaky(raw, *rest):
        if raw.endswith("/5.png"):
            raise workers.BadImage("Input/output error", lasting=False)
        return original(raw, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(workers, "decode", flaky)
        assert len(load_images(open_source(pictures), (3, 8, 8), cache=cache)) == 29
    assert len(load_images(open_source(pictures), (3, 8, 8), cache=cache)) == 30


def test_ctrl_c_leaves_what_the_next_call_continues(pictures, cache):
    def press(done, total):
        if done == 5:
            raise KeyboardInterrupt

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        load_images(open_source(pictures), (3, 8, 8), cache=cache, progress=press)
    assert (len(complete(cache)), len(unfinished(cache))) == (0, 1)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("ThreadPool")]
    assert len(load_images(open_source(pictures), (3, 8, 8), cache=cache)) == 30
    assert (len(complete(cache)), len(unfinished(cache))) == (1, 0)


INTERRUPTED = """
import sys, time
from pathlib import Path
from secu.data.decoding import workers
from secu.data import load_images, open_source
decode = workers.decode
workers.decode = lambda *a: time.sleep(0.05) or decode(*a)
load_images(open_source(sys.argv[1]), (3, 8, 8), cache=Path(sys.argv[2]), progress=lambda *a: print(*a, flush=True))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of another kind")
def test_a_real_ctrl_c(pictures, cache):
    command = [sys.executable, "-c", INTERRUPTED, str(pictures), str(cache)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "1 30\n"
        assert len(unfinished(cache)) == 1
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert errors.endswith("KeyboardInterrupt\n")
    assert complete(cache) == []


def test_ctrl_c_does_not_wait_for_the_queue(pictures, cache, monkeypatch, decodes):
    counted = workers.decode
    monkeypatch.setattr(workers, "decode", lambda *a: time.sleep(0.5) or counted(*a))
    monkeypatch.setattr(data_stream, "cores", lambda: 2)

    def press(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_images(open_source(pictures), (3, 8, 8), cache=cache, progress=press)
    assert 1 <= len(decodes) < 8  # which were read ahead


def test_a_former_cache_survives_a_failed_rebuild_of_another_size(pictures, cache, decodes):
    load_images(open_source(pictures), (3, 8, 8), cache=cache)

    def press(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_images(open_source(pictures), (3, 9, 9), cache=cache, progress=press)
    decodes.clear()
    load_images(open_source(pictures), (3, 8, 8), cache=cache)
    assert not decodes


@pytest.mark.parametrize("where", ["reserve", "write"])
def test_a_full_disk(pictures, cache, monkeypatch, where):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(data_cache, "_reserve" if where == "reserve" else "_finish", full)
    with pytest.raises(
        UserError, match=r"cache: not enough space in .*cache for 0 MB of images; free some space, or set SECU_DATA"
    ):
        load_images(open_source(pictures), (3, 8, 8), cache=cache)
    assert complete(cache) == unfinished(cache) == []


def test_a_disk_that_is_really_full(tmp_path, monkeypatch):
    folder, disk = fill(tmp_path / "pictures", 30), tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("cannot mount a small disk here")
    except FileNotFoundError:
        pytest.skip("no mount here")
    try:
        for reserve in (True, False):  # with and without being told beforehand
            if not reserve:
                monkeypatch.setattr(data_cache, "_reserve", lambda *_: None)
            with pytest.raises(UserError, match=r"cache: not enough space in"):
                load_images(open_source(folder), (3, 128, 128), cache=disk)
            assert complete(disk) == unfinished(disk) == []
        assert len(load_images(open_source(folder), (3, 32, 32), cache=disk)) == 30
    finally:
        gc.collect()
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_cache_that_cannot_be_written(pictures, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"cache: cannot write to .*file: "):
        load_images(open_source(pictures), (3, 8, 8), cache=tmp_path / "file")
    with pytest.raises(UserError, match=r"cache: cannot write to .*file/below: Not a directory"):
        load_images(open_source(pictures), (3, 8, 8), cache=tmp_path / "file" / "below")


def test_what_a_killed_process_left_of_an_earlier_state_is_removed(pictures, cache):
    images = load_images(open_source(pictures), (3, 8, 8), cache=cache)
    (file,) = complete(cache)
    left = cache / f".{file.name}.part"
    left.write_bytes(b"x")
    fill(pictures, 1, 50)
    assert len(load_images(open_source(pictures), (3, 8, 8), cache=cache)) == 1 + len(images)
    assert not left.exists()


def test_the_same_array_understood_in_another_way_is_decoded_anew(tmp_path, cache):
    np.save(tmp_path / "a.npy", np.full((4, 8, 8), 255, np.uint16))
    for values, level in ((None, 255), ("int 0..65535", 0), (None, 255)):
        source = open_source(tmp_path / "a.npy")
        assert firsts(load_images(source, (1, 8, 8), values=values, cache=cache)) == [level] * 4


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["folder", "zip", "array"])
def test_people_see_the_originals_where_these_are_larger(tmp_path, cache, kind, channels):
    levels = np.arange(6, dtype=np.uint8)[:, None, None, None] * 40 + np.arange(48, dtype=np.uint8)[None, None, :, None]
    pictures = np.broadcast_to(levels, (6, 40, 48, 3))
    source = tmp_path / "folder"
    source.mkdir()
    for i, picture in enumerate(pictures):
        Image.fromarray(picture).save(source / f"{i}.png")
    if kind == "zip":
        source = shutil.make_archive(tmp_path / "a", "zip", source)
    elif kind == "array":
        source = tmp_path / "a.npy"
        np.save(source, pictures)
    images = load_images(open_source(source), (channels, 8, 8), cache=cache).select([5, 1, 3])
    index = torch.tensor([2, 0])
    assert images.pictures(index, 8).equal(images.fetch(index))
    for side, found in ((20, 20), (40, 40), (300, 40)):  # never enlarged
        shown = images.pictures(index, side)
        assert shown.shape == (2, channels, found, found)
        wanted = [open_source(source).decode(number, found, channels) for number in (3, 5)]
        assert torch.equal(shown, torch.from_numpy(np.stack(wanted)))
    assert Images(images.tensor).pictures(index, 40).shape == (2, channels, 8, 8)  # no originals at hand


def test_an_original_that_is_gone_is_shown_as_it_was(tmp_path, cache):
    (tmp_path / "p").mkdir()
    for i in range(4):
        Image.new("RGB", (32, 32), (60 * i, 0, 0)).save(tmp_path / "p" / f"{i}.png")
    images = load_images(open_source(tmp_path / "p"), (3, 8, 8), cache=cache)
    (tmp_path / "p" / "2.png").unlink()
    shown = images.pictures(torch.tensor([3, 2]), 16)
    assert shown.shape == (2, 3, 16, 16)
    assert shown[:, 0].flatten(1).unique(dim=1).tolist() == [[180], [120]]
    unseen = load_images(open_source(tmp_path / "p"), (3, 8, 8), cache=cache)
    (tmp_path / "p").rename(tmp_path / "elsewhere")
    assert images.pictures(torch.tensor([1]), 16)[0, 0].unique().tolist() == [60]
    assert unseen.pictures(torch.tensor([1]), 16).equal(unseen.tensor[1:2])  # nobody knows how large they were


def test_memory_does_not_grow_with_the_stream(pictures, monkeypatch):
    """No more images are in flight than the threads can use."""
    source = open_source(pictures)
    read, reads = source.read, []
    monkeypatch.setattr(source, "read", lambda i, values: reads.append(i) or read(i, values))
    stream = decoded(source, (3, 8, 8), workers=1)
    next(stream)
    assert len(reads) <= data_stream.AHEAD + 1
    stream.close()


def test_an_array_larger_than_its_squares(tmp_path, cache):
    array = np.zeros((20, 12, 12, 3), np.float32)
    array[:, :, :, 1] = np.linspace(0, 1, 20)[:, None, None]
    np.save(tmp_path / "a.npy", array)
    images = load_images(open_source(tmp_path / "a.npy"), (3, 6, 6), cache=cache)
    assert images.ids == tuple(map(str, range(20)))
    assert images.tensor[:, 1, 3, 3].tolist() == np.rint(np.linspace(0, 1, 20) * 255).astype(int).tolist()


def test_strange_names_go_all_the_way(tmp_path, cache):
    folder = tmp_path / "strange"
    folder.mkdir()
    for name in (b"\xff.png", b"a\nb.png", b"<b>.png"):
        with open(os.path.join(os.fsencode(folder), name), "wb") as file:
            Image.new("L", (2, 2)).save(file, "PNG")
    (folder / "bad\n.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"the first: bad\\x0a.png: empty file") as caught:
        load_images(open_source(folder), (1, 4, 4), cache=cache)
    assert str(caught.value).isprintable()
    assert len(load_images(open_source(folder), (1, 4, 4), cache=cache, allow_bad=True)) == 3
