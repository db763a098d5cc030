"""What the documents say is true: commands resolve, the tour names every file, the examples run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from secu.settings import load_config, recipe_names

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = re.findall(r"`secu train ([^`]+)`", (ROOT / "docs" / "recipes.md").read_text())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_recipes_page_resolves(command):
    recipe, *overrides = shlex.split(command)
    changed = load_config(recipe, overrides)
    assert (changed == load_config(recipe)) == (not overrides or overrides == ["init_from=runs/stl10"])


def test_every_recipe_of_the_paper_is_on_the_page():
    assert {command.split()[0] for command in COMMANDS} == set(recipe_names()) - {"digits"}


def test_the_papers_number_on_the_page_is_the_recipes():
    rows = re.findall(r"`secu train (\S+)` \| ([\d.]+)[^/|]*/ ([\d.]+)", (ROOT / "docs" / "recipes.md").read_text())
    table = {"cifar10", "cifar10-entropy"}  # rows of Tables 1 to 4 print single runs, a tenth off the mean of Table 5
    for recipe, acc, nmi in rows:
        paper = load_config(recipe).paper
        assert paper.acc == float(acc)
        assert recipe in table or paper.nmi == float(nmi)


def test_the_tour_names_every_file():
    tour = (ROOT / "README.md").read_text().partition("## The tour")[2]
    names = {path.name for path in (ROOT / "src" / "secu").glob("*.py")} - {"__init__.py", "__main__.py", "errors.py"}
    assert [name for name in sorted(names) if f"`{name}`" not in tour] == []


def test_links_of_the_documents_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_figure_1_shows_the_difference(tmp_path):
    script, picture = ROOT / "examples" / "figure1.py", tmp_path / "figure1.png"
    done = subprocess.run([sys.executable, script, picture], check=True, capture_output=True, text=True, timeout=120)
    kmeans, secu = map(float, re.findall(r"0\.\d+", done.stdout.partition("mean accuracy")[2]))
    assert secu > kmeans
    assert picture.stat().st_size > 10_000
