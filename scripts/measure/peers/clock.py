"""What the programs beside this file share: their task, and a clock of equal steps.

It imports only the standard library, because each program runs in an environment of its own.
"""

import json
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any


def read_task() -> dict[str, Any]:
    """Return the task that peers.py passes as the only argument; see `peers.task`."""
    return json.loads(sys.argv[1])


class Clock:
    """Wall and CPU seconds (user and system, of all threads) between the ends of steps.

    Args:
      began: `time.monotonic()` when the process was started, in the process that started it.
    """

    def __init__(self, began: float):
        self.began = began
        self.ends: list[tuple[float, float]] = []

    def step_ended(self) -> None:
        """Record that a step has ended, with all its results computed."""
        self.ends.append((time.monotonic(), time.process_time()))

    def report(self, *packages: str, **others: Any) -> None:
        """Print times, peak memory in bytes and versions of packages as one line of JSON."""
        pairs = list(zip(self.ends, self.ends[1:], strict=False))
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
        times = {
            "first": self.ends[0][0] - self.began,
            "wall": [end[0] - start[0] for start, end in pairs],
            "cpu": [end[1] - start[1] for start, end in pairs],
            "peak": 1024 * int(peak),
            "versions": {name: metadata.version(name) for name in packages},
        }
        print(json.dumps(times | others))
