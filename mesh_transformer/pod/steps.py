"""Training steps of a cluster: dispatched to the hosts, and reported by them."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np


class StepReport(NamedTuple):
    """One host's report about one training step.

    Attributes:
      step: number of the step.
      seconds: duration of the step on this host, in seconds.
      numbers: the step's metrics, by name.
      finished: number of later steps that have also finished on this host.
      save_failed: whether the last save of a checkpoint has failed on this host.
      notice: whether this host has received SIGTERM, a sign that its machine will be shut down.
    """

    step: int
    seconds: float
    numbers: dict[str, float]
    finished: int
    save_failed: bool
    notice: bool = False


@dataclasses.dataclass
class DispatchedStep:
    """A training step that `Fleet.train` has dispatched to the hosts.

    Attributes:
      step: number of the step.
      dispatched: the results of the `Train` calls, one per host, which come later.
      values: metrics of the step; None until `Fleet.read` has fetched them.
      error: the error of the step, if it has failed.
      finished: whether all hosts have reported that the step has finished.
    """

    step: int
    dispatched: list[Future[Any]]
    values: dict[str, float] | None = None
    error: Exception | None = None
    finished: bool = False


class PendingMetric:
    """One metric of a training step; `float(metric)` waits until the step has finished."""

    def __init__(
        self, read: Callable[[DispatchedStep], dict[str, float]], reading: DispatchedStep, name: str
    ):
        self._read, self._reading, self._name = read, reading, name

    def __float__(self) -> float:
        return self._read(self._reading)[self._name]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(float(self), dtype)

    def __format__(self, form: str) -> str:
        return format(float(self), form)

    def is_ready(self) -> bool:
        """Return whether the step is known to have finished.

        A finished step may give False until metrics of this step or an earlier one are read.
        """
        return self._reading.finished or self._reading.values is not None
