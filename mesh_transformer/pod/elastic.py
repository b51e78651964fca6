"""Runs that shrink when hosts are lost for good, and grow again when more can be used.

A run changes its mesh by restarting all hosts: every attempt resumes from the newest saved state,
which any mesh can restore.
"""

import sys
from typing import Any, NamedTuple, Protocol

from mesh_transformer.config import Config
from mesh_transformer.pod.cluster import TPUCluster
from mesh_transformer.pod.fit import mesh_name
from mesh_transformer.pod.hosts import Host
from mesh_transformer.storage.access import AnyPath


class Present(NamedTuple):
    """The hosts on which a run can continue.

    Attributes:
      hosts: the hosts.
      config: the run's config for the mesh over these hosts.
      missing: what the run has to do without; "" if nothing.
    """

    hosts: list[Host]
    config: Config
    missing: str


class ElasticHosts(Protocol):
    """The hosts of a run; some may be missing."""

    def __call__(self) -> Present:
        """Wait a while for missing hosts, and return those on which the run can continue."""
        ...

    def larger_mesh(self, used: int) -> str:
        """Return why a restart would give a run that uses `used` hosts a larger mesh, or ""."""
        ...


class ElasticCluster(TPUCluster):
    """A `TPUCluster` on the largest mesh that the present hosts allow.

    Checkpoints store the run's own config, not that of the smaller mesh.

    Args:
      config: the run's config on all its hosts.
      options: keyword arguments of `TPUCluster`.
    """

    def __init__(self, config: Config, machines: ElasticHosts, **options: Any):
        present = machines()
        if present.missing:
            bits = "bit-identical" if config.virtual_mesh else "losses differ by rounding"
            line = f"{present.missing}: using {mesh_name(present.config)} ({bits})"
            print(line, file=sys.stderr, flush=True)
        self._machines, self._run_config = machines, config
        super().__init__(present.config, present.hosts, **options)

    def larger_mesh(self) -> str:
        """Return why a restart would give the run a larger mesh; "" if it would not."""
        return self._machines.larger_mesh(len(self.hosts))

    def save(self, folder: AnyPath, aux: dict[str, Any] | None = None) -> None:
        """Start saving the state, with the run's own config; see `TPUCluster.save`."""
        super().save(folder, (aux or {}) | {"config": self._run_config.as_dict()})
