"""Programs on a mesh: `Layout`, compiler options and the on-disk compilation cache."""

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import jax
from jax.sharding import Mesh

from mesh_transformer import status_lines
from mesh_transformer.config import Config
from mesh_transformer.mesh.apart import Exact
from mesh_transformer.mesh.devices import named
from mesh_transformer.mesh.jax_versions import (
    coordination_client,
    is_tracing,
    wrap_compilation,
    write_in_every_process,
)
from mesh_transformer.mesh.parallel import Auto, Manual, Parallel
from mesh_transformer.mesh.virtual import virtual, virtual_mesh
from mesh_transformer.util import InputError, cache_folder

COMPILE_SECONDS = 3600  # the longest time that one process waits for another's compilation
CACHE_VARIABLE = "MESH_TRANSFORMER_CACHE"


def compiled_folder() -> str:
    """Return the folder or URI of the cache of compiled programs; "" for no cache.

    This is `$MESH_TRANSFORMER_CACHE` or, if this variable is not set, in the user's cache folder.
    """
    return os.environ.get(CACHE_VARIABLE, str(cache_folder() / "compiled"))


def use_compilation_cache() -> None:
    """Enable JAX's persistent compilation cache.

    The cache is in the folder `compiled_folder`, if there is one.  If JAX's configuration already
    sets a cache folder, that folder is used instead.
    """
    _name_compilations()
    folder = compiled_folder()
    if not folder or jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    # By default JAX does not cache programs that compile in less than a second.  Every start of a
    # script compiles hundreds of these.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if "://" not in folder:
        write_in_every_process()


@functools.cache  # once per process
def _name_compilations() -> None:
    """Let status lines say that a program is being compiled."""

    def wrap(compile_program: Callable[..., Any]) -> Callable[..., Any]:
        def compile_named(*args: Any, **kw: Any) -> Any:
            with status_lines.doing("compiling"):
                return compile_program(*args, **kw)

        return compile_named

    wrap_compilation(wrap)


def compile_together() -> None:
    """Make every process wait, after each compilation, until all processes have compiled.

    This is for programs that run on the CPUs of several processes.  There, a process fails if its
    first collective waits more than 30 s for another process, and JAX has no setting for this
    timeout.  On a busy machine, the processes' compilation times can differ by more than 30 s.
    """
    numbers = itertools.count()  # equal in all processes, as they compile in the same order

    def wrap(compile_program: Callable[..., Any]) -> Callable[..., Any]:
        def compile_and_wait(backend: Any, module: Any, devices: Any, *args: Any, **kw: Any) -> Any:
            program = compile_program(backend, module, devices, *args, **kw)
            if len({device.process_index for device in devices.flat}) > 1:
                name = f"mesh_transformer/compiled/{next(numbers)}"
                coordination_client().wait_at_barrier(name, COMPILE_SECONDS * 1000)
            return program

        return compile_and_wait

    wrap_compilation(wrap)


def check_not_traced() -> None:
    """Raise InputError inside `jax.grad`, `jax.jit` or another transformation of a function.

    The programs of a network would run there as usual, but without gradients for its parameters,
    which are no arguments of the function.
    """
    if is_tracing():
        raise InputError(
            "jax.grad, jax.jit and other transformations take the weights of a network for "
            "constants; use a function of them, such as mesh_transformer.apply(network.params, "
            "tokens)"
        )


# The TPU on which an all-reduce can run beside matmuls.  On older ones the options for that have no
# effect; for v5p and v6e, libtpu 0.0.48 and later refuse them, as results could be wrong.
ASYNC_KIND = "TPU v5 lite"


def compiler_options(layout: "Layout") -> dict[str, Any] | None:
    """Return the XLA options for compiling a training step; None if there are none."""
    config, device = layout.config, layout.mesh.devices.flat[0]
    if device.platform != "tpu":
        return None
    options: dict[str, Any] = {}
    passes = []  # to disable
    if config.virtual_mesh is not None:  # this one moves code into functions to be kept apart
        passes.append("conditional-code-motion")
    if config.zero == 3:
        # This pass moves all-reduces over replicas out of the loop over microbatches.  ZeRO 3 has
        # none to move, because it reduce-scatters gradients in the loop over layers.  On a
        # prototype of ZeRO 3 the pass crashed the compiler (libtpu 0.0.42), except on small models.
        passes.append("while-loop-all-reduce-code-motion")
    if passes:
        options["xla_disable_hlo_passes"] = ",".join(passes)
    if device.device_kind == ASYNC_KIND:
        # These options are off by default.  They let the backward pass all-reduce the activations'
        # gradients while it computes the weights' gradients, which do not depend on the all-reduce.
        options["xla_enable_async_all_reduce"] = "true"
        options["xla_tpu_enable_async_collective_fusion_fuse_all_reduce"] = "true"
    return options or None


@dataclass(frozen=True)
class Layout:
    """A config on a mesh, and what follows from the two.

    Subclasses add the layout of the training state and that of the weights for generation.
    """

    config: Config
    mesh: Mesh

    def of(self, config: Config) -> Self:
        """Return the layout of another config on the same mesh."""
        return dataclasses.replace(self, config=config)

    @functools.cached_property
    def par(self) -> Parallel:
        """The interface to the mesh's collectives that the config selects."""
        return self.parallel()

    def parallel(self, **choices: Any) -> Parallel:
        """Return `par` with other choices; see `partitioned`.

        The config key `partitioning` selects its class.  On a mesh of one device, the result has no
        collectives.
        """
        config = self.config
        if config.exact:
            choices |= {"exact": Exact(self.mesh.devices.flat[0].platform)}
        if config.virtual_mesh is not None:
            return Manual(virtual_mesh(config.virtual_mesh), config.zero or 0, **choices)
        if self.mesh.size == 1:  # even a sum over a single device takes time
            return Auto(**choices)
        kind = Auto if config.partitioning == "jit" else Manual
        return kind(self.mesh, config.zero or 0, **choices)

    def partitioned(
        self,
        function: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        **choices: Any,
    ) -> Callable[..., Any]:
        """Return a function of global arrays that runs `function`, partitioned over the mesh.

        Args:
          function: called with the arguments of the returned function, and with the keyword
            arguments `config` and `par`.  `par` is the `Parallel` that supplies its collectives.
          in_specs: the PartitionSpecs of the arguments.
          out_specs: the PartitionSpecs of the results.
          choices: `attention` and `split_stream` (see `Parallel`).
        """
        config, mesh = self.config, self.mesh
        par = self.parallel(**choices)

        def program(*args: Any) -> Any:
            # By default TPUs and newer GPUs round f32 matmul inputs to fewer bits.
            exact = config.dtype == "float32"
            with jax.default_matmul_precision("highest") if exact else contextlib.nullcontext():
                return function(*args, config=config, par=par)

        if not par.axes:
            return program
        if config.virtual_mesh is not None:
            return virtual(program, config.virtual_mesh, mesh, in_specs, out_specs)
        return jax.shard_map(
            program,
            mesh=mesh,
            in_specs=par.restrict_specs(in_specs),
            out_specs=par.restrict_specs(out_specs),
            axis_names=set(par.axes),
        )

    def compiled(
        self,
        function: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        donate_argnums: int | None = None,
    ) -> Callable[..., Any]:
        """Return the result of `partitioned`, jitted with `in_specs` and `out_specs` as shardings.

        For the arguments, see `partitioned` and `jax.jit`.
        """
        return jax.jit(
            self.partitioned(function, in_specs, out_specs),
            in_shardings=named(self.mesh, in_specs),
            out_shardings=named(self.mesh, out_specs),
            donate_argnums=donate_argnums,
        )
