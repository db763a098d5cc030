"""The examples run as their first lines say, in a process of their own, and stay short."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from secu.constraints import NO_LABEL
from secu.losses import PADDING
from secu.run import Run

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NAMES = ["arrays", "constraint", "folder"]


def run(name, *arguments, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SECU_DATA": str(cwd / "data")}
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_says_how_to_run_it(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) < 60
    assert f"    python examples/{name}.py" in text.split('"""')[1]


def test_no_example_has_the_name_of_a_module():
    # A script's folder comes first on the path: array.py would stand in the way of Python's own array.
    assert not {path.stem for path in EXAMPLES.glob("*.py")} & set(sys.stdlib_module_names)


def test_folder(tmp_path):
    (tmp_path / "photos").mkdir()
    for number, image in enumerate(load_digits().images[:40]):
        Image.fromarray((image * 15).astype("uint8")).save(tmp_path / "photos" / f"{number}.png")
    (tmp_path / "photos" / "40.png").write_text("not a picture")
    said = run("folder", "photos", 3, 1, cwd=tmp_path)
    assert sum(int(size) for size in re.findall(r"cluster \d: (\d+) pictures", said)) == 40
    assert (tmp_path / "runs" / "photos" / "report.html").is_file()


def test_arrays(tmp_path):
    said = run("arrays", 1, 100, cwd=tmp_path)
    assert re.search(r"k-means on pixels: [\d.]+% right; SeCu: [\d.]+%", said)
    saved, fitted = re.findall(r"\[[\d ]+\]", said)
    assert saved == fitted
    assert not list(tmp_path.iterdir())


def test_constraint(tmp_path):
    said = run("constraint", "run", "optim.epochs=1", "heads=[10]", "optim.batch_size=128", cwd=tmp_path)
    assert float(re.search(r"ACC ([\d.]+)", said)[1]) > 0.15
    record = Run.open(tmp_path / "run").metrics()[-1]
    assert record["smallest"] > 0.4 * 1797 / 10  # without any constraint a cluster of the first epochs is empty
    assert record["largest"] < 2 * 1797 / 10


def test_sinkhorn_balances_a_batch_and_leaves_padding_alone():
    Sinkhorn = runpy.run_path(str(EXAMPLES / "constraint.py"))["Sinkhorn"]
    scores_BHK = torch.randn(400, 2, 8, generator=torch.Generator().manual_seed(0)) * 0.05
    scores_BHK[..., 0] += 0.2  # without a constraint, nearly all go there
    scores_BHK[:, 0, 4:] -= PADDING
    labels_BH = Sinkhorn(torch.tensor([4, 8])).assign(scores_BHK, torch.full((400, 2), NO_LABEL))
    for head, clusters in enumerate((4, 8)):
        sizes = labels_BH[:, head].bincount(minlength=8)
        assert sizes[clusters:].sum() == 0
        assert sizes[:clusters].min() > 0.7 * 400 / clusters
    assert scores_BHK[:, 1].argmax(-1).bincount(minlength=8)[0] > 300
