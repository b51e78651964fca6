"""Waiting for other processes and threads, with a time limit in case they hang."""

import time
from collections.abc import Callable
from typing import Any

SECONDS = 900.0  # longer than anything takes, even on a machine with other work


def wait_until(
    condition: Callable[[], Any], what: str, seconds: float = SECONDS, pause: float = 0.01
) -> Any:
    """Return the condition's first true value; raises AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(pause)
    raise AssertionError(f"{what}: not within {seconds:.0f} s")
