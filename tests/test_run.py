"""A run's folder: never overwritten by accident, never half-written, never trusted blindly."""

import json
import os
import pickle
import stat

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from secu.checkpoint import load_trained
from secu.errors import UserError
from secu.files import write_atomically, write_json, write_text
from secu.run import FILES, Run
from secu.settings import load_config

CONFIG = load_config("digits", ["heads=[3]", "optim.epochs=2"])
STATE = {"momentum": {}, "epochs_done": 1, "seconds": 0.5}


def modules():
    """Return something to save that looks like a model: an encoder and centers with two kinds of tensors."""
    clustering = nn.Module()
    clustering.centers = nn.Module()
    clustering.centers.weight = nn.Parameter(torch.randn(1, 3, 2))
    clustering.register_buffer("labels", torch.tensor([[0], [2], [1]]))
    return {"encoder": nn.Linear(2, 2), "clustering": clustering}


# The folder


def test_a_new_run_holds_its_config(tmp_path):
    run = Run.create(tmp_path / "a" / "b", CONFIG)
    assert [path.name for path in run.path.iterdir()] == ["config.yaml"]
    assert Run.open(run.path).config() == CONFIG


def test_an_empty_folder_may_become_a_run(tmp_path):
    assert Run.create(tmp_path, CONFIG).config() == CONFIG


def test_an_existing_run_is_left_alone(tmp_path):
    Run.create(tmp_path, CONFIG)
    other = load_config("digits", ["heads=[4]"])
    with pytest.raises(UserError, match=r"exists; choose another folder, --resume it or replace it with --force"):
        Run.create(tmp_path, other)
    assert Run.open(tmp_path).config() == CONFIG


def test_force_replaces_a_run_and_spares_what_is_not_its_own(tmp_path):
    run = Run.create(tmp_path, CONFIG)
    for name in FILES[1:]:
        (tmp_path / name).write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    other = load_config("digits", ["heads=[4]"])
    Run.create(tmp_path, other, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert run.config() == other


@pytest.mark.parametrize("files", [{"thesis.tex": "text"}, {"config.yaml": "title: blog\n"}, {"config.yaml": ": ["}])
def test_force_refuses_a_folder_that_is_not_a_run(tmp_path, files):
    """config.yaml is a common name: somebody else's must not be deleted either."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=r"is not a run folder .*force leaves it alone"):
        Run.create(tmp_path, CONFIG, force=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "taken").write_text("x")
    with pytest.raises(UserError, match=r"taken is a file"):
        Run.create(tmp_path / "taken", CONFIG, force=True)
    with pytest.raises(UserError, match=r"cannot create .*taken/run: Not a directory"):
        Run.create(tmp_path / "taken" / "run", CONFIG)
    assert (tmp_path / "taken").read_text() == "x"


def test_a_folder_without_config_is_not_a_run(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"is not a run folder \(no config.yaml in it\)"):
            Run.open(path)


@pytest.mark.parametrize("content", [b": [", b"- 1\n", b"", b"\xff\xff", b"head: [3]\n", b"heads: 3\n"])
def test_a_config_that_cannot_be_read_is_a_user_error(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(UserError) as caught:
        Run.open(tmp_path).config()
    assert "\n" not in str(caught.value)


def test_a_run_without_a_checkpoint_can_be_taken_back(tmp_path):
    run = Run.create(tmp_path / "run", CONFIG)
    run.add_metrics({"epoch": 0})
    run.discard_unsaved()
    assert list(tmp_path.iterdir()) == []


def test_a_run_with_a_checkpoint_is_never_taken_back(tmp_path):
    saved = Run.create(tmp_path / "saved", CONFIG)
    saved.save(modules(), STATE)
    saved.discard_unsaved()
    assert saved.has_checkpoint()
    assert saved.config() == CONFIG


def test_a_model_without_a_checkpoint_is_not_trained_over(tmp_path):
    """What SeCu.save leaves, or who has removed the large state.pt."""
    run = Run.create(tmp_path / "run", CONFIG)
    write_json(run.path / "run.json", {"finished": True})
    with pytest.raises(UserError, match=r"run: .*run has no checkpoint \(state.pt\) to resume from"):
        Run.start(run.path, CONFIG, resume=True, force=False)
    assert sorted(path.name for path in run.path.iterdir()) == ["config.yaml", "run.json"]


def test_taking_back_a_run_spares_files_of_others(tmp_path):
    run = Run.create(tmp_path / "run", CONFIG)
    (run.path / "notes.txt").write_text("mine")
    run.discard_unsaved()
    assert [path.name for path in run.path.iterdir()] == ["notes.txt"]


# Atomic writes


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "model"
    path.write_text("old")

    def fail(temporary):
        temporary.write_text("half of the n")
        raise error

    with pytest.raises(error):
        write_atomically(path, fail)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert path.read_text() == "old"


def test_the_old_file_is_whole_until_the_new_one_is(tmp_path):
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


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path):
    run = Run.create(tmp_path, CONFIG)
    run.save(modules(), STATE)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        run.save({}, {**STATE, "unpicklable": lambda: None})
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after["state.pt"] == before["state.pt"]
    assert sorted(after) == sorted(before)


def test_the_state_is_written_after_the_model(tmp_path, monkeypatch):
    """Resuming believes the state: were it first, a kill in between could end a run with an older model for good."""
    order = []
    real = os.replace
    monkeypatch.setattr("pathlib.Path.replace", lambda self, to: (order.append(to.name), real(self, to))[1])
    Run.create(tmp_path, CONFIG).save(modules(), STATE)
    assert order == ["config.yaml", "model.safetensors", "state.pt"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_mode_that_the_umask_asks_for(tmp_path, mask, mode):
    """A temporary file's own mode, 0600, would hide a run from colleagues."""
    before = os.umask(mask)
    try:
        run = Run.create(tmp_path, CONFIG)
        run.save(modules(), STATE)
        run.add_metrics({"epoch": 0})
        run.write_csv("assignments.csv", ["a"], [[1]])
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == mode, path.name


def test_text_json_and_tables_are_utf8(tmp_path):
    write_text(tmp_path / "text", "grün\n")
    write_json(tmp_path / "json", {"a": [1, None, "ü"]})
    Run(tmp_path).write_csv("table.csv", ("name", "n"), [("a,b", 1), ("ü", 2)])
    assert (tmp_path / "text").read_bytes() == "grün\n".encode()
    assert json.loads((tmp_path / "json").read_text()) == {"a": [1, None, "ü"]}
    assert (tmp_path / "table.csv").read_text(encoding="utf-8").splitlines() == ["name,n", '"a,b",1', "ü,2"]


# metrics.jsonl


def test_metrics_are_a_line_an_epoch(tmp_path):
    run = Run.create(tmp_path, CONFIG)
    assert run.metrics() == []
    for epoch in range(3):
        run.add_metrics({"epoch": epoch, "loss": epoch / 2})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert [record["loss"] for record in run.metrics()] == [0, 0.5, 1]


@pytest.mark.parametrize("cut", ['{"epoch": 3, "lo', '{"epoch": 3}', "\0\0"])
def test_a_last_line_that_was_cut_off_is_ignored_and_then_repaired(tmp_path, cut):
    run = Run.create(tmp_path, CONFIG)
    for epoch in range(3):
        run.add_metrics({"epoch": epoch})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(cut)
    assert [record["epoch"] for record in run.metrics()] == [0, 1, 2]
    run.keep_metrics(2)
    run.add_metrics({"epoch": 2, "again": True})
    assert run.metrics() == [{"epoch": 0}, {"epoch": 1}, {"epoch": 2, "again": True}]


# Checkpoints


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path):
    run, parts = Run.create(tmp_path, CONFIG), modules()
    assert not run.has_checkpoint()
    run.save(parts, STATE)
    assert run.has_checkpoint()
    state = run.load_state()
    assert (state["epochs_done"], state["seconds"]) == (1, 0.5)
    expected = {f"{name}.{key}": value for name, part in parts.items() for key, value in part.state_dict().items()}
    assert state["tensors"].keys() == expected.keys()
    assert all(torch.equal(state["tensors"][key], expected[key]) for key in expected)


def test_weights_in_the_gpus_memory_order_can_be_saved(tmp_path):
    encoder = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    run = Run.create(tmp_path, CONFIG)
    run.save({**modules(), "encoder": encoder}, STATE)
    assert not encoder.weight.is_contiguous()
    assert torch.equal(run.load_model()["encoder.weight"], encoder.weight)


def test_a_model_is_encoder_and_centers_and_not_the_label_memory(tmp_path):
    run = Run.create(tmp_path, CONFIG)
    run.save(modules(), STATE)
    assert sorted(run.load_model()) == ["clustering.centers.weight", "encoder.bias", "encoder.weight"]


def test_missing_files_say_what_is_missing(tmp_path):
    run = Run.create(tmp_path, CONFIG)
    with pytest.raises(UserError, match=r"has no checkpoint \(state.pt\)"):
        run.load_state()
    with pytest.raises(UserError, match=r"has no model yet \(model.safetensors\)"):
        run.load_model()


GARBAGE = [b"", b"\0" * 100, b"PK\x03\x04 not a zip", b"\xff" * 8 + b"{}", b"hello"]


@pytest.mark.parametrize("content", GARBAGE)
def test_garbage_is_neither_a_model_nor_a_checkpoint(tmp_path, content):
    run = Run.create(tmp_path, CONFIG)
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"model.safetensors is not a safetensors file"):
        run.load_model()
    with pytest.raises(UserError, match=r"state.pt is not a checkpoint of this program"):
        run.load_state()


def test_a_truncated_checkpoint_is_a_user_error(tmp_path):
    run = Run.create(tmp_path, CONFIG)
    run.save(modules(), STATE)
    for name in ("state.pt", "model.safetensors"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-40])
    with pytest.raises(UserError):
        run.load_state()
    with pytest.raises(UserError):
        run.load_model()


@pytest.mark.parametrize("content", [{"weights": torch.zeros(2)}, [torch.zeros(2)], torch.zeros(2), {"tensors": {}}])
def test_a_torch_file_of_others_is_not_a_checkpoint(tmp_path, content):
    run = Run.create(tmp_path, CONFIG)
    torch.save(content, tmp_path / "state.pt")
    with pytest.raises(UserError, match=r"state.pt is not a checkpoint of this program"):
        run.load_state()


def test_a_safetensors_file_of_others_is_not_a_model(tmp_path):
    run = Run.create(tmp_path, CONFIG)
    save_file({"bert.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model.safetensors is not a model of this program"):
        run.load_model()


def test_a_model_of_another_network_is_refused(tmp_path):
    run = Run.create(tmp_path, CONFIG)
    run.save(modules(), STATE)
    with pytest.raises(UserError, match="holds another encoder than its data and config ask for"):
        load_trained(run, (1, 8, 8), torch.device("cpu"))


class Bomb:
    """Unpickles by creating a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("save", [torch.save, lambda bomb, path: path.write_bytes(pickle.dumps(bomb, 2))])
def test_a_hostile_checkpoint_is_refused_and_nothing_of_it_runs(tmp_path, save):
    run = Run.create(tmp_path / "run", CONFIG)
    trace = tmp_path / "executed"
    save({**STATE, "tensors": Bomb(trace)}, run.path / "state.pt")
    with pytest.raises(UserError, match=r"state.pt is not a checkpoint of this program"):
        run.load_state()
    assert not trace.exists()
    pickle.loads(pickle.dumps(Bomb(trace))).close()  # the bomb itself does work
    assert trace.exists()


def test_a_full_disk_is_one_line_that_names_the_file(tmp_path, monkeypatch):
    run = Run.create(tmp_path / "run", load_config("digits"))

    def full(*_):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 132800 vs 132688\nmore")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"cannot write .*state.pt: is the disk full\? \(\[enforce fail.*132688\)$"):
        run.save({"encoder": nn.Linear(1, 1)}, {})

    def no_space(_):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: '.*a.txt'"):
        write_atomically(tmp_path / "a.txt", no_space)
