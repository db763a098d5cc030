"""What is installed, and the plan of the package: layers that import only those below them, and few questions asked."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE = ROOT / "src" / "secu"
LAYERS = ("data", "views", "nets", "cluster", "methods", "train", "results")  # above them: apps, cli and the estimator
BASIS = {"base", "config", "settings", "registry"}  # what every layer uses, and what a run is


def needs(*modules):
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@needs("build", "hatchling")
def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        recipe = archive.read("secu/recipes/cifar10.yaml")
    sources = {
        path.relative_to(ROOT / "src").as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == sources
    assert "secu/py.typed" in inside
    assert sum(name.endswith(".yaml") for name in inside) == 18
    assert recipe == (PACKAGE / "recipes" / "cifar10.yaml").read_bytes()


@needs("build", "hatchling")
def test_an_unpacked_wheel_works_away_from_the_repository(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import secu, secu.settings\n"
        f"assert secu.__file__.startswith({str(tmp_path)!r}), secu.__file__\n"
        "assert len([secu.settings.load_config(name) for name in secu.settings.recipe_names()]) == 18\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr


@needs("build", "hatchling")
def test_the_wheel_installs_the_command_and_names_license_and_python(wheel):
    with zipfile.ZipFile(wheel) as archive:
        texts = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "secu = secu.cli:main" in texts["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    assert "Requires-Python: >=3.11" in texts["METADATA"]
    assert "Requires-Dist: torch>=2.11" in texts["METADATA"]
    assert "Apache License" in texts["LICENSE"]


def test_the_version_is_the_same_in_both_places():
    from secu import __version__

    assert SETTINGS["project"]["version"] == __version__


# Layers


def lint_imports(folder):
    """Run import-linter on a copy of the package, away from the installed one."""
    code = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    environment = {"PYTHONPATH": str(folder / "src"), "PATH": ""}
    command = [sys.executable, "-c", code, "--no-cache"]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=60)


@needs("importlinter")
@pytest.mark.parametrize(
    ("file", "line", "kept"),
    [
        ("errors", "", True),
        ("cluster/losses", "import secu.train.loop", False),
        ("data/images", "import secu.views.augment", False),
        ("results/health", "import secu.apps.pipeline", False),
        ("registry", "import secu.methods.base", False),
        ("config", "from secu.data import Shape", False),
    ],
)
def test_a_layer_imports_only_layers_below_it(tmp_path, file, line, kept):
    """The contracts hold; and they would be broken if, say, a loss imported the training loop."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "src" / "secu" / f"{file}.py").open("a") as source:
        source.write(f"\n{line}\n")
    done = lint_imports(tmp_path)
    assert ("BROKEN" not in done.stdout) is kept, done.stdout + done.stderr
    assert (done.returncode == 0) is kept


def test_the_contracts_are_the_plan_of_the_package():
    contracts = SETTINGS["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    (basis,) = [contract for contract in contracts if contract["type"] == "forbidden"]
    *rest, top = reversed(layers)
    assert rest == [f"secu.{name}" for name in LAYERS]
    assert set(top.split(" : ")) == {"secu.cli", "secu.estimator", "secu.apps"}  # of one layer, but not independent
    everything = {name.removeprefix("secu.") for layer in layers for name in layer.split(" : ")}
    assert set(basis["source_modules"]) == {f"secu.{name}" for name in BASIS}
    assert set(basis["forbidden_modules"]) == {f"secu.{name}" for name in everything}
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {
        path.parent.name for path in PACKAGE.glob("*/__init__.py")
    }
    assert modules == everything | BASIS | {"__init__", "__main__", "recipes"}


def imports_of(path):
    """Return the modules that a file imports, wherever it does."""
    tree = ast.parse(path.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return names | {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    }


def test_what_the_commands_do_does_not_depend_on_the_command_line():
    for path in (PACKAGE / "apps").glob("*.py"):
        assert not {name for name in imports_of(path) if name.startswith(("secu.cli", "secu.estimator"))}, path
    assert not {name for name in imports_of(PACKAGE / "estimator.py") if name.startswith("secu.cli")}


# The plan of the house


def test_few_things_lie_directly_in_the_package():
    entries = sorted(path.name for path in PACKAGE.iterdir() if path.name != "__pycache__")
    assert len(entries) <= 18, entries


SOURCES = sorted(PACKAGE.rglob("*.py"))
QUESTIONS = {
    "which method": r"config\.selflabel|\.selflabel is|\.method [!=]=|isinstance\([^)]*(SelfLabeling|ConfidentLabels)",
    "which kind of images": r"isinstance\([^)]*OwnImages|OwnImages|data\.name",
    "the first head": r"heads\[0\]|\.head\(0\)|\.sizes\(0\)",
}
MAY_ASK = {"which method": ("methods/", "config.py", "settings.py", "registry.py", "apps/selflabel.py")}


@pytest.mark.parametrize("question", QUESTIONS)
def test_nobody_asks(question):
    """Which method, which kind of images and which head are chosen in one place, not asked about in many."""
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in SOURCES
        if not path.relative_to(PACKAGE).as_posix().startswith(MAY_ASK.get(question, ("-",)))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(QUESTIONS[question], line)
    ]
    assert not found


def test_a_question_would_be_found():
    lines = ["if config.selflabel is None:", 'if config.method == "secu":', "isinstance(images, OwnImages)"]
    lines += ['if data.name == "own":', "config.heads[0]"]
    for line in lines:
        assert any(re.search(pattern, line) for pattern in QUESTIONS.values()), line


LONG_FILES = {"config.py", "estimator.py"}


def test_files_and_functions_are_short():
    """About 250 lines for a file, and about 40 for a function besides its signature and docstring."""
    files = {path.relative_to(PACKAGE).as_posix(): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name for name, lines in files.items() if lines > 260} <= LONG_FILES
    functions = {
        f"{path.relative_to(PACKAGE).as_posix()}:{node.name}": body_lines(node)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert not {name for name, lines in functions.items() if lines > 40}


def body_lines(function):
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return function.end_lineno - (first.end_lineno if is_docstring else first.lineno - 1)
