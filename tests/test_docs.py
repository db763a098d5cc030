"""What the documents say is true: commands parse, settings exist, links resolve, generated pages are up to date."""

import ast
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
import unicodedata
from functools import cache
from pathlib import Path

import pytest
import typer
import yaml

import secu
from secu.cli import app
from secu.config import Config
from secu.settings import load_config, recipe_names

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
GUIDES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")))
PAGES = (*GUIDES, ROOT / "CHANGELOG.md", *sorted((DOCS / "lab").glob("*.md")))
RECIPES = (DOCS / "recipes.md").read_text()
TRAINED = re.findall(r"`secu train ([^`]+)`", RECIPES)
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
BRITISH = "colour|grey|centre|centring|licence|neighbour|(normal|initial|optim|organ)is(e|ing|ation)"


def name_of(page):
    return str(page.relative_to(ROOT))


def without_code(text):
    return FENCE.sub("", text)


# Commands


@pytest.mark.parametrize("command", TRAINED)
def test_every_command_of_the_recipes_page_resolves(command):
    recipe, *overrides = shlex.split(command)
    changed = load_config(recipe, overrides)
    assert (changed == load_config(recipe)) == (not overrides or overrides == ["init_from=runs/stl10"])


def test_every_recipe_is_on_the_page():
    assert {command.split()[0] for command in TRAINED} == set(recipe_names())


def test_the_papers_number_on_the_page_is_the_recipes():
    rows = re.findall(r"`secu train (\S+)` \| ([\d.]+)[^/|]*/ ([\d.]+)", RECIPES)
    table = {"cifar10", "cifar10-entropy"}  # rows of Tables 1 to 4 print single runs, a tenth off the mean of Table 5
    assert rows
    for recipe, acc, nmi in rows:
        paper = load_config(recipe).paper
        assert paper.acc == float(acc)
        assert recipe in table or paper.nmi == float(nmi)


@cache
def command_line():
    return typer.main.get_command(app)


def parse(words):
    """Parse a command line without running it."""
    program = command_line()
    command = program.commands[words[0]]
    return command.make_context(words[0], list(words[1:]))


def shown_commands():
    """Return each line of a code block that calls secu, with the page it is on."""
    for page in GUIDES:
        for block in FENCE.findall(page.read_text()):
            for line in block.splitlines():
                if line.startswith("secu "):
                    yield pytest.param(line, id=f"{name_of(page)}: {line[:60]}")


@pytest.mark.parametrize("line", list(shown_commands()))
def test_every_command_in_a_code_block_parses(line):
    parse(shlex.split(line, comments=True)[1:])


def test_a_wrong_command_does_not_parse():
    with pytest.raises(Exception, match="--cluster"):
        parse(["fit", "photos", "--cluster-number", "8"])


def test_every_command_in_the_text_has_a_name_and_options_that_exist():
    commands = command_line().commands
    found = 0
    for page in PAGES:
        for code in re.findall(r"`secu ([a-z][^`]*)`", without_code(page.read_text())):
            name, *words = code.split()
            assert name in commands, f"{name_of(page)}: secu {code}"
            known = {flag for option in commands[name].params for flag in (*option.opts, *option.secondary_opts)}
            used = {word.partition("=")[0] for word in words if word.startswith("-")}
            assert used <= known, f"{name_of(page)}: secu {code}"
            found += 1
    assert found > 50


# Settings


def settings_script():
    spec = importlib.util.spec_from_file_location("make_settings", DOCS / "make_settings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_settings_reference_is_up_to_date():
    page = (DOCS / "settings.md").read_text()
    assert settings_script().make_page() == page, "run: python docs/make_settings.py"


def test_every_setting_is_described():
    rows = re.findall(r"^\| `([a-z_.]+)` \|.*\| (.*) \|$", (DOCS / "settings.md").read_text(), re.MULTILINE)
    assert len(rows) > 70
    assert [key for key, description in rows if not description.strip()] == []


def test_every_setting_that_the_documents_name_exists():
    script = settings_script()
    sections = dict(script.sections(Config))
    keys = {f"{name}.{field}" for name, model in sections.items() for field in model.model_fields}
    first = "|".join(name for name in sections if "." not in name)
    for page in (*GUIDES, *(DOCS / "lab").glob("*.md")):
        for key in re.findall(rf"(?<![\w/.])((?:{first})(?:\.[a-z_]+)+)", page.read_text()):
            assert key in keys or key.endswith((".csv", ".json", ".md", ".py")), f"{name_of(page)}: {key}"


# Links and pages


def anchors(page):
    """Return the anchors of a page's headings, as Markdown makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", without_code(page.read_text()), re.MULTILINE):
        plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", without_code(page.read_text())):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path) if path else page
        assert linked.exists(), f"{name_of(page)}: {target}"
        assert not anchor or anchor in anchors(linked), f"{name_of(page)}: {target}"
        if page.is_relative_to(DOCS):  # the site has nothing else
            assert linked.resolve().is_relative_to(DOCS), f"{name_of(page)}: {target}"


def test_every_page_is_in_the_navigation_and_the_other_way_around():
    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        children = entry.values() if isinstance(entry, dict) else entry
        return [page for child in children for page in pages(child)]

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_spelling_is_american(page):
    words = re.findall(rf"\b\w*(?:{BRITISH})\w*", page.read_text(), re.IGNORECASE)
    assert words == [], f"{name_of(page)}: {words}"


def test_the_picture_of_the_report_is_small():
    assert (DOCS / "report.png").stat().st_size < 400_000


# The house


def test_the_house_names_everything_in_the_package():
    entries = {path.name for path in (ROOT / "src" / "secu").iterdir() if path.is_dir() or path.suffix == ".py"}
    entries = {name for name in entries if not name.startswith("__")}
    for page in (ROOT / "README.md", DOCS / "architecture.md"):
        text = page.read_text()
        missing = [name for name in sorted(entries) if not re.search(rf"\b{re.escape(name)}\b", text)]
        assert missing == [], name_of(page)


def test_every_file_that_the_architecture_names_exists():
    text = (DOCS / "architecture.md").read_text()
    named = re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|/))`", text)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / "src" / "secu" / name).exists()] == []


def imported(script):
    """Return what a script imports from the package, as pairs of module and name."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "secu":
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=name_of)
def test_examples_import_only_what_is_public(example):
    public = (DOCS / "api.md").read_text()
    for module, name in imported(example):
        part = getattr(importlib.import_module(module), name)
        # What a package offers under a shorter name is public under both.
        places = {f"{module}.{name}", f"{getattr(part, '__module__', module)}.{name}"}
        documented = any(re.search(rf"\b{re.escape(place)}\b", public) for place in places)
        assert documented or (module == "secu" and name in secu.__all__), f"{module}.{name} is not in docs/api.md"


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == secu.__version__
    assert citation["preferred-citation"]["title"] in (ROOT / "README.md").read_text()


def test_figure_1_shows_the_difference(tmp_path):
    script = ROOT / "examples" / "figure1.py"
    picture = tmp_path / "figure1.png"
    done = subprocess.run([sys.executable, script, picture], check=True, capture_output=True, text=True, timeout=120)
    kmeans, ours = map(float, re.findall(r"0\.\d+", done.stdout.partition("mean accuracy")[2]))
    assert ours > kmeans
    assert picture.stat().st_size > 10_000
