"""Files and folders that are written whole or not at all."""

import signal
import subprocess
import sys

import pytest

from secu.base.errors import UserError
from secu.base.files import aside, is_taken, is_temporary, remove_leftovers, write_atomically, write_text


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
