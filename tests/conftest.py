"""Shared by all tests."""

import os
import signal

import torch

# Small tensors gain nothing from a second thread, and where another process wants that core they lose tenfold.
os.environ["OMP_NUM_THREADS"] = "1"  # for the programs that tests start
torch.set_num_threads(1)

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes a minute or more; run by default, left out by -m 'not slow'")
