"""Threads that end by an exception."""

import queue
import subprocess
import sys

from mesh_transformer.util import start_thread

PROGRAM = """
import threading
from mesh_transformer.util import start_thread

start_thread({}.pop, "broken", name="reader")
threading.Event().wait()
"""


def test_a_thread_that_fails_ends_its_process():
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    *_, error, line = ended.stderr.splitlines()
    assert error == "KeyError: 'broken'"
    assert line.startswith("error: the thread 'reader' has failed (KeyError: 'broken'); see the ")


def test_a_thread_that_fails_calls_its_handler(capfd):
    failed: queue.Queue[Exception] = queue.Queue()
    start_thread({}.pop, "broken", name="reader", failed=failed.put).join()
    assert repr(failed.get_nowait()) == "KeyError('broken')"
    assert capfd.readouterr().err.endswith("KeyError: 'broken'\n")
