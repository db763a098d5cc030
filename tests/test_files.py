"""Files and folders that are written whole or not at all."""

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from secu.base import files
from secu.base.errors import UserError
from secu.base.exchange import exchange
from secu.base.files import (
    aside,
    is_taken,
    is_temporary,
    remove_leftovers,
    replace_folder,
    write_atomically,
    write_text,
)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "model"
    path.write_text("old")

    def fail(temporary):
        temporary.write_text("half of the n")
        raise error

    with pytest.raises(error):
        write_atomically(path, fail)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert path.read_text() == "old"


def test_old_file_is_complete_until_the_new_one_is(tmp_path):
    path = tmp_path / "model"
    path.write_text("old")
    seen = []

    def write(temporary):
        temporary.write_text("half")
        seen.append((temporary.parent == tmp_path, temporary.name[0], path.read_text()))
        temporary.write_text("new")

    write_atomically(path, write)
    assert seen == [(True, ".", "old")]
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_folder_aside_is_removed_unless_its_content_is_moved(tmp_path):
    with aside(tmp_path / "deep" / "done") as folder:
        assert folder.parent == tmp_path / "deep"
        (folder / "new").mkdir()
        (folder / "new").rename(tmp_path / "deep" / "done")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["done"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"out: cannot create .*file/done"), aside(tmp_path / "file" / "done"):
        pass


def test_empty_folder_is_not_taken(tmp_path):
    assert not is_taken(tmp_path / "nowhere")
    assert not is_taken(tmp_path)
    (tmp_path / "a").write_text("")
    assert is_taken(tmp_path)
    assert is_taken(tmp_path / "a")


def test_full_disk_is_reported_with_the_name_that_the_user_knows(tmp_path):
    def no_space(_):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: '.*a.txt'"):
        write_atomically(tmp_path / "a.txt", no_space)


LEAVE = """
import os, signal, sys
from pathlib import Path
from secu.base.files import aside, write_atomically
def die(path):
    (path / "a").write_text("half") if path.is_dir() else path.write_text("half")
    print(path.name, flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
path = Path(sys.argv[1])
if sys.argv[2] == "file":
    write_atomically(path, die)
else:
    with aside(path) as folder:
        die(folder)
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_leftovers_of_a_killed_process_are_removed_and_those_of_a_living_one_are_not(tmp_path, kind):
    path = tmp_path / "new.csv"
    (tmp_path / ".other.csv.0123abcd.tmp").write_text("for another name")
    (tmp_path / ".new.csv.notes").write_text("not ours")
    command = [sys.executable, "-c", LEAVE, path, kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        left = process.stdout.readline().strip()
        remove_leftovers(tmp_path)
        assert (tmp_path / left).exists()
        process.communicate("\n")
    assert process.returncode == -signal.SIGKILL
    assert is_temporary(left)
    assert (tmp_path / left).exists()
    (tmp_path / ".other.csv.0123abcd.tmp").write_text("for another name")
    if kind == "file":
        write_text(path, "whole")
    else:
        with aside(path):
            pass
    expected = {".other.csv.0123abcd.tmp", ".new.csv.notes"} | ({"new.csv"} if kind == "file" else set())
    assert {entry.name for entry in tmp_path.iterdir()} == expected


def test_names_of_any_length_can_be_written(tmp_path):
    for name in ("x" * 255, "ä" * 127):
        write_text(tmp_path / name, "text")
        assert (tmp_path / name).read_text() == "text"


# Folders that replace a folder

CHANGES = {"open", "os.chmod", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree", "ctypes.dlsym"}


def replace(path):
    """Put a new folder in the place of an old one."""
    with aside(path) as folder:
        place = folder / path.name
        place.mkdir()
        (place / "a").write_text("new")
        (place / "b").write_text("new")
        replace_folder(place, path)


def killed_before(step, work):
    """Let a process do some work, but kill it before its ``step``-th change of the disk; return whether it was."""
    process = os.fork()
    if process == 0:
        steps = itertools.count()

        def hook(event, arguments):
            if event in CHANGES and next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(process, 0)[1] != 0


def contents(path):
    return {name.name: name.read_text() for name in path.iterdir()}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("in_one_step", [True, False])
def test_a_folder_is_replaced_as_a_whole_wherever_the_process_is_killed(tmp_path, monkeypatch, in_one_step):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    if not in_one_step:
        monkeypatch.setattr(files, "exchange", lambda first, second: False)
    elif not exchange(tmp_path / "one", tmp_path / "two"):
        pytest.skip("this disk cannot exchange two names")
    old = {"a": "old", "c": "old"}
    new = {"a": "new", "b": "new"}
    found = []
    missing = 0
    for step in itertools.count():
        path = tmp_path / f"{step}" / "done"
        path.mkdir(parents=True)
        for name, text in old.items():
            (path / name).write_text(text)
        killed = killed_before(step, lambda path=path: replace(path))
        missing += not path.exists()
        remove_leftovers(path.parent, "done")
        assert [entry.name for entry in path.parent.iterdir()] == ["done"]
        assert contents(path) in (old, new)
        found.append(contents(path))
        if not killed:
            break
    assert missing == (0 if in_one_step else 1)
    assert found == found.count(old) * [old] + found.count(new) * [new]
    assert found.count(old) > 5
    assert found.count(new) > 3


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_an_interrupted_process_puts_the_old_folder_back(tmp_path, monkeypatch, error):
    path = tmp_path / "done"
    path.mkdir()
    (path / "a").write_text("old")
    usual = Path.rename

    def rename(place, target):
        if (place / "b").exists():
            raise error
        return usual(place, target)

    monkeypatch.setattr(files, "exchange", lambda first, second: False)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(type(error)):
        replace(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["done"]
    assert contents(path) == {"a": "old"}


def test_an_old_folder_stays_aside_while_it_cannot_be_put_back(tmp_path, monkeypatch):
    old = tmp_path / ".done.01234567.tmp" / files.REPLACED / "done"
    old.mkdir(parents=True)
    (old / "a").write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda place, target: os.rename(place, place / "nowhere" / "deep"))
        remove_leftovers(tmp_path)
    assert contents(old) == {"a": "old"}
    remove_leftovers(tmp_path)
    assert contents(tmp_path / "done") == {"a": "old"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["done"]


def test_an_old_folder_never_replaces_what_took_its_place(tmp_path):
    (tmp_path / ".done.01234567.tmp" / files.REPLACED / "done").mkdir(parents=True)
    (tmp_path / ".done.01234567.tmp" / files.REPLACED / "other").mkdir()  # not ours
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "a").write_text("new")
    remove_leftovers(tmp_path)
    assert contents(tmp_path / "done") == {"a": "new"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["done"]


def test_systems_that_cannot_exchange_names_are_recognized(tmp_path, monkeypatch):
    paths = [tmp_path / "a", tmp_path / "b"]
    assert not exchange(*paths)  # nothing is there
    for path in paths:
        path.mkdir()
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert not exchange(*paths)
    monkeypatch.setattr("sys.platform", "darwin")
    assert not exchange(*paths)
