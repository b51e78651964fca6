"""Runs that shrink when a host is lost for good, and grow again when it returns.

A run changes its mesh by restarting all hosts: every attempt resumes from the newest saved state,
which any mesh can restore.
"""

import sys
from typing import Any, Protocol

from mesh_transformer.config import Config
from mesh_transformer.pod.cluster import TPUCluster
from mesh_transformer.pod.fit import largest_fit
from mesh_transformer.pod.hosts import Host


class ElasticHosts(Protocol):
    """The hosts of a run; some may be missing.

    Attributes:
      total: number of hosts if none is missing.
    """

    total: int

    def __call__(self) -> list[Host]:
        """Wait a while for missing hosts, and return those that are present, at least one."""
        ...

    def present(self) -> int:
        """Return the number of hosts that are present now."""
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
        fit = largest_fit(config, machines.total, len(present))
        if fit.hosts < machines.total:
            bits = "bit-identical" if config.virtual_mesh else "losses differ by rounding"
            line = f"{len(present)} of {machines.total} hosts are present: using {fit} ({bits})"
            print(line, file=sys.stderr, flush=True)
        self._machines, self._run_config = machines, config
        super().__init__(fit.config, present[: fit.hosts], **options)

    def larger_mesh(self) -> str:
        """Return why a restart would give the run a larger mesh; "" if it would not."""
        total, present = self._machines.total, self._machines.present()
        if present <= len(self.hosts):
            return ""
        fit = largest_fit(self._run_config, total, present)
        if fit.hosts <= len(self.hosts):
            return ""
        return f"{present} of {total} hosts are present again, which allows {fit}"

    def save(self, folder: str, aux: dict[str, Any] | None = None) -> None:
        """Start saving the state, with the run's own config; see `TPUCluster.save`."""
        super().save(folder, self._with_run_config(aux or {}))

    def keep(self, aux: dict[str, Any]) -> str:
        """Start copying the state to the hosts' memory; see `TPUCluster.keep`."""
        return super().keep(self._with_run_config(aux))

    def _with_run_config(self, aux: dict[str, Any]) -> dict[str, Any]:
        return aux | {"config": self._run_config.as_dict()}
