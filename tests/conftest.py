"""Shared by all tests."""

import torch

# Small tensors gain nothing from a second thread, and where another process wants that core they lose tenfold.
torch.set_num_threads(1)


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes a minute or more; run by default, left out by -m 'not slow'")
