"""Placement of batch rows on a mesh that may span processes, and collection of the results."""

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer.util import HostError

# Maximum number of programs that are dispatched and have not finished.  XLA's CPU client runs up to
# 32 per device at once (jaxlib 0.10).  When it has to wait, it does so in the threads that should
# run the programs: with more virtual devices than cores it then deadlocks, and after a minute the
# process is aborted.
MOST_IN_FLIGHT = 16
_in_flight: deque[Array] = deque()  # a result of each program, of all models in this process


def limit_in_flight(result: Array) -> None:
    """Wait until at most `MOST_IN_FLIGHT` programs of this process have not finished.

    Args:
      result: a small result of the program that was dispatched last.
    """
    _in_flight.append(result)
    if len(_in_flight) > MOST_IN_FLIGHT:
        # Whoever reads the result gets its error.
        with contextlib.suppress(RuntimeError):
            _in_flight.popleft().block_until_ready()


class Rows:
    """Transfers this process's batch rows to and from a mesh that may span processes.

    Args:
      unit: the number of rows of each replica must be a multiple of this.

    Attributes:
      replicas: dp indices, ascending, of the replicas that have devices in this process.  Processes
        that share a replica must pass in the same rows for it, and get the same results.
      alone: whether all of the mesh's devices belong to this process.
    """

    def __init__(self, mesh: Mesh, unit: int = 1):
        self.mesh, self._unit = mesh, unit
        self.dp = mesh.shape["dp"]
        process = jax.process_index()
        self.replicas = [
            replica
            for replica, devices in enumerate(mesh.devices)
            if any(device.process_index == process for device in devices.flat)
        ]
        self.alone = all(device.process_index == process for device in mesh.devices.flat)

    @property
    def multiple(self) -> int:
        """The number of rows of this process must be a multiple of this."""
        return len(self.replicas) * self._unit

    def pad(self, rows: np.ndarray) -> np.ndarray:
        """Append copies of the first row until the number of rows is a multiple of `multiple`."""
        missing = -len(rows) % self.multiple
        return np.concatenate((rows, np.repeat(rows[:1], missing, axis=0))) if missing else rows

    def place(self, tree: Any, spec: P) -> Any:
        """Make global arrays on the mesh from the rows of this process.

        Args:
          tree: arrays with this process's rows, in the order of `replicas`.  Each replica has the
            same number of rows.
          spec: the PartitionSpec of the global arrays.  The rows are along the array axis that it
            splits over dp.
        """
        sharding = NamedSharding(self.mesh, spec)
        if self.alone:
            return jax.device_put(tree, sharding)
        axis = tuple(spec).index("dp")

        def place(x: np.ndarray) -> Array:
            rows = x.shape[axis] // len(self.replicas)  # per replica

            def part(index: Any) -> np.ndarray:
                local = self.replicas.index((index[axis].start or 0) // rows)
                return np.take(x, range(local * rows, (local + 1) * rows), axis)

            shape = (*x.shape[:axis], rows * self.dp, *x.shape[axis + 1 :])
            return jax.make_array_from_callback(shape, sharding, part)

        return jax.tree.map(place, tree)

    def fetch(self, x: Array, count: int) -> Array | np.ndarray:
        """Return the first `count` of this process's rows of x.

        The rows are along the first axis of x, which must be split over dp.  If all devices of the
        mesh belong to this process and x has `count` rows, the result is x, and `fetch` does not
        wait for its values to be computed.  Otherwise the result is a numpy array.
        """
        if self.alone:
            return x if count == len(x) else np.asarray(x)[:count]
        parts = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
        return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])[:count]


def process_rows(replicas: list[list[int]], size: int) -> list[np.ndarray]:
    """Return, for each process, the indices of the process's rows in the global batch.

    Args:
      replicas: for each process, the dp indices of its replicas.
      size: rows per replica.
    """
    return [
        np.concatenate([np.arange(replica * size, (replica + 1) * size) for replica in own])
        for own in replicas
    ]


def gathered(results: Sequence[np.ndarray], at: Sequence[np.ndarray]) -> np.ndarray:
    """Assemble a global batch of results from the rows that each process returned.

    Args:
      results: one array of rows per process.
      at: the rows' indices in the global batch, one array per process, as returned by
        `process_rows`.  Together they must cover every row.

    Raises:
      HostError: if two processes returned different bits for the same row.
    """
    count = 1 + max(int(indices.max(initial=-1)) for indices in at)
    whole = np.empty((count, *results[0].shape[1:]), results[0].dtype)
    known = np.zeros(count, bool)
    for rank, (rows, indices) in enumerate(zip(results, at, strict=True)):
        again = known[indices]
        # Compared as bytes, so that NaN equals NaN.
        if whole[indices[again]].tobytes() != rows[again].tobytes():
            raise HostError(
                f"host {rank} and an earlier host returned different values for the same batch "
                "row; restart from the newest checkpoint"
            )
        whole[indices], known[indices] = rows, True
    return whole
