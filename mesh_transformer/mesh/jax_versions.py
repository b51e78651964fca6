"""Differences between the supported JAX versions, and JAX's private names that the library uses.

No other module depends on JAX's version or imports its private modules.  Each function says which
version requires it, or which public function of JAX's would replace it.  docs/versions.md lists the
supported versions.

If JAX lacks one of the private names, `coordination_client` and `detect_cluster` raise
AttributeError, and the other functions that use one do nothing.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# By module of `jax._src`.
PRIVATE = {
    "clusters": ("ClusterEnv",),
    "compiler": ("_cache_write", "compile_or_get_cached"),
    "core": ("trace_state_clean",),
    "distributed": ("global_state",),
    "xla_bridge": ("_jax",),
}


def private(module: str, name: str) -> Any:
    """Return an entry of `PRIVATE`, or None if this version of JAX lacks it."""
    assert name in PRIVATE[module]
    try:
        return getattr(importlib.import_module(f"jax._src.{module}"), name, None)
    except ImportError:
        return None


def coordination_client() -> Any:
    """Return the client of the coordination service that `jax.distributed` connects to.

    JAX has no public function for this; Orbax uses the private one too.
    """
    return private("distributed", "global_state").client


def wrap_compilation(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the function with which JAX compiles all programs by `wrap(function)`.

    Its first arguments are the backend, the program and an array of devices.  JAX has no public
    hook for compilations.
    """
    _wrap("compiler", "compile_or_get_cached", wrap)


def write_in_every_process() -> None:
    """Make every process write to JAX's compilation cache, instead of process 0 only.

    By default only process 0 writes, which suits storage that all processes share.  A local cache
    folder is on each host's own disk, so all hosts but the first would recompile their programs at
    every start.  On CPUs, moreover, each process compiles different programs.  JAX has no setting
    for this.
    """
    state = private("distributed", "global_state")
    if state is None:
        return

    def wrap(write: Callable[..., Any]) -> Callable[..., Any]:
        def write_as_process_0(*args: Any, **kwargs: Any) -> None:
            rank, state.process_id = state.process_id, 0
            try:
                write(*args, **kwargs)
            finally:
                state.process_id = rank

        return write_as_process_0

    _wrap("compiler", "_cache_write", wrap)


def bind_collectives(address: str) -> None:
    """Let this process's CPUs communicate with those of other processes at `address`.

    By default, Gloo looks up the machine's host name, which fails where that has no address, and
    on many machines is a loopback address that other machines cannot reach.  JAX has no setting for
    this.

    Args:
      address: an IP address of this machine, at which the other processes reach this one.
    """
    library = private("xla_bridge", "_jax")
    make = getattr(library, "make_gloo_tcp_collectives", None)
    if make is not None:
        library.make_gloo_tcp_collectives = functools.partial(make, hostname=address)


def is_tracing() -> bool:
    """Return whether the caller runs inside `jax.jit`, `jax.grad` or another transformation.

    JAX has no public function for this.
    """
    is_clean = private("core", "trace_state_clean")
    return is_clean is not None and not is_clean()


def detect_cluster(
    coordinator: str | None, ids: list[int] | None, seconds: int
) -> tuple[str | None, int | None, int | None, list[int] | None]:
    """Return (address of process 0, process count, process index, local device ids) from JAX.

    `jax.distributed.initialize` detects them too, but there a process that cannot connect is
    aborted.  JAX has no public function that only detects them.

    Raises:
      Exception: of any type, if the cluster's environment is inconsistent.
    """
    return private("clusters", "ClusterEnv").auto_detect_unset_distributed_params(
        coordinator, None, None, ids, None, seconds
    )


@jax.custom_jvp
def erfc(x: Array) -> Array:
    """Return 1 - erf(x); JAX 0.12 cannot differentiate `lax.erfc` inside a `shard_map`."""
    return lax.erfc(x)


erfc.defjvps(lambda dx, _, x: -2 / np.pi**0.5 * (dx * jnp.exp(-jnp.square(x))))


def carry_of(params: dict[str, Any]) -> tuple[int, int]:
    """Return how many constants a traced scan has, and how many arrays its carry.

    JAX 0.12 has changed the names of these parameters of the primitive.
    """
    if "ft_in" in params:
        constants, carry, _ = map(len, params["ft_in"].unpack())
        return constants, carry
    return params["num_consts"], params["num_carry"]


def prng_name(dtype: Any) -> str:
    """Return the name of the generator of a dtype of PRNG keys.

    The public `jax.random.key_impl` takes only arrays.
    """
    return dtype._impl.name


def varying_axes(shape: jax.ShapeDtypeStruct) -> frozenset[str]:
    """Return the mesh axes along which a result of `jax.eval_shape` differs, inside `shard_map`.

    JAX 0.9 has renamed this attribute, and does not document it.
    """
    return getattr(shape.manual_axis_type, "varying", frozenset())  # type: ignore[attr-defined]


def _wrap(module: str, name: str, wrap: Callable[..., Callable[..., Any]]) -> None:
    function = private(module, name)
    if function is not None:
        setattr(importlib.import_module(f"jax._src.{module}"), name, wrap(function))
