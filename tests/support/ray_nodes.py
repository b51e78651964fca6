"""Ray nodes that stand for machines: start one, and let one vanish with all its processes."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from mesh_transformer.pod.ray_head import RESOURCE


@contextlib.contextmanager
def other_node(address: str) -> Iterator[None]:
    """Run another Ray node, as if on a second machine, which ends with the context."""
    with start_node(address) as process:
        try:
            yield
        finally:
            vanish(address)
            process.kill()


def start_node(address: str) -> subprocess.Popen[bytes]:
    """Start a Ray node with a loopback address that joins the cluster of this process."""
    import ray  # imported only after RayHead has set how Ray authenticates

    head = ray.get_runtime_context().gcs_address
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus", "0"]
    command += ["--address", head, "--node-ip-address", address]
    command += ["--resources", f'{{"{RESOURCE}": 1}}']
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def vanish(address: str) -> None:
    """Kill all processes of the Ray node with this address at once, as if its machine was gone."""
    while pids := _processes(address):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _processes(address: str) -> list[int]:
    """Return the raylet with this address and all its descendants, which are not zombies."""
    parents, raylets = {}, set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(path.name)] = int(parent)
                arguments = (path / "cmdline").read_bytes().split(b"\0")
                if f"--node_ip_address={address}".encode() in arguments:
                    raylets.add(int(path.name))
    members = set(raylets)
    while more := {pid for pid, parent in parents.items() if parent in members} - members:
        members |= more
    return sorted(members)
