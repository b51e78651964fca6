"""Start a `TPUCluster` for a Config, on local processes or on the hosts of a TPU."""

import contextlib
import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mesh_transformer.config import Config
from mesh_transformer.pod.ray_head import OBJECT_STORE, RESOURCE, RayHead, local_address
from mesh_transformer.pod.tpu.api import PreemptedError
from mesh_transformer.pod.tpu.install import ray_token
from mesh_transformer.pod.tpu.spec import SshOptions, TpuSpec
from mesh_transformer.pod.tpu.vm import TpuVm
from mesh_transformer.util import HostError, InputError, StoppedError

if TYPE_CHECKING:
    from mesh_transformer.pod.cluster import TPUCluster
    from mesh_transformer.pod.host_copies import HostCopies
    from mesh_transformer.pod.hosts import Host

FIRST_TRIES = 3  # maximum attempts to start the hosts before they have all joined once
BATCHES_IN_STORE = 8  # half for training steps in flight, half for validation and sampling


def build_model(
    config: Config, hosts: "list[Host]", *original: object, **options: Any
) -> "TPUCluster":
    """Return a new `TPUCluster` on `hosts`, which has no parameters yet.

    The caller must then call the cluster's `init`, `load` or `restore`.

    Args:
      original: must be empty.  Any further positional argument, as in calls that were written for
        the original mesh-transformer-jax, raises InputError.
      options: keyword arguments of `TPUCluster`, such as `heartbeat`.
    """
    if original or hosts is None or isinstance(hosts, str):
        raise InputError(
            "build_model(params, tpu_name, region, preemptible) is now build_model(config, hosts); "
            "get hosts from mesh_transformer.pod.launch.tpu_machines, or run train.py --tpu NAME"
        )
    from mesh_transformer.pod.cluster import TPUCluster

    return TPUCluster(config, hosts, **options)


def new_copies(config: Config) -> "HostCopies | None":
    """Return a new `HostCopies` if the config sets `memory_every`, else None.

    A `HostCopies` keeps copies of the training state in the hosts' memory.  Pass it as the argument
    `copies` to every call of `build_model` in a training run.  Call this function inside the `with`
    block of `local_machines` or `tpu_machines`, because Ray must not be imported earlier.
    """
    if config.memory_every is None:
        return None
    from mesh_transformer.pod.host_copies import HostCopies

    return HostCopies()


def local_machines(
    config: Config, count: int, wait: float | None = None
) -> "contextlib.AbstractContextManager[Callable[[], list[Host]]]":
    """Return a context manager that starts Ray and provides `count` hosts on this machine.

    The context manager yields a function that returns the hosts.  Call the function before each
    attempt to create a `TPUCluster`; the function restarts Ray if necessary.  Ray and the hosts'
    processes are killed when the `with` block ends, or when this process ends.

    Args:
      wait: if given, each host is a Ray node of its own, as if on a machine of its own.  The
        function is then an `elastic.ElasticHosts`, which waits this many seconds for a host that
        has been lost.

    Raises:
      InputError: immediately, before the `with` block, if `count` does not divide the config's
        `tpu_size`.
    """
    assert config.tpu_size is not None
    if count < 1 or config.tpu_size % count:
        raise InputError(
            f"--local-hosts is {count}, which does not divide the config's tpu_size "
            f"{config.tpu_size}; give a divisor of {config.tpu_size}"
        )
    return _local_machines(config, count) if wait is None else _local_nodes(config, count, wait)


@contextlib.contextmanager
def _local_machines(config: Config, count: int) -> "Iterator[Callable[[], list[Host]]]":
    with RayHead(_object_store(config)) as head:
        from mesh_transformer.pod.hosts import local_hosts

        def hosts() -> "list[Host]":
            head.revive()
            return local_hosts(config, count)

        yield hosts


@contextlib.contextmanager
def _local_nodes(config: Config, count: int, wait: float) -> "Iterator[LocalNodes]":
    addresses = [local_address(number) for number in range(count)]
    with RayHead(_object_store(config), addresses) as head:
        assert config.tpu_size is not None
        yield LocalNodes(head, addresses, config.tpu_size // count, wait)


class LocalNodes:
    """Ray nodes that stand for machines; an `elastic.ElasticHosts`.

    Args:
      devices: number of virtual CPU devices per host.
      wait: seconds to wait for a host that has been lost.  After that, the host is used again once
        it has returned, but not waited for.
    """

    def __init__(self, head: RayHead, addresses: list[str], devices: int, wait: float):
        self.total = len(addresses)
        self._head, self._addresses = head, addresses
        self._devices, self._wait = devices, wait
        self._awaited = addresses

    def __call__(self) -> "list[Host]":
        from mesh_transformer.pod.hosts import joined_hosts

        self._head.revive()
        joined = joined_hosts(self._addresses, self._wait, self._awaited)
        present = [host.address for host in joined]
        for address in self._awaited:
            if address not in present:
                print(
                    f"host {address} is missing; to replace it: ray start --num-cpus 0 "
                    f"--address {self._head.address} --node-ip-address {address} "
                    f"--resources '{{\"{RESOURCE}\": 1}}'",
                    file=sys.stderr,
                    flush=True,
                )
        self._awaited = present
        return [dataclasses.replace(host, devices=self._devices) for host in joined]

    def present(self) -> int:
        from mesh_transformer.pod.hosts import missing_hosts

        return self.total - len(missing_hosts(self._addresses))


def tpu_machines(
    config: Config, spec: TpuSpec, ssh: SshOptions | None = None
) -> "contextlib.AbstractContextManager[Callable[[], list[Host]]]":
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
    if spec.devices != config.tpu_size:
        raise InputError(
            f"TPU type {spec.accelerator_type} has {spec.devices} devices, but the config's "
            f"tpu_size is {config.tpu_size}; choose another TPU type or change tpu_size"
        )
    return _tpu_machines(config, TpuVm(spec, ssh=ssh, adopt=True))


@contextlib.contextmanager
def _tpu_machines(config: Config, tpu: TpuVm) -> "Iterator[Callable[[], list[Host]]]":
    with RayHead(_object_store(config)) as head, tpu, _stop_after(tpu.spec.max_hours):
        known: list[str] = []  # addresses of the TPU's hosts that have joined Ray
        # Once all hosts have joined, every later failure counts as temporary.
        tries_left = FIRST_TRIES

        def hosts() -> "list[Host]":
            nonlocal tries_left
            head.revive()
            if _is_gone(tpu):
                known.clear()
                tpu.recreate()
            try:
                joined = _join(tpu, head.address, known)
            except StoppedError as error:
                tries_left -= 1
                if tries_left > 0 or _is_gone(tpu):
                    raise HostError(str(error)) from error
                raise StoppedError(
                    f"{error}; giving up after {FIRST_TRIES} attempts to start the hosts"
                ) from None
            tries_left = sys.maxsize
            known[:] = [host.address for host in joined]
            return joined

        yield hosts


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


def _join(tpu: TpuVm, head: str, known: list[str]) -> "list[Host]":
    """Start Ray on the TPU's hosts; return the hosts once all have joined the Ray cluster.

    Args:
      head: "HOST:PORT" of the Ray head.
      known: addresses of the hosts if all have joined before, else empty.  Ray is then started only
        on hosts that have left the cluster.  A restart of Ray on the other hosts would end the
        copies of the state in their memory.
    """
    from mesh_transformer.pod.hosts import joined_hosts, missing_hosts

    missing = missing_hosts(known) if known else None
    if missing != []:
        tpu.start_ray(head, ray_token(), only=missing)
    return joined_hosts(tpu.hosts())


def _object_store(config: Config) -> int:
    """Return a size in bytes for Ray's object store that suffices for all batches in flight."""
    assert config.tpu_size is not None
    replicas = config.replicas(config.tpu_size // config.cores_per_replica)
    sequences = config.per_replica_batch * replicas
    tokens = sequences * config.gradient_accumulation_steps * config.seq
    return max(OBJECT_STORE, BATCHES_IN_STORE * tokens * 2 * 4)
