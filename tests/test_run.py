"""A run's folder: never overwritten by accident, never half-written, never trusted blindly."""

import json
import os
import pickle
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from secu.base.errors import UserError
from secu.base.files import write_json, write_text
from secu.settings import load_config, with_shape
from secu.train.place import FILES
from secu.train.run import Run
from small_runs import new_run

CONFIG = load_config("digits", ["heads=[3]", "optim.epochs=2"])
MODEL = {"encoder.weight": torch.arange(6.0).view(2, 3), "clustering.centers.weight": torch.ones(1, 3, 2)}
STATE = {"tensors": MODEL, "momentum": {"0": torch.ones(2)}, "epochs_done": 1, "seconds": 0.5}


MARK = {"versions": {"secu": "0.3"}}  # in run.json, by which a folder is known to be ours


def save(run):
    """Write what a checkpoint consists of."""
    run.save_model("model.safetensors", MODEL)
    run.save_state(STATE)


# The folder


def test_new_run_holds_its_config(tmp_path):
    run = new_run(tmp_path / "a" / "b", CONFIG)
    assert [path.name for path in run.path.iterdir()] == ["config.yaml"]
    assert Run.open(run.path).config() == CONFIG


def test_empty_folder_may_become_a_run(tmp_path):
    assert new_run(tmp_path, CONFIG).config() == CONFIG


def test_existing_run_is_not_touched(tmp_path):
    write_json(new_run(tmp_path, CONFIG).path / "run.json", MARK)
    other = load_config("digits", ["heads=[4]"])
    with pytest.raises(UserError, match=r"exists; choose another folder, --resume it or replace it with --force"):
        Run.create(tmp_path, other)
    assert Run.open(tmp_path).config() == CONFIG


def test_force_replaces_a_run_and_no_other_file(tmp_path):
    run = new_run(tmp_path, CONFIG)
    for name in FILES[1:]:
        (tmp_path / name).write_text("old")
    write_json(tmp_path / "run.json", MARK)
    (tmp_path / "notes.txt").write_text("mine")
    other = load_config("digits", ["heads=[4]"])
    begun = Run.create(tmp_path, other, force=True)
    assert begun.config() == other
    assert run.config() == CONFIG  # until the new one is put in its place
    begun.put_in_place()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert run.config() == other


OURS = yaml.safe_dump(CONFIG.model_dump(mode="json"))  # what somebody who uses secu as a library may also have
OTHERS = [
    {"thesis.tex": "text"},
    {"config.yaml": "title: blog\n"},
    {"config.yaml": ": ["},
    {"config.yaml": OURS},
    {"config.yaml": OURS, "run.json": "{}"},
    {"config.yaml": OURS, "run.json": "{"},
    {"config.yaml": OURS, "run.json": '{"versions": {"other": "1"}}'},
]


@pytest.mark.parametrize("files", OTHERS)
def test_force_refuses_a_folder_that_is_not_a_run(tmp_path, files):
    """config.yaml is a common name: somebody else's must not be deleted either."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=r"is not a secu run folder, so it will not be replaced"):
        new_run(tmp_path, CONFIG, force=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_file_in_the_way_is_reported(tmp_path):
    (tmp_path / "taken").write_text("x")
    with pytest.raises(UserError, match=r"taken is a file"):
        new_run(tmp_path / "taken", CONFIG, force=True)
    with pytest.raises(UserError, match=r"cannot create .*taken/run: Not a directory"):
        new_run(tmp_path / "taken" / "run", CONFIG)
    assert (tmp_path / "taken").read_text() == "x"


def test_folder_without_config_is_not_a_run(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"is not a run folder \(no config.yaml in it\)"):
            Run.open(path)


@pytest.mark.parametrize("content", [b": [", b"- 1\n", b"", b"\xff\xff", b"head: [3]\n", b"heads: 3\n"])
def test_config_that_cannot_be_read_is_a_user_error(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(UserError) as caught:
        Run.open(tmp_path).config()
    assert "\n" not in str(caught.value)


def test_model_without_a_checkpoint_is_not_trained_over(tmp_path):
    """What SeCu.save leaves, or a person who removed the large checkpoint."""
    run = new_run(tmp_path / "run", CONFIG)
    write_json(run.path / "run.json", {"finished": True})
    with pytest.raises(UserError, match=r"run: .*run has no checkpoint \(state.safetensors\) to resume from"):
        Run.check_start(run.path, CONFIG, resume=True, force=False)
    assert sorted(path.name for path in run.path.iterdir()) == ["config.yaml", "run.json"]


# Starting and resuming


def test_run_starts_in_an_empty_folder_whether_it_is_resumed_or_not(tmp_path):
    for resume in (False, True):
        Run.check_start(tmp_path, CONFIG, resume=resume, force=False)
    assert Run.to_resume(tmp_path / "nowhere") is None
    assert Run.create(tmp_path, CONFIG).config() == CONFIG


def test_resume_and_force_contradict_each_other(tmp_path):
    with pytest.raises(UserError, match="--resume and --force cannot be combined"):
        Run.check_free(tmp_path / "run", resume=True, force=True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr=0.3", r"was started with optim.lr=\S+, got optim.lr=0.3; start a new run elsewhere"),
        ("seed=4", "was started with seed=0, got seed=4"),
        ("heads=[4]", r"was started with heads=\[3\], got heads=\[4\]"),
        ("augment.affine=null", r"was started with augment.affine.\w+="),
        ("data.image_size=9", "was started with data.image_size=8, got data.image_size=9"),
    ],
)
def test_run_is_resumed_with_the_same_settings_only(tmp_path, override, message):
    run = new_run(tmp_path / "run", with_shape(CONFIG, (1, 8, 8)))
    save(run)
    Run.check_start(run.path, with_shape(CONFIG, (1, 8, 8)), resume=True, force=False)
    other = with_shape(load_config("digits", ["heads=[3]", "optim.epochs=2", override]), (1, 8, 8))
    with pytest.raises(UserError, match=f"resume: .*run {message}"):
        Run.check_start(run.path, other, resume=True, force=False)


def test_description_and_stated_shape_are_no_other_settings(tmp_path):
    """A recipe may be described anew; runs of version 0.1 did not state the shape of their inputs."""
    run = new_run(tmp_path, CONFIG)
    assert run.config().data.image_size is None
    assert run.input_shape() == (1, 8, 8)
    run.require_settings(with_shape(CONFIG, (1, 8, 8)))
    run.require_settings(load_config("digits", ["heads=[3]", "optim.epochs=2", "description=other"]))


def test_settings_of_a_finished_run_can_be_amended(tmp_path):
    run = new_run(tmp_path, CONFIG)
    config = run.amend({"loss": {"confidence_temperature": 0.2}})
    assert config == run.config()
    assert config.loss.prediction_temperature == 0.2
    assert config.model_copy(update={"loss": CONFIG.loss}) == CONFIG
    with pytest.raises(UserError, match=r"loss.temprature: unknown setting"):
        run.amend({"loss": {"temprature": 0.2}})
    assert run.config() == config
    assert list(yaml.safe_load((tmp_path / "config.yaml").read_text())) == list(CONFIG.model_dump())


# What a run says about itself


def test_unfinished_run_says_how_to_finish_it(tmp_path):
    run = new_run(tmp_path, CONFIG)
    assert (run.finished, run.record()) == (False, {})
    assert run.unfinished() == (
        "training stopped after 0 of 3 epochs; to continue, run the original command with --resume"
    )
    write_json(tmp_path / "run.json", {"finished": False, "epochs_done": 2, "command": "train digits"})
    assert run.unfinished() == "training stopped after 2 of 3 epochs; to continue, run secu train digits with --resume"
    write_json(tmp_path / "run.json", {"finished": True})
    assert run.finished
    assert run.unfinished() == ""


@pytest.mark.parametrize("name", ["outcome.json", "selflabel.json"])
def test_outcome_is_read_under_its_name_and_that_of_version_0_1(tmp_path, name):
    run = new_run(tmp_path, CONFIG)
    assert (run.outcome(), run.warnings()) == ({}, ())
    write_json(tmp_path / name, {"moved": 0.5, "warnings": ["one", "two"]})
    assert run.outcome()["moved"] == 0.5
    assert run.warnings() == ("one", "two")


def test_images_of_a_run_are_known_or_not(tmp_path):
    run = new_run(tmp_path, CONFIG)
    assert run.images() is None
    write_json(tmp_path / "images.json", {"a.png": 7})
    assert run.images() == {"a.png": 7}
    for content in ("[1]", "no json"):
        (tmp_path / "images.json").write_text(content)
        with pytest.raises(UserError, match=r"images.json is damaged: it is not a JSON object"):
            run.images()


# Files


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_mode_that_the_umask_asks_for(tmp_path, mask, mode):
    """A temporary file's own mode, 0600, would hide a run from colleagues."""
    before = os.umask(mask)
    try:
        run = new_run(tmp_path, CONFIG)
        save(run)
        run.add_metrics({"epoch": 0})
        write_text(run.path / "report.html", "report")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == mode, path.name


def test_text_and_json_are_utf8(tmp_path):
    write_text(tmp_path / "text", "grün\n")
    write_json(tmp_path / "json", {"a": [1, None, "ü"]})
    assert (tmp_path / "text").read_bytes() == "grün\n".encode()
    assert json.loads((tmp_path / "json").read_text()) == {"a": [1, None, "ü"]}


# metrics.jsonl


def test_metrics_are_one_line_per_epoch(tmp_path):
    run = new_run(tmp_path, CONFIG)
    assert run.metrics() == []
    for epoch in range(3):
        run.add_metrics({"epoch": epoch, "loss": epoch / 2})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert [record["loss"] for record in run.metrics()] == [0, 0.5, 1]


@pytest.mark.parametrize("rest", ['{"epoch": 3, "lo', '{"epoch": 3}', "\0\0"])
def test_truncated_last_line_is_ignored_and_then_repaired(tmp_path, rest):
    run = new_run(tmp_path, CONFIG)
    for epoch in range(3):
        run.add_metrics({"epoch": epoch})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(rest)
    assert [record["epoch"] for record in run.metrics()] == [0, 1, 2]
    run.keep_metrics(2)
    run.add_metrics({"epoch": 2, "again": True})
    assert run.metrics() == [{"epoch": 0}, {"epoch": 1}, {"epoch": 2, "again": True}]


# Models and checkpoints


def test_model_and_state_are_read_back_bit_for_bit(tmp_path):
    run = new_run(tmp_path, CONFIG)
    assert not run.has_checkpoint()
    save(run)
    assert run.has_checkpoint()
    state = run.load_state()
    assert (state["epochs_done"], state["seconds"]) == (1, 0.5)
    for ours, theirs in ((run.load_model(), MODEL), (state["tensors"], MODEL), (state["momentum"], STATE["momentum"])):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_model_file_carries_metadata(tmp_path):
    run = new_run(tmp_path, CONFIG)
    assert run.metadata("best.safetensors") == {}
    run.save_model("best.safetensors", MODEL, {"epoch": "3"})
    assert run.metadata("best.safetensors") == {"epoch": "3"}
    assert torch.equal(run.load_model("best.safetensors")["encoder.weight"], MODEL["encoder.weight"])
    (tmp_path / "best.safetensors").write_bytes(b"garbage")
    with pytest.raises(UserError, match=r"best.safetensors is not a safetensors file"):
        run.metadata("best.safetensors")


def test_missing_file_is_named(tmp_path):
    run = new_run(tmp_path, CONFIG)
    with pytest.raises(UserError, match=r"has no checkpoint \(state.safetensors\)"):
        run.load_state()
    with pytest.raises(UserError, match=r"has no model yet \(model.safetensors\)"):
        run.load_model()


GARBAGE = [b"", b"\0" * 100, b"PK\x03\x04 not a zip", b"\xff" * 8 + b"{}", b"hello"]


@pytest.mark.parametrize("content", GARBAGE)
def test_garbage_is_neither_a_model_nor_a_checkpoint(tmp_path, content):
    run = new_run(tmp_path, CONFIG)
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"model.safetensors is not a safetensors file"):
        run.load_model()
    with pytest.raises(UserError, match=r"state.pt is not a checkpoint written by secu"):
        run.load_state()
    (tmp_path / "state.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"state.safetensors is not a safetensors file"):
        run.load_state()


def test_truncated_checkpoint_is_a_user_error(tmp_path):
    run = new_run(tmp_path, CONFIG)
    save(run)
    for name in ("state.safetensors", "model.safetensors"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-40])
    with pytest.raises(UserError):
        run.load_state()
    with pytest.raises(UserError):
        run.load_model()


@pytest.mark.parametrize(
    "content",
    [{"weights": torch.zeros(2)}, [torch.zeros(2)], torch.zeros(2), {"tensors": {}}, {**STATE, "momentum": 3}],
)
def test_foreign_torch_file_is_not_a_checkpoint(tmp_path, content):
    run = new_run(tmp_path, CONFIG)
    torch.save(content, tmp_path / "state.pt")
    with pytest.raises(UserError, match=r"state.pt is not a checkpoint written by secu"):
        run.load_state()


class Bomb:
    """Unpickles by creating a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("write", [torch.save, lambda bomb, path: path.write_bytes(pickle.dumps(bomb, 2))])
def test_hostile_checkpoint_is_refused_and_not_executed(tmp_path, write):
    run = new_run(tmp_path / "run", CONFIG)
    trace = tmp_path / "executed"
    write({**STATE, "tensors": Bomb(trace)}, run.path / "state.pt")
    with pytest.raises(UserError, match=r"state.pt is not a checkpoint written by secu"):
        run.load_state()
    assert not trace.exists()
    pickle.loads(pickle.dumps(Bomb(trace))).close()  # the bomb itself does work
    assert trace.exists()


def test_full_disk_is_one_line_that_names_the_file(tmp_path):
    run = new_run(tmp_path / "run", load_config("digits"))
    code = """
import resource, sys
from pathlib import Path
import torch
from secu.base.errors import UserError
from secu.train.run import Run
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
state = {"tensors": {"encoder.weight": torch.ones(9000)}, "momentum": {}, "epochs_done": 1, "seconds": 0.5}
try:
    Run(Path(sys.argv[1])).save_state(state)
except (UserError, OSError) as error:
    print(error)
"""
    process = subprocess.run([sys.executable, "-c", code, run.path], capture_output=True, text=True, check=False)
    assert process.returncode == 0
    assert re.search(
        r"state.safetensors.*(File too large|os error 27)|File too large.*state.safetensors", process.stdout
    )
    assert len(process.stdout.splitlines()) == 1
    assert [path.name for path in run.path.iterdir()] == ["config.yaml"]


# Wrong models


def test_a_checkpoint_beyond_the_end_is_refused(tmp_path):
    run = new_run(tmp_path, CONFIG)
    for change in ({"epochs_done": 4}, {"epochs_done": -1}, {"seconds": -1.0}, {"seconds": float("inf")}):
        run.save_state(STATE | change)
        with pytest.raises(UserError, match=r"state.safetensors is damaged: it claims \S+ epochs of 3 in \S+ seconds"):
            run.load_state()
        (tmp_path / "state.safetensors").unlink()
        torch.save(STATE | change, tmp_path / "state.pt")
        with pytest.raises(UserError, match=r"state.pt is damaged: it claims"):
            run.load_state()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["tensors", "momentum"])
def test_values_that_are_not_finite_are_refused(tmp_path, part, wrong):
    run = new_run(tmp_path, CONFIG)
    state = STATE | {part: {"a": torch.ones(3), "b": torch.tensor([1.0, wrong])}}
    run.save_state(state)
    with pytest.raises(UserError, match=rf"damaged: {part}.b contains NaN or infinite values"):
        run.load_state()
    (tmp_path / "state.safetensors").unlink()
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(UserError, match=r"damaged: b contains NaN or infinite values"):
        run.load_state()
    run.save_model("model.safetensors", state[part])
    with pytest.raises(UserError, match=r"model.safetensors is damaged: b contains NaN or infinite values"):
        run.load_model()


def test_a_model_that_run_json_does_not_describe_is_refused(tmp_path):
    run = new_run(tmp_path, CONFIG)
    save(run)
    run.write_record(MARK)
    assert run.load_model().keys() == MODEL.keys()
    save_file({**MODEL, "encoder.weight": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"is not the model that run.json describes \(its checksum differs\)"):
        run.load_model()


def test_at_every_moment_the_model_has_a_known_checksum(tmp_path, monkeypatch):
    run = new_run(tmp_path, CONFIG)
    save(run)
    run.write_record(MARK)
    moments = []
    real = os.replace

    def replace(path, target):
        run.load_model()
        real(path, target)
        moments.append((Path(target).name, float(run.load_model()["encoder.weight"].sum())))

    monkeypatch.setattr("pathlib.Path.replace", replace)
    run.save_model("model.safetensors", {**MODEL, "encoder.weight": torch.zeros(2, 3)})
    run.write_record(MARK)
    assert moments == [("run.json", 15.0), ("model.safetensors", 0.0), ("run.json", 0.0)]
    assert "next_model_sha256" not in run.record()


BROKEN = [
    ("run.json", "{", "is not a JSON object"),
    ("run.json", "[" * 100_000, "is not a JSON object"),
    ("run.json", '{"finished": 1}', "finished has the value '1'"),
    ("run.json", '{"versions": []}', "versions has the value"),
    ("run.json", '{"losses": [1]}', "losses must be a list of names"),
    ("metrics.jsonl", "{}\n", "line 1 is not a JSON object with an epoch"),
    ("metrics.jsonl", '{"epoch": 0}\n{"epo\n', "line 2 is not a JSON object with an epoch"),
    ("metrics.jsonl", '{"epoch": 0, "loss": "low"}\n', "loss in line 1 must be a number"),
    ("outcome.json", "7", "is not a JSON object"),
    ("outcome.json", '{"warnings": "none"}', "warnings must be a list of texts"),
    ("selflabel.json", "\xff", "is not a JSON object"),
    ("images.json", '{"a.png": "x"}', "does not hold one checksum per image"),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN)
def test_broken_records_are_named_in_one_line(tmp_path, name, content, message):
    run = new_run(tmp_path, CONFIG)
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=rf"run: .*{name} is damaged: .*{message}") as caught:
        (run.record(), run.metrics(), run.outcome(), run.images())
    assert len(str(caught.value)) < 500
