"""`ClusterTrainSet`: a training set whose batches are read by the members of a fleet."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mesh_transformer.util import InputError

if TYPE_CHECKING:
    from mesh_transformer.pod.fleet import Fleet

# Stands for a batch on the driver when only the hosts hold it, because they read it themselves.
READ_ON_HOSTS: dict[str, np.ndarray] = {}


class ClusterTrainSet:
    """A training set whose batches are read by the hosts, and not by the process that leads them.

    Each host opens a `TFRecordNewInputs` for its own batch rows, so all hosts must have access to
    the files.  The batches and the results of `state` are the same as if one process read all rows.
    A run may therefore resume with another number of hosts, or with the driver reading all rows.

    Raises:
      InputError: if opening or reading the training set raises InputError on any host, or if the
        hosts do not all see the same record files.
      HostError: if a host fails, or if the hosts are not all at the same record.
    """

    def __init__(self, fleet: "Fleet"):
        self._fleet = fleet
        self._state: dict[str, Any] = {}
        self.restore(None)
        seen = fleet.call("record_files")
        for member, files in zip(fleet.members, seen, strict=True):
            if files != seen[0]:
                raise InputError(
                    f"train_set: {member.name} sees other record files than "
                    f"{fleet.members[0].name} (names or sizes differ); give all hosts the same "
                    "files"
                )

    def restore(self, state: dict[str, Any] | None, batches: int = 0) -> None:
        """Continue reading from a position; see `TFRecordNewInputs.restore`."""
        train_set, path_of = self._fleet.config.train_set, self._fleet.members_path
        assert train_set is not None
        if isinstance(train_set, Mapping):
            resolved: Any = {path_of(path): weight for path, weight in train_set.items()}
        else:
            resolved = path_of(train_set)
        self._call("open_train_set", resolved, state, batches)

    def get_samples(self) -> dict[str, np.ndarray]:
        """Make the hosts read the next batch, which stays on the hosts.

        Returns:
          The placeholder `READ_ON_HOSTS`.  Passing it to `TPUCluster.train` trains on the batch
          that the hosts have read.
        """
        self._call("read")
        return READ_ON_HOSTS

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch that was read; see `TFRecordNewInputs.state`."""
        return self._state

    def close(self) -> None:
        """Do nothing, because the readers on the hosts close by themselves."""

    def _call(self, method: str, *arguments: Any) -> None:
        """Call a `NetworkRunner` method on all hosts, and store the position that it returns.

        Raises:
          HostError: if the hosts return different positions in the training set.
        """
        states = self._fleet.call(method, *[arguments] * len(self._fleet.members))
        if any(state != states[0] for state in states):
            raise self._fleet.failure("the hosts are at different records of train_set")
        self._state = states[0]
