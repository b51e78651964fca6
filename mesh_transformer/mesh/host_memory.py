"""Arrays in host memory, next to the devices; `config.offload` selects which.

Only trained matrices and their moments can be there.  Of the other arrays, only frozen matrices are
large.
"""

from typing import Any

import jax
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding

from mesh_transformer.config import Config
from mesh_transformer.mesh.declaration import Declaration, map_declared
from mesh_transformer.mesh.devices import named

HOST = "pinned_host"  # JAX's name of the memory


def is_offloaded(declaration: Declaration) -> bool:
    """Return whether a parameter, or a moment of it, can be in host memory."""
    return declaration.decay and not declaration.frozen


def in_host(mesh: Mesh, specs: Any, declared: Any) -> Any:
    """Return NamedShardings for a tree of PartitionSpecs; in host memory if `is_offloaded`."""

    def one(declaration: Declaration, sharding: NamedSharding) -> NamedSharding:
        return sharding.with_memory_kind(HOST) if is_offloaded(declaration) else sharding

    return map_declared(one, declared, named(mesh, specs))


def is_in_host(x: Any) -> bool:
    """Return whether an array, which may be abstract, is in host memory."""
    return x.sharding is not None and x.sharding.memory_kind == HOST


def on_device(x: Array) -> Array:
    """Move an array to the memory of the devices, inside `jit`."""
    return jax.device_put(x, jax.memory.Space.Device)


def on_host(x: Array) -> Array:
    """Move an array to host memory, inside `jit`."""
    return jax.device_put(x, jax.memory.Space.Host)


def device_copies(params: Any, declared: Any, config: Config, dtype: Any) -> Any:
    """Return parameters of a training state as arrays of the devices, inside `jit`.

    Those that `config.offload` keeps in host memory are cast to `dtype`, one layer at a time.
    """

    def copy(declaration: Declaration, x: Array) -> Array:
        if not is_offloaded(declaration):
            return x
        if not declaration.stacked:
            return on_device(x).astype(dtype)
        return lax.map(lambda layer: on_device(layer).astype(dtype), x)

    return map_declared(copy, declared, params) if config.offload == "params" else params
