"""One process at a time writes into a run folder, and an old run is whole until the new one is."""

import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from secu.base.errors import UserError
from secu.base.files import write_json
from secu.settings import load_config
from secu.train import place
from secu.train.place import FILES, LOCK, NEXT, READY, finish_replacement, held, holds_files, require_unlocked
from secu.train.run import Run
from small_runs import new_run

OLD = load_config("digits", ["heads=[3]"])
NEW = load_config("digits", ["heads=[4]"])
MARK = {"versions": {"secu": "0.3"}}
HOLD = """
import sys, time
from pathlib import Path
from secu.train.place import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def write(run: Run, text: str) -> Run:
    """Give a run the files of a finished one."""
    for name in ("assignments.csv", "model.safetensors", "images.json") if text == "old" else ("model.safetensors",):
        (run.folder / name).write_text(text)
    write_json(run.folder / "run.json", {**MARK, "command": text})
    return run


def contents(path: Path) -> dict[str, str]:
    return {name: (path / name).read_text() for name in FILES if (path / name).is_file()}


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of a folder."""
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "run"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


# The lock


def test_a_second_process_gets_one_line(tmp_path, holder):
    path = tmp_path / "run"
    for enter in (lambda: held(path).__enter__(), lambda: require_unlocked(path), lambda: Run.check_free(path)):
        with pytest.raises(
            UserError, match=r"out: .*run is in use by another process \(.*\.secu\.lock is locked\); wait"
        ):
            enter()


def test_the_lock_of_a_killed_process_is_free(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "run" / LOCK).is_file()
    Run.check_free(tmp_path / "run")
    with held(tmp_path / "run"):
        pass


def test_a_failed_start_leaves_no_folder(tmp_path):
    with held(tmp_path / "a" / "run"):
        Run.create(tmp_path / "a" / "run", NEW)
    assert list((tmp_path / "a").iterdir()) == []


def test_a_folder_that_the_user_made_is_kept(tmp_path):
    with held(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"out: cannot create .*file/run: Not a directory"), held(tmp_path / "file/run"):
        pass


# What a killed process leaves


def test_remains_of_a_killed_process_do_not_occupy_the_folder(tmp_path):
    """Killed before its first checkpoint: neither --resume nor --force is needed."""
    Run.create(tmp_path, OLD)
    (tmp_path / ".run.json.0123abcd.tmp").write_text('{"fin')
    assert not holds_files(tmp_path)
    Run.check_free(tmp_path)
    assert Run.to_resume(tmp_path) is None
    with held(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [NEXT, LOCK]
        Run.create(tmp_path, NEW).put_in_place()
    assert Run.open(tmp_path).config() == NEW


# Replacement


def test_replacement_is_whole_wherever_it_stops(tmp_path, monkeypatch):
    """Stop before the n-th change of the disk, for every n, then open the run."""
    reference = {}
    for name, config in (("old", OLD), ("new", NEW)):
        reference[name] = contents(write(new_run(tmp_path / name, config), name).path)
    outcomes = []
    for stop in count():
        path = tmp_path / f"stopped-{stop}"
        write(new_run(path, OLD), "old")
        (path / "notes.txt").write_text("mine")
        begun = write(Run.create(path, NEW, force=True), "new")
        finished = stop_at(stop, begun.put_in_place, monkeypatch)
        assert Run.open(path).path == path
        found = contents(path)
        assert found in reference.values()
        outcomes.append("new" if found == reference["new"] else "old")
        assert (path / "notes.txt").read_text() == "mine"
        assert not (path / READY).exists()
        if finished:
            break
    assert outcomes == sorted(outcomes, reverse=True)  # old until a moment, new from then on
    assert outcomes.count("old") >= 2  # before the list is written, and before the rename
    assert outcomes.count("new") > 5


def stop_at(number: int, work, monkeypatch) -> bool:
    """Run a function, but stop before its ``number``-th change of the disk; return whether it came to its end."""
    steps = count()

    def stopping(real):
        def step(*arguments, **options):
            if next(steps) == number:
                raise KeyboardInterrupt
            return real(*arguments, **options)

        return step

    with monkeypatch.context() as patch:
        for owner, name in ((Path, "write_text"), (Path, "rename"), (Path, "replace"), (Path, "unlink")):
            patch.setattr(owner, name, stopping(getattr(owner, name)))
        patch.setattr(shutil, "rmtree", stopping(shutil.rmtree))
        try:
            work()
        except KeyboardInterrupt:
            return False
    return True


def test_a_replacement_that_another_process_makes_is_waited_for(tmp_path, holder, monkeypatch):
    (tmp_path / "run" / READY).mkdir()
    monkeypatch.setattr(place, "PATIENCE", 0.1)
    with pytest.raises(UserError, match=r"run: .*run is being replaced"):
        finish_replacement(tmp_path / "run")


@pytest.mark.parametrize("text", ["{", '{"a": 1}', "7"])
def test_a_damaged_list_is_one_line(tmp_path, text):
    (tmp_path / READY).mkdir()
    (tmp_path / READY / place.LIST).write_text(text)
    with pytest.raises(UserError, match=r"files.json is damaged: it is not a JSON list"):
        Run.open(tmp_path)


def test_a_hostile_list_reaches_no_other_file(tmp_path):
    path = new_run(tmp_path / "run", OLD).path
    (tmp_path / "mine.txt").write_text("mine")
    (path / "notes.txt").write_text("mine")
    (path / READY).mkdir()
    (path / READY / "notes.txt").write_text("theirs")
    (path / READY / place.LIST).write_text(json.dumps(["notes.txt", "../mine.txt", "/etc/passwd", 7]))
    finish_replacement(path)
    assert (path / "notes.txt").read_text() == (tmp_path / "mine.txt").read_text() == "mine"


# Whole processes

KILLED = """
import os, signal, sys
from pathlib import Path
import secu.train.run as run
step = run.{function}
def die(*arguments):
    {before}
    os.kill(os.getpid(), signal.SIGKILL)
run.{function} = die
sys.argv = ["secu", *sys.argv[1:]]
from secu.cli import main
main()
"""


def secu(*arguments, code="from secu.cli import main; main()"):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.parametrize("before", ["pass", "step(*arguments)"], ids=["before", "after"])
def test_force_killed_around_the_replacement_keeps_a_whole_run(tiny_digits, tmp_path, before):
    old = shutil.copytree(tiny_digits.path, tmp_path / "run")
    train = ["train", "digits", "heads=[4]", "optim.epochs=1", "optim.batch_size=256", "--out", old, "--force"]
    process = secu(*train, code=KILLED.format(function="put_in_place", before=before))
    assert process.returncode == -signal.SIGKILL, process.stderr
    run = Run.open(old)
    clusters = run.config().clusters
    assert clusters == (10 if before == "pass" else 4)
    assert run.load_model()["clustering.centers.weight"].shape[1] >= clusters
    assert not (old / READY).exists()
    process = secu("evaluate", old)
    assert process.returncode == 0, process.stderr
