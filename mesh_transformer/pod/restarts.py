"""Training runs and servers that survive host failures by restarting all hosts."""

import functools
import re
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mesh_transformer.calls import Call, Result
from mesh_transformer.checkpoint.source import saved_steps
from mesh_transformer.evaluation import all_steps
from mesh_transformer.generation.batch import NewBatch
from mesh_transformer.network import Eval, Network, TrainableNetwork
from mesh_transformer.pod.faults import RaisedError
from mesh_transformer.storage.access import local_path
from mesh_transformer.training import loop, references
from mesh_transformer.training.goodput import Ledger
from mesh_transformer.util import HostError, StoppedError

if TYPE_CHECKING:
    from mesh_transformer.pod.cluster import TPUCluster

ATTEMPTS = 3  # maximum attempts per call; each retry uses new hosts
SECONDS_BETWEEN = 5.0  # between two attempts


class RestartingCluster(Network):
    """A `TPUCluster` for servers that restarts all hosts after a host failure.

    If a host fails during `batch` or `eval`, or has failed earlier, all hosts are restarted and the
    call is retried.  If a host fails during `score`, `embed` or a method of a batch, HostError is
    raised, and the next call of `batch` or `eval` restarts the hosts.

    Args:
      make: function that returns a new cluster with its weights loaded.
    """

    def __init__(self, make: "Callable[[], TPUCluster]"):
        self._make = make
        self._closed = False
        self._cluster = make()
        self.config = self._cluster.config
        self.dp, self.batch_size = self._cluster.dp, self._cluster.batch_size

    @property
    def adapters(self) -> int:
        """Number of LoRA adapters that each text may choose from."""
        return self._cluster.adapters

    def run(self, call: Call[Result]) -> Result:
        """Run a call; see `TPUCluster.run`.

        Raises:
          HostError: if a host fails during another call than `Eval` and `NewBatch`, if all
            `ATTEMPTS` attempts fail, or if `close` has been called.
        """
        if not isinstance(call, Eval | NewBatch):
            return self._cluster.run(call)
        failures = 0
        while True:
            try:
                if self._cluster.ended:
                    if self._closed:
                        raise HostError("the hosts have been shut down because `close` was called")
                    print("restarting all hosts", file=sys.stderr, flush=True)
                    self._cluster = self._make()
                    if self._closed:  # another thread called `close` during the start
                        self._cluster.kill()
                return self._cluster.run(call)
            except HostError as error:
                failures += 1
                if failures == ATTEMPTS or self._closed:
                    raise
                print(error, file=sys.stderr, flush=True)
                time.sleep(SECONDS_BETWEEN)

    def close(self) -> None:
        """Shut down the hosts immediately, even during a call, and never restart them."""
        self._closed = True
        self._cluster.kill()


RETRIES = 8  # maximum number of consecutive restarts without progress
LONGEST_WAIT = 60.0  # seconds between two attempts


def train(
    make: Callable[[], TrainableNetwork],
    folder: str,
    *,
    ledger: Ledger | None = None,
    retries: int = RETRIES,
    **options: Any,
) -> None:
    """Run `training.loop.train`, and restart it on a new network after each host failure.

    Every attempt resumes from the newest saved state.  The wait before a new attempt is 1 s at
    first, and doubles after each failure without progress, up to `LONGEST_WAIT` seconds.

    Args:
      make: function that returns a new network; called for each attempt.
      folder: see `training.loop.train`.
      ledger: see `training.loop.train`.
      retries: maximum number of consecutive restarts without progress.
      **options: the other arguments of `training.loop.train`.

    Raises:
      StoppedError: if a host fails again after `retries` restarts without progress, or if
        `training.loop.train` raises StoppedError for another reason.
    """
    ledger = ledger or Ledger()
    attempt = functools.partial(loop.train, folder=folder, ledger=ledger, **options)
    _run_with_retries(make, attempt, retries, ledger)


def validate(make: Callable[[], TrainableNetwork], path: str) -> None:
    """Run `references.validate`, and restart it on a new network after each host failure.

    Args:
      make: function that returns a new network; called for each attempt.
      path: path of the model to validate.
    """
    _run_with_retries(make, lambda network: references.validate(network, path))


def evaluate_all(make: Callable[[], TrainableNetwork], folder: str) -> None:
    """Run `all_steps.evaluate_all`, and restart it on a new network after each host failure.

    Args:
      make: function that returns a new network; called for each attempt.
      folder: the model folder.
    """
    folder = local_path(folder)
    steps = functools.partial(saved_steps, folder)
    _run_with_retries(make, lambda network: all_steps.evaluate_all(network, folder, steps))


def _run_with_retries(
    make: Callable[[], TrainableNetwork],
    attempt: Callable[[TrainableNetwork], Any],
    retries: int = RETRIES,
    ledger: Ledger | None = None,
) -> None:
    """Call `attempt` with a new network from `make`, and repeat this after each host failure.

        raised by the attempt                          then
        HostError, also RaisedError                    a restart; after `retries`, StoppedError
        RaisedError with the text of the one before,   StoppedError
          without progress in between
        PermanentError, other StoppedErrors            the same error
        InputError                                     the same error

    An attempt makes progress if it reaches a step that no earlier attempt has reached.  Progress
    resets the number of restarts and the wait before the next one.  The ledger counts the seconds
    of the waits and of the calls of `make`.
    """
    ledger = ledger or Ledger()
    furthest, failures, previous = -1, 0, ""
    while True:
        reached = furthest
        try:
            with ledger.spending("machines"):
                made = make()
            with loop.closing(made) as network:
                try:
                    return attempt(network)
                finally:
                    reached = network.step
        except HostError as error:
            if reached > furthest:
                furthest, failures, previous = reached, 0, ""
            failures += 1
            # Ports and process ids in an error differ between attempts.
            text = re.sub(r"\d+", "", str(error)) if isinstance(error, RaisedError) else ""
            repeated, previous = text and text == previous, text
            if failures > retries or repeated:
                raise StoppedError(
                    f"{error}; giving up after {failures} failures without progress"
                ) from None
            wait = min(2.0 ** (failures - 1), LONGEST_WAIT)
            print(
                f"{error}\nrestarting all hosts in {wait:.0f} s from the newest saved state "
                f"(restart {failures} of {retries} before step {furthest + 1})",
                file=sys.stderr,
                flush=True,
            )
            with ledger.spending("machines"):
                time.sleep(wait)
