"""The command line: what it prints, what it leaves, and the one line that every mistake becomes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml
from sklearn.datasets import load_digits

from calls import Result, caller
from secu import __version__, cli
from secu.base.errors import UserError
from secu.settings import load_config, recipe_names, with_shape
from secu.train.place import LOCK
from secu.train.run import Run
from small_runs import new_run
from waiting import epochs_of, wait_for

TINY = ("heads=[3]", "optim.epochs=1", "optim.batch_size=256", "optim.warmup_epochs=0", "encoder.dim=8")


@pytest.fixture
def secu(tmp_path, monkeypatch, capsys, quick_map):
    """Call the program in this process, in an empty folder and without any data set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECU_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "100")
    return caller(monkeypatch, capsys)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A tiny run, trained as a user would, into a log of the oldest encoding: folder and output."""
    path = tmp_path_factory.mktemp("finished") / "a-path-longer-than-a-line-of-a-terminal" / "run"
    start = "import secu.results.report.layout as layout; layout.LEAST_POINTS = 10**9; import secu.cli; secu.cli.main()"
    arguments = ("train", "digits", *TINY, "--out", path, "--seed", 3)
    done = program(*arguments, env={"PYTHONIOENCODING": "ascii"}, start=["-c", start])  # as quick_map does
    assert done.returncode == 0, done.stderr
    return path, done


@pytest.fixture
def old_run(finished, tmp_path):
    """A copy of that run as ``run`` in the folder where commands are called; returns its files."""
    shutil.copytree(finished[0], tmp_path / "run")
    return contents(tmp_path / "run")


SAME_AS_FINISHED = ("train", "digits", *TINY, "--seed", "3", "--out", "run")


def program(*arguments, start=("-m", "secu"), **options):
    """Call the program in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    command = [sys.executable, *start, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, **options)


def assert_one_line(result, code=2):
    """Check that a failure is one line on stderr that starts with our name, and return it."""
    assert result.code == code
    assert result.err.count("\n") == 1, result.err
    assert result.err.startswith("secu: ")
    assert "Traceback" not in result.err + result.out
    return result.err


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != LOCK)


def contents(folder):
    return {name: (folder / name).read_bytes() for name in files(folder)}


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
def test_waiting_threads_yield_soon_unless_the_user_decides_otherwise(secu, monkeypatch, before, after):
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # so that it is restored
    monkeypatch.delenv("GOMP_SPINCOUNT")
    if before:
        monkeypatch.setenv("GOMP_SPINCOUNT", before)
    secu("--version")
    assert os.environ["GOMP_SPINCOUNT"] == after


def test_help_is_under_0_7_seconds_of_work():
    """CPU time, because a busy machine makes everything slow."""
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
        assert "..." not in "".join(lines[1:])  # no description is truncated


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


def test_train_leaves_a_run_folder_and_prints_where(finished):
    path, done = finished
    assert done.stderr == ""
    expected = ["assignments.csv", "assignments.parquet", "clusters.csv", "config.yaml", "exemplars.png"]
    expected += ["metrics.jsonl", "model.safetensors", "report.html", "run.json", "skipped.csv", "state.safetensors"]
    assert files(path) == expected
    assert Run.open(path).config() == with_shape(load_config("digits", [*TINY, "seed=3"]), (1, 8, 8))
    printed = done.stdout.splitlines()
    lines = [line for line in printed if not line.startswith("warning: ")]  # two epochs are too few
    assert printed[-2].startswith("warning: ")
    assert lines[0] == "training on cpu, engine eager"
    last = Run.open(path).metrics()[-1]
    losses = r"loss \d\.\d+  center loss \d\.\d+"
    scores = r"ACC .*  NMI .*  ARI .*"
    assert re.fullmatch(rf"epoch +2 of 2  {losses}  clusters [\d,]+ to [\d,]+  {scores}  .* s", lines[-5])
    assert f"ACC {last['acc']:.4f}" in lines[-5]
    assert lines[-4:-1] == ["assigning all images", "writing the tables", "writing the report"]
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
    before = contents(path)
    secu("evaluate", path)
    assert contents(path) == before


def test_a_run_of_a_recipe_is_used_like_any_other(secu, finished, tmp_path):
    """Its settings say what its images are, so that new images can be predicted and its own can be found again."""
    path, _ = finished
    np.save(tmp_path / "digits.npy", load_digits().images)
    predicted = secu("predict", path, "digits.npy", "-o", "found.csv")
    assert (predicted.code, predicted.err) == (0, "values from 0 to 16 are interpreted as float 0..16\n")
    rows = [line.split(",")[1] for line in (tmp_path / "found.csv").read_text().splitlines()]
    assert rows == [line.split(",")[1] for line in (path / "assignments.csv").read_text().splitlines()]
    assert secu("sort", path, "sorted").out == "1,797 images in sorted\n"
    assert len(list((tmp_path / "sorted").rglob("*.png"))) == 1797


def test_a_recipe_may_be_trained_on_other_images(secu, tmp_path):
    np.save(tmp_path / "digits.npy", (load_digits().images[:50] * 15).astype(np.uint8))
    source = ("data.source=digits.npy", "data.image_size=8", "data.channels=1")
    result = secu("train", "digits", *source, *TINY, "optim.batch_size=16", "--out", "run")
    assert (result.code, result.err) == (0, "")
    assert "ACC" not in result.out  # they have no labels
    assert len((tmp_path / "run" / "assignments.csv").read_text().splitlines()) == 51
    assert len(Run.open(tmp_path / "run").images()) == 50


def test_a_run_is_named_after_its_recipe_by_default(secu, tmp_path):
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
    stopped = secu(*SAME_AS_FINISHED, "--time-limit", "0.01s")
    assert stopped.code == 0
    line = "stopped by --time-limit after 1 epoch; the same command with --resume continues"
    assert stopped.out.splitlines()[-1] == line
    assert "assignments.csv" not in files(tmp_path / "run")
    resumed = secu(*SAME_AS_FINISHED, "--resume")
    assert resumed.code == 0
    assert resumed.out.splitlines()[0] == "training on cpu, engine eager, resumed after 1 epoch"
    for name in ("model.safetensors", "assignments.csv", "exemplars.png", "config.yaml"):
        assert (tmp_path / "run" / name).read_bytes() == (path / name).read_bytes(), name


def test_force_replaces_a_run(secu, old_run, tmp_path):
    assert secu(*SAME_AS_FINISHED, "optim.epochs=0", "--seed", "9", "--force").code == 0
    assert (tmp_path / "run" / "model.safetensors").read_bytes() != old_run["model.safetensors"]
    assert Run.open(tmp_path / "run").config().seed == 9


def test_resume_of_nothing_starts(secu, tmp_path):
    assert secu("train", "digits", *TINY, "optim.epochs=0", "--out", "new", "--resume").code == 0
    assert Run.open(tmp_path / "new").has_checkpoint()


# Mistakes

MISTAKES = {
    "command": (
        ["trian"],
        ["unknown 'trian'", "did you mean train?", "valid: data, demo, embed, evaluate, export, fit, "],
    ),
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
    "backbone": (
        ["train", "digits", "encoder.backbone=vit"],
        ["encoder.backbone: unknown 'vit'", "valid: hf, lite0, none, resnet18, resnet34, resnet50, small"],
    ),
    "constraint": (
        ["train", "digits", "constraint.kind=sizes"],
        ["constraint.kind: unknown 'sizes'", "did you mean size?"],
    ),
    "centers": (["train", "digits", "centers.kind=means"], ["centers.kind: unknown 'means'", "did you mean kmeans?"]),
    "method": (["train", "digits", "method=secuu"], ["method: unknown 'secuu'", "did you mean secu?"]),
    "choice": (["train", "digits", "optim.name=adam"], ["optim.name: 'adam'", "'sgd' or 'lars'"]),
    "head": (["train", "digits", "head=5"], ["head: 5 must be the position of one of 5 heads, from 0"]),
    "other method": (["train", "digits", "method=selflabel"], ["selflabel", "run secu selflabel"]),
    "combination": (["train", "cifar10-ce", "centers.kind=kmeans"], ["loss.name: ce", "got kmeans"]),
    "time limit": (["train", "digits", "--time-limit", "9x"], ["--time-limit: '9x'", "for example 9m"]),
    "no time": (["train", "digits", "--time-limit", "0s"], ["--time-limit: '0s'", "positive number"]),
    "device": (["train", "digits", "--device", "gpu"], ["device: 'gpu'", "valid: auto, ", "cpu"]),
    "missing data": (["train", "cifar10"], ["cifar10: not found under", "run: secu data cifar10"]),
    "missing folders": (["train", "imagenet"], ["imagenet: split train not found", "<class>"]),
    "data set": (["train", "digits", "data.source=dataset:digit"], ["'digit'", "did you mean digits?"]),
    "old name": (["train", "digits", "data.name=digit"], ["'digit'", "did you mean digits?"]),
    "no source": (["train", "digits", "data.source=nowhere", "data.image_size=8"], ["nowhere does not exist"]),
    "split of recipe": (["train", "digits", "data.train=trian"], ["no split 'trian'", "did you mean train?"]),
    "download": (["data", "cifar"], ["'cifar'", "did you mean cifar10?"]),
    "not a run": (["evaluate", "nowhere"], ["nowhere is not a run folder"]),
    "clusters": (["train", "digits", "heads=[2000]"], ["2000 clusters need at least 2000 images, got 1797"]),
    "channels": (["train", "digits", "data.mean=[1,2,3]"], ["data.mean: 3 values", "1 channels"]),
    "engine": (["train", "digits", "engine=graph", "--device", "cpu"], ["graph needs a CUDA device", "eager"]),
    "start": (["train", "digits", "init_from=elsewhere"], ["elsewhere is not a run folder"]),
    "both": (["train", "digits", "--resume", "--force"], ["--resume and --force cannot be combined"]),
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
    new_run(tmp_path / "run", load_config("digits"))
    assert "has no model yet" in assert_one_line(secu("evaluate", "run"))


def test_a_damaged_run_says_so(secu, tmp_path, finished):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_bytes((finished[0] / "config.yaml").read_bytes())
    (tmp_path / "run" / "model.safetensors").write_bytes(b"garbage")
    assert "is not a safetensors file" in assert_one_line(secu("evaluate", "run"))
    (tmp_path / "run" / "config.yaml").write_text("heads: [")
    assert "is not valid YAML" in assert_one_line(secu("evaluate", "run"))


def test_an_existing_run_is_left_alone(secu, old_run, tmp_path):
    line = "out: run exists; choose another folder, --resume it or replace it with --force"
    assert line in assert_one_line(secu(*SAME_AS_FINISHED))
    assert contents(tmp_path / "run") == old_run


@pytest.mark.parametrize(
    "mistake",
    [
        ["--device", "gpu", "--force"],
        ["data.source=dataset:cifar10", "--force"],
        ["optim.lr=x", "--force"],
        ["heads=[2000]", "--force"],
        ["--device", "gpu", "--resume"],
    ],
)
def test_a_mistake_does_not_cost_an_old_run(secu, old_run, tmp_path, mistake):
    assert_one_line(secu(*SAME_AS_FINISHED, *mistake))
    assert contents(tmp_path / "run") == old_run


def test_resume_with_other_settings_names_the_first(secu, old_run, tmp_path):
    message = assert_one_line(secu(*SAME_AS_FINISHED, "optim.epochs=2", "--resume"))
    change = "run was started with optim.epochs=1, got optim.epochs=2"
    assert message == f"secu: resume: {change}; start a new run elsewhere\n"
    message = assert_one_line(secu(*SAME_AS_FINISHED, "augment.affine=null", "--resume"))
    assert "augment.affine" in message
    assert contents(tmp_path / "run") == old_run


def test_a_folder_that_is_not_a_run_is_neither_resumed_nor_replaced(secu, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    arguments = ("train", "digits", *TINY, "--out", "thesis")
    assert "exists" in assert_one_line(secu(*arguments))
    assert "not a secu run folder" in assert_one_line(secu(*arguments, "--force"))
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
def test_an_option_that_is_not_a_number_is_named_with_its_value(secu, word):
    message = assert_one_line(secu("train", "digits", *word))
    assert "'--seed'" in message
    assert "'x'" in message


def test_a_loss_that_is_not_finite_is_one_line(secu, tmp_path):
    message = assert_one_line(secu("train", "digits", *TINY, "optim.lr=1e30", "--out", "run"))
    assert "loss: nan after epoch 1 of run is not finite; lower optim.lr or centers.lr" in message
    assert files(tmp_path) == []


# Bugs, tracebacks and interruptions


def test_debug_shows_the_traceback():
    done = program("recipes", "no", "--debug")
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "load_recipe" in done.stderr


@pytest.mark.parametrize(
    "arguments", [["--debug", "recipes", "no"], ["recipes", "--debug", "no"], ["recipes", "no", "--debug"]]
)
def test_debug_raises_the_error_itself(monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["secu", *arguments])
    with pytest.raises(UserError, match="unknown 'no'"):
        cli.main()


def test_debug_holds_for_one_call(secu, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["secu", "--debug", "recipes", "no"])
    with pytest.raises(UserError):
        cli.main()
    assert_one_line(secu("recipes", "no"))


def test_every_command_has_the_option_debug(secu):
    commands = [command.name or command.callback.__name__ for command in cli.app.registered_commands]
    assert len(commands) == 14
    for command in commands:
        assert "--debug" in secu(command, "--help").out, command


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
        # What libraries do: catch it and fail later, or be inside an exec(), after which Python ends by the signal.
        "try:\n        press()\n    except BaseException:\n        raise ValueError('half imported') from None",
        "exec('press()')",
    ],
)
def test_ctrl_c_at_any_point(tmp_path, work):
    code = f"""
import os, signal, sys, time
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


def test_ctrl_c_cleans_up_on_its_way(tmp_path):
    """It is an exception like any other: blocks are left in order, and temporary files are removed."""
    code = f"""
import os, signal, sys, time
from pathlib import Path
from secu import cli
from secu.base.files import write_atomically

@cli.app.command()
def work():
    def write(path):
        path.write_text("half")
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    try:
        write_atomically(Path({str(tmp_path / "file")!r}), write)
    except cli.Interrupted:
        print("interrupted")
        raise

sys.argv = ["secu", "work"]
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "interrupted\n", "secu: interrupted\n")
    assert files(tmp_path) == []


def test_ctrl_c_that_is_ignored_stays_ignored(tmp_path):
    """As under nohup."""
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.argv = ['secu', '--version']\n"
    code += "from secu import cli\ntry: cli.main()\nexcept SystemExit: pass\n"
    code += "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_is_one_line_and_the_run_can_be_resumed(secu, tmp_path):
    np.save(tmp_path / "digits.npy", (load_digits().images[:300] * 15).astype(np.uint8))
    source = (f"data.source={tmp_path / 'digits.npy'}", "data.image_size=8", "data.channels=1")
    settings = ("train", "digits", *source, *TINY, "optim.epochs=12", "optim.batch_size=32", "--out")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "secu", *settings, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    wait_for(lambda: epochs_of(tmp_path / "run") >= 2, process)  # so that the state of one is kept
    process.send_signal(signal.SIGINT)
    pressed = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - pressed < 20  # no thread of ours delays the end
    assert "finished" not in out
    message = assert_one_line(Result(process.returncode, out, err), code=130)
    assert message == "secu: interrupted; the same command with --resume continues from the last checkpoint, if any\n"
    left = files(tmp_path / "run")
    assert set(left) <= {
        "config.yaml",
        "images.json",
        "metrics.jsonl",
        "model.safetensors",
        "run.json",
        "state.safetensors",
    }

    resumed = secu(*settings, tmp_path / "run", "--resume")
    assert (resumed.code, resumed.err) == (0, "")
    assert secu(*settings, tmp_path / "whole").code == 0
    for name in ("model.safetensors", "assignments.csv"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["epochs_done"] == 13


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("9m", 540), ("1.5h", 5400), ("0.5m", 30), (None, float("inf"))],
)
def test_times_are_read(text, seconds):
    assert cli.parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1s", "1d", "9 m", "1e3", "inf", "nan", "0", "0.0h", "1.m", "9m30s"])
def test_other_times_are_refused(text):
    with pytest.raises(UserError, match="must be a positive number, optionally followed by s, m or h, for example 9m"):
        cli.parse_time(text)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("can't start new thread"), True),  # no memory for its stack
        (RuntimeError("could not create a primitive"), True),
        (OSError(12, "can't allocate memory"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("can't start new thread"), False),
    ],
)
def test_errors_without_memory_are_recognized(error, expected):
    assert cli._is_out_of_memory(error) is expected
