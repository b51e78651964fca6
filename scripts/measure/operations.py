"""Print the device operations in a profiler trace that took longest: `bench --profile`."""

import argparse
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from mesh_transformer.util import InputError, run_script

_HOST = "/host:CPU"
# A trace has planes (devices), and a plane has lines (timelines of events).  The keys are prefixes
# of plane names, and the values are prefixes of line names.  Operations are on the matching lines.
_LINES = {_HOST: "", "/device:TPU": "XLA Ops", "/device:GPU": "Stream"}
_CONTAINER = re.compile(r"(while|call|conditional)\b")


@dataclass(frozen=True)
class Operation:
    """One operation or kernel of a program, with its total time over all runs on all devices.

    Attributes:
      seconds: time of the operation itself, without the operations nested in it.
      share: `seconds` as a fraction of the total over all operations.
      runs: number of runs, on all devices together.
    """

    name: str
    seconds: float
    share: float
    runs: int


def operations(folder: str) -> list[Operation]:
    """Return the operations in the newest trace under a folder, longest total time first.

    The operations inside loops and calls are included, but the loops and calls themselves are not.

    Raises:
      InputError: if there is no trace.
    """
    traces = sorted(Path(folder).rglob("*.xplane.pb"), key=os.path.getmtime)
    if not traces:
        raise InputError(f"{folder} contains no profiler trace (*.xplane.pb); record one first")
    seconds: dict[str, float] = defaultdict(float)
    runs: dict[str, int] = defaultdict(int)
    for line in _lines(jax.profiler.ProfileData.from_file(str(traces[-1]))):
        for name, nanoseconds in _self_times(line):
            # Loops and calls are left out, because their own time is not reliable: on CPUs the body
            # may run on another thread, and then its time is not subtracted.
            if _CONTAINER.match(name):
                continue
            seconds[name] += nanoseconds / 1e9
            runs[name] += 1
    total = sum(seconds.values())
    result = [Operation(name, own, own / total, runs[name]) for name, own in seconds.items()]
    return sorted(result, key=lambda operation: -operation.seconds)


Event = tuple[str, float, float]  # name, start, end; times in nanoseconds


def _lines(trace: Any) -> Iterator[list[Event]]:
    """Yield the device operations of a profiler trace, as one list per timeline.

    A trace has one plane per device and one for the host's CPU.  A plane has several timelines,
    called lines.  On a TPU, only the line "XLA Ops" is used, because the other lines show the same
    work again.  A GPU has one line per stream.  The CPU has one line per thread, and only those of
    its events that have the stat `hlo_op` are operations.
    """
    for plane in trace.planes:
        kind = next((prefix for prefix in _LINES if plane.name.startswith(prefix)), None)
        for line in plane.lines:
            if kind is not None and line.name.startswith(_LINES[kind]):
                yield [
                    (event.name, event.start_ns, event.start_ns + event.duration_ns)
                    for event in line.events
                    if kind != _HOST or any(key == "hlo_op" for key, _ in event.stats)
                ]


def _self_times(events: Iterable[Event]) -> Iterator[tuple[str, float]]:
    """Yield each event's name and its time in nanoseconds, without the time of nested events.

    For example, the events of a loop's body are nested in the event of the loop.
    """
    open_events: list[list[Any]] = []  # [name, end, own time], outermost event first
    for name, start, end in sorted(events, key=lambda event: (event[1], -event[2])):
        while open_events and open_events[-1][1] <= start:
            closed = open_events.pop()
            yield closed[0], closed[2]
        if open_events:
            open_events[-1][2] -= min(end, open_events[-1][1]) - start
        open_events.append([name, end, end - start])
    for name, _, own in open_events:
        yield name, own


def lines(longest: list[dict[str, Any]]) -> list[str]:
    """Format operations, given as dicts of their attributes, as lines of readable text."""
    return [
        f"the {len(longest)} longest operations, all devices together:",
        *(
            f"  {operation['share']:6.1%} {operation['seconds'] * 1e3:10.2f} ms "
            f"{operation['runs']:7} x {operation['name']}"
            for operation in longest
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="folder with the trace")
    parser.add_argument("--count", type=int, default=10, help="operations to print (default 10)")
    args = parser.parse_args()
    longest = operations(args.folder)[: args.count]
    print("\n".join(lines([vars(operation) for operation in longest])))


if __name__ == "__main__":
    run_script(main)
