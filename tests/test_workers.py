"""Decoding in worker processes: the same images as in threads, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from functools import partial

import numpy as np
import pytest
from PIL import Image

from secu.base.errors import UserError
from secu.config import AugmentConfig
from secu.data import open_source
from secu.data.broken import Broken
from secu.data.decoding import decode, workers
from secu.data.decoding.image_files import BadImage
from secu.data.decoding.workers import Decoder, Task
from secu.data.stream import crop_now, decoded, decoded_ahead
from secu.views.originals import OriginalCrops

SHAPE = (3, 24, 24)
SUFFIXES = ("png", "jpg", "webp", "gif", "tif")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write 40 images of several formats, sizes and modes; some of them are broken."""
    folder = tmp_path_factory.mktemp("pictures")
    numbers = np.random.default_rng(0)
    for n in range(40):
        pixels = numbers.integers(0, 256, (30 + n, 70 - n, 3), np.uint8)
        path = folder / f"{n:02}.{SUFFIXES[n % len(SUFFIXES)]}"
        Image.fromarray(pixels).convert("L" if n % 7 == 0 else "RGB").save(path)
        if n % 11 == 3:
            path.write_bytes(path.read_bytes()[:60])
    return folder


@pytest.fixture
def processes(monkeypatch):
    """Decode in two processes, however few cores and images there are."""
    monkeypatch.setattr(workers, "THREADS_SUFFICE", 0)
    monkeypatch.setattr(workers, "ENOUGH", 1)
    monkeypatch.setattr(workers, "AT_ONCE", 3)
    yield
    if workers._processes.cache_info().currsize:
        workers._processes(2).executor.shutdown(kill_workers=True)
    workers._processes.cache_clear()


def all_ways(folder):
    """Return the results of every function that decodes, and the reasons for what is broken."""
    source = open_source(str(folder))
    with closing(decoded(source, SHAPE, workers=2)) as images:
        plain = [(i, str(image) if isinstance(image, BadImage) else image.tolist()) for i, image in images]
    sides = {7: (3, 9, 9), 2: (1, 30, 30), 39: (3, 5, 5)}
    with closing(decoded(source, sides, workers=2)) as images:
        own = [(i, image.tolist()) for i, image in images]
    broken = Broken(source, most=0.5)
    batches = [[5, 3, 30], [14, 0, 1, 2, 38], [36]]
    with closing(decoded_ahead(broken, batches, SHAPE, None)) as batches_of_pixels:
        ahead = [pixels.tolist() for pixels in batches_of_pixels]
    boxes = OriginalCrops(AugmentConfig(), 16)
    numbers = [9, 3, 25, 11, 0, 14, 31]
    crops = crop_now(broken, numbers, [partial(boxes.boxes, 5, i) for i in numbers], (3, 16, 16), None)
    return plain, own, ahead, crops.tolist(), broken.reasons


def test_processes_decode_what_threads_do(folder, request):
    in_threads = all_ways(folder)
    request.getfixturevalue("processes")
    assert all_ways(folder) == in_threads
    assert workers._processes.cache_info().currsize == 1
    plain, _, ahead, crops, reasons = in_threads
    assert sum(isinstance(image, str) for _, image in plain) == 4
    assert [len(batch) for batch in ahead] == [3, 5, 1]
    assert np.shape(crops) == (2, 7, 3, 16, 16)
    assert set(reasons) == {3, 14, 25, 36}


@pytest.mark.parametrize(
    ("cores", "images", "elsewhere"), [(4, 10_000, False), (5, 499, False), (5, 500, True), (64, 3, False)]
)
def test_processes_are_for_many_cores_and_images(cores, images, elsewhere):
    decoder = Decoder(images, cores, None, decode.MAX_PIXELS)
    assert decoder.elsewhere == elsewhere
    assert (decoder.at_once > 1) == elsewhere


def test_arrays_are_scaled_in_the_thread(processes):
    decoder = Decoder(10, 2, None, decode.MAX_PIXELS)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    assert decoder([Task(pixels, 8, 3)])[0].tolist() == pixels.transpose(2, 0, 1).tolist()
    assert not workers._processes.cache_info().currsize


def end_this_process(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_one_line_and_the_next_call_works(folder, processes):
    decoder = Decoder(10, 2, None, decode.MAX_PIXELS)
    path = str(folder / "00.png")
    with pytest.raises(UserError, match=r"^source: a process that decodes images was ended, probably for lack of"):
        decoder([Task(path, 8, 3, choose=end_this_process)])
    assert decoder([Task(path, 8, 3)])[0].shape == (3, 8, 8)


def test_large_images_are_decoded_one_at_a_time_across_processes(tmp_path, processes, monkeypatch):
    """A worker holds the lock that all of them share while it decodes a large image."""
    executor, turns = workers._processes(2)
    path = tmp_path / "large.png"
    Image.new("L", (5_100, 5_000)).save(path)
    decoder = Decoder(10, 2, None, decode.MAX_PIXELS)
    decoder([Task(str(path), 4, 1)])  # the processes have started
    with turns:
        future = executor.submit(workers.decode_all, [Task(str(path), 4, 1)], None, decode.MAX_PIXELS)
        small = decoder([Task(np.zeros((4, 4), np.uint8), 4, 1), Task(str(path), 4, 1)][:1])
        time.sleep(0.5)
        assert small[0].shape == (1, 4, 4)
        assert not future.done()
    assert future.result(timeout=30)[0].shape == (1, 4, 4)


SCRIPT = """
    import os, sys, time
    from secu.data.decoding import workers
    from secu.data.stream import decoded
    from secu.data import open_source

    print("main", flush=True)  # a script without the usual guard
    workers.THREADS_SUFFICE = 0
    workers.ENOUGH = 1
    images = list(decoded(open_source(sys.argv[1]), (3, 8, 8), workers=2))
    pids = {workers._processes(2).executor.submit(os.getpid).result() for _ in range(20)}
    print(len(images), *pids, flush=True)
    time.sleep(float(sys.argv[2]))
"""


def started(folder, seconds):
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def all_end(pids, seconds=15):
    end = time.monotonic() + seconds
    while any(map(running, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    return not any(map(running, pids))


def test_a_script_without_a_guard_runs_once_and_ends_quickly(folder):
    began = time.monotonic()
    script = started(folder, 0)
    out, err = script.communicate(timeout=60)
    assert script.returncode == 0, err
    assert err == ""
    first, second = out.splitlines()
    assert first == "main"
    count, *pids = map(int, second.split())
    assert count == 40
    assert all_end(pids)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_processes_end_with_the_main_process(folder, kind):
    script = started(folder, 60)
    script.stdout.readline()
    _, *pids = map(int, script.stdout.readline().split())
    assert pids
    assert all(map(running, pids))
    script.send_signal(kind)
    script.wait(timeout=30)
    assert all_end(pids)


def test_processes_ignore_the_signals_of_a_terminal(folder):
    """Ctrl-C reaches every process of the group; the main process alone decides what happens."""
    script = started(folder, 60)
    script.stdout.readline()
    _, *pids = map(int, script.stdout.readline().split())
    for pid in pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    time.sleep(1)
    assert all(map(running, pids))
    script.kill()
    script.wait(timeout=30)
    assert all_end(pids)
