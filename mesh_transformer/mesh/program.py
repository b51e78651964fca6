"""Programs over a mesh: partitioned, compiled with which options, and cached on disk."""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from mesh_transformer.config import Config
from mesh_transformer.mesh.devices import named
from mesh_transformer.mesh.parallel import Auto, Manual, Parallel
from mesh_transformer.util import cache_folder

VARIABLE = "MESH_TRANSFORMER_CACHE"


def use_compilation_cache() -> None:
    """Turns JAX's persistent cache on, in `$MESH_TRANSFORMER_CACHE` or the user's cache folder.

    An empty variable turns it off.  A cache that JAX was already given stays as it is.
    """
    folder = os.environ.get(VARIABLE, str(cache_folder() / "compiled"))
    if not folder or jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    # By default what compiles within a second is not kept; a start has hundreds of those.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if "://" not in folder:
        _write_in_every_process()


def _write_in_every_process() -> None:
    """Has each process of several keep what it compiles; by itself JAX has the first do so alone.

    That spares storage which all of them share.  But hosts have a disk each, without which all but
    the first would compile anew at every start; and on CPUs a process's programs are its own.  JAX
    has no setting for this: where its inside is not the one known here, it stays as it is.
    """
    try:
        from jax._src import compiler, distributed

        write, state = compiler._cache_write, distributed.global_state
    except (ImportError, AttributeError):
        return

    @functools.wraps(write)
    def write_here(*args: Any, **kwargs: Any) -> None:
        rank, state.process_id = state.process_id, 0
        try:
            write(*args, **kwargs)
        finally:
            state.process_id = rank

    compiler._cache_write = write_here


# TPUs with an engine of its own for collectives; on the older ones the options change nothing.
ASYNC_KINDS = ("TPU v5", "TPU v6")


def compiler_options(config: Config, mesh: Mesh) -> dict[str, Any] | None:
    """The options of a training step on those devices; None where there are none."""
    device = mesh.devices.flat[0]
    if device.platform != "tpu":
        return None
    options: dict[str, Any] = {}
    if config.zero == 3:
        # The pass moves sums over replicas out of the loop over microbatches.  ZeRO 3 has none
        # that could leave it, as they are scattered in the loop over layers; and a prototype's
        # crashed the compiler there (libtpu 0.0.42), though small models compile with the pass.
        options["xla_disable_hlo_passes"] = "while-loop-all-reduce-code-motion"
    if any(kind in device.device_kind for kind in ASYNC_KINDS):
        # Off by default.  The activations' all-reduce of the backward pass then runs beside the
        # matmuls of the weights' gradients, which do not wait for it.
        options["xla_enable_async_all_reduce"] = "true"
        options["xla_tpu_enable_async_collective_fusion_fuse_all_reduce"] = "true"
    return options or None


def parallel_of(
    config: Config, mesh: Mesh, *, attention: str = "xla", split_stream: bool = False
) -> Parallel:
    """Who splits over mp."""
    if mesh.size == 1:  # nobody to talk to: even a sum over one device would take its time
        return Auto(attention=attention)
    kind = Auto if config.partitioning == "jit" else Manual
    return kind(mesh, config.zero or 0, attention=attention, split_stream=split_stream)


def partitioned(
    function: Callable[..., Any],
    config: Config,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    *,
    attention: str = "xla",
    split_stream: bool = False,
) -> Callable[..., Any]:
    """`function(*args, config=, par=)` on every part of the mesh, as one function of the whole.

    `attention` is the backend for attention over whole sequences (`attention_backend`).
    """
    par = parallel_of(config, mesh, attention=attention, split_stream=split_stream)

    def program(*args: Any) -> Any:
        # TPUs and newer GPUs would round f32 matmul inputs to fewer bits unless told not to.
        exact = config.dtype == "float32"
        with jax.default_matmul_precision("highest") if exact else contextlib.nullcontext():
            return function(*args, config=config, par=par)

    if not par.axes:
        return program
    return jax.shard_map(
        program,
        mesh=mesh,
        in_specs=par.within(in_specs),
        out_specs=par.within(out_specs),
        axis_names=set(par.axes),
    )


def compiled(
    function: Callable[..., Any],
    config: Config,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    donate_argnums: int | None = None,
    *,
    attention: str = "xla",
) -> Callable[..., Any]:
    return jax.jit(
        partitioned(function, config, mesh, in_specs, out_specs, attention=attention),
        in_shardings=named(mesh, in_specs),
        out_shardings=named(mesh, out_specs),
        donate_argnums=donate_argnums,
    )
