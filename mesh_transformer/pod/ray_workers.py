"""The worker processes of a Ray cluster, which compute the parts of a whole in any order.

Workers and machines may die, and join, at any time.  In the end, parts of workers that hang are
begun a second time.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import ray
from ray import exceptions
from tqdm import tqdm

from mesh_transformer.pod.ray_head import connected
from mesh_transformer.util import StoppedError, last_line

PER_CPU = 2  # parts that are sent to the cluster at a time, per CPU of it
ATTEMPTS = 10  # workers that may die of a part
SECONDS = 1.0  # between two looks at the cluster
STRAGGLER = 3.0  # times the median time after which a part is begun a second time
LEAST_STRAGGLER = 5.0  # seconds

Part = TypeVar("Part")
Result = TypeVar("Result")


class RayWorkers:
    """Context manager that connects to a Ray cluster; see `parts.Workers`.

    Args:
      address: see `connected`.

    Raises:
      InputError: if no cluster answers.
    """

    def __init__(self, address: str):
        self._connection = contextlib.ExitStack()
        self._connection.enter_context(connected(address))

    def __enter__(self) -> "RayWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def run(
        self, function: Callable[[bytes, Part], Result], shared: bytes, parts: Iterable[Part]
    ) -> Iterator[tuple[Part, Result]]:
        """Yield (part, function(shared, part)) for each part, in the order of completion.

        The function may be called several times for a part.

        Raises:
          StoppedError: if the function raises an error, or workers die of a part again and again.
        """
        calls = _Calls(function, shared)
        if not ray.cluster_resources().get("CPU"):
            tqdm.write(
                "the Ray cluster has no CPUs; waiting for a machine (ray start --num-cpus N)"
            )
        rest, is_last = iter(parts), False
        while calls.running or not is_last:
            while not is_last and len(calls.running) < _limit():
                part = next(rest, None)
                is_last = part is None
                if part is not None:
                    calls.start(part)
            yield from calls.finished()
            if is_last:
                calls.double_stragglers()


def _limit() -> int:
    return PER_CPU * max(1, int(ray.cluster_resources().get("CPU", 0)))


class _Calls:
    """The calls of a function that have not returned.

    Attributes:
      running: for each part, the references of its calls.
    """

    def __init__(self, function: Callable[[bytes, Any], Any], shared: bytes):
        # This class begins calls again, because Ray would wait for hanging ones.
        self._remote = ray.remote(num_cpus=1, max_retries=0)(function)
        self._shared = ray.put(shared)
        self.running: dict[Any, list[ray.ObjectRef]] = {}
        self._began: dict[Any, float] = {}
        self._deaths: dict[Any, int] = {}
        self._seconds: list[float] = []  # of parts that are finished

    def start(self, part: Any) -> None:
        # Spread, so that a part that is begun again is rather not with the same machine.
        call = self._remote.options(scheduling_strategy="SPREAD").remote(self._shared, part)
        self.running.setdefault(part, []).append(call)
        self._began[part] = time.monotonic()

    def finished(self) -> Iterator[tuple[Any, Any]]:
        """Wait a moment, and yield (part, result) for each part that is finished."""
        parts = {call: part for part, calls in self.running.items() for call in calls}
        if not parts:
            return
        ready, _ = ray.wait(list(parts), num_returns=1, timeout=SECONDS)
        for call in ready:
            part = parts[call]
            try:
                result = ray.get(call)
            except exceptions.RayTaskError as error:
                raise _failed(part, error) from error
            except exceptions.RayError as error:
                self._lost(part, call, error)
                continue
            self._seconds.append(time.monotonic() - self._began[part])
            for other in self.running.pop(part):
                if other != call:
                    ray.cancel(other, force=True)
            yield part, result

    def _lost(self, part: Any, call: ray.ObjectRef, error: exceptions.RayError) -> None:
        """Begin a part again whose worker has died, unless another call is still running."""
        self.running[part].remove(call)
        self._deaths[part] = self._deaths.get(part, 0) + 1
        if self._deaths[part] == ATTEMPTS:
            raise StoppedError(
                f"{part}: {ATTEMPTS} workers died of it, the last with {type(error).__name__}; "
                "check the memory of the machines, and Ray's logs"
            )
        tqdm.write(f"{part}: its worker died ({type(error).__name__}); another one begins it again")
        if not self.running[part]:
            self.start(part)

    def double_stragglers(self) -> None:
        """Begin a second call for each part that takes much longer than usual."""
        if not self._seconds:
            return
        limit = max(STRAGGLER * statistics.median(self._seconds), LEAST_STRAGGLER)
        for part, calls in self.running.items():
            if len(calls) == 1 and time.monotonic() - self._began[part] > limit:
                self.start(part)


def _failed(part: Any, error: exceptions.RayTaskError) -> StoppedError:
    line = f"{part}: a worker failed: {last_line(error)}"
    if isinstance(error.cause, ImportError) or "failed to import" in str(error):
        line += "; install the same version of mesh-transformer on all machines of the cluster"
    return StoppedError(line)
