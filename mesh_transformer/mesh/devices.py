"""The (dp, mp) mesh of devices, and layouts on it."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mesh_transformer.config import Config
from mesh_transformer.mesh.declaration import is_spec
from mesh_transformer.util import InputError


def use_virtual_devices(count: int) -> None:
    """Makes the CPU backend show `count` devices, where the caller has not chosen a number.

    Harmless beside an accelerator, which stays the default backend; does nothing once JAX has
    started or where `XLA_FLAGS` or `jax_num_cpu_devices` already say how many.
    """
    chosen = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if chosen or jax.config.jax_num_cpu_devices != -1:  # type: ignore[attr-defined]
        return
    # JAX refuses the setting once its backends run: the caller's devices are then what there is.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)


def make_mesh(config: Config, devices: Sequence[Any] | None = None) -> Mesh:
    """The (dp, mp) mesh of `config.cores_per_replica` columns over `devices` (default: all).

    Raises:
      InputError: when the devices do not divide into replicas of that size.
    """
    devices = jax.devices() if devices is None else devices
    mp = config.cores_per_replica
    if len(devices) % mp:
        platform = devices[0].platform
        remedy = "set cores_per_replica to a divisor of their number"
        if platform == "cpu" and len(devices) < mp:  # JAX ran before it was asked for more
            flag = f"--xla_force_host_platform_device_count={config.tpu_size}"
            remedy += f", or start with XLA_FLAGS={flag}"
        raise InputError(
            f"config: cores_per_replica is {mp}, but there are {len(devices)} {platform} devices; "
            f"{remedy}"
        )
    return Mesh(np.asarray(devices).reshape(-1, mp), ("dp", "mp"))


def abstract(shapes: Any, layout: Any) -> Any:
    """A tree of shapes and dtypes with the NamedShardings of another: arrays without data."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        layout,
    )


def named(mesh: Mesh, specs: Any) -> Any:
    """The tree of PartitionSpecs as NamedShardings on `mesh`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)
