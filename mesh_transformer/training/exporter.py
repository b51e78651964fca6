"""Serves the newest metrics of runs to Prometheus."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from mesh_transformer.util import InputError


class Newest(Collector):
    """The newest value of each metric of some runs, as gauges with the label `run`.

    A metric train/loss is called mesh_transformer_train_loss.

    Attributes:
      values: the metrics of each run, by its name.
    """

    def __init__(self) -> None:
        self.values: dict[str, dict[str, float]] = {}
        self._server: Any = None

    def update(self, run: str, rows: Sequence[Mapping[str, Any]], *, is_first: bool) -> None:
        """Replace the values of a run by those of its new rows.

        Args:
          is_first: whether they replace all earlier ones.
        """
        values = {} if is_first else dict(self.values.get(run, {}))
        for row in rows:
            values |= {key: x for key, x in row.items() if isinstance(x, (int, float))}
        self.values = self.values | {run: values}  # replaced, as another thread may read it

    def collect(self) -> Iterator[GaugeMetricFamily]:
        values = self.values
        for metric in sorted({name for own in values.values() for name in own}):
            name = "mesh_transformer_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
            family = GaugeMetricFamily(name, f"The newest {metric} of a run", labels=["run"])
            for run, own in values.items():
                if metric in own:
                    family.add_metric([run], own[metric])
            yield family

    def keep(self, runs: Collection[str]) -> None:
        """Forget all runs but these."""
        self.values = {run: own for run, own in self.values.items() if run in runs}

    def serve(self, port: int, host: str = "127.0.0.1") -> int:
        """Serve the metrics at http://<host>:<port>/metrics, in a thread; return the port.

        Args:
          port: 0 for any free one.

        Raises:
          InputError: if the port is in use.
        """
        registry = CollectorRegistry()
        registry.register(self)
        try:
            server, _ = start_http_server(port, host, registry=registry)
        except OSError as error:
            raise InputError(
                f"port {port} cannot be used ({error.strerror}); give another with --port"
            ) from None
        self._server = server
        return server.server_port

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
