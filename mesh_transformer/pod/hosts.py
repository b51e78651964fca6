"""Wait for the hosts of a mesh to join the Ray cluster; start and kill the hosts' processes."""

import contextlib
import dataclasses
import os
import re
import signal
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group_table,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)
from tqdm import tqdm

from mesh_transformer import log_lines
from mesh_transformer.config import Config
from mesh_transformer.pod.ray_head import RESOURCE
from mesh_transformer.pod.runner import NetworkRunner
from mesh_transformer.util import HostError, is_running

SECONDS_TO_END = 1.5  # for Ray to end a process before it is sent SIGKILL
ACCELERATORS = ("GPU", "TPU")  # Ray's names
SECONDS_TO_KILL = 10.0  # for the other machines to kill their processes


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine, or a part of a machine, that runs one process of the mesh.

    Attributes:
      node: the machine's node id in the Ray cluster.
      address: IP address at which the other hosts reach this host.
      devices: number of virtual CPU devices; None to use the machine's accelerators.
      accelerators: what the process reserves of Ray's resources `GPU` and `TPU` on the machine.
      bundle: the number of the bundle that holds these, in this process's placement group of Ray;
        None if they are not in one.
    """

    node: str
    address: str
    devices: int | None = None
    accelerators: tuple[tuple[str, float], ...] = ()
    bundle: int | None = None


def local_hosts(config: Config, count: int) -> list[Host]:
    """Return `count` hosts on this machine, with `tpu_size` virtual CPU devices in total.

    The config's `tpu_size` must be a multiple of `count`, because all hosts get the same number of
    devices.
    """
    assert config.tpu_size is not None
    this_node = ray.get_runtime_context().get_node_id()
    return [Host(this_node, "127.0.0.1", config.tpu_size // count)] * count


def cluster_hosts() -> list[Host]:
    """Return the machines of this Ray cluster, ordered by address: those with accelerators, if any.

    The processes on them reserve all accelerators.
    """
    hosts = [
        Host(node["NodeID"], node["NodeManagerAddress"], None, _accelerators(node["Resources"]))
        for node in ray.nodes()
        if node["Alive"]
    ]
    hosts.sort(key=lambda host: (host.address, host.node))
    return [host for host in hosts if host.accelerators] or hosts


def group_hosts() -> list[Host]:
    """Return the machines of the bundles in this process's placement group of Ray, in order.

    The processes on them reserve the accelerators of the bundles.  Machines that Ray has lost, and
    not replaced yet, are left out.
    """
    table: Any = placement_group_table(_group())
    addresses = {
        node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]
    }
    return [
        Host(node, addresses[node], None, _accelerators(table["bundles"][bundle]), bundle)
        for bundle, node in sorted(table["bundles_to_node_id"].items())
        if node in addresses
    ]


def _group() -> PlacementGroup:
    group = get_current_placement_group()
    assert group is not None
    return group


def _accelerators(resources: dict[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple((name, resources[name]) for name in ACCELERATORS if resources.get(name))


def joined_hosts(
    addresses: Sequence[str], seconds: float = 300.0, awaited: Sequence[str] | None = None
) -> list[Host]:
    """Wait until the machines at `addresses` have joined this Ray cluster; return them as `Host`s.

    The result is in the order of `addresses`.  If a machine was replaced by another one with the
    same address, Ray lists both for some seconds.  This function then waits until Ray lists only
    the new machine.

    Args:
      awaited: if given, wait only for these of the machines, and return all machines that have
        joined, as soon as the awaited ones have, or once `seconds` have passed.

    Raises:
      HostError: if the machines have not all joined within `seconds`; with `awaited`, if none has.
    """
    deadline = time.monotonic() + seconds
    with tqdm(total=len(addresses), desc="hosts joined", unit="host") as bar:
        while True:
            nodes = _nodes_at(addresses)
            missing = [address for address in addresses if len(nodes[address]) != 1]
            bar.update(len(addresses) - len(missing) - bar.n)
            joined = [address for address in addresses if address not in missing]
            late = time.monotonic() > deadline
            complete = not missing if awaited is None else not set(missing) & {*awaited}
            if joined and (complete or (late and awaited is not None)):
                return [Host(nodes[address][0], address) for address in joined]
            if late:
                if line := duplicate(missing[0]):
                    raise HostError(line)
                raise HostError(
                    f"host {missing[0]} has not joined the Ray cluster within {seconds:.0f} s; "
                    "check that the host can reach this machine's ports and runs the same version "
                    "of Ray"
                )
            time.sleep(1.0)


def missing_hosts(addresses: Sequence[str]) -> list[str]:
    """Return the addresses at which Ray lists no running machine, or more than one."""
    return [address for address, nodes in _nodes_at(addresses).items() if len(nodes) != 1]


def duplicate(address: str) -> str:
    """Return a line for the user if several Ray nodes run at an address, else ""."""
    count = len(_nodes_at([address])[address])
    if count < 2:
        return ""
    return f"{count} Ray nodes have joined as host {address}; stop Ray there, and start it once"


def _nodes_at(addresses: Sequence[str]) -> dict[str, list[str]]:
    """Return {address: Ray's node ids of the running machines at that address}."""
    alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(RESOURCE)]
    return {
        address: [node["NodeID"] for node in alive if node["NodeManagerAddress"] == address]
        for address in addresses
    }


def start_process(rank: int, host: Host) -> Any:
    """Start the `NetworkRunner` of process `rank` on `host`, and return its Ray actor.

    This function does not wait until the process has started.
    """
    remote: Any = ray.remote  # Ray's type annotations lack these options
    options = {"num_cpus": 0, "max_restarts": 0, "concurrency_groups": {"health": 1}}
    options["enable_task_events"] = False  # only Ray's dashboard would use them
    options["runtime_env"] = {"env_vars": _variables(host)}
    reserved = dict(host.accelerators)
    if gpus := reserved.pop("GPU", None):
        options["num_gpus"] = gpus  # Ray hides those that are not reserved
    if reserved:
        options["resources"] = reserved
    return remote(**options, **on(host))(NetworkRunner).remote(rank, own_process=True)


def _variables(host: Host) -> dict[str, str]:
    """Return the environment variables of a host's process that differ from its machine's."""
    if host.devices is None:
        return log_lines.variables()
    # Remove the driver's device count; `NetworkRunner.start` sets the host's own.
    flags = os.environ.get("XLA_FLAGS", "")
    flags = re.sub(r"--xla_force_host_platform_device_count=\S*", "", flags)
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()} | log_lines.variables()


def kill_processes(actors: Sequence[Any], pids: Sequence[int], hosts: Sequence[Host]) -> None:
    """End the hosts' processes, and send SIGKILL to those that Ray cannot end.

    Ray cannot end a process that is suspended (SIGSTOP).  Once this function has returned, the
    processes on all reachable machines no longer write files, so new processes can be started.

    Args:
      actors: Ray actors of the processes.
      pids: process ids in the order of `hosts`; empty if they are not known yet, in which case no
        process is sent SIGKILL.
    """
    for actor in actors:
        ray.kill(actor)
    this_node = ray.get_runtime_context().get_node_id()
    remote: Any = ray.remote
    tasks = [
        remote(num_cpus=0, max_retries=0, **on(host))(_kill_remaining).remote([pid])
        for pid, host in zip(pids, hosts, strict=False)
        if host.node != this_node
    ]
    _kill_remaining([pid for pid, host in zip(pids, hosts, strict=False) if host.node == this_node])
    if tasks:
        ray.wait(tasks, num_returns=len(tasks), timeout=SECONDS_TO_KILL)


def _kill_remaining(pids: list[int]) -> None:
    """Give Ray up to `SECONDS_TO_END` to end these local processes, and then kill the rest.

    The processes are not killed at once, because Ray prints an error for each process that dies
    before Ray has ended it.
    """
    deadline = time.monotonic() + SECONDS_TO_END
    while pids and time.monotonic() < deadline:
        time.sleep(0.02)
        pids = [pid for pid in pids if is_running(pid)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def on(host: Host) -> dict[str, Any]:
    """Return the Ray options that make a task or an actor run on the machine of `host`."""
    if host.bundle is None:
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(host.node, soft=False)}
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(_group(), host.bundle)}
