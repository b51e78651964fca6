"""`LastingCluster`: a `TPUCluster` to answer with, that outlives its hosts."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from mesh_transformer.generation.decode import Chosen
from mesh_transformer.pod.batch import ClusterBatch
from mesh_transformer.util import HostError

if TYPE_CHECKING:
    from mesh_transformer.pod.cluster import TPUCluster

ATTEMPTS = 3  # on end at which new hosts may fail before they have a batch
SECONDS_BETWEEN = 5.0

Answer = TypeVar("Answer")


class LastingCluster:
    """A cluster whose hosts are all made anew, for the next question, once one of them has failed.

    Args:
      make: gives a new cluster, with its weights.
    """

    def __init__(self, make: "Callable[[], TPUCluster]"):
        self._make = make
        self._closed = False
        self._cluster = make()
        self.config = self._cluster.config
        self.dp = self._cluster.dp

    def batch(self, rows: int) -> ClusterBatch:
        """As `TPUCluster.batch`; HostError where new hosts fail too."""
        return self._lasting(lambda cluster: cluster.batch(rows))

    def eval(self, sample: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As `TPUCluster.eval`; HostError where new hosts fail too."""
        return self._lasting(lambda cluster: cluster.eval(sample))

    def _lasting(self, ask: "Callable[[TPUCluster], Answer]") -> "Answer":
        failures = 0
        while True:
            try:
                if self._cluster.ended:
                    if self._closed:
                        raise HostError("the hosts have been ended")
                    print("all hosts start again", file=sys.stderr, flush=True)
                    self._cluster = self._make()
                    if self._closed:  # meanwhile
                        self._cluster.kill()
                return ask(self._cluster)
            except HostError as error:
                failures += 1
                if failures == ATTEMPTS or self._closed:
                    raise
                print(error, file=sys.stderr, flush=True)
                time.sleep(SECONDS_BETWEEN)

    @property
    def batch_size(self) -> int:
        """As `TPUCluster.batch_size`."""
        return self._cluster.batch_size

    def score(self, tokens: np.ndarray, alternatives: int) -> Chosen:
        """As `TPUCluster.score`."""
        return self._cluster.score(tokens, alternatives)

    def close(self) -> None:
        """Ends the hosts at once and for good, whatever they do: there is nothing to save."""
        self._closed = True
        self._cluster.kill()
