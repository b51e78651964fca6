"""What a profiler's trace says of the devices: which operations took the time."""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from mesh_transformer.util import InputError

_HOST = "/host:CPU"
_LINES = {_HOST: "", "/device:TPU": "XLA Ops", "/device:GPU": "Stream"}  # of a plane, that count
_CONTAINER = re.compile(r"(while|call|conditional)\b")


@dataclass(frozen=True)
class Operation:
    """One operation of a program, or one kernel; all its runs on all devices together."""

    name: str
    seconds: float  # less what ran inside it
    share: float  # of all operations' seconds
    runs: int


def record(folder: str) -> Any:
    """A context in which JAX's profiler writes to a folder what the devices do."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every Python call would be a line, and slow the rest
    return jax.profiler.trace(folder, profiler_options=options)


def operations(folder: str) -> list[Operation]:
    """The operations of the newest trace under a folder, those that took longest first.

    Raises:
      InputError: where there is no trace.
    """
    traces = sorted(Path(folder).rglob("*.xplane.pb"), key=os.path.getmtime)
    if not traces:
        raise InputError(f"{folder}: holds no *.xplane.pb; was a trace recorded there?")
    seconds: dict[str, float] = defaultdict(float)
    runs: dict[str, int] = defaultdict(int)
    for line in _lines(jax.profiler.ProfileData.from_file(str(traces[-1]))):
        for name, nanoseconds in _own_times(line):
            if _CONTAINER.match(name):  # on CPUs its body may be another thread's
                continue
            seconds[name] += nanoseconds / 1e9
            runs[name] += 1
    whole = sum(seconds.values())
    found = [Operation(name, each, each / whole, runs[name]) for name, each in seconds.items()]
    return sorted(found, key=lambda each: -each.seconds)


Event = tuple[str, float, float]  # name, start and end in nanoseconds


def _lines(trace: Any) -> Iterator[list[Event]]:
    """The events of each line whose events are operations.

    A TPU has a line "XLA Ops" beside others about the same time, a GPU one for each stream, and a
    CPU's are the threads, among whose events those with `hlo_op` are operations.
    """
    for plane in trace.planes:
        kind = next((each for each in _LINES if plane.name.startswith(each)), None)
        for line in plane.lines:
            if kind is not None and line.name.startswith(_LINES[kind]):
                yield [
                    (event.name, event.start_ns, event.start_ns + event.duration_ns)
                    for event in line.events
                    if kind != _HOST or any(key == "hlo_op" for key, _ in event.stats)
                ]


def _own_times(events: Iterable[Event]) -> Iterator[tuple[str, float]]:
    """Each event's nanoseconds less those of the events inside it, such as a loop's body."""
    open_events: list[list[Any]] = []  # name, end, own time
    for name, start, end in sorted(events, key=lambda event: (event[1], -event[2])):
        while open_events and open_events[-1][1] <= start:
            closed = open_events.pop()
            yield closed[0], closed[2]
        if open_events:
            open_events[-1][2] -= min(end, open_events[-1][1]) - start
        open_events.append([name, end, end - start])
    for name, _, own in open_events:
        yield name, own
