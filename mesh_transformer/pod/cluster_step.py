"""A training step that is under way on the hosts of a cluster."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass
class Reading:
    """The calls that dispatch a step, then what it measured."""

    step: int
    dispatched: list[Any]
    values: dict[str, float] | None = None
    ended: bool = False  # on all hosts, as far as they have said


class Number:
    """One of a step's measurements, waited for when read."""

    def __init__(self, read: Callable[[Reading], dict[str, float]], reading: Reading, name: str):
        self._read, self._reading, self._name = read, reading, name

    def __float__(self) -> float:
        return self._read(self._reading)[self._name]

    def is_ready(self) -> bool:
        """Whether the step is known to have ended; only reading one before it finds out."""
        return self._reading.ended or self._reading.values is not None
