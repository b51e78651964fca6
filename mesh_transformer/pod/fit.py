"""The meshes on which a run can continue when some of its hosts are missing."""

from typing import Any, NamedTuple

from mesh_transformer.config import Config
from mesh_transformer.util import HostError


class Fit(NamedTuple):
    """A mesh over some of a run's hosts.

    Attributes:
      hosts: number of hosts that the mesh needs.
      config: the run's config for this mesh.
    """

    hosts: int
    config: Config

    def __str__(self) -> str:
        assert self.config.tpu_size is not None
        mp = self.config.cores_per_replica
        hosts = "1 host" if self.hosts == 1 else f"{self.hosts} hosts"
        return f"mesh {self.config.tpu_size // mp}x{mp} on {hosts}"


def largest_fit(config: Config, hosts: int, present: int) -> Fit:
    """Return the largest mesh on which a run can continue with fewer hosts.

    A microbatch keeps its number of sequences.  So dp must divide the run's dp, or that of its
    virtual mesh.  Without a virtual mesh, each replica gets more sequences.  mp is reduced only if
    the present hosts have too few devices for a single replica, and never if the parameters depend
    on mp.

    Args:
      config: the run's config on all its hosts.
      hosts: number of the run's hosts, which have the same number of devices.
      present: number of the hosts that are present, at least 1.

    Raises:
      HostError: if the present hosts have too few devices, and mp cannot be reduced.
    """
    size, mp = config.tpu_size, config.cores_per_replica
    assert size is not None
    replicas = config.replicas(size // mp)
    fixed = config.norm == "layernorm-desync" and config.virtual_mesh is None
    for shards in [mp] if fixed else [n for n in range(mp, 0, -1) if mp % n == 0]:
        for count in range(min(present, hosts), 0, -1):
            dp, rest = divmod(size // hosts * count, shards)
            if not rest and replicas % dp == 0:
                return Fit(count, _smaller(config, shards, dp))
    raise HostError(
        f"{present} of {hosts} hosts have too few devices for cores_per_replica {mp}, which "
        f"norm {config.norm} does not allow to change"
    )


def _smaller(config: Config, mp: int, dp: int) -> Config:
    """Return a config for a smaller mesh with the same batches."""
    assert config.tpu_size is not None
    changes: dict[str, Any] = {"tpu_size": dp * mp, "cores_per_replica": mp}
    old_dp = config.tpu_size // config.cores_per_replica
    if config.virtual_mesh is None and dp != old_dp:
        more = old_dp // dp
        changes["per_replica_batch"] = rows = config.per_replica_batch * more
        # The number of sequences per validation batch and replica is rounded down.
        scored = max(1, int(config.per_replica_batch * config.val_batch_multiplier)) * more
        changes["val_batch_multiplier"] = (scored + 0.5) / rows
    return config.replace(**changes)
