"""The hosts of a mesh as Ray knows them: found, given a process each, and rid of it."""

import contextlib
import dataclasses
import os
import re
import signal
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tqdm import tqdm

from mesh_transformer.config import Config
from mesh_transformer.pod.runner import NetworkRunner
from mesh_transformer.util import HostError

RESOURCE = "tpu"  # what scripts/init_ray.sh says that a host has
SECONDS_TO_END = 1.5
SECONDS_TO_KILL = 10.0


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine, or a part of one, that runs one process of the mesh.

    Attributes:
      node: Ray's id of the machine.
      address: where the other hosts reach it.
      devices: as many virtual CPU devices; None where it has an accelerator.
    """

    node: str
    address: str
    devices: int | None = None


def local_hosts(config: Config, count: int) -> list[Host]:
    """`count` processes of this machine; the config's devices divide by it."""
    assert config.tpu_size is not None
    here = ray.get_runtime_context().get_node_id()
    return [Host(here, "127.0.0.1", config.tpu_size // count)] * count


def joined_hosts(addresses: Sequence[str], seconds: float = 300.0) -> list[Host]:
    """The machines at `addresses`, in that order, once all have joined this Ray cluster.

    One that has just vanished is still among them for some seconds, in which its successor at
    the same address is not.

    Raises:
      HostError: where that takes longer than `seconds`.
    """
    deadline = time.monotonic() + seconds
    with tqdm(total=len(addresses), desc="hosts that joined", unit="host") as bar:
        while True:
            alive = [n for n in ray.nodes() if n["Alive"] and n["Resources"].get(RESOURCE)]
            there = {
                address: [n["NodeID"] for n in alive if n["NodeManagerAddress"] == address]
                for address in addresses
            }
            missing = [address for address in addresses if len(there[address]) != 1]
            bar.update(len(addresses) - len(missing) - bar.n)
            if not missing:
                return [Host(there[address][0], address) for address in addresses]
            if time.monotonic() > deadline:
                raise HostError(
                    f"host {missing[0]} has not joined within {seconds:.0f} s; it has to reach "
                    "this machine's ports, and run the same Ray"
                )
            time.sleep(1.0)


def start_process(rank: int, host: Host) -> Any:
    """The handle of a new `NetworkRunner` on a host; it is made in the background."""
    variables = {}
    if host.devices is not None:
        # The devices are this process's own number, whatever the driver's flags say.
        flags = os.environ.get("XLA_FLAGS", "")
        flags = re.sub(r"--xla_force_host_platform_device_count=\S*", "", flags)
        variables = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    remote: Any = ray.remote  # whose declared types know no options by name
    options = {"num_cpus": 0, "max_restarts": 0, "concurrency_groups": {"health": 1}}
    options["enable_task_events"] = False  # what only a dashboard would show
    runner = remote(**options, **_on(host), runtime_env={"env_vars": variables})(NetworkRunner)
    return runner.remote(rank)


def kill_processes(actors: Sequence[Any], pids: Sequence[int], hosts: Sequence[Host]) -> None:
    """Ends the processes; by SIGKILL too, since Ray alone does not end one that is stopped.

    `pids` may be empty, where they are not known yet.  When this returns, none of them on a
    machine that can be reached writes or calls any more.
    """
    for actor in actors:
        ray.kill(actor)
    here = ray.get_runtime_context().get_node_id()
    remote: Any = ray.remote
    elsewhere = [
        remote(num_cpus=0, max_retries=0, **_on(host))(_make_sure).remote([pid])
        for pid, host in zip(pids, hosts, strict=False)
        if host.node != here
    ]
    _make_sure([pid for pid, host in zip(pids, hosts, strict=False) if host.node == here])
    if elsewhere:
        ray.wait(elsewhere, num_returns=len(elsewhere), timeout=SECONDS_TO_KILL)


def _make_sure(pids: list[int]) -> None:
    """Kills what of this machine's processes Ray has not ended within `SECONDS_TO_END`.

    Ray tells the user of every process that goes without its word, so it comes first.
    """
    deadline = time.monotonic() + SECONDS_TO_END
    while pids and time.monotonic() < deadline:
        time.sleep(0.02)
        pids = [pid for pid in pids if _exists(pid)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _on(host: Host) -> dict[str, Any]:
    """Ray's options for what has to run on this host and nowhere else."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(host.node, soft=False)}
