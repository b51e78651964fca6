"""The device mesh, with the axes dp (data), cp (context) and mp (model), and shardings on it."""

import contextlib
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mesh_transformer.config import Config
from mesh_transformer.mesh.declaration import is_spec
from mesh_transformer.mesh.device_order import arranged, axes_of
from mesh_transformer.util import InputError

SPARE_DEVICES = 8  # minimum number of virtual CPU devices when a model is loaded without a config


def use_virtual_devices(count: int) -> None:
    """Make JAX's CPU backend provide `count` virtual devices, unless their number is already set.

    This function does nothing if JAX's backends have already started, or if `XLA_FLAGS` or
    `jax_num_cpu_devices` already sets the number.  On a machine with an accelerator, the
    accelerator remains the default backend.
    """
    chosen = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if chosen or jax.config.jax_num_cpu_devices != -1:  # type: ignore[attr-defined]
        return
    # JAX raises RuntimeError if its backends have already started; their devices are then kept.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)


def fit_to_devices(saved: Config, changes: dict[str, Any]) -> Config:
    """Return a saved config adapted to the devices of this machine.

    mp (`cores_per_replica`) becomes the greatest common divisor of its saved value and the number
    of devices.  On CPUs mp becomes 1, because virtual devices share the same cores.  With `norm`
    "layernorm-desync", mp is kept, because the parameters depend on it.  `attention` becomes
    "auto", because the saved value was chosen for the devices of the training run, and so was
    `offload`, which becomes "none".
    """
    saved = saved.replace(attention="auto", offload="none")
    assert saved.tpu_size is not None
    if "tpu_size" in changes:
        # mp is chosen below, so it need not divide this number.
        alone = {"cores_per_replica": 1, "context_parallel": 1, "tpu_size": changes["tpu_size"]}
        wanted = saved.replace(**alone).tpu_size
        assert wanted is not None
        use_virtual_devices(max(wanted, SPARE_DEVICES))
        if wanted > jax.device_count():
            raise InputError(
                f"tpu_size is {wanted}, but there are {jax.device_count()} devices; "
                "lower it, or load this model before others use JAX"
            )
    # Create more devices than this model needs: their number is fixed once JAX has started, and
    # another model loaded later may need more.
    use_virtual_devices(saved.tpu_size * -(-SPARE_DEVICES // saved.tpu_size))
    if saved.norm == "layernorm-desync":  # its parameters depend on mp
        size = saved.tpu_size // saved.context_parallel
        return saved.replace(context_parallel=1, tpu_size=size)
    on_cpu = jax.default_backend() == "cpu"
    shards = 1 if on_cpu else math.gcd(saved.cores_per_replica, jax.device_count())
    return saved.replace(cores_per_replica=shards, context_parallel=1, tpu_size=shards, zero=0)


def make_mesh(config: Config, devices: Sequence[Any] | None = None) -> Mesh:
    """Return the (dp, cp, mp) mesh over `devices`, in the order in which they are given.

    By default, these are all JAX devices, in an order in which TPUs that are linked to each other
    follow each other (see `device_order.arranged`).  mp is `config.cores_per_replica`, cp is
    `config.context_parallel`, and dp is the number of devices divided by both.  If cp is 1, the
    mesh has no such axis.

    Raises:
      InputError: if the number of devices is not a multiple of mp times cp.
    """
    is_plain = devices is not None
    devices = jax.devices() if devices is None else devices
    mp, cp = config.cores_per_replica, config.context_parallel
    if not len(devices):
        raise InputError("make_mesh: there are no devices in `devices`; give at least one")
    if len(devices) % config.replica_devices:
        platform = devices[0].platform
        remedy = f"set cores_per_replica to a divisor of {len(devices)}"
        if cp > 1:
            remedy = f"set it and context_parallel ({cp}) to numbers whose product is one"
        # JAX may have started before the virtual devices were set.
        if platform == "cpu" and len(devices) < config.replica_devices:
            flag = f"--xla_force_host_platform_device_count={config.tpu_size}"
            remedy += f", create the model before other uses of JAX, or start with XLA_FLAGS={flag}"
        raise InputError(
            f"config: cores_per_replica is {mp}, but there are {len(devices)} {platform} devices; "
            f"{remedy}"
        )
    dp = len(devices) // config.replica_devices
    if config.replicas(dp) % dp:
        raise InputError(
            f"config: virtual_mesh is {config.virtual_mesh}, whose dp is not divisible by the {dp} "
            f"replicas of {len(devices)} devices; change it, or use fewer devices"
        )
    array = arranged(devices, mp, cp)
    if is_plain:
        array = np.array(devices, object).reshape(array.shape)
    return Mesh(array, axes_of(array))


def abstract(shapes: Any, layout: Any) -> Any:
    """Return a tree of ShapeDtypeStructs with the given shapes, dtypes and shardings.

    Args:
      shapes: a tree whose leaves have a `shape` and a `dtype`.
      layout: a tree of shardings with the same structure.
    """
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        layout,
    )


def named(mesh: Mesh, specs: Any) -> Any:
    """Convert a tree of PartitionSpecs to NamedShardings on `mesh`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)
