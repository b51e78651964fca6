"""Waiting for what other processes and threads do, with a limit for those that hang."""

import time
from collections.abc import Callable
from typing import Any

SECONDS = 240.0  # for a whole run, on a machine that has other things to do


def wait_until(
    condition: Callable[[], Any], what: str, seconds: float = SECONDS, pause: float = 0.01
) -> Any:
    """The condition's first true value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(pause)
    raise AssertionError(f"{what}: not within {seconds:.0f} s")
