"""Start a `TPUCluster` for a Config, on local processes or on the hosts of a TPU.

`TPUCluster` itself starts the process of each host, with `hosts.start_process`.  Without a driver,
Slurm or the user starts the processes; see `every_host`.
"""

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mesh_transformer.config import Config
from mesh_transformer.pod.fit import largest_fit, mesh_name
from mesh_transformer.pod.ray_head import (
    OBJECT_STORE,
    RESOURCE,
    RayHead,
    connected,
    is_connected,
    local_address,
)
from mesh_transformer.pod.tpu.api import PreemptedError
from mesh_transformer.pod.tpu.install import ray_token
from mesh_transformer.pod.tpu.spec import SshOptions, TpuSpec
from mesh_transformer.pod.tpu.vm import Limits, TpuVm
from mesh_transformer.storage.access import AnyPath
from mesh_transformer.util import HostError, InputError, StoppedError

if TYPE_CHECKING:
    from mesh_transformer.pod.cluster import TPUCluster
    from mesh_transformer.pod.elastic import Present
    from mesh_transformer.pod.hosts import Host

FIRST_TRIES = 3  # maximum attempts to start the hosts before they have all joined once
SECONDS_TO_RETURN = 300.0  # for the machines of a Ray cluster
BATCHES_IN_STORE = 8  # half for training steps in flight, half for validation and sampling


def build_model(
    config: Config | dict[str, Any] | AnyPath,
    hosts: "list[Host] | None" = None,
    *original: object,
    **options: Any,
) -> "TPUCluster":
    """Return a new `TPUCluster` on `hosts`, which has no parameters yet.

    The caller must then call the cluster's `init`, `load` or `restore`.

    Args:
      config: a Config, a dict of config keys and values, or the path of a config file.
      hosts: as yielded by the functions of `local_machines`, `ray_machines` and `tpu_machines`.
      original: must be empty.  Any further positional argument, as in calls that were written for
        the original mesh-transformer-jax, raises InputError.
      options: keyword arguments of `TPUCluster`, such as `heartbeat`.
    """
    if original or not hosts or isinstance(hosts, str):
        raise InputError(
            "build_model(params, tpu_name, region, preemptible) is now build_model(config, hosts); "
            "get hosts from mesh_transformer.pod.launch.tpu_machines or local_machines, or run "
            "train.py --tpu NAME"
        )
    from mesh_transformer.pod.cluster import TPUCluster

    return TPUCluster(Config.of(config), hosts, **options)


def local_machines(
    config: Config, count: int
) -> "contextlib.AbstractContextManager[Callable[[], list[Host]]]":
    """Return a context manager that starts Ray and provides `count` hosts on this machine.

    The context manager yields a function that returns the hosts.  Call the function before each
    attempt to create a `TPUCluster`; the function restarts Ray if necessary.  Ray and the hosts'
    processes are killed when the `with` block ends, or when this process ends.

    Raises:
      InputError: immediately, before the `with` block, if `count` does not divide the config's
        `tpu_size`.
    """
    _check_count(config, count)
    return _local_machines(config, count)


def local_nodes(
    config: Config, count: int, wait: float
) -> "contextlib.AbstractContextManager[LocalNodes]":
    """Return a context manager like `local_machines`, whose hosts can be lost and return.

    Each host is a Ray node of its own, as if on a machine of its own.

    Args:
      wait: seconds to wait for a host that has been lost.

    Raises:
      InputError: as for `local_machines`.
    """
    _check_count(config, count)
    return _local_nodes(config, count, wait)


def _check_count(config: Config, count: int) -> None:
    assert config.tpu_size is not None
    if count < 1 or config.tpu_size % count:
        raise InputError(
            f"--local-hosts is {count}, which does not divide the config's tpu_size "
            f"{config.tpu_size}; give a divisor of {config.tpu_size}"
        )


@contextlib.contextmanager
def _local_machines(config: Config, count: int) -> "Iterator[Callable[[], list[Host]]]":
    if is_connected():  # this process is a replica of a server, in a Ray cluster
        from mesh_transformer.pod.hosts import local_hosts

        yield lambda: local_hosts(config, count)
        return
    with RayHead(_object_store(config)) as head:
        from mesh_transformer.pod.hosts import local_hosts

        def hosts() -> "list[Host]":
            head.revive()
            return local_hosts(config, count)

        yield hosts


@contextlib.contextmanager
def ray_machines(config: Config, address: str) -> "Iterator[ClusterHosts]":
    """Return a context manager that connects to a Ray cluster and provides its machines as hosts.

    The context manager yields a function that returns the hosts.  Call the function before each
    attempt to create a `TPUCluster`.  The cluster stays when the `with` block ends.

    Args:
      address: see `ray_head.connected`.
    """
    with connected(address):
        yield ClusterHosts(config)


class ClusterHosts:
    """The machines of the Ray cluster to which this process is connected.

    They are those with accelerators.  If none has any, all machines share `tpu_size` virtual CPU
    devices equally.  From the second call on, as many machines are returned as by the first one.

    Raises:
      InputError: if the machines cannot share the devices equally.
      HostError: if some are still missing after `SECONDS_TO_RETURN`.
    """

    def __init__(self, config: Config):
        self._config = config
        self._count, self._has_accelerators = 0, False  # of the first call

    def __call__(self) -> "list[Host]":
        hosts, count = self._present(), self._count
        deadline = time.monotonic() + SECONDS_TO_RETURN
        while len(hosts) < count:
            if time.monotonic() > deadline:
                raise HostError(f"{len(hosts)} of {count} machines are in the Ray cluster")
            time.sleep(1.0)
            hosts = self._present()
        hosts = hosts[: count or None]
        self._count, self._has_accelerators = len(hosts), bool(hosts[0].accelerators)
        if self._has_accelerators:
            return hosts
        assert self._config.tpu_size is not None
        devices, rest = divmod(self._config.tpu_size, len(hosts))
        if rest:
            raise InputError(
                f"--ray: {len(hosts)} machines without accelerators cannot share the config's "
                f"tpu_size, {self._config.tpu_size} devices, equally; change tpu_size"
            )
        return [dataclasses.replace(host, devices=devices) for host in hosts]

    def _present(self) -> "list[Host]":
        """Return the machines that are in the cluster now, of the kind of the first ones."""
        from mesh_transformer.pod.hosts import cluster_hosts

        return [h for h in cluster_hosts() if h.accelerators or not self._has_accelerators]


class GroupHosts(ClusterHosts):
    """The machines of this process's placement group of Ray, like `ClusterHosts`.

    Args:
      count: their number.
    """

    def __init__(self, config: Config, count: int):
        super().__init__(config)
        self._count = count

    def _present(self) -> "list[Host]":
        from mesh_transformer.pod.hosts import group_hosts

        return group_hosts()


@contextlib.contextmanager
def _local_nodes(config: Config, count: int, wait: float) -> "Iterator[LocalNodes]":
    addresses = [local_address(number) for number in range(count)]
    with RayHead(_object_store(config), addresses) as head:
        yield LocalNodes(config, head, addresses, wait)


class LocalNodes:
    """Ray nodes that stand for machines; an `elastic.ElasticHosts`.

    Args:
      wait: seconds to wait for a host that has been lost.  After that, the host is used again once
        it has returned, but not waited for.
    """

    def __init__(self, config: Config, head: RayHead, addresses: list[str], wait: float):
        assert config.tpu_size is not None
        self._config, self._head, self._addresses, self._wait = config, head, addresses, wait
        self._devices = config.tpu_size // len(addresses)  # of each host
        self._awaited = addresses

    def __call__(self) -> "Present":
        from mesh_transformer.pod.elastic import Present
        from mesh_transformer.pod.hosts import duplicate, joined_hosts

        self._head.revive()
        joined = joined_hosts(self._addresses, self._wait, self._awaited)
        present = [host.address for host in joined]
        for address in self._awaited:
            if address not in present:
                missing = (
                    f"host {address} is missing; to replace it: ray start --num-cpus 0 "
                    f"--address {self._head.address} --node-ip-address {address} "
                    f"--resources '{{\"{RESOURCE}\": 1}}'"
                )
                print(duplicate(address) or missing, file=sys.stderr, flush=True)
        self._awaited = present
        config, used = self._fit(len(joined))
        hosts = [dataclasses.replace(host, devices=self._devices) for host in joined[:used]]
        missing = "" if config == self._config else self._counted(len(joined))
        return Present(hosts, config, missing)

    def larger_mesh(self, used: int) -> str:
        """Return why a restart would give a run that uses `used` hosts a larger mesh, or ""."""
        count = self.present()
        if count <= used:
            return ""
        config, usable = self._fit(count)
        if usable <= used:
            return ""
        return f"{self._counted(count)} again, which allows {mesh_name(config)}"

    def present(self) -> int:
        """Return the number of hosts that are present now."""
        from mesh_transformer.pod.hosts import missing_hosts

        return len(self._addresses) - len(missing_hosts(self._addresses))

    def _counted(self, present: int) -> str:
        return f"{present} of {len(self._addresses)} hosts are present"

    def _fit(self, present: int) -> tuple[Config, int]:
        """Return the config for the largest mesh, and how many hosts it uses."""
        sizes = range(self._devices, self._devices * present + 1, self._devices)
        config = largest_fit(self._config, sizes)
        assert config.tpu_size is not None
        return config, config.tpu_size // self._devices


def tpu_machines(
    config: Config, spec: TpuSpec, ssh: SshOptions | None = None
) -> "contextlib.AbstractContextManager[TpuHosts]":
    """Return a context manager that creates a TPU and provides its hosts.

    The TPU is created when the `with` block begins and deleted when the block ends.  The context
    manager yields a function that returns the hosts.  Call the function before each attempt to
    create a `TPUCluster`.  If Google Cloud has preempted the TPU, the function creates a new one.
    A TPU that a killed process left behind is reused, as described for `adopt` in `TpuVm`.

    Args:
      ssh: how to log in to the hosts (default: `SshOptions()`).

    Raises:
      InputError: immediately, before the `with` block, if the TPU's number of devices is not the
        config's `tpu_size`, or if the SSH key or the Google Cloud credentials are missing.
    """
    _check_devices(config, spec)
    return _tpu_machines(config, TpuVm(spec, ssh=ssh, adopt=True))


def smaller_tpus(
    config: Config, spec: TpuSpec, wait: float, ssh: SshOptions | None = None
) -> "contextlib.AbstractContextManager[ElasticTpu]":
    """Return a context manager like `tpu_machines`, which can provide a smaller TPU.

    Args:
      wait: seconds for which only the whole TPU is requested if the zone has no capacity for it.
        After that, smaller ones are requested as well, down to one replica.

    Raises:
      InputError: as for `tpu_machines`, and if the TPU is queued.
    """
    _check_devices(config, spec)
    if spec.queued:
        raise InputError("--wait cannot be combined with --queued; remove one of them")
    types = [part.accelerator_type for part in spec.smaller() if _fits(config, part.devices)]
    if types:
        line = f"if there is no {spec.accelerator_type} for {wait:g} s: {', '.join(types)}"
        print(line, file=sys.stderr, flush=True)
    limits = Limits(smaller_after=wait)
    return _smaller_tpus(config, TpuVm(spec, ssh=ssh, adopt=True, smaller=types, limits=limits))


def _check_devices(config: Config, spec: TpuSpec) -> None:
    if spec.devices != config.tpu_size:
        raise InputError(
            f"TPU type {spec.accelerator_type} has {spec.devices} devices, but the config's "
            f"tpu_size is {config.tpu_size}; choose another TPU type or change tpu_size"
        )


@contextlib.contextmanager
def _tpu_machines(config: Config, tpu: TpuVm) -> "Iterator[TpuHosts]":
    with RayHead(_object_store(config)) as head, tpu, _stop_after(tpu.spec.max_hours):
        yield TpuHosts(head, tpu)


@contextlib.contextmanager
def _smaller_tpus(config: Config, tpu: TpuVm) -> "Iterator[ElasticTpu]":
    with _tpu_machines(config, tpu) as hosts:
        yield ElasticTpu(config, hosts)


class TpuHosts:
    """The hosts of a TPU, which is created again if it has been preempted."""

    def __init__(self, head: RayHead, tpu: TpuVm):
        self.tpu = tpu
        self._head = head
        self._known: list[str] = []  # addresses of the TPU's hosts that have joined Ray
        # Once all hosts have joined, every later failure counts as temporary.
        self._tries_left = FIRST_TRIES

    def __call__(self) -> "list[Host]":
        from mesh_transformer.pod.hosts import joined_hosts, missing_hosts

        self._head.revive()
        if _is_gone(self.tpu):
            self._known = []
            self.tpu.recreate()
        try:
            # Once all have joined, Ray is started only on hosts that have left the cluster.  On
            # others, a restart would end the copies of the state in their memory.
            missing = missing_hosts(self._known) if self._known else None
            if missing != []:
                self.tpu.start_ray(self._head.address, ray_token(), only=missing)
            joined = joined_hosts(self.tpu.hosts())
        except StoppedError as error:
            self._tries_left -= 1
            if self._tries_left > 0 or _is_gone(self.tpu):
                raise HostError(str(error)) from error
            raise StoppedError(
                f"{error}; giving up after {FIRST_TRIES} attempts to start the hosts"
            ) from None
        self._tries_left = sys.maxsize
        self._known = [host.address for host in joined]
        return joined


class ElasticTpu:
    """The hosts of a TPU, or of a smaller TPU in its place; an `elastic.ElasticHosts`."""

    def __init__(self, config: Config, hosts: TpuHosts):
        self._config, self._hosts = config, hosts

    def __call__(self) -> "Present":
        from mesh_transformer.pod.elastic import Present

        hosts, spec = self._hosts(), self._hosts.tpu.spec
        config = largest_fit(self._config, [spec.devices])
        smaller = config.tpu_size != self._config.tpu_size
        missing = f"TPU {spec.name!r} is only a {spec.accelerator_type}" if smaller else ""
        return Present(hosts, config, missing)

    def larger_mesh(self, used: int) -> str:
        """Return "": whether the zone has capacity again is unknown until a TPU is requested."""
        return ""


def _fits(config: Config, size: int) -> bool:
    """Return whether a run can continue with `size` devices and the same mp."""
    try:
        return largest_fit(config, [size]).cores_per_replica == config.cores_per_replica
    except HostError:
        return False


@contextlib.contextmanager
def _stop_after(hours: float | None) -> Iterator[None]:
    """Send SIGTERM to this process if the `with` block lasts longer than `hours`.

    On SIGTERM, a training run saves a checkpoint and deletes its TPU.  If `hours` is None, there is
    no time limit.
    """
    if hours is None:
        yield
        return

    def stop() -> None:
        print(f"{hours:g} hours (--max-hours) have passed; stopping", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(3600 * hours, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_gone(tpu: TpuVm) -> bool:
    try:
        tpu.check()
    except PreemptedError:
        return True
    return False


def _object_store(config: Config) -> int:
    """Return a size in bytes for Ray's object store that suffices for all batches in flight."""
    assert config.tpu_size is not None
    replicas = config.replicas(config.tpu_size // config.replica_devices)
    sequences = config.per_replica_batch * replicas
    tokens = sequences * config.gradient_accumulation_steps * config.seq
    return max(OBJECT_STORE, BATCHES_IN_STORE * tokens * 2 * 4)
