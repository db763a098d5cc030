"""The command line: what it prints, what it leaves, and the one line that every mistake becomes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from secu import __version__, cli
from secu.errors import UserError
from secu.run import Run
from secu.settings import load_config, recipe_names

TINY = ("heads=[3]", "optim.epochs=1", "optim.batch_size=256", "optim.warmup_epochs=0", "encoder.dim=8")


class Result:
    """How a command ended."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def secu(tmp_path, monkeypatch, capsys):
    """Call the program in this process, in an empty folder and without any data set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECU_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["secu", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return Result(ended.value.code, captured.out, captured.err)

    return call


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Train a tiny run once, as a user would, into a log of the oldest encoding; return folder and output."""
    path = tmp_path_factory.mktemp("finished") / "a-path-longer-than-a-line-of-a-terminal" / "run"
    done = program("train", "digits", *TINY, "--out", path, "--seed", 3, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    return path, done


def program(*arguments, **options):
    """Call the program in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    command = [sys.executable, "-m", "secu", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, **options)


def assert_one_line(result, code=2):
    """Check that a failure is one line on stderr that starts with our name, and return it."""
    assert result.code == code
    assert result.err.count("\n") == 1, result.err
    assert result.err.startswith("secu: ")
    assert "Traceback" not in result.err + result.out
    return result.err


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# Answers that need no model


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["recipes"], ["recipes", "digits"], []])
def test_quick_answers_do_not_import_torch(arguments, tmp_path):
    code = (
        "import sys, secu.cli\n"
        f"sys.argv = ['secu', *{arguments!r}]\n"
        "try: secu.cli.main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'numpy', 'scipy', 'sklearn', 'matplotlib', 'PIL'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("before", "after"), [(None, "10000"), ("7", "7")])
def test_threads_that_wait_give_way_soon_unless_the_user_says_otherwise(secu, monkeypatch, before, after):
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # so that it is put back
    monkeypatch.delenv("GOMP_SPINCOUNT")
    if before:
        monkeypatch.setenv("GOMP_SPINCOUNT", before)
    secu("--version")
    assert os.environ["GOMP_SPINCOUNT"] == after


def test_help_is_under_0_7_seconds_of_work():
    """Of the CPU's time: a busy machine makes anything slow."""
    seconds = []
    for _ in range(3):
        before = os.times()
        assert program("--help").returncode == 0
        after = os.times()
        seconds.append(after.children_user - before.children_user + after.children_system - before.children_system)
    assert 0 < min(seconds) < 0.7, seconds


def test_help_and_nothing_at_all_list_the_commands(secu):
    for arguments in (["--help"], []):
        result = secu(*arguments)
        assert (result.code, result.err) == (0, "")
        lines = result.out.splitlines()
        assert lines[0] == "Usage: secu [OPTIONS] COMMAND [ARGS]..."
        for command in ("train", "repeat", "selflabel", "evaluate", "recipes", "data", "demo"):
            assert any(re.match(rf"  {command} +[A-Z]\w+", line) for line in lines), command
        assert "..." not in "".join(lines[1:])  # no description is cut off


@pytest.mark.parametrize("command", ["train", "repeat", "selflabel", "evaluate", "recipes", "data", "demo"])
def test_every_command_has_help(secu, command):
    result = secu(command, "--help")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"Usage: secu {command} ")


def test_version(secu):
    result = secu("--version")
    assert (result.code, result.out, result.err) == (0, f"secu {__version__}\n", "")


def test_recipes_lists_all_with_the_papers_number(secu):
    result = secu("recipes")
    assert result.code == 0
    words = result.out.split()
    for name in recipe_names():
        assert name in words
    assert "88.1" in words


def test_a_recipe_is_shown_as_resolved_and_can_be_used_as_a_file(secu, tmp_path):
    result = secu("recipes", "stl10-entropy")
    assert (result.code, result.err) == (0, "")
    assert yaml.safe_load(result.out) == load_config("stl10-entropy").model_dump(mode="json")
    (tmp_path / "mine.yaml").write_text(result.out)
    assert load_config(str(tmp_path / "mine.yaml")) == load_config("stl10-entropy")


# Train and evaluate


def test_train_leaves_a_run_folder_and_says_where(finished):
    path, done = finished
    assert done.stderr == ""
    assert files(path) == [
        *("assignments.csv", "assignments.parquet", "clusters.csv", "config.yaml", "exemplars.png", "metrics.jsonl"),
        *("model.safetensors", "report.html", "run.json", "state.pt"),
    ]
    assert Run.open(path).config() == load_config("digits", [*TINY, "seed=3"])
    told = done.stdout.splitlines()
    lines = [line for line in told if not line.startswith("warning: ")]  # two epochs are too few, which it says
    assert told[-2].startswith("warning: ")
    assert lines[0] == "training on cpu, engine eager"
    last = Run.open(path).metrics()[-1]
    assert re.fullmatch(r"epoch +2  loss \d\.\d+  clusters [\d,]+ to [\d,]+  ACC .*  NMI .*  ARI .*  .* s", lines[-4])
    assert f"ACC {last['acc']:.4f}" in lines[-4]
    assert lines[-3:-1] == ["writing the tables", "writing the report"]
    assert re.fullmatch(rf"finished in \d+ s: {re.escape(str(path))}", lines[-1])  # also a long path stays whole


def test_evaluate_prints_what_training_measured(secu, finished):
    path, _ = finished
    last = Run.open(path).metrics()[-1]
    for split in ("test", "all"):
        result = secu("evaluate", path, "--split", split)
        assert (result.code, result.err) == (0, "")
        for expected in ("1,797", *(f"{last[name]:.4f}" for name in ("acc", "nmi", "ari"))):
            assert expected in result.out
    assignments = (path / "assignments.csv").read_text().splitlines()[1:]
    sizes = [sum(row.split(",")[1] == str(cluster) for row in assignments) for cluster in range(3)]
    assert re.search(rf"{max(sizes):,} .* {min(sizes):,} ", result.out)


def test_evaluate_changes_nothing(secu, finished):
    path, _ = finished
    before = {name: (path / name).read_bytes() for name in files(path)}
    secu("evaluate", path)
    assert {name: (path / name).read_bytes() for name in files(path)} == before


def test_a_run_is_called_after_its_recipe_by_default(secu, tmp_path):
    assert secu("train", "digits", *TINY, "optim.epochs=0").code == 0
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(load_config("digits", TINY).model_dump(mode="json")))
    assert secu("train", "mine.yaml", "optim.epochs=0").code == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["digits", "mine"]


def test_a_name_in_brackets_is_printed_as_it_is(secu):
    assert secu("train", "digits", *TINY, "optim.epochs=0", "--out", "a[b]c").out.endswith(": a[b]c\n")


def test_the_seed_option_is_the_last_word(secu, tmp_path):
    assert secu("train", "digits", *TINY, "seed=1", "optim.epochs=0", "--seed", "2", "--out", "a").code == 0
    assert Run.open(tmp_path / "a").config().seed == 2


def test_stopped_by_the_time_limit_and_resumed(secu, finished, tmp_path):
    path, _ = finished
    arguments = ("train", "digits", *TINY, "--seed", "3", "--out", "run")
    stopped = secu(*arguments, "--time-limit", "0.01s")
    assert stopped.code == 0
    assert (
        stopped.out.splitlines()[-1] == "stopped by --time-limit after 1 epochs; the same command with --resume goes on"
    )
    assert "assignments.csv" not in files(tmp_path / "run")
    resumed = secu(*arguments, "--resume")
    assert resumed.code == 0
    assert resumed.out.splitlines()[0] == "training on cpu, engine eager, resumed after 1 epochs"
    for name in ("model.safetensors", "assignments.csv", "exemplars.png", "config.yaml"):
        assert (tmp_path / "run" / name).read_bytes() == (path / name).read_bytes(), name


def test_force_replaces_a_run(secu, tmp_path):
    arguments = ("train", "digits", *TINY, "optim.epochs=0", "--out", "run")
    secu(*arguments)
    first = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert secu(*arguments, "--seed", "9", "--force").code == 0
    assert (tmp_path / "run" / "model.safetensors").read_bytes() != first


def test_resume_of_nothing_starts(secu, tmp_path):
    assert secu("train", "digits", *TINY, "optim.epochs=0", "--out", "new", "--resume").code == 0
    assert Run.open(tmp_path / "new").has_checkpoint()


# Mistakes

MISTAKES = {
    "command": (["trian"], ["unknown 'trian'", "did you mean train?", "valid: data, demo, evaluate, export, fit, "]),
    "option": (["train", "digits", "--frce"], ["--frce", "--force"]),
    "top option": (["--verson"], ["--verson", "--version"]),
    "no recipe": (["train"], ["recipe"]),
    "no run": (["evaluate"], ["RUN"]),
    "seed type": (["train", "digits", "--seed", "x"], ["--seed", "integer"]),
    "seed range": (["train", "digits", "--seed", "-1"], ["seed: -1", "0"]),
    "seed size": (["train", "digits", "--seed", "99999999999999999999"], ["seed: 99999999999999999999"]),
    "recipe": (["train", "digit"], ["unknown 'digit'", "did you mean digits?", "cifar10", ".yaml"]),
    "shown recipe": (["recipes", "cifar"], ["unknown 'cifar'", "did you mean cifar10?"]),
    "recipe file": (["train", "no/such.yaml"], ["no file no/such.yaml"]),
    "override": (["train", "digits", "fast"], ["'fast' must look like key=value"]),
    "key": (["train", "digits", "optim.epoch=3"], ["optim.epoch: unknown", "did you mean epochs?"]),
    "section": (["train", "digits", "optm.lr=3"], ["optm: unknown", "did you mean optim?"]),
    "value": (["train", "digits", "optim.lr=fast"], ["optim.lr: 'fast'", "number"]),
    "choice": (["train", "digits", "encoder.backbone=vit"], ["'vit'", "'resnet18', 'resnet34', 'resnet50' or 'small'"]),
    "combination": (["train", "cifar10-ce", "centers.kind=kmeans"], ["loss.name: ce", "got kmeans"]),
    "time limit": (["train", "digits", "--time-limit", "9x"], ["--time-limit: '9x'", "for example 9m"]),
    "no time": (["train", "digits", "--time-limit", "0s"], ["--time-limit: '0s'", "over 0"]),
    "device": (["train", "digits", "--device", "gpu"], ["device: 'gpu'", "valid: auto, ", "cpu"]),
    "missing data": (["train", "cifar10"], ["cifar10: not found under", "run: secu data cifar10"]),
    "missing folders": (["train", "imagenet"], ["imagenet: split train not found", "<class>"]),
    "data set": (["train", "digits", "data.name=digit"], ["'digit'", "did you mean digits?"]),
    "split of recipe": (["train", "digits", "data.train=trian"], ["no split 'trian'", "did you mean train?"]),
    "download": (["data", "cifar"], ["'cifar'", "did you mean cifar10?"]),
    "not a run": (["evaluate", "nowhere"], ["nowhere is not a run folder"]),
    "clusters": (["train", "digits", "heads=[2000]"], ["2000 clusters need at least 2000 images, got 1797"]),
    "channels": (["train", "digits", "data.mean=[1,2,3]"], ["data.mean: 3 values", "1 channels"]),
    "engine": (["train", "digits", "engine=graph", "--device", "cpu"], ["graph needs a CUDA device", "eager"]),
    "start": (["train", "digits", "init_from=elsewhere"], ["elsewhere is not a run folder"]),
    "both": (["train", "digits", "--resume", "--force"], ["--resume and --force", "choose one"]),
    "demo override": (["demo", "optim.epoch=1"], ["optim.epoch: unknown"]),
    "demo device": (["demo", "--device", "gpu"], ["device: 'gpu'", "cpu"]),
}


@pytest.mark.parametrize(("arguments", "parts"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_that_names_it_and_leaves_nothing(secu, tmp_path, arguments, parts):
    message = assert_one_line(secu(*arguments))
    for part in parts:
        assert part in message
    assert files(tmp_path) == []


def test_cuda_is_not_available(secu, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert "device: 'cuda' is not available here; valid: auto, " in assert_one_line(
        secu("train", "digits", "--device", "cuda")
    )
    assert files(tmp_path) == []


def test_an_unknown_split_is_named(secu, finished):
    message = assert_one_line(secu("evaluate", finished[0], "--split", "tets"))
    assert "digits has no split 'tets'; did you mean test? valid: all, test, train" in message


def test_a_run_without_a_model_says_so(secu, tmp_path):
    Run.create(tmp_path / "run", load_config("digits"))
    assert "has no model yet" in assert_one_line(secu("evaluate", "run"))


def test_a_damaged_run_says_so(secu, tmp_path, finished):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_bytes((finished[0] / "config.yaml").read_bytes())
    (tmp_path / "run" / "model.safetensors").write_bytes(b"garbage")
    assert "is not a safetensors file" in assert_one_line(secu("evaluate", "run"))
    (tmp_path / "run" / "config.yaml").write_text("heads: [")
    assert "is not valid YAML" in assert_one_line(secu("evaluate", "run"))


def test_an_existing_run_is_left_alone(secu, tmp_path):
    arguments = ("train", "digits", *TINY, "optim.epochs=0", "--out", "run")
    secu(*arguments)
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    told = "out: run exists; choose another folder, --resume it or replace it with --force"
    assert told in assert_one_line(secu(*arguments))
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


@pytest.mark.parametrize(
    "mistake", [["--device", "gpu"], ["data.name=cifar10", "--force"], ["optim.lr=x"], ["--device", "gpu", "--resume"]]
)
def test_a_mistake_does_not_cost_an_old_run(secu, tmp_path, mistake):
    arguments = ("train", "digits", *TINY, "optim.epochs=0", "--out", "run")
    secu(*arguments)
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    assert_one_line(secu(*arguments, "--force" if "--resume" not in mistake else "--seed=0", *mistake))
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


def test_resume_with_other_settings_names_the_first(secu, tmp_path):
    arguments = ("train", "digits", *TINY, "--out", "run")
    secu(*arguments, "optim.epochs=0")
    message = assert_one_line(secu(*arguments, "--resume"))
    assert message == "secu: resume: run was started with optim.epochs=0, got optim.epochs=1; begin anew elsewhere\n"
    message = assert_one_line(secu(*arguments, "optim.epochs=0", "augment.affine=null", "--resume"))
    assert "augment.affine" in message


def test_a_folder_of_others_is_neither_resumed_nor_replaced(secu, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    arguments = ("train", "digits", *TINY, "--out", "thesis")
    assert "exists" in assert_one_line(secu(*arguments))
    assert "not a run folder" in assert_one_line(secu(*arguments, "--force"))
    assert "not a run folder" in assert_one_line(secu(*arguments, "--resume"))
    assert files(tmp_path) == ["thesis/thesis.tex"]


def test_an_out_that_cannot_be_is_one_line(secu, tmp_path):
    (tmp_path / "file").write_text("x")
    assert "file is a file" in assert_one_line(secu("train", "digits", *TINY, "--out", "file"))
    assert "Not a directory" in assert_one_line(secu("train", "digits", *TINY, "--out", "file/run"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_out_without_permission_is_one_line(secu, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "Permission denied" in assert_one_line(secu("train", "digits", *TINY, "--out", "locked/run"))


@pytest.mark.parametrize("word", [["--seed", "x"], ["--seed=x"]])
def test_an_option_that_is_no_number_is_named_with_its_value(secu, word):
    message = assert_one_line(secu("train", "digits", *word))
    assert "'--seed'" in message
    assert "'x'" in message


def test_a_loss_that_is_not_finite_is_one_line(secu, tmp_path):
    message = assert_one_line(secu("train", "digits", *TINY, "optim.lr=1e30", "--out", "run"))
    assert "loss: nan after epoch 1 of run is not finite; lower optim.lr or centers.lr" in message
    assert files(tmp_path) == []


# Bugs, tracebacks and interruptions


@pytest.mark.parametrize("arguments", [["--debug", "recipes", "no"], ["recipes", "no", "--debug"]])
def test_debug_shows_the_traceback(arguments):
    done = program(*arguments)
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "load_recipe" in done.stderr


def test_debug_raises_the_error_itself(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["secu", "--debug", "recipes", "no"])
    with pytest.raises(UserError, match="unknown 'no'"):
        cli.main()


def test_a_bug_is_one_line_with_exit_code_1(secu, monkeypatch):
    def broken():
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("secu.settings.recipe_names", broken)
    message = assert_one_line(secu("recipes"), code=1)
    assert message == "secu: unexpected RuntimeError: two lines (--debug shows where)\n"


def test_a_real_process_fails_like_a_called_one(tmp_path):
    done = program("train", "digits", "optim.epoch=3", cwd=tmp_path)
    assert_one_line(Result(done.returncode, done.stdout, done.stderr))
    assert done.stdout == ""
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "work",
    [
        "press()",
        # What libraries do: catch it and stumble later, or be inside an exec(), after which Python ends by the signal.
        "try:\n        press()\n    except BaseException:\n        raise ValueError('half imported') from None",
        "exec('press()')",
        # What our own threads do: they may be at work on something that nobody wants any more.
        "threading.Thread(target=time.sleep, args=[200]).start()\n    press()",
    ],
)
def test_ctrl_c_in_the_midst_of_anything(tmp_path, work):
    code = f"""
import os, signal, sys, threading, time
from secu import cli

def press():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)

@cli.app.command()
def work():
    print("a row")
    {work}

sys.argv = ["secu", "work"]
cli.main()
"""
    (tmp_path / "work.py").write_text(code)
    command = [sys.executable, "-m", "work"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "a row\n", "secu: interrupted\n")


def test_ctrl_c_is_one_line_and_the_run_goes_on_afterwards(secu, tmp_path):
    settings = ("train", "digits", *TINY, "optim.epochs=10", "optim.batch_size=128", "--out")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "secu", *settings, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    wait_for_a_line(tmp_path / "run" / "metrics.jsonl", process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert "finished" not in out
    message = assert_one_line(Result(process.returncode, out, err), code=130)
    assert message == "secu: interrupted; the same command with --resume goes on after the last whole epoch\n"
    left = files(tmp_path / "run")
    assert set(left) <= {"config.yaml", "metrics.jsonl", "model.safetensors", "run.json", "state.pt"}

    resumed = secu(*settings, tmp_path / "run", "--resume")
    assert (resumed.code, resumed.err) == (0, "")
    assert secu(*settings, tmp_path / "whole").code == 0
    for name in ("model.safetensors", "assignments.csv"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["epochs_done"] == 11


def wait_for_a_line(path: Path, process: subprocess.Popen) -> None:
    for _ in range(2400):
        if path.is_file() and path.read_text().endswith("\n"):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError(f"no line in {path}")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("9m", 540), ("1.5h", 5400), ("0.5m", 30), (None, float("inf"))],
)
def test_times_are_read(text, seconds):
    assert cli.parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1s", "1d", "9 m", "1e3", "inf", "nan", "0", "0.0h", "1.m", "9m30s"])
def test_other_times_are_refused(text):
    with pytest.raises(UserError, match="must be a number over 0 with s, m or h, for example 9m"):
        cli.parse_time(text)
