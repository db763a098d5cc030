"""The commands for own images as a user sees them: what they print, write and refuse, and Ctrl-C."""

import csv
import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from calls import Result, caller
from own_images import digits, rows_of, tree, write_folder, write_manifest
from secu import cli
from secu.train.place import LOCK, NEXT
from secu.train.run import Run
from waiting import epochs_of, wait_for

COMMANDS = ["fit", "predict", "sort", "export", "report", "tree"]
SHORT = ("optim.epochs=2", "optim.warmup_epochs=0", "encoder.dim=8", "--device", "cpu")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with pictures in it, and a run on them."""
    folder = tmp_path_factory.mktemp("home")
    write_folder(folder / "digits", 120)
    return folder


@pytest.fixture
def secu(home, monkeypatch, capsys, quick_map):
    """Call the program in this process, in the folder with the pictures."""
    monkeypatch.chdir(home)
    monkeypatch.setenv("SECU_DATA", str(home / "data"))
    monkeypatch.setenv("COLUMNS", "100")
    return caller(monkeypatch, capsys)


@pytest.fixture
def run(secu, home):
    """Return the run that every test reads and none changes."""
    if not (home / "runs" / "digits").exists():
        result = secu("fit", "digits", "--clusters", 3, "--labels", "folder", *SHORT)
        assert (result.code, result.err) == (0, "")
        (home / "fit.txt").write_text(result.out)
    return home / "runs" / "digits"


def assert_one_line(result, *parts, code=2):
    """Check that a failure is one line on stderr that starts with our name and contains all parts."""
    assert result.code == code, result.err
    assert result.err.count("\n") == 1, result.err
    assert result.err.startswith("secu: ")
    assert "Traceback" not in result.err + result.out
    for part in parts:
        assert part in result.err
    return result.err


# Help


def test_help_lists_the_commands(secu):
    lines = secu("--help").out.splitlines()
    for command in COMMANDS:
        assert any(re.match(rf"  {command} +[A-Z]\w+", line) for line in lines), command


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(secu, command):
    result = secu(command, "--help")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"Usage: secu {command} ")
    assert len(result.out.splitlines()[2]) > 20  # what it does


def test_help_of_fit_lists_its_options(secu):
    text = secu("fit", "--help").out
    for option in (
        "--clusters",
        "--balance",
        "--labels",
        "--hints",
        "--dry-run",
        "--allow-bad",
        "--resume",
        "--out",
        "SOURCE",
    ):
        assert option in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_does_not_import_torch(command, tmp_path):
    code = (
        "import sys, secu.cli\n"
        f"sys.argv = ['secu', {command!r}, '--help']\n"
        "try: secu.cli.main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'numpy', 'scipy', 'sklearn', 'PIL', 'pyarrow', 'onnx'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr


# The tour: fit, look, use


def test_fit_prints_its_progress_and_where_to_look(run, home):
    lines = (home / "fit.txt").read_text().splitlines()
    assert re.fullmatch(r"\d+ images in digits", lines[0])
    assert re.fullmatch(r"about \d+ seconds on this device", lines[1])
    assert lines[2] == "reading images: 1 of 120"
    assert lines[3] == "reading images: 120 of 120"
    assert lines[4] == "training on cpu, engine eager"
    first = lines.index("assigning all images")
    steps = ["assigning all images", "looking for near-duplicates", "writing the tables", "writing the report"]
    assert lines[first : first + 4] == steps
    assert any(re.fullmatch(r"ACC 0\.\d{4}  NMI 0\.\d{4}  ARI -?0\.\d{4} *", line) for line in lines)
    assert re.fullmatch(r"finished in \d+ s; open runs/digits/report\.html", lines[-1])
    assert (run / "report.html").is_file()


def test_predict_prints_a_table(secu, run):
    result = secu("predict", "runs/digits", "digits")
    assert (result.code, result.err) == (0, "")
    found = list(csv.DictReader(io.StringIO(result.out, newline="")))
    expected = rows_of(run / "assignments.csv")
    assert [row["id"] for row in found] == [row["id"] for row in expected]
    assert [row["cluster"] for row in found] == [row["cluster"] for row in expected]


def test_predict_writes_a_file_and_counts_what_it_left_out(secu, run, tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "bad.png").write_text("x")
    Image.new("L", (9, 9)).save(tmp_path / "p" / "good.png")
    result = secu("predict", run, tmp_path / "p", "-o", tmp_path / "p.jsonl", "--device", "cpu")
    reason = "not an image of a kind that can be read (JPEG, PNG, WebP, BMP, TIFF, GIF)"
    left_out = f"images left out: 1, the first bad.png: {reason}\n"
    assert (result.code, result.err) == (0, left_out)
    assert result.out == f"1 images in {tmp_path / 'p.jsonl'}\n"
    assert json.loads((tmp_path / "p.jsonl").read_text())["id"] == "good.png"


@pytest.mark.parametrize("option", [[], ["--link"], ["--copy"], ["--without-duplicates"]])
def test_sort_prints_where_the_pictures_are(secu, run, tmp_path, option):
    result = secu("sort", run, tmp_path / "sorted", *option)
    assert (result.code, result.err, result.out) == (0, "", f"120 images in {tmp_path / 'sorted'}\n")
    files = list((tmp_path / "sorted").rglob("*.png"))
    assert len(files) == 120
    assert all(path.is_symlink() is (option != ["--copy"]) for path in files)


def test_export_prints_where_the_model_is(secu, run, tmp_path):
    pytest.importorskip("onnxscript")
    result = secu("export", run, tmp_path / "m.onnx")
    assert (result.code, result.out, result.err) == (0, f"{tmp_path / 'm.onnx'}\n", "")
    assert tree(tmp_path) == ["m.onnx"]


def test_report_is_written_again(secu, run):
    before = {name: (run / name).read_bytes() for name in tree(run)}
    (run / "report.html").unlink()
    result = secu("report", "runs/digits")
    assert (result.code, result.out, result.err) == (0, "runs/digits/report.html\n", "")
    assert tree(run) == sorted(before)
    for name in before.keys() - {"report.html"}:
        assert (run / name).read_bytes() == before[name]


def test_evaluate_scores_own_images(secu, run):
    last = Run.open(run).metrics()[-1]
    result = secu("evaluate", run)
    assert (result.code, result.err) == (0, "")
    for expected in ("120", *(f"{last[name]:.4f}" for name in ("acc", "nmi", "ari"))):
        assert expected in result.out


def test_using_a_run_changes_nothing(secu, run):
    before = {name: (run / name).read_bytes() for name in tree(run)}
    secu("predict", run, "digits")
    secu("evaluate", run)
    assert {name: (run / name).read_bytes() for name in tree(run)} == before


# Plans


def test_a_dry_run_prints_the_plan_and_leaves_nothing(secu, home):
    before = tree(home)
    result = secu("fit", "digits", "-k", 3, "--dry-run", "--device", "cpu", "--out", "elsewhere")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == "120 images in digits"
    settings = [line.split("=")[0].split(":")[0].strip() for line in lines[1:-1]]
    expected = ["constraint.lower", "data.image_size", "data.channels", "decoding", "encoder.backbone"]
    expected += ["optim.batch_size", "centers.kind", "heads", "optim.epochs", "neighbors.count", "augment", "answer"]
    assert settings == expected
    assert re.fullmatch(r"about \d+ (seconds|minutes) on this device", lines[-1])
    assert tree(home) == before


def test_a_plan_that_takes_too_long_says_so_and_what_would_help(secu):
    result = secu("fit", "digits", "-k", 3, "--dry-run", "--device", "cpu", "optim.epochs=100000000")
    lines = result.out.splitlines()
    assert re.fullmatch(r"about [\d,.]+ hours on this device", lines[-2])
    for part in ("too long", "GPU", "data.image_size", "fewer images"):
        assert part in lines[-1]


def test_a_dry_run_shows_what_was_requested(secu):
    out = secu("fit", "digits", "-k", 3, "--dry-run", "--device", "cpu", "optim.epochs=7", "--balance", 0.25).out
    assert "  optim.epochs=7: 28 steps\n" in out
    assert "  optim.epochs=7: as requested\n" in out
    assert "25% of an equal share" in out


# Settings


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("digits", "digits"),
        ("digits/", "digits"),
        ("digits/*/*.png", "digits"),
        ("all.v2.npy", "all"),
        (".", "here"),
        ("*.npy", "here"),
        ("../here/digits", "digits"),
    ],
)
def test_a_run_is_named_after_its_source(secu, tmp_path, monkeypatch, source, name):
    here = tmp_path / "here"
    here.mkdir()
    write_folder(here / "digits", 12)
    np.save(here / "all.v2.npy", digits(12)[0])
    monkeypatch.chdir(here)
    assert cli.own.name_of(source) == name
    if source != "*.npy":  # a pattern names images
        assert secu("fit", source, "-k", "2", *SHORT, "optim.epochs=0").code == 0
        assert [path.name for path in (here / "runs").iterdir()] == [name]


def test_options_reach_the_config(secu, home, tmp_path):
    arguments = ("fit", "digits", "-k", 4, "--balance", 0.3, "--seed", 5, "--out", tmp_path / "run", *SHORT)
    assert secu(*arguments, "optim.epochs=0", "optim.lr=0.03").code == 0
    config = Run.open(tmp_path / "run").config()
    assert (config.clusters, config.constraint.lower, config.seed, config.optim.lr) == (4, 0.3, 5, 0.03)


def test_the_time_limit_and_resume(secu, run, tmp_path):
    arguments = ("fit", "digits", "--clusters", 3, "--labels", "folder", *SHORT, "--out", tmp_path / "run")
    stopped = secu(*arguments, "--time-limit", "0.001s")
    line = "stopped by --time-limit after 1 epoch; the same command with --resume continues"
    assert stopped.out.splitlines()[-1] == line
    assert_one_line(secu("predict", tmp_path / "run", "digits"), "clusters.csv", "stopped after 1 of 3 epochs")
    resumed = secu(*arguments, "--resume")
    assert "training on cpu, engine eager, resumed after 1 epoch" in resumed.out.splitlines()
    for name in ("model.safetensors", "assignments.csv"):
        assert (tmp_path / "run" / name).read_bytes() == (run / name).read_bytes()


def test_skipped_images_and_warnings_are_reported(secu, tmp_path):
    folder = write_folder(tmp_path / "p", 40)
    (folder / "bad.png").write_text("x")
    lines = secu("fit", folder, "-k", 3, "--out", tmp_path / "run", *SHORT).out.splitlines()
    assert f"images left out: 1, see {tmp_path / 'run' / 'skipped.csv'}" in lines
    assert sum(line.startswith("warning: ") for line in lines) >= 1  # two epochs are too few
    warnings = [line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")]
    assert all("(" in text or "optim.epochs" in text or "balance" in text for text in warnings)


def test_columns_of_a_manifest_come_out_again(secu, tmp_path):
    write_folder(tmp_path / "p", 30)
    table = write_manifest(tmp_path / "t.csv", tmp_path / "p", camera=["left", "right"])
    assert secu("fit", table, "-k", 2, "--labels", "digit", "--out", tmp_path / "run", *SHORT).code == 0
    assert {row["camera"] for row in rows_of(tmp_path / "run" / "assignments.csv")} == {"left", "right"}


def test_report_and_sort_name_images_that_are_missing(secu, tmp_path):
    folder = write_folder(tmp_path / "p", 30)
    assert secu("fit", folder, "-k", 2, "--out", tmp_path / "run", *SHORT).code == 0
    (folder / "0" / "0.png").unlink()
    Image.new("RGB", (99, 99), "red").save(folder / "new.png")
    line = "1 of 30 images of the run are left out: 1 gone (first 0/0.png)\n"
    for arguments in (("report", tmp_path / "run"), ("sort", tmp_path / "run", tmp_path / "sorted")):
        result = secu(*arguments)
        assert result.code == 0
        assert result.err.endswith(line)
    assert "29 images in 2 clusters" in (tmp_path / "run" / "report.html").read_text()
    assert len(list((tmp_path / "sorted").rglob("*.png"))) == 29


def test_how_the_values_of_an_array_are_read_is_reported(secu, tmp_path):
    np.save(tmp_path / "a.npy", digits(30)[0] / 255)
    lines = secu("fit", tmp_path / "a.npy", "-k", 2, "--dry-run").out.splitlines()
    assert re.fullmatch(r"values from 0 to \S+ are interpreted as float 0\.\.1", lines[1])


# Mistakes

MISTAKES = {
    "no source": (["fit"], ["SOURCE"]),
    "nowhere": (["fit", "nowhere", "-k", "3"], ["nowhere does not exist", "a folder"]),
    "unknown kind": (["fit", "fit.txt", "-k", "3"], ["fit.txt has an unsupported type"]),
    "range down": (["fit", "digits", "-k", "5..3"], ["clusters: 5..3 must be a range", "smaller number first"]),
    "range from 1": (["fit", "digits", "-k", "1..4"], ["clusters: 1..4 must be a range of at least 2"]),
    "open range": (["fit", "digits", "-k", "5.."], ["clusters: '5..' must be a number such as 8, a range such as"]),
    "long range": (["fit", "digits", "-k", "5..121"], ["121 clusters need at least 121 images, got 120"]),
    "range and balance": (["fit", "digits", "-k", "3..6", "--balance", "1"], ["balance: 1.0 needs one number", "3..6"]),
    "range and heads": (["fit", "digits", "-k", "3..6", "heads=[3]"], ["heads: [3] needs one number", "3..6"]),
    "no clusters": (["fit", "digits", "-k", "1"], ["clusters: 1 must be at least 2"]),
    "clusters type": (["fit", "digits", "-k", "x"], ["clusters: 'x' must be a number"]),
    "more clusters": (["fit", "digits", "-k", "121"], ["121 clusters need at least 121 images, got 120"]),
    "balance": (["fit", "digits", "-k", "3", "--balance", "1.5"], ["balance: 1.5 must be from 0"]),
    "labels": (
        ["fit", "digits", "-k", "3", "--labels", "foldr"],
        ["labels: digits has no 'foldr'", "did you mean folder?"],
    ),
    "device": (["fit", "digits", "-k", "3", "--device", "gpu"], ["device: 'gpu'"]),
    "key": (["fit", "digits", "-k", "3", "optim.epoch=3"], ["optim.epoch: unknown", "did you mean epochs?"]),
    "size": (
        ["fit", "digits", "-k", "3", "data.image_size=null"],
        ["data.image_size: must be a number of pixels, got null"],
    ),
    "batch": (["fit", "digits", "-k", "3", "optim.batch_size=0"], ["optim.batch_size: 0"]),
    "hints": (["fit", "digits", "-k", "3", "--hints", "none.csv"], ["hints: cannot read none.csv: No such file"]),
    "hints of a run": (
        ["fit", "digits", "-k", "3", "--hints", "runs/digits/clusters.csv"],
        ["clusters.csv needs columns id and label", "it has cluster, size"],
    ),
    "section": (["fit", "digits", "-k", "3", "optim=3"], ["optim: 3"]),
    "not a pair": (["fit", "digits", "-k", "3", "fast"], ["'fast' must look like key=value"]),
    "time": (["fit", "digits", "-k", "3", "--time-limit", "soon"], ["--time-limit: 'soon'"]),
    "both": (["fit", "digits", "-k", "3", "--resume", "--force"], ["cannot be combined"]),
    "missing shards": (["fit", "s-{0..3}.tar", "-k", "3"], ["expands to 4 files", "s-0.tar and 3 more does not exist"]),
    "no shards": (["predict", "runs/digits", "none/*.parquet"], ["no file matches none/*.parquet"]),
    "dry run": (["fit", "nowhere", "-k", "3", "--dry-run"], ["nowhere does not exist"]),
    "expanded": (["fit", "digits/0/0.png", "-k", "3", "digits/1"], ["expected one source", "'digits/1'", "in quotes"]),
    "predict what": (["predict", "runs/digits"], ["SOURCE"]),
    "predict no run": (["predict", "digits", "digits"], ["digits is not a run folder"]),
    "predict nowhere": (["predict", "runs/digits", "nowhere"], ["nowhere does not exist"]),
    "predict format": (["predict", "runs/digits", "digits", "-o", "a.xlsx"], ["'a.xlsx' must end in .csv, .jsonl"]),
    "predict folder": (["predict", "runs/digits", "digits", "-o", "no/a.csv"], ["folder no does not exist"]),
    "sort where": (["sort", "runs/digits"], ["DEST"]),
    "sort exists": (["sort", "runs/digits", "digits"], ["digits already exists; choose a new folder"]),
    "sort no run": (["sort", "nowhere", "new"], ["nowhere is not a run folder"]),
    "export suffix": (["export", "runs/digits", "model.pt"], ["model.pt must end in .onnx"]),
    "export no run": (["export", "nowhere", "m.onnx"], ["nowhere is not a run folder"]),
    "export folder": (["export", "runs/digits", "no/m.onnx"], ["folder no does not exist"]),
    "report no run": (["report", "digits"], ["digits is not a run folder"]),
    "command": (["prdict"], ["unknown 'prdict'", "did you mean predict?"]),
}


@pytest.mark.parametrize(("arguments", "parts"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_that_names_it_and_leaves_nothing(secu, run, home, arguments, parts):
    before = [name for name in tree(home) if not name.startswith("data")]
    out = ["--out", "new"] if arguments[0] == "fit" else []
    assert_one_line(secu(*arguments, *out), *parts)
    assert [name for name in tree(home) if not name.startswith("data")] == before


def test_a_number_that_is_not_given_is_chosen_and_explained(secu, tmp_path):
    command = ("fit", "digits", "--out", tmp_path / "run", *SHORT)
    stopped = secu(*command, "--time-limit", "0.001")
    assert stopped.code != 2
    result = secu(*command, "--resume")
    assert (result.code, result.err) == (0, "")
    number = json.loads((tmp_path / "run" / "outcome.json").read_text())["number"]
    assert list(number["scores"]) == ["3", "4", "5", "6", "8", "10", "12"]  # ten images per cluster
    for reason in number["reasons"]:
        assert reason in result.out
    assert "recommended" in number["reasons"][0]
    assert Run.open(tmp_path / "run").config().clusters == number["recommended"]


def test_hints_hold_images_in_the_clusters_of_their_names(secu, home, tmp_path):
    ids = sorted(path.relative_to(home / "digits").as_posix() for path in (home / "digits").rglob("*.png"))
    hints = tmp_path / "hints.csv"
    hints.write_text("id,label\n" + "".join(f"{name},number {name[0]}\n" for name in ids[::5]))
    command = ("fit", "digits", "-k", 3, "--hints", hints, "--out", tmp_path / "run", *SHORT)
    planned = secu(*command, "--dry-run")
    assert "answer=head: hints hold images in clusters of a head" in planned.out
    assert "checksum" not in planned.out
    result = secu(*command)
    assert result.code == 0
    summary = json.loads((tmp_path / "run" / "outcome.json").read_text())["hints"]
    line = f"{summary['followed']} of 24 hinted images are in the cluster of their hint"
    names = ", ".join(f"cluster {cluster} is {name}" for cluster, name in summary["names"].items())
    assert f"{line}; {names}" in result.out
    assert sorted(summary["names"].values()) == ["number 0", "number 1", "number 4"]
    assert_one_line(secu(*command[:4], *command[6:], "--resume"), "was started with hints; give them again")


def test_the_tree_of_a_run_is_printed_and_cut(secu, run, tmp_path):
    printed = secu("tree", run)
    assert printed.code == 0
    assert printed.out.startswith("(")
    assert printed.out.endswith(");\n")
    assert "--level 2 to" in printed.err
    assert secu("predict", run, "digits", "-o", tmp_path / "a.csv", "--level", 2).code == 0
    assert {row["cluster"] for row in rows_of(tmp_path / "a.csv")} <= {"0", "1"}
    assert secu("sort", run, tmp_path / "sorted", "--level", 2).code == 0
    assert_one_line(secu("predict", run, "digits", "--level", 1), "level: 1 must be a number of groups from 2 to")


def test_the_report_of_a_run_that_was_killed_is_one_line(secu, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    assert_one_line(secu("report", tmp_path / "run"), "has no run.json; was it stopped early?")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission_is_one_line(secu, tmp_path):
    (tmp_path / "locked").mkdir(mode=0)
    assert_one_line(secu("fit", tmp_path / "locked", "-k", 3), "cannot read the folder", "Permission denied")


# Real processes

PROMPTLY = 20  # seconds on a busy machine; decoding everything that the tests below leave undecoded takes longer


def start(*arguments, cwd, **options):
    """Start the program in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SECU_DATA": str(cwd / "data")}
    command = [sys.executable, "-m", "secu", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=environment, **pipes, **options)


def interrupt(process):
    """Press Ctrl-C; the program must end soon, whatever its threads are working on."""
    process.send_signal(signal.SIGINT)
    pressed = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - pressed < PROMPTLY
    return Result(process.returncode, out, err)


def write_noise(folder, count, side, suffix="png"):
    """Write large pictures that take a while to decode; all are the same file."""
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    Image.fromarray(noise).save(folder / f"0.{suffix}", "PNG")
    for number in range(1, count):
        os.link(folder / f"0.{suffix}", folder / f"{number}.{suffix}")


def test_ctrl_c_while_decoding_and_then_while_training(secu, tmp_path, monkeypatch):
    """First press: only an empty cache is left. Second: --resume ends where an uninterrupted run does."""
    write_noise(tmp_path / "p", 60, 1000)
    settings = ("fit", "p", "-k", 2, "data.image_size=8", *SHORT, "optim.epochs=14", "optim.batch_size=4")

    process = start(*settings, "--out", "run", cwd=tmp_path)
    wait_for(lambda: list((tmp_path / "data").glob("images/.*")), process)
    line = "secu: interrupted; the same command with --resume continues from the last checkpoint"
    assert_one_line(interrupt(process), line, code=130)
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / "data" / "images").glob("*.images"))

    process = start(*settings, "--out", "run", "--resume", cwd=tmp_path)
    wait_for(lambda: epochs_of(tmp_path / "run") >= 2, process)  # so that the state of one is kept
    assert_one_line(interrupt(process), "with --resume", code=130)
    left = {path.name for path in (tmp_path / "run").iterdir()} - {LOCK}
    assert left <= {"config.yaml", "images.json", "metrics.jsonl", "model.safetensors", "run.json", "state.safetensors"}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECU_DATA", str(tmp_path / "data"))
    resumed = secu(*settings, "--out", "run", "--resume")
    assert (resumed.code, resumed.err) == (0, "")
    assert secu(*settings, "--out", "whole").code == 0
    for name in ("model.safetensors", "assignments.csv"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["data"]["source"] == str(tmp_path / "p")


def test_ctrl_c_while_training_on_images_that_are_decoded_on_demand(tmp_path):
    """A thread fetches the next batch, and others decode it: none of them delays the end."""
    for group in ("a", "b"):
        write_noise(tmp_path / "root" / "imagenet" / "train" / group, 150, 1000, "JPEG")
        write_noise(tmp_path / "root" / "imagenet" / "val" / group, 2, 10, "JPEG")
    settings = ("data.image_size=8", "augment.size=8", "encoder.backbone=small", "encoder.prediction_layers=0")
    settings += ("heads=[2]", "optim.batch_size=20", "optim.epochs=40", "optim.warmup_epochs=0", "--device", "cpu")
    process = start("train", "imagenet", *settings, "--data", "root", "--out", "run", cwd=tmp_path)
    wait_for((tmp_path / "run" / NEXT / "metrics.jsonl").is_file, process)  # the first epoch has begun
    time.sleep(1)
    assert_one_line(interrupt(process), "secu: interrupted", code=130)


def test_ctrl_c_while_predicting_leaves_nothing(run, home, tmp_path):
    write_noise(tmp_path / "p", 300, 1500)
    process = start("predict", run, tmp_path / "p", "-o", tmp_path / "out.csv", cwd=home)
    wait_for(lambda: list(tmp_path.glob(".out.csv.*")), process)
    assert assert_one_line(interrupt(process), code=130) == "secu: interrupted\n"
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_a_reader_that_closes_the_pipe_is_no_error_message(run, home):
    """As in secu predict … | head, which typer handles if the last flush comes in time."""
    process = start("predict", run, "digits", cwd=home)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 1
    process.stderr.close()


def test_a_real_process_fails_like_a_called_one(tmp_path):
    process = start("fit", "nowhere", "-k", 3, cwd=tmp_path)
    out, err = process.communicate(timeout=60)
    assert_one_line(Result(process.returncode, out, err), "nowhere does not exist")
    assert tree(tmp_path) == []


# Problems that first-time users had


def test_copies_are_not_put_among_the_pictures_they_are_copies_of(secu, run, home):
    assert_one_line(secu("sort", run, "digits/sorted", "--copy"), "sort: digits/sorted is inside", "choose another")
    assert not (home / "digits" / "sorted").exists()


def test_a_run_that_was_stopped_says_so_in_its_report(secu, tmp_path):
    done = secu("fit", "digits", "-k", 3, "--out", tmp_path / "run", *SHORT, "optim.epochs=9", "--time-limit", "0.001s")
    assert "the same command with --resume continues" in done.out
    assert secu("report", tmp_path / "run").code == 0
    page = (tmp_path / "run" / "report.html").read_text()
    line = f"training stopped after 1 of {Run.open(tmp_path / 'run').config().optim.total_epochs} epochs"
    assert line in page
    sorting = secu("sort", tmp_path / "run", tmp_path / "sorted")
    assert (sorting.code, sorting.err) == (0, f"warning: {line}; to continue, run secu fit with --resume\n")


def test_pictures_that_were_moved_are_found_where_the_config_says(secu, tmp_path):
    pictures = write_folder(tmp_path / "p", 24)
    assert secu("fit", pictures, "-k", 2, "--out", tmp_path / "run", *SHORT).code == 0
    pictures.rename(tmp_path / "q")
    assert_one_line(secu("report", tmp_path / "run"), "its images cannot be found", "data.source in", "config.yaml")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(pictures), str(tmp_path / "q")))
    assert secu("report", tmp_path / "run").code == 0


def test_a_source_is_not_a_setting(secu, tmp_path):
    for setting in ("data.source=other", "data.labels=folder"):
        arguments = ("fit", "digits", "-k", 3, "--out", tmp_path / "run", setting)
        assert_one_line(secu(*arguments), setting.partition("=")[0], "cannot be set here")
    assert not (tmp_path / "run").exists()


def test_a_new_run_under_resume_is_reported(secu, tmp_path):
    done = secu("fit", "digits", "-k", 3, "--out", tmp_path / "run", "--resume", *SHORT)
    assert (done.code, done.out.count("holds no run yet: starting a new one")) == (0, 1)
    done = secu("fit", "digits", "-k", 3, "--out", tmp_path / "run", "--resume", *SHORT)
    assert (done.code, done.out.count("holds no run yet")) == (0, 0)


def test_a_score_states_how_many_images_have_a_label(secu, tmp_path):
    pictures = write_folder(tmp_path / "p", 24)
    table = write_manifest(tmp_path / "m.csv", pictures, kind=["a", "", ""])
    run = tmp_path / "run"
    assert secu("fit", table, "-k", 2, "--labels", "kind", "--out", run, *SHORT).code == 0
    assert "24, 8 with a label" in secu("evaluate", run).out


def test_a_folder_that_cannot_be_written_is_named_as_it_was_given(secu, run, tmp_path, monkeypatch):
    def refuse(path, **_):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "touch", refuse)
    assert_one_line(secu("predict", run, "digits", "-o", tmp_path / "found.csv"), f"'{tmp_path / 'found.csv'}'")


def test_the_option_for_the_seed_wins_over_the_setting(secu, tmp_path):
    for arguments, seed in ((("seed=5",), 5), (("seed=5", "--seed", 3), 3), ((), 0)):
        done = secu("fit", "digits", "-k", 3, *SHORT, *arguments, "--out", tmp_path / str(seed))
        assert done.code == 0, done.err
        assert Run.open(tmp_path / str(seed)).config().seed == seed


def test_hostile_values_and_limits_are_one_line(secu):
    """Of images that are all too large, a dry run already names the limit and its setting."""
    for value in ("9" * 5000, "2024-13-45", "!!int x", "&a [*a]", "{a: 1, a: 2}"):
        result = secu("fit", "digits", "-k", 3, "--dry-run", f"seed={value}")
        assert result.code == 2
        assert result.err.count("\n") == 1
        assert len(result.err) < 1000
    result = secu("fit", "digits", "-k", 3, "--dry-run", "data.max_pixels=60")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "8 x 8 are 64 pixels; the limit is 60 (data.max_pixels)" in result.err
