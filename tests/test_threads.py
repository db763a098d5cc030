"""Threads: none runs while Python exits, however often Ctrl-C is pressed."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from secu.base.threads import finish

PRESSED_WHILE_WAITING = """
import os, signal, threading, time
from concurrent.futures import ThreadPoolExecutor
from secu.base.threads import finish

def work():
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
    print("the work is complete", flush=True)

pool = ThreadPoolExecutor(1)
future = pool.submit(work)
try:
    finish(pool, [future])
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_a_thread_is_waited_for_at_exit_if_waiting_was_interrupted():
    """``pool.shutdown()`` fails this test in Python 3.11 and 3.12."""
    done = subprocess.run([sys.executable, "-c", PRESSED_WHILE_WAITING], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("interrupted\nthe work is complete\n", "", 0)


def test_calls_that_have_started_are_waited_for_and_all_others_canceled():
    began = threading.Event()
    goes_on = threading.Event()

    def work():
        began.set()
        assert goes_on.wait(60)

    pool = ThreadPoolExecutor(1)
    futures = [pool.submit(work) for _ in range(3)]
    assert began.wait(60)
    threading.Timer(0.2, goes_on.set).start()
    finish(pool, futures)
    assert goes_on.is_set()
    assert [future.cancelled() for future in futures] == [False, True, True]
    assert futures[0].result() is None


def test_the_estimator_shortens_busy_waiting_before_torch_is_imported():
    code = "import os, sys, secu; assert 'torch' not in sys.modules; secu.SeCu; print(os.environ['GOMP_SPINCOUNT'])"
    for given, expected in ((None, "10000"), ("7", "7")):
        variables = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        variables |= {} if given is None else {"GOMP_SPINCOUNT": given}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=variables)
        assert (done.stdout, done.stderr) == (f"{expected}\n", "")
