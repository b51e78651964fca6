"""Time accounting of a run; goodput is the share of time spent on steps whose results are kept."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

# What a run spends time on, in the order of the summary.
KINDS = {
    "steps": "training steps whose results are kept",
    "lost": "training steps that were repeated after a failure",
    "compile": "the first step of each start, in which the program is compiled",
    "data": "waiting for records",
    "rollouts": "sampling answers and computing their rewards",
    "validation": "validation and evaluation tasks",
    "samples": "writing the texts of `sample_prompts`",
    "save": "waiting for checkpoints",
    "init": "initialising or loading the weights of a new run",
    "restore": "restoring the newest checkpoint",
    "machines": "waiting for hosts, at the start and after failures",
    "start": "everything else, most of it before the first step",
}
PREFIX = "seconds/"  # of the metrics' names


class Ledger:
    """Measures how many seconds a run spends on each of `KINDS`.

    Each moment counts towards exactly one kind, at first "start".  To include the time of a run's
    earlier processes, call `resume`.

    Args:
      elapsed: seconds to add to "start" for the time before this object was created, such as that
        of the program's imports.

    Attributes:
      seconds: seconds by kind.
    """

    def __init__(self, elapsed: float = 0.0):
        self.seconds = dict.fromkeys(KINDS, 0.0) | {"start": elapsed}
        self._kind = "start"
        self._last = time.monotonic()
        self._resumed = False

    def switch(self, kind: str) -> str:
        """Count the time from now on towards `kind`; return the previous kind."""
        now = time.monotonic()
        self.seconds[self._kind] += now - self._last
        self._last, previous, self._kind = now, self._kind, kind
        return previous

    @contextlib.contextmanager
    def spending(self, kind: str) -> Iterator[None]:
        """Count the time inside this context towards `kind`, then return to the previous kind."""
        previous = self.switch(kind)
        try:
            yield
        finally:
            self.switch(previous)

    def relabel(self, old: str, new: str) -> None:
        """Count the time of the kind `old`, which is the current one, towards `new` instead."""
        self.switch(new)
        self.seconds[new] += self.seconds[old]
        self.seconds[old] = 0.0

    def resume(self, rows: Iterable[Mapping[str, Any]], step: int) -> None:
        """Continue the counts of a run that resumes from a checkpoint.

        The first call adds the seconds of the run's earlier processes, which are part of `rows`.
        Every call moves the seconds of the steps after `step` from "steps" to "lost", because the
        run repeats these steps.

        Args:
          rows: all rows of the metrics, including those after `step`.
          step: the restored step.
        """
        self.switch(self._kind)
        earlier, kept, newest = {}, 0.0, 0.0
        for row in rows:
            newest = row.get(f"{PREFIX}steps", newest)
            if row["step"] <= step:
                kept = newest
            if f"{PREFIX}start" in row:
                earlier = {kind: row.get(PREFIX + kind, 0.0) for kind in KINDS}
        if not self._resumed:  # else this process has counted all of it
            for kind, seconds in (earlier | {"steps": newest}).items():
                self.seconds[kind] += seconds
        self._resumed = True
        self.seconds["lost"] += self.seconds["steps"] - kept
        self.seconds["steps"] = kept

    def metrics(self, *, complete: bool) -> dict[str, float]:
        """Return the metric `seconds/steps`; if `complete`, the metrics of all kinds."""
        self.switch(self._kind)
        kinds = [kind for kind in KINDS if self.seconds[kind] or kind == "start"]
        return {
            PREFIX + kind: round(self.seconds[kind], 3)
            for kind in (kinds if complete else ["steps"])
        }

    def summary(self) -> str:
        """Return one line with the total time, and the percentage of each kind."""
        self.switch(self._kind)
        total = sum(self.seconds.values())
        shares = [
            f"{kind} {seconds / total:.1%}" for kind, seconds in self.seconds.items() if seconds
        ]
        hours, rest = divmod(round(total), 3600)
        return f"time {hours}:{rest // 60:02}:{rest % 60:02}: {', '.join(shares)}"


def process_seconds() -> float:
    """Return the seconds since this process was started; 0 if the system is not Linux."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return 0.0
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
