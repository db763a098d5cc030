"""A short form of ``make soak``: every command that writes is stopped a few times, and nothing is lost."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_short_soak():
    counts = ["--kills", "23", "--signals", "9", "--pairs", "10", "--starved", "4", "--ranks", "0", "--minutes", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "soak", *counts],
        cwd=BENCHMARKS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.endswith(": 0")] == [
        "lost: 0",
        "corrupt: 0",
        "unexplained: 0",
        "left behind: 0",
    ]
    trials = int(re.search(r"(\d+) trials in", done.stdout)[1])
    assert trials == 46 or ("out of time" in done.stderr and trials > 5)
