"""A batch's rows over the replicas of a mesh: this process's onto its devices, and back."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer.util import HostError


class Rows:
    """Which rows of a batch are this process's, on a (dp, mp) mesh that others may share.

    Attributes:
      replicas: the dp rows of the mesh, ascending, that this process has devices of.  Where a
        replica spans processes, each of them gives, and gets, the same rows of the batch.
      alone: whether all of the mesh's devices are this process's.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.dp = mesh.shape["dp"]
        here = jax.process_index()
        self.replicas = [
            replica
            for replica, devices in enumerate(mesh.devices)
            if any(device.process_index == here for device in devices)
        ]
        self.alone = all(device.process_index == here for device in mesh.devices.flat)

    def pad(self, rows: np.ndarray) -> np.ndarray:
        """The rows and copies of the first, so that they divide over this process's replicas."""
        missing = -len(rows) % len(self.replicas)
        return np.concatenate((rows, np.repeat(rows[:1], missing, axis=0))) if missing else rows

    def place(self, tree: Any, spec: P) -> Any:
        """Arrays of this process's rows as arrays on the mesh, of all processes' rows.

        The rows are along the axis that `spec` gives to dp, as many to each replica.
        """
        sharding = NamedSharding(self.mesh, spec)
        if self.alone:
            return jax.device_put(tree, sharding)
        axis = tuple(spec).index("dp")

        def place(x: np.ndarray) -> Array:
            rows = x.shape[axis] // len(self.replicas)  # of one replica

            def part(index: Any) -> np.ndarray:
                held = self.replicas.index((index[axis].start or 0) // rows)
                return np.take(x, range(held * rows, (held + 1) * rows), axis)

            shape = (*x.shape[:axis], rows * self.dp, *x.shape[axis + 1 :])
            return jax.make_array_from_callback(shape, sharding, part)

        return jax.tree.map(place, tree)

    def fetch(self, x: Array, count: int) -> Array | np.ndarray:
        """The first `count` of this process's rows of x, which dp splits along its first axis.

        A mesh of this process alone gives a device array at once; else it is numpy's.
        """
        if self.alone:
            return x if count == len(x) else x[:count]
        parts = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
        return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])[:count]


def share(x: np.ndarray, replicas: list[int], dp: int, axis: int = 0) -> np.ndarray:
    """The rows along `axis` of those of the dp replicas; dp divides their number."""
    parts = np.split(x, dp, axis)
    return np.concatenate([parts[replica] for replica in replicas], axis)


def places(replicas: list[list[int]], size: int) -> list[np.ndarray]:
    """Which of all rows are whose, for processes that hold these replicas of `size` rows each."""
    return [
        np.concatenate([np.arange(replica * size, (replica + 1) * size) for replica in held])
        for held in replicas
    ]


def gathered(found: Sequence[np.ndarray], at: Sequence[np.ndarray]) -> np.ndarray:
    """All rows, from what each process found for the rows at its places; every row is someone's.

    Raises:
      HostError: where two that have the same row found something else for it, if only by a bit.
    """
    count = 1 + max(int(places.max(initial=-1)) for places in at)
    whole = np.empty((count, *found[0].shape[1:]), found[0].dtype)
    known = np.zeros(count, bool)
    for rank, (rows, places) in enumerate(zip(found, at, strict=True)):
        again = known[places]
        # As bytes, in which NaN equals NaN.
        if whole[places[again]].tobytes() != rows[again].tobytes():
            raise HostError(f"host {rank} disagrees with one before it about the same rows")
        whole[places], known[places] = rows, True
    return whole
