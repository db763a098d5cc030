"""Shared by all tests."""

import os
import signal

import torch
from hypothesis import HealthCheck, settings

# What a terminal or a CI system says to programs is not what tests are about; a console reads it when it is made.
for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES", "PYTHONWARNINGS"):
    os.environ.pop(name, None)

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

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes a minute or more; run by default, left out by -m 'not slow'")
