"""`ClusterTrainSet`: a training set that the hosts of a mesh read themselves."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mesh_transformer.data.storage import local_path

if TYPE_CHECKING:
    from mesh_transformer.pod.cluster import TPUCluster

# Stands for a batch on the driver when only the hosts hold it, because they read it themselves.
READ_ON_HOSTS: dict[str, np.ndarray] = {}


class ClusterTrainSet:
    """A training set read by the hosts: each opens a `TFRecordNewInputs` for its own batch rows.

    All hosts must have access to the files.  The batches and states are the same as if one process
    read all rows.  A run may therefore resume with another number of hosts, or with the driver
    reading all rows.

    Raises:
      InputError: if `TFRecordNewInputs` raises it on any host.
      HostError: if a host fails, or is at a different record than the others.
    """

    def __init__(self, cluster: "TPUCluster"):
        self._cluster = cluster
        self._state: dict[str, Any] = {}
        self._open(None)

    def _open(self, state: dict[str, Any] | None) -> None:
        train_set = self._cluster.config.train_set
        assert train_set is not None
        if isinstance(train_set, Mapping):
            resolved: Any = {local_path(path): weight for path, weight in train_set.items()}
        else:
            resolved = local_path(train_set)
        self._call("open_train_set", resolved, state)

    def get_samples(self) -> dict[str, np.ndarray]:
        """Make the hosts read the next batch, which stays on the hosts.

        Returns:
          `READ_ON_HOSTS`; pass it to `TPUCluster.train` to train on the batch that the hosts have
          read.
        """
        self._call("read")
        return READ_ON_HOSTS

    def state(self) -> dict[str, Any]:
        """See `TFRecordNewInputs.state`."""
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        """See `TFRecordNewInputs.restore`."""
        self._open(state)

    def close(self) -> None:
        """Do nothing: a host closes its reader when it opens another one, or when it ends."""

    def _call(self, method: str, *arguments: Any) -> None:
        """Call `method` on all hosts and store the state that they return; all must be equal."""
        states = self._cluster.call(method, *[arguments] * len(self._cluster.replicas))
        if any(state != states[0] for state in states):
            raise self._cluster.failed("the hosts are at different records of train_set")
        self._state = states[0]
