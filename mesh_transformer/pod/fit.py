"""The meshes on which a run can continue when some of its devices are missing."""

import itertools
from collections.abc import Iterable
from typing import Any

from mesh_transformer.config import Config
from mesh_transformer.util import HostError


def largest_fit(config: Config, sizes: Iterable[int]) -> Config:
    """Return the run's config for the largest mesh of one of the given sizes.

    A microbatch keeps its number of sequences.  So dp must divide the run's dp, or that of its
    virtual mesh.  Without a virtual mesh, each replica gets more sequences.  First cp, then mp is
    reduced, only if no size suffices for a single replica, and mp never if the parameters depend on
    it.

    Args:
      config: the run's config on all its devices.
      sizes: the numbers of devices that a mesh can have; at least one.

    Raises:
      HostError: if all sizes are too small, and mp cannot be reduced.
    """
    sizes = sorted(sizes, reverse=True)
    mp = config.cores_per_replica
    assert config.tpu_size is not None
    replicas = config.replicas(config.tpu_size // config.replica_devices)
    fixed = config.norm == "layernorm-desync" and config.virtual_mesh is None
    for shards, cp in itertools.product(
        [mp] if fixed else _divisors(mp), _divisors(config.context_parallel)
    ):
        for size in sizes:
            dp, rest = divmod(size, shards * cp)
            if dp and not rest and replicas % dp == 0:
                return _smaller(config, shards, cp, dp)
    most = "1 device is" if sizes[0] == 1 else f"{sizes[0]} devices are"
    raise HostError(
        f"{most} present, which is too few for cores_per_replica {mp}; norm {config.norm} does not "
        "allow it to change"
    )


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, the largest first."""
    return [n for n in range(number, 0, -1) if number % n == 0]


def mesh_name(config: Config) -> str:
    """Return "mesh DPxMP" for the mesh of a config, or "mesh DPxCPxMP"."""
    assert config.tpu_size is not None
    cp = f"x{config.context_parallel}" if config.context_parallel > 1 else ""
    return f"mesh {config.tpu_size // config.replica_devices}{cp}x{config.cores_per_replica}"


def _smaller(config: Config, mp: int, cp: int, dp: int) -> Config:
    """Return a config for a smaller mesh with the same batches."""
    assert config.tpu_size is not None
    changes: dict[str, Any] = {"cores_per_replica": mp, "context_parallel": cp}
    changes["tpu_size"] = dp * cp * mp
    old_dp = config.tpu_size // config.replica_devices
    if config.virtual_mesh is None and dp != old_dp:
        more = old_dp // dp
        changes["per_replica_batch"] = rows = config.per_replica_batch * more
        # The number of sequences per validation batch and replica is rounded down.
        scored = max(1, int(config.per_replica_batch * config.val_batch_multiplier)) * more
        changes["val_batch_multiplier"] = (scored + 0.5) / rows
    return config.replace(**changes)
