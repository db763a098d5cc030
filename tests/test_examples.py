"""The examples run as their first lines say, in a process of their own, stay short, and use public names only."""

import ast
import io
import os
import re
import runpy
import sqlite3
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from secu.cluster.constraints import NO_LABEL
from secu.cluster.losses import PADDING
from secu.data import open_source
from secu.registry import BACKBONES, CENTERS, CONSTRAINTS, METHODS, SOURCES
from secu.results.reading import read_assignments
from secu.train.run import Run

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NAMES = ["arrays", "backbone", "constraint", "folder", "method", "ray_predict", "source"]
DIGITS = load_digits()
SETTINGS_AND_TYPES = {
    "secu.config.EncoderConfig",
    "secu.data.Shape",
}  # on other pages: settings.md, and the types there
SHORT = ("heads=[10]", "optim.warmup_epochs=0")


# Runs the script that follows, with a quick map in its report: t-SNE of all digits takes longer than all else.
QUICK = """
import runpy, sys
import secu.results.report.layout as layout
layout.LEAST_POINTS = 10**9
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(name, *arguments, cwd, quick=False):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SECU_DATA": str(cwd / "data")}
    start = ["-c", QUICK] if quick else []
    command = [sys.executable, *start, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracy_in(text):
    return float(re.search(r"ACC ([\d.]+)", text)[1])


@pytest.fixture(scope="module")
def parts():
    """The names that each example defines; the parts that they register are forgotten afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for registry in (CONSTRAINTS, CENTERS, BACKBONES, METHODS, SOURCES):
            patch.setattr(registry, "_parts", dict(registry._parts))
        yield {name: runpy.run_path(str(EXAMPLES / f"{name}.py")) for name in ("constraint", "method", "source")}


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_says_how_to_run_it(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) < 70
    assert f"    python examples/{name}.py" in text.split('"""')[1]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_uses_documented_names_and_replaces_none(path):
    """Nothing private is imported, and nothing of the package is assigned to, from outside."""
    tree = ast.parse(path.read_text())
    documented = (EXAMPLES.parent / "docs" / "api.md").read_text()
    imported = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "secu"
        for alias in node.names
    }
    assert imported
    assert {name for name in imported if name not in documented} <= SETTINGS_AND_TYPES
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Import) or not any("secu" in alias.name for alias in node.names)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            assert isinstance(node.value, ast.Name)
            assert node.value.id == "self"


def test_no_example_has_the_name_of_a_module():
    # A script's folder comes first on the path: array.py would shadow Python's own array.
    assert not {path.stem for path in EXAMPLES.glob("*.py")} & set(sys.stdlib_module_names)


def test_folder(tmp_path):
    (tmp_path / "photos").mkdir()
    for number, image in enumerate(DIGITS.images[:40]):
        Image.fromarray((image * 15).astype("uint8")).save(tmp_path / "photos" / f"{number}.png")
    (tmp_path / "photos" / "40.png").write_text("not a picture")
    printed = run("folder", "photos", 3, 1, cwd=tmp_path)
    assert sum(int(size) for size in re.findall(r"cluster \d: (\d+) pictures", printed)) == 40
    assert (tmp_path / "runs" / "photos" / "report.html").is_file()


def test_arrays(tmp_path):
    printed = run("arrays", 1, 100, cwd=tmp_path)
    assert re.search(r"k-means on pixels: [\d.]+% right; SeCu: [\d.]+%", printed)
    saved, fitted = re.findall(r"\[[\d ]+\]", printed)
    assert saved == fitted
    assert not list(tmp_path.iterdir())


def test_constraint(tmp_path, parts):
    printed = run("constraint", "run", "optim.epochs=1", "heads=[10]", "optim.batch_size=128", cwd=tmp_path, quick=True)
    assert accuracy_in(printed) > 0.15
    made = Run.open(tmp_path / "run")
    assert made.config().constraint.kind == "sinkhorn"
    record = made.metrics()[-1]
    assert record["smallest"] > 0.4 * 1797 / 10  # without any constraint a cluster of the first epochs is empty
    assert record["largest"] < 2 * 1797 / 10


def test_sinkhorn_balances_a_batch_and_leaves_padding_alone(parts):
    Sinkhorn = parts["constraint"]["Sinkhorn"]
    scores_BHK = torch.randn(400, 2, 8, generator=torch.Generator().manual_seed(0)) * 0.05
    scores_BHK[..., 0] += 0.2  # without a constraint, nearly all go there
    scores_BHK[:, 0, 4:] -= PADDING
    labels_BH = Sinkhorn(torch.tensor([4, 8])).assign(scores_BHK, torch.full((400, 2), NO_LABEL))
    for head, clusters in enumerate((4, 8)):
        sizes = labels_BH[:, head].bincount(minlength=8)
        assert sizes[clusters:].sum() == 0
        assert sizes[:clusters].min() > 0.7 * 400 / clusters
    assert scores_BHK[:, 1].argmax(-1).bincount(minlength=8)[0] > 300


def test_method(tmp_path, parts):
    """It learns: three epochs are far from chance. Its run is used as any other."""
    printed = run("method", "run", "optim.epochs=3", *SHORT, cwd=tmp_path, quick=True)
    assert accuracy_in(printed) > 0.35  # chance is below 0.2
    made = Run.open(tmp_path / "run")
    losses = [record["loss"] for record in made.metrics()]
    assert losses[-1] < 0.8 * losses[0]
    assert made.metrics()[-1]["center_loss"] > 0
    from secu import SeCu

    loaded = SeCu.load(tmp_path / "run", device="cpu")
    assert loaded.config_.method == "contrastive"
    assert (loaded.predict(DIGITS.images) == loaded.labels_).all()


def test_the_contrastive_loss_is_that_of_a_loop(parts):
    embeddings = torch.nn.functional.normalize(torch.randn(10, 4, generator=torch.Generator().manual_seed(0)), dim=-1)
    expected = 0.0
    for i in range(10):
        terms = [float(torch.exp(embeddings[i] @ embeddings[j] / 0.2)) for j in range(10)]
        terms[i] = float(torch.exp(torch.tensor(-1 / 0.2)))
        expected -= float(torch.log(torch.tensor(terms[(i + 5) % 10] / sum(terms)))) / 10
    assert float(parts["method"]["contrast"](embeddings, 0.2)) == pytest.approx(expected, rel=1e-5)


def test_backbone(tmp_path):
    printed = run("backbone", "run", "optim.epochs=1", "optim.batch_size=128", *SHORT, cwd=tmp_path, quick=True)
    assert accuracy_in(printed) > 0.1
    weight = Run.open(tmp_path / "run").load_model()["encoder.backbone.0.weight"]
    assert weight.shape == (64, 1, 5, 5)


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """Forty digits as blobs."""
    path = tmp_path_factory.mktemp("database") / "photos.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE photos (name TEXT, image BLOB, camera TEXT)")
        for number, image in enumerate(DIGITS.images[:40]):
            file = io.BytesIO()
            Image.fromarray((image * 15).astype("uint8")).save(file, "PNG")
            row = (f"photo {number}", file.getvalue(), ["left", "right"][number % 2])
            connection.execute("INSERT INTO photos VALUES (?, ?, ?)", row)
        connection.commit()
    return path


def test_source(tmp_path, database):
    printed = run("source", database, 3, 1, cwd=tmp_path)
    assert re.match(r"photo 0: cluster [012]\n", printed)
    made = Run.open(tmp_path / "runs" / "database")
    assert made.config().data.source == f"sqlite:{database}"
    assert (made.path / "report.html").is_file()
    rows = (made.path / "assignments.csv").read_text().splitlines()
    assert rows[0].endswith(",camera")
    assert rows[2].endswith(",right")


def test_a_database_is_opened_by_its_name(parts, database):
    source = open_source(f"sqlite:{database}")
    assert isinstance(source, parts["source"]["Database"])
    assert source.ids[:2] == ("photo 0", "photo 1")
    assert (source.decode(3, 8, 1)[0] == (DIGITS.images[3] * 15).astype("uint8")).all()
    assert source.label("camera").class_names == ("left", "right")


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_ray_predict(tmp_path, tiny_fit, tiny_pictures):
    """Two workers of a local Ray give what the run's own table says."""
    parquet = pytest.importorskip("pyarrow.parquet")
    printed = run("ray_predict", tiny_fit.path, tiny_pictures, tmp_path / "out", cwd=tmp_path)
    assert "120 photos" in printed
    rows = parquet.read_table(tmp_path / "out").to_pylist()
    table = read_assignments(tiny_fit.path / "assignments.csv")
    expected = dict(zip(table["id"], table["cluster"], strict=True))
    assert {str(Path(row["path"]).relative_to(tiny_pictures)): row["cluster"] for row in rows} == expected


def test_a_misspelled_option_is_not_ignored(tmp_path):
    from secu.apps import pipeline
    from secu.data import load
    from secu.settings import load_config

    config = load_config("digits")
    with pytest.raises(TypeError, match="unexpected keyword argument 'devise'"):
        pipeline.run(config, load(config.data), tmp_path / "run", devise="cpu")
    assert not list(tmp_path.iterdir())
