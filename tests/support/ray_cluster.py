"""A Ray cluster whose nodes, with CPUs, are on this machine."""

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from typing import Any

from mesh_transformer.pod.ray_head import HEAD_ENVIRONMENT

ATTEMPTS = 4  # to start a node: on a busy machine, a start may exceed Ray's limit of 30 s
# Without a dashboard, a log monitor and an autoscaler, whose imports take most of the start.
NODE: dict[str, Any] = {
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
    "object_store_memory": 80 << 20,
}


def add_node(cluster: Any, cpus: int) -> Any:
    """Add a node with some CPUs to a `ray.cluster_utils.Cluster`, and return it."""
    for attempt in range(ATTEMPTS):
        try:
            return cluster.add_node(num_cpus=cpus, **NODE, **_ports())
        except Exception:  # Ray's is of no narrower class
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError


def _ports() -> dict[str, int]:
    """Return free ports for a node's agents; Ray waits for ports that the agents choose."""
    names = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("", 0))) for _ in names]
        return {name: server.getsockname()[1] for name, server in zip(names, servers, strict=True)}


@contextlib.contextmanager
def ray_cluster(cpus: int) -> Iterator[Any]:
    """Run a cluster of one node with some CPUs; this process is not connected to it."""
    os.environ.update(HEAD_ENVIRONMENT)
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    from ray.cluster_utils import Cluster  # reads the environment

    cluster = Cluster()
    try:
        add_node(cluster, cpus)
        yield cluster
    finally:
        cluster.shutdown()
