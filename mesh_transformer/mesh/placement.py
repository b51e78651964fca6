"""Placement of batch rows on a mesh that may span processes, and reassembly of the results."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer.util import HostError


class Rows:
    """This process's batch rows on a (dp, mp) mesh that may span processes.

    Attributes:
      replicas: ascending dp indices of the replicas that have devices in this process.  If a
        replica spans several processes, all of these processes pass in the same batch rows and get
        the same rows back.
      alone: whether all of the mesh's devices belong to this process.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.dp = mesh.shape["dp"]
        process = jax.process_index()
        self.replicas = [
            replica
            for replica, devices in enumerate(mesh.devices)
            if any(device.process_index == process for device in devices)
        ]
        self.alone = all(device.process_index == process for device in mesh.devices.flat)

    def pad(self, rows: np.ndarray) -> np.ndarray:
        """Append copies of the first row until the rows divide equally among `replicas`."""
        missing = -len(rows) % len(self.replicas)
        return np.concatenate((rows, np.repeat(rows[:1], missing, axis=0))) if missing else rows

    def place(self, tree: Any, spec: P) -> Any:
        """Make global arrays on the mesh from the rows of this process.

        Args:
          tree: arrays with this process's rows, divided equally among its replicas.
          spec: the layout of the global arrays.  The axis that is split over dp is the row axis.
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

        The rows are along the first axis of x, which is split over dp.  If all devices of the mesh
        belong to this process, the result is a device array, and `fetch` does not wait for its
        values.  Otherwise the result is a numpy array.
        """
        if self.alone:
            return x if count == len(x) else x[:count]
        parts = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
        return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])[:count]


def replica_rows(x: np.ndarray, replicas: list[int], dp: int, axis: int = 0) -> np.ndarray:
    """Return the rows of the global batch x that belong to `replicas`.

    Args:
      x: the global batch, whose number of rows is a multiple of dp.
      replicas: the dp indices of the replicas.
      axis: the row axis of x.
    """
    parts = np.split(x, dp, axis)
    return np.concatenate([parts[replica] for replica in replicas], axis)


def process_rows(replicas: list[list[int]], size: int) -> list[np.ndarray]:
    """Return, for each process, the indices of its rows in the global batch.

    Args:
      replicas: for each process, the dp indices of its replicas.
      size: rows per replica.
    """
    return [
        np.concatenate([np.arange(replica * size, (replica + 1) * size) for replica in own])
        for own in replicas
    ]


def gathered(results: Sequence[np.ndarray], at: Sequence[np.ndarray]) -> np.ndarray:
    """Assemble the rows of the global batch from the results of all processes.

    Args:
      results: each process's rows.
      at: each process's row indices in the global batch, as returned by `process_rows`; together
        they must cover every row.

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
                f"host {rank} and an earlier host returned different values for the same row"
            )
        whole[indices], known[indices] = rows, True
    return whole
