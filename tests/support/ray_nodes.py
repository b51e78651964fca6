"""Ray nodes that stand for machines: start one, and let one vanish with all its processes."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from mesh_transformer.pod.ray_head import RESOURCE


def cluster_address() -> str:
    """Return the address of the Ray cluster to which this process is connected."""
    import ray  # imported only after RayHead has set how Ray authenticates

    return ray.get_runtime_context().gcs_address


@contextlib.contextmanager
def other_node(address: str) -> Iterator[None]:
    """Run another Ray node, as if on a second machine, which vanishes at the end of the context."""
    cluster = cluster_address()
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus", "0"]
    command += ["--address", cluster, "--node-ip-address", address]
    command += ["--resources", f'{{"{RESOURCE}": 1}}']
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()
        vanish(address, cluster)


def vanish(address: str, cluster: str | None = None) -> None:
    """Kill all processes of a Ray node at once, as if its machine had vanished.

    Args:
      address: the node's address.
      cluster: address of its cluster (default: that of this process); the nodes of other clusters
        on this machine may have the same addresses.
    """
    while pids := _processes(address, cluster or cluster_address()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _processes(address: str, cluster: str) -> set[int]:
    """Return the raylet of a node, and all its descendants that have not ended."""
    wanted = {f"--node_ip_address={address}".encode(), f"--gcs-address={cluster}".encode()}
    parents: dict[int, int] = {}
    members = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(path.name)] = int(parent)
                if wanted <= {*(path / "cmdline").read_bytes().split(b"\0")}:
                    members.add(int(path.name))
    while more := {pid for pid, parent in parents.items() if parent in members} - members:
        members |= more
    return members
