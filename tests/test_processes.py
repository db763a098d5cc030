"""Several processes: real ones, on the CPU with gloo, give what one process with the whole batch gives."""

import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from feature_runs import paint
from process_cases import CASES, start, start_jobs
from secu.base import processes
from secu.base.errors import UserError
from secu.cli import app
from secu.train.run import Run
from small_runs import assert_same
from waiting import epochs_of, wait_for

NAMES = (*CASES, "features", "selflabel", "selflabel-many")
STOPPED = ("size", "selflabel")  # after one epoch by one process, then resumed by two
STOPPED_BY_TWO = "entropy"  # resumed by one process and by four
CLOSE = 1e-9  # relative error of numbers in double precision; tiny runs amplify rounding


def ended(running, code=0):
    """Wait for processes, and return what each wrote to stderr, without what libraries wrote."""
    outputs = [process.communicate(timeout=250) for process in running]
    codes = [process.returncode for process in running]
    assert codes == ([code] * len(codes) if isinstance(code, int) else code), outputs
    return [[line for line in err.splitlines() if line.startswith("secu: ")] for _, err in outputs]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    paint(folder / "pictures", 31)
    np.save(folder / "array.npy", np.random.default_rng(0).integers(0, 256, (200, 8, 8), dtype=np.uint8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECU_DATA", str(folder / "data"))  # decoded images stay out of the user's cache
        yield folder


def fit(base, out, epochs=8):
    """Return a command that trains for some epochs of five steps."""
    settings = ["optim.batch_size=40", "optim.warmup_epochs=1", "encoder.dim=8", f"optim.epochs={epochs}"]
    images = ["fit", str(base / "array.npy"), "-k", "4", "--from-scratch"]
    return [*images, "answer=head", *settings, "--device", "cpu", "--out", str(out)]


def commands(folder):
    """Return commands whose results must not depend on the number of processes."""
    return [
        "embed",
        f"secu fit {folder.parent / 'pictures'} -k 3 --from-scratch --out {folder / 'fit'} optim.epochs=2"
        " optim.batch_size=8 data.image_size=12 --device cpu",
        "undo:selflabel",
        f"secu selflabel {folder / 'fit'} --out {folder / 'second'} optim.epochs=2 --device cpu",
        f"secu evaluate {folder / 'fit'} --device cpu",
        f"secu predict {folder / 'fit'} {folder.parent / 'array.npy'} -o {folder / 'out'}/ --device cpu",
    ]


@pytest.fixture(scope="module")
def alone(base):
    """Do everything in one process; return its folder."""
    folder = base / "1"
    folder.mkdir()
    jobs = [*NAMES, *commands(folder), *(f"stop:{name}" for name in STOPPED)]
    ended([start_jobs(1, folder, folder / "size", jobs)])
    return folder


@pytest.fixture(scope="module")
def two(base, alone):
    folder = base / "2"
    shutil.copytree(alone / "stopped", folder / "stopped")
    jobs = [*NAMES, *commands(folder), f"stop:{STOPPED_BY_TWO}", *(f"resume:{name}" for name in STOPPED)]
    jobs.append(shlex.join(["secu", *fit(base, folder / "uninterrupted")]))
    ended([start_jobs(2, folder, alone / "size", jobs)])
    return folder


def with_stopped(two, folder):
    """Make a folder that contains the run that two processes began."""
    shutil.copytree(two / "stopped" / STOPPED_BY_TWO, folder / "stopped" / STOPPED_BY_TWO)
    return folder


@pytest.fixture(scope="module")
def four(base, alone, two):
    folder = with_stopped(two, base / "4")
    ended([start_jobs(4, folder, alone / "size", [*NAMES, f"resume:{STOPPED_BY_TWO}"])])
    return folder


@pytest.fixture(scope="module")
def again(base, alone, two):
    """Continue in one process; return its folder."""
    folder = with_stopped(two, base / "again")
    ended([start_jobs(1, folder, alone / "size", [f"resume:{STOPPED_BY_TWO}"])])
    return folder


def assert_alike(ours, theirs, name, world):
    """Compare all processes with each other bit by bit, and with the single one up to rounding."""
    expected = torch.load(theirs / f"{name}-0.pt")
    states = [torch.load(ours / f"{name}-{rank}.pt") for rank in range(world)]
    for key, value in expected.items():
        for state in states[1:]:
            assert torch.equal(states[0][key], state[key]), key
        if value.is_floating_point():
            torch.testing.assert_close(states[0][key], value, rtol=CLOSE, atol=CLOSE, msg=key)
        else:
            assert torch.equal(states[0][key], value), key
    mine, other = (Run.open(folder / name).metrics() for folder in (ours, theirs))
    assert len(mine) == len(other)
    for a, b in zip(mine, other, strict=True):
        same = {key for key in b if "seconds" not in key}
        assert a.keys() == b.keys()
        assert {key: a[key] for key in same} == pytest.approx({key: b[key] for key in same}, rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_equal_one(alone, two, name):
    assert_alike(two, alone, name, 2)


@pytest.mark.parametrize("name", NAMES)
def test_four_processes_equal_one(alone, four, name):
    assert_alike(four, alone, name, 4)


@pytest.mark.parametrize("name", STOPPED)
def test_a_run_of_one_process_is_resumed_by_two(alone, two, name):
    assert_alike(two / "stopped", alone, name, 2)


@pytest.mark.parametrize(("folder", "world"), [("again", 1), ("four", 4)])
def test_a_run_of_two_processes_is_resumed_by_another_number(alone, folder, world, request):
    assert_alike(request.getfixturevalue(folder) / "stopped", alone, STOPPED_BY_TWO, world)


def test_the_time_limit_ends_all_processes_after_the_same_epoch(two):
    assert len(Run.open(two / "stopped" / "entropy").metrics()) == 1


def test_run_json_names_the_number_of_processes(alone, two):
    assert Run.open(two / "size").record()["processes"] == 2
    assert "processes" not in Run.open(alone / "size").record()


def test_every_process_embeds_a_part_of_the_images(alone, two):
    assert np.array_equal(np.load(two / "features.npy"), np.load(alone / "features.npy"))
    assert [(two / f"embedded-{rank}").read_text() for rank in range(2)] == ["15", "16"]
    assert not list((two / "data").rglob(".*.part*"))


@pytest.mark.parametrize("name", ["fit", "second"])
def test_a_whole_run_of_two_processes_has_the_same_tables(alone, two, name):
    for file in ("assignments.csv", "clusters.csv"):
        ours, theirs = (np.genfromtxt(folder / name / file, delimiter=",", names=True) for folder in (two, alone))
        assert ours.dtype == theirs.dtype
        for column in ours.dtype.names:
            assert ours[column] == pytest.approx(theirs[column], abs=1e-5, nan_ok=True), column
    assert (two / name / "report.html").is_file()


def test_all_processes_return_to_the_first_model(alone, two):
    first = {name: tensor for name, tensor in Run.open(alone / "size").load_model().items() if "encoder" in name}
    states = [torch.load(folder) for folder in (alone / "undone-0.pt", two / "undone-0.pt", two / "undone-1.pt")]
    kept = [state.pop("kept") for state in states]
    for state in states:
        assert {f"encoder.{name}" for name in state} == set(first)
        assert all(torch.equal(tensor, first[f"encoder.{name}"]) for name, tensor in state.items())
    assert kept[0]["epoch"] is None
    assert kept[0]["acc"] > 0
    assert kept[1] == kept[2] == pytest.approx(kept[0])


def test_predictions_in_a_folder_do_not_depend_on_who_wrote_them(alone, two):
    ours, theirs = (sorted((folder / "out").glob("*.parquet")) for folder in (two, alone))
    assert [path.name for path in ours] == [path.name for path in theirs]
    tables = [pa.concat_tables(map(parquet.read_table, paths)) for paths in (ours, theirs)]
    assert tables[0]["cluster"].equals(tables[1]["cluster"])
    assert tables[0]["id"].to_pylist() == [str(i) for i in range(200)]


def test_an_error_of_one_process_is_one_line_that_names_it(base, tmp_path):
    failed = start(2, "failing_process.py", *fit(base, tmp_path / "run"))
    assert ended(failed, code=[1, 2]) == [[], ["secu: rank 1: made up: 1 must be 2"]]
    assert not (tmp_path / "run").exists()


def test_other_commands_say_that_they_run_in_one_process(monkeypatch):
    monkeypatch.setattr(processes._Group, "world", 2)
    with pytest.raises(UserError, match="recipes runs in one process; start it without torchrun"):
        app(["recipes"], standalone_mode=False)


RESTARTS = [("0", "a/1", False), ("1", "a/1", True), ("1", "b/1", False)]


@pytest.mark.parametrize(("count", "launch", "expected"), RESTARTS)
def test_only_a_run_of_the_same_launch_is_resumed_after_a_restart(count, launch, expected, tmp_path, monkeypatch):
    Run(tmp_path).write_record({"launch": launch})
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("os.getppid", lambda: 1)
    asked = (False, True)  # --force
    assert Run.continued(tmp_path, resume=False, force=True) == ((True, False) if expected else asked)


def test_without_torchrun_there_is_no_process_group():
    assert (processes.rank(), processes.world(), processes.launched()) == (0, 1, False)
    processes.barrier()
    assert processes.agree("mine") == "mine"
    assert not torch.distributed.is_initialized()


def test_a_signal_saves_and_ends_all_processes(base, tmp_path):
    run = tmp_path / "run"
    running = start(2, "-m", "secu", *fit(base, run, epochs=4000))
    wait_for(lambda: epochs_of(run) >= 2, *running)
    for process in running:
        process.send_signal(signal.SIGTERM)
    errors = ended(running, code=143)
    assert len(errors[0]) == 1
    assert errors[0][0].startswith("secu: terminated; the same command with --resume continues")
    assert errors[1] == []
    assert Run.open(run).load_state()["epochs_done"] >= 1  # the record of an epoch is written before its state


def test_after_kills_torchrun_goes_on_from_the_last_checkpoint(base, two, tmp_path):
    """Two kills at random moments; every epoch has a checkpoint, so that not all of them start anew."""
    run = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [*launcher, "--max-restarts", "3", "quick_secu.py", *fit(base, run)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    tests = Path(__file__).parent
    torchrun = subprocess.Popen(script, env=environment, stdout=pipe, stderr=pipe, text=True, cwd=tests)
    moments = random.Random(0)
    for epochs in (2, 4):
        wait_for(lambda epochs=epochs: epochs_of(run) >= epochs, torchrun)
        time.sleep(moments.uniform(0, 0.3))
        os.kill(moments.choice(children(torchrun.pid)), signal.SIGKILL)
    out, err = torchrun.communicate(timeout=250)
    assert torchrun.returncode == 0, err
    assert "resumed after" in out
    assert_same(Run.open(run), Run.open(two / "uninterrupted"))
    assert (run / "report.html").is_file()


def children(parent):
    """Return the processes that a process started, which run secu."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(path.parent.name))
    return found
