"""Decoding in worker processes: the same images as in threads, and nothing is left behind."""

import io
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import numpy as np
import pytest
from PIL import Image, ImageFile

from secu.base.errors import UserError
from secu.config import AugmentConfig
from secu.data import open_source
from secu.data.broken import Broken
from secu.data.decoding import decode, workers
from secu.data.decoding import process as process_module
from secu.data.decoding.image_files import BadImage
from secu.data.decoding.process import Process
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
    """Decode in processes, however few cores and images there are."""
    workers.end_idle()
    monkeypatch.setattr(workers, "THREADS_SUFFICE", 0)
    monkeypatch.setattr(workers, "ENOUGH", 1)
    yield
    workers.end_idle()


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
    assert 1 <= len(workers._idle) <= max(2, os.cpu_count())
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
    assert not workers._idle


def end_this_process(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def decoder_of(images=10):
    return Decoder(images, 2, None, decode.MAX_PIXELS)


def test_a_killed_process_is_one_line_and_the_next_call_works(folder, processes):
    decoder = decoder_of()
    path = str(folder / "00.png")
    with pytest.raises(UserError, match=r"^source: a process that decodes images was ended, probably for lack of"):
        decoder([Task(path, 8, 3, choose=end_this_process)])
    assert decoder([Task(path, 8, 3)])[0].shape == (3, 8, 8)


def test_an_idle_process_may_end(folder, processes):
    """By itself, after a while, or because somebody kills it: that is no error."""
    decoder = decoder_of()
    task = Task(str(folder / "00.png"), 8, 3)
    for _ in range(2):
        decoder([task])
        (process,) = workers._idle
        process.popen.kill()
        process.popen.wait()
    assert decoder([task])[0].shape == (3, 8, 8)


def test_a_process_that_ends_for_lack_of_work_while_it_is_called_is_replaced(folder, processes, monkeypatch):
    decoder = decoder_of()
    task = Task(str(folder / "00.png"), 8, 3)
    decoder([task])
    (process,) = workers._idle
    monkeypatch.setattr(Process, "runs", True)  # not noticed yet
    process.popen.send_signal(signal.SIGALRM)
    process.popen.wait()
    assert decoder([task])[0].shape == (3, 8, 8)


def test_an_idle_process_ends_after_a_while(tmp_path):
    start = "from secu.data.decoding import process; process.IDLE = 1; process.serve()"
    script = f"from secu.data.decoding import process; process.START = {start!r}; p = process.Process(); "
    script += "assert p.call(abs, -3) == 3; assert p.runs; print(p.popen.wait(timeout=20))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{-signal.SIGALRM}\n", done.stderr


def test_without_another_process_the_thread_decodes(folder, processes, monkeypatch):
    def refuse(*_, **__):
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert decoder_of()([Task(str(folder / "00.png"), 8, 3)])[0].shape == (3, 8, 8)


@pytest.mark.parametrize("start", ["os._exit(1)", "os.dup2(os.open(os.devnull, os.O_WRONLY), 2); raise OSError"])
def test_if_processes_cannot_start_the_thread_decodes(folder, processes, monkeypatch, start):
    monkeypatch.setattr(process_module, "START", start)
    assert decoder_of()([Task(str(folder / "00.png"), 8, 3)])[0].shape == (3, 8, 8)


def test_processes_started_at_once_share_one_lock(processes):
    """A large image is decoded alone only then."""
    for _ in range(3):
        process_module._turns = None
        with ThreadPoolExecutor(3) as pool:
            found = {future.result() for future in [pool.submit(turns_of_a_new_process) for _ in range(3)]}
        assert len(found) == 1


def turns_of_a_new_process():
    process = Process()
    try:
        return process.call(lock_of_turns)
    finally:
        process.end()


def lock_of_turns():
    found = os.fstat(decode._one_large.file)
    return found.st_dev, found.st_ino


def test_what_lies_in_the_current_folder_is_not_run(folder, tmp_path, processes, monkeypatch):
    for name in ("ast", "struct", "pickle", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('run')")
    monkeypatch.chdir(tmp_path)
    assert decoder_of()([Task(str(folder / "00.png"), 8, 3)])[0].shape == (3, 8, 8)
    assert len(workers._idle) == 1


def test_errors_of_a_call_come_back(processes):
    process = Process()
    with pytest.raises(ValueError, match="invalid literal"):
        process.call(int, "x")
    assert process.call(int, "7") == 7
    with pytest.raises((AttributeError, pickle.PicklingError)):
        process.call(lambda: 0)
    assert process.call(int, "8") == 8
    process.end()


def test_paths_are_those_of_the_folder_of_now(tmp_path, processes, monkeypatch):
    for name, color in (("a", 10), ("b", 200)):
        (tmp_path / name).mkdir()
        Image.new("L", (4, 4), color).save(tmp_path / name / "x.png")
    for name, color in (("a", 10), ("b", 200)):
        monkeypatch.chdir(tmp_path / name)
        assert decoder_of()([Task("x.png", 2, 1)])[0].tolist() == [[[color] * 2] * 2]
    assert len(workers._idle) == 1


@pytest.mark.parametrize("allowed", [True, False])
def test_incomplete_files_are_read_if_the_script_wants_them(tmp_path, processes, monkeypatch, allowed):
    content = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(content, "JPEG")
    tasks = [Task(content.getvalue()[:-400], 8, 1)]
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", allowed)
    (outcome,) = decoder_of()(tasks)
    (expected,) = workers.decode_all(tasks, None, decode.MAX_PIXELS)
    assert isinstance(outcome, BadImage) == isinstance(expected, BadImage) == (not allowed)


def test_large_images_are_decoded_one_at_a_time_across_processes(tmp_path, processes):
    path = tmp_path / "large.png"
    Image.new("L", (5_100, 5_000)).save(path)
    large = [Task(str(path), 4, 1)]
    decoder = decoder_of()
    decoder(large)
    with ThreadPoolExecutor(1) as pool:
        holder = Process()  # this process itself would pass its own lock
        holder.call(lock_turns)
        future = pool.submit(decoder, large)
        small = Process().call(workers.decode_all, [Task(b"", 4, 1)], None, decode.MAX_PIXELS)
        time.sleep(0.5)
        assert isinstance(small[0], BadImage)
        assert not future.done()
        holder.end()  # which releases the lock
        assert future.result(timeout=30)[0].shape == (1, 4, 4)


def lock_turns():
    decode._one_large.__enter__()


def test_leaving_early_does_not_wait_for_what_is_decoded(tmp_path, processes):
    for n in range(8):
        Image.new("L", (5_100, 5_000), n).save(tmp_path / f"{n}.png")
    with closing(decoded(open_source(str(tmp_path)), (1, 4, 4), workers=2)) as images:
        next(images)
        began = time.monotonic()
    assert time.monotonic() - began < 1


def test_parts_are_smaller_for_large_files():
    decoder = decoder_of()
    decoder.at_once = 3
    sizes = [10, 10, 10, 10, 2**21, 10, 10]
    tasks = [(n, Task(bytes(size), 8, 3)) for n, size in enumerate(sizes)]
    parts = [numbers for numbers, _ in decoder.parts(tasks)]
    assert parts == [[0, 1, 2], [3, 4], [5, 6]]


def test_ctrl_c_does_not_wait_for_batches(tmp_path, processes):
    numbers = np.random.default_rng(0)
    for n in range(3):
        pixels = numbers.integers(0, 4, (5_000, 5_100), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{n}.png", compress_level=1)
    broken = Broken(open_source(str(tmp_path)))
    began = time.monotonic()
    batches = decoded_ahead(broken, [[0], [1, 2]], (1, 4, 4), None)
    next(batches)
    took = time.monotonic() - began
    batches.close()
    assert time.monotonic() - began - took < max(0.2, took / 2)
    began = time.monotonic()
    while any(process.runs for process in list(process_module._all) if process.stopped):
        assert time.monotonic() - began < took
        time.sleep(0.01)


CHILDREN = """
    import multiprocessing, os, sys
    from secu.data.decoding import decode, workers
    from secu.data import open_source
    from secu.data.stream import decoded

    workers.THREADS_SUFFICE = 0
    workers.ENOUGH = 1

    def count(_=None):
        return sum(1 for _ in decoded(open_source(sys.argv[1]), (3, 8, 8), workers=2))

    assert count() == 40
    idle = [process.popen for process in workers._idle]
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
        assert idle and all(process.poll() is None for process in idle)  # the child has left them alone
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(count, range(2)) == [40, 40]
        print("good")
    else:
        assert count() == 40
"""


def test_children_of_the_main_process_decode_too(folder):
    options = ["-X", "dev", "-W", "ignore::DeprecationWarning"]
    command = [sys.executable, *options, "-c", textwrap.dedent(CHILDREN), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("good\n", "")


SCRIPT = """
    import os, sys, time
    from secu.data.decoding import workers
    from secu.data.stream import decoded
    from secu.data import open_source

    print("main", flush=True)  # a script without the usual guard
    workers.THREADS_SUFFICE = 0
    workers.ENOUGH = 1
    images = list(decoded(open_source(sys.argv[1]), (3, 8, 8), workers=2))
    pids = [process.popen.pid for process in workers._idle]
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


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_processes_end_with_the_main_process(folder, kind):
    """A Ctrl-C in a terminal, which reaches the whole group, does not reach them."""
    script = started(folder, 60)
    script.stdout.readline()
    _, *pids = map(int, script.stdout.readline().split())
    assert pids
    assert all(map(running, pids))
    assert all(os.getpgid(pid) not in (os.getpgid(0), os.getpgid(script.pid)) for pid in pids)
    script.send_signal(kind)
    script.wait(timeout=30)
    assert all_end(pids)
