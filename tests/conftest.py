"""Shared by all tests.

Finished runs that every test may read. They are made once per session; copy the folder before changing anything:

- ``tiny_pictures``: a folder of 120 digits as PNG files, in one folder for each of 0, 1 and 4
- ``tiny_fit``: the run of ``secu fit`` on them with labels="folder"; heads of 3 and 6 clusters, 3 epochs of 4 steps
- ``tiny_digits``: the run of the recipe ``digits``, heads of 10 and 20 clusters, the initial epoch and one more

Fixtures that change how tests run, for ``pytest.mark.usefixtures``:

- ``own_cache``: decoded images stay out of the user's cache
- ``quick_map``: the report lays out its map by PCA, as t-SNE takes 10 seconds for all digits
"""

import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

# What a terminal or a CI system says to programs is not what tests are about; a console reads it when it is made.
for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES", "PYTHONWARNINGS"):
    os.environ.pop(name, None)

# Begun first, so that all workers end at about the same time: the tests of a file stay together.
LONGEST = ("soak", "processes", "report_tree_browser", "report_browser", "exports", "examples", "signals", "demo")


def pytest_collection_modifyitems(items):
    names = [f"test_{name}.py" for name in LONGEST]
    items.sort(key=lambda item: names.index(item.path.name) if item.path.name in names else len(names))


# On a GPU matrix products are the same every time only with this.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

# The same examples every time, however slow the machine is.
settings.register_profile(
    "same",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("same")

# Small tensors gain nothing from a second thread, and where another process wants that core they lose tenfold.
os.environ["OMP_NUM_THREADS"] = "1"  # for the programs that tests start
torch.set_num_threads(1)

# Ignored in the background and under nohup; what tests start would inherit that.
USUAL = {signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
for number, handler in USUAL.items():
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes a minute or more; run by default, left out by -m 'not slow'")


@pytest.fixture(scope="session")
def tiny_pictures(tmp_path_factory):
    from own_images import write_folder

    return write_folder(tmp_path_factory.mktemp("tiny") / "pictures", 120)


@pytest.fixture(scope="session")
def tiny_fit(tmp_path_factory, tiny_pictures):
    from own_images import fitted

    return fitted(tmp_path_factory.mktemp("tiny-fit"), tiny_pictures, labels="folder", report=True)


@pytest.fixture(scope="session")
def tiny_digits(tmp_path_factory):
    from secu.apps.pipeline import Request
    from secu.apps.recipe import run_recipes
    from secu.settings import load_config
    from secu.train.listener import Listener

    short = ["heads=[10,20]", "optim.epochs=1", "optim.batch_size=256", "encoder.dim=8"]
    request = Request(load_config("digits", short), tmp_path_factory.mktemp("tiny-digits") / "run", Listener())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secu.results.report.layout.LEAST_POINTS", 10**9)
        return run_recipes([request], device="cpu")[0].run


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SECU_DATA", str(tmp_path_factory.getbasetemp() / "shared-cache"))


@pytest.fixture
def quick_map(monkeypatch):
    monkeypatch.setattr("secu.results.report.layout.LEAST_POINTS", 10**9)
