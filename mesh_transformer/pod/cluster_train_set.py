"""`ClusterTrainSet`: what a mesh trains on, read by its hosts."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from mesh_transformer.config import Config
from mesh_transformer.data.storage import local_path
from mesh_transformer.util import HostError

# A batch that the hosts hold: none of it is here.
READ_ON_HOSTS: dict[str, np.ndarray] = {}


class Cluster(Protocol):
    """What a train set asks of its `TPUCluster`, where these are told of."""

    config: Config
    replicas: list[list[int]]  # of each host

    def call(self, method: str, *arguments: tuple[Any, ...]) -> list[Any]: ...

    def failed(self, told: str) -> HostError: ...


class ClusterTrainSet:
    """`TFRecordNewInputs` on every host, each for the rows of its own replicas.

    The batches are those that one process would read, record for record, and so are the states:
    a run may go on with fewer hosts, or with the driver reading.  All hosts must see the files.

    Raises:
      InputError: as `TFRecordNewInputs`, where any host finds something wrong.
      HostError: when a host fails, or is at another record than the others.
    """

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._state: dict[str, Any] = {}
        self._open(None)

    def _open(self, state: dict[str, Any] | None) -> None:
        found = self._cluster.config.train_set
        assert found is not None
        if isinstance(found, Mapping):
            whole: Any = {local_path(path): weight for path, weight in found.items()}
        else:
            whole = local_path(found)
        self._call("open_train_set", whole, state)

    def get_samples(self) -> dict[str, np.ndarray]:
        """Has the hosts read the next batch; gives `READ_ON_HOSTS`, to train on."""
        self._call("read")
        return READ_ON_HOSTS

    def state(self) -> dict[str, Any]:
        """As `TFRecordNewInputs.state`."""
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        """As `TFRecordNewInputs.restore`."""
        self._open(state)

    def close(self) -> None:
        """Does nothing: the hosts end theirs when another takes its place, or with themselves."""

    def _call(self, method: str, *arguments: Any) -> None:
        """A call whose answer is the state that all hosts are in then."""
        states = self._cluster.call(method, *[arguments] * len(self._cluster.replicas))
        if any(state != states[0] for state in states):
            raise self._cluster.failed("the hosts are at different records of train_set")
        self._state = states[0]
