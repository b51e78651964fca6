"""Runs that shrink when a host is lost for good, and grow again when it returns.

A run changes its mesh by restarting all hosts: every attempt resumes from the newest saved state,
which any mesh can restore.
"""

import sys
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mesh_transformer.config import Config
from mesh_transformer.pod.launch import build_model
from mesh_transformer.util import HostError

if TYPE_CHECKING:
    from mesh_transformer.pod.cluster import TPUCluster
    from mesh_transformer.pod.hosts import Host


class ElasticHosts(Protocol):
    """Hosts of a run of which some may be missing.

    Attributes:
      total: number of hosts when none is missing.
    """

    total: int

    def __call__(self) -> "list[Host]":
        """Wait a while for missing hosts, and return those that are there, at least one."""
        ...

    def present(self) -> int:
        """Return the number of hosts that are there now."""
        ...


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
        return f"mesh {self.config.tpu_size // mp}x{mp} on {self.hosts} hosts"


def largest_fit(config: Config, hosts: int, present: int) -> Fit:
    """Return the largest mesh on which a run can go on with fewer hosts.

    A microbatch keeps its sequences.  So dp must divide the run's dp, or that of its virtual mesh;
    without a virtual mesh, each replica gets more sequences.  mp is reduced only if a single
    replica does not find enough devices.

    Args:
      config: the run's config on all its hosts.
      hosts: number of the run's hosts, which have the same number of devices.
      present: number of the hosts that are there, at least 1.
    """
    size, mp = config.tpu_size, config.cores_per_replica
    assert size is not None
    for count in range(min(present, hosts), 0, -1):
        devices = size // hosts * count
        for shards in (n for n in range(mp, 0, -1) if mp % n == 0 and devices % n == 0):
            changes = {"tpu_size": devices, "cores_per_replica": shards}
            dp, replicas = devices // shards, config.replicas(size // mp)
            if replicas % dp:
                continue
            if config.virtual_mesh is None:
                changes["per_replica_batch"] = config.per_replica_batch * (replicas // dp)
            return Fit(count, config.replace(**changes))
    raise HostError(f"{present} of {hosts} hosts allow no mesh whose dp divides that of the run")


def build_elastic(config: Config, hosts: ElasticHosts, **options: Any) -> "TPUCluster":
    """Return a new `TPUCluster` on the largest mesh that the present hosts allow.

    When a larger mesh has become possible at a save, the run restarts.

    Args:
      config: the run's config on all its hosts.
      options: keyword arguments of `TPUCluster`.
    """
    found = hosts()
    fit = largest_fit(config, hosts.total, len(found))
    if fit.hosts < hosts.total:
        bits = "every bit stays the same" if config.virtual_mesh else "losses differ by rounding"
        line = f"{len(found)} of {hosts.total} hosts are there: training on {fit} ({bits})"
        print(line, file=sys.stderr, flush=True)

    def larger() -> str:
        possible = largest_fit(config, hosts.total, hosts.present())
        return f"{possible} is possible again" if possible.hosts > fit.hosts else ""

    return build_model(fit.config, found[: fit.hosts], larger=larger, **options)
