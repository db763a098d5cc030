"""What is installed: recipes inside the wheel, and a package whose files import only what stands above them."""

import importlib.util
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE = ROOT / "src" / "secu"
MODULES = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
MODULES |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"recipes"}


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
        for path in (ROOT / "src" / "secu").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == sources
    assert "secu/py.typed" in inside
    assert sum(name.endswith(".yaml") for name in inside) == 16
    assert recipe == (ROOT / "src" / "secu" / "recipes" / "cifar10.yaml").read_bytes()


@needs("build", "hatchling")
def test_an_unpacked_wheel_works_away_from_the_repository(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import secu, secu.settings\n"
        f"assert secu.__file__.startswith({str(tmp_path)!r}), secu.__file__\n"
        "assert len([secu.settings.load_config(name) for name in secu.settings.recipe_names()]) == 16\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr


@needs("build", "hatchling")
def test_the_wheel_installs_the_command_and_names_licence_and_python(wheel):
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
@pytest.mark.parametrize(("file", "line", "kept"), [("errors", "", True), ("losses", "import secu.train", False)])
def test_a_file_imports_only_files_above_it(tmp_path, file, line, kept):
    """The contract holds; and it would be broken if a loss imported the training loop."""
    import shutil

    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "src" / "secu" / f"{file}.py").open("a") as source:
        source.write(f"\n{line}\n")
    done = lint_imports(tmp_path)
    assert ("KEPT" in done.stdout) is kept, done.stdout + done.stderr
    assert (done.returncode == 0) is kept


@needs("importlinter")
def test_every_file_has_its_place_in_the_layers():
    (contract,) = SETTINGS["tool"]["importlinter"]["contracts"]
    places = [name.strip().removeprefix("secu.") for layer in contract["layers"] for name in layer.split("|")]
    assert len(places) == len(set(places))
    assert set(places) == MODULES
