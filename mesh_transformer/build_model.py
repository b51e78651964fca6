"""From a Config to a running `TPUCluster`: on this machine's processes, or on a TPU's hosts."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mesh_transformer.config import Config
from mesh_transformer.ray_head import OBJECT_STORE, RayHead
from mesh_transformer.util import HostError, InputError

# Both import Ray, which has to wait until `RayHead` has chosen its authentication.
if TYPE_CHECKING:
    from mesh_transformer.ray_hosts import Host
    from mesh_transformer.tpu_cluster import TPUCluster
    from mesh_transformer.tpu_spec import TpuSpec

BATCHES_IN_STORE = 8  # those under way, and as much again for what validation and sampling send


def build_model(config: Config, hosts: "list[Host]", **options: Any) -> "TPUCluster":
    """The config's network over `hosts`, without weights yet; `options` are `TPUCluster`'s."""
    from mesh_transformer.tpu_cluster import TPUCluster

    return TPUCluster(config, hosts, **options)


def local_machines(
    config: Config, count: int
) -> "contextlib.AbstractContextManager[Callable[[], list[Host]]]":
    """What gives `count` processes of this machine, that stand in for hosts, at each attempt.

    They and Ray end with the `with` block, or with this process.

    Raises:
      InputError: at once, where the devices do not divide by `count`.
    """
    assert config.tpu_size is not None
    if count < 1 or config.tpu_size % count:
        raise InputError(
            f"--local-hosts is {count}, which does not divide the config's tpu_size "
            f"{config.tpu_size}; give a divisor of it"
        )
    return _local_machines(config, count)


@contextlib.contextmanager
def _local_machines(config: Config, count: int) -> "Iterator[Callable[[], list[Host]]]":
    with RayHead(_object_store(config)):
        from mesh_transformer.ray_hosts import local_hosts

        yield lambda: local_hosts(config, count)


@contextlib.contextmanager
def tpu_machines(config: Config, spec: "TpuSpec") -> "Iterator[Callable[[], list[Host]]]":
    """What gives the hosts of a TPU at each attempt, which is made again where it was taken away.

    The TPU is deleted at the end of the `with` block.
    """
    from mesh_transformer.tpu_ray import ray_token
    from mesh_transformer.tpu_vm import PreemptedError, TpuVm

    if spec.devices != config.tpu_size:
        raise InputError(
            f"the TPU {spec.accelerator_type} has {spec.devices} devices, expected the config's "
            f"tpu_size {config.tpu_size}"
        )
    with RayHead(_object_store(config)) as head, TpuVm(spec, adopt=True) as tpu:
        from mesh_transformer.ray_hosts import joined_hosts

        def hosts() -> "list[Host]":
            try:
                tpu.check()
            except PreemptedError:
                tpu.make_again()
            addresses = tpu.hosts()
            with contextlib.suppress(HostError):
                return joined_hosts(addresses, seconds=0.0)
            tpu.start_ray(head.address, ray_token())
            return joined_hosts(addresses)

        yield hosts


def _object_store(config: Config) -> int:
    """Bytes for the batches on their way from the driver."""
    assert config.tpu_size is not None
    sequences = config.per_replica_batch * config.tpu_size // config.cores_per_replica
    tokens = sequences * config.gradient_accumulation_steps * config.seq
    return max(OBJECT_STORE, BATCHES_IN_STORE * tokens * 2 * 4)
