"""The mesh, and the few things a layer or a step may ask of it.

`Manual` runs inside `shard_map`: arrays are this device's blocks, collectives are written out.
`Auto` runs under `jit` (or on one device): arrays are global, the compiler adds the collectives.
Both answer the same questions, so that no layer and no step knows which one it has.
"""

import contextlib
import functools
import os
from collections.abc import Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from haiku.experimental import current_name
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer.config import Config
from mesh_transformer.declaration import Declaration, declare, map_declared
from mesh_transformer.util import InputError

Axes = tuple[str | None, ...]


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
        raise InputError(
            f"config: cores_per_replica is {mp}, but there are {len(devices)} "
            f"{devices[0].platform} devices; set cores_per_replica to a divisor of their number"
        )
    return Mesh(np.asarray(devices).reshape(-1, mp), ("dp", "mp"))


def named(mesh: Mesh, specs: Any) -> Any:
    """The tree of PartitionSpecs as NamedShardings on `mesh`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)


def _is_spec(node: Any) -> bool:
    return isinstance(node, P)


class Auto:
    """Global arrays under `jit` over a mesh, or on one device where `mesh` is None.

    `mp` is how many parts a program sees (one: arrays are global), `replicas` how many gradients
    of one microbatch.  `declared` is a tree of the parameters' declarations.
    """

    mp = 1
    replicas = 1

    def __init__(self, mesh: Mesh | None = None, zero_stage: int = 0):
        self.mesh = mesh
        self.zero_stage = zero_stage

    def _constrain(self, tree: Any, specs: Any) -> Any:
        if self.mesh is None:
            return tree
        return lax.with_sharding_constraint(tree, named(self.mesh, specs))

    def _splits(self, declaration: Declaration) -> bool:
        """Whether a parameter is split over dp where it is at rest."""
        if self.mesh is None or not self.zero_stage:
            return False
        return declaration.zero_axis(self.mesh.shape["dp"], self.mesh.shape["mp"]) is not None

    def local(self, shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
        """The shape of this program's part of a global array split along `axes`."""
        return shape

    def fan_out(self, x: Array) -> Array:
        """Megatron's f: identity forward, a sum over mp backward."""
        return x

    def sum(self, x: Array) -> Array:
        """Megatron's g: a sum over mp forward, identity backward."""
        return x

    def max(self, x: Array) -> Array:
        """The maximum over mp; has no gradient."""
        return x

    def rank(self) -> Array | int:
        """Which mp part this program holds."""
        return 0

    def gather(self, x: Array, axis: int = -1) -> Array:
        """The parts of x along `axis`, joined over mp."""
        return x

    def shard(self, x: Array, *axes: str | None) -> Array:
        """x, with a hint how the compiler should lay it out."""
        return self._constrain(x, P(*axes))

    def zeros(self, shape: tuple[int, ...], dtype: Any, *axes: str | None) -> Array:
        """Zeros of this program's shape, that differ between the parts along `axes`."""
        return self.shard(jnp.zeros(shape, dtype), *axes)

    def at_rest(self, declared: Any) -> Any:
        """The layouts of the state."""
        if self.mesh is None or not self.zero_stage:
            return map_declared(lambda d: d.spec, declared)
        sizes = self.mesh.shape["dp"], self.mesh.shape["mp"]
        return map_declared(lambda d: d.at_rest(*sizes), declared)

    def compute_copy(self, params: Any, declared: Any, dtype: Any) -> Any:
        """Once a step: the state's parameters as the forward pass takes them, in `dtype`.

        ZeRO 3 leaves what it splits in f32, for `collect` to cast.
        """

        def copy(d: Declaration, x: Array) -> Array:
            if self.zero_stage == 3 and self._splits(d):
                return x.astype(jnp.float32)
            return self._constrain(x.astype(dtype), d.spec)

        return map_declared(copy, declared, params)

    def collect(self, params: Any, declared: Any, dtype: Any) -> Any:
        """At the point of use: the parameters of one part, whole but for mp, in `dtype`."""

        def whole(d: Declaration, x: Array) -> Array:
            if self.zero_stage == 3 and self._splits(d):
                return self._constrain(x.astype(dtype), d.spec)
            return x

        return map_declared(whole, declared, params)

    def accumulator(self, params: Any, declared: Any) -> Any:
        """Zeros in f32 for the sum of gradients over microbatches."""
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return self._constrain(zeros, self.at_rest(declared))

    def mean(self, grads: Any, declared: Any) -> Any:
        """Once a step: the mean of the gradients over dp, in the state's layout."""
        return self._constrain(grads, self.at_rest(declared))

    def total(self, squares: Any, declared: Any) -> Array:
        """The sum of one number a leaf, leaves in the state's layout, over all their parts."""
        return jnp.sum(jnp.stack(jax.tree.leaves(squares)))

    def micro(self, grads: Any, declared: Any) -> Any:
        """One microbatch's gradient as one of the `replicas` has it."""
        return grads

    def micro_total(self, squares: Any, declared: Any) -> Array:
        """As `total`, of what was computed from `micro`."""
        return self.total(squares, declared)

    def mean_scalar(self, x: Array) -> Array:
        """The mean over dp of what each replica measured."""
        return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather_cast(x: Array, axis: int, dtype: Any) -> Array:
    """f32 parts along `axis` joined over dp and cast; their gradient is summed in f32.

    Without the custom rule the transpose would sum the replicas' gradients in `dtype`.
    """
    return lax.all_gather(x.astype(dtype), "dp", axis=axis, tiled=True)


def _gather_cast_forward(x: Array, axis: int, dtype: Any) -> tuple[Array, None]:
    return _gather_cast(x, axis, dtype), None


def _gather_cast_backward(axis: int, dtype: Any, _: None, g: Array) -> tuple[Array]:
    g = g.astype(jnp.float32)
    return (lax.psum_scatter(g, "dp", scatter_dimension=axis, tiled=True),)


_gather_cast.defvjp(_gather_cast_forward, _gather_cast_backward)


class Manual:
    """This device's blocks inside `shard_map` over a (dp, mp) mesh; answers as `Auto` does.

    Every value is typed with the axes along which it differs between devices (`check_vma`);
    `pcast` to varying transposes to a psum, which makes Megatron's f of it.
    """

    def __init__(self, mesh: Mesh, zero_stage: int = 0):
        self.mp = mesh.shape["mp"]
        self.dp = mesh.shape["dp"]
        self.zero_stage = zero_stage
        self.replicas = self.dp if zero_stage < 3 else 1

    def _zero_axis(self, declaration: Declaration) -> int | None:
        return declaration.zero_axis(self.dp, self.mp) if self.zero_stage else None

    def local(self, shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
        return tuple(
            size // self.mp if axis == "mp" else size
            for size, axis in zip(shape, axes, strict=True)
        )

    def fan_out(self, x: Array) -> Array:
        return lax.pcast(x, "mp", to="varying")

    def sum(self, x: Array) -> Array:
        return lax.psum(x, "mp")

    def max(self, x: Array) -> Array:
        return lax.pmax(x, "mp")

    def rank(self) -> Array | int:
        return lax.axis_index("mp")

    def gather(self, x: Array, axis: int = -1) -> Array:
        return lax.all_gather(x, "mp", axis=axis % x.ndim, tiled=True, to="invarying")

    def shard(self, x: Array, *axes: str | None) -> Array:
        return x

    def zeros(self, shape: tuple[int, ...], dtype: Any, *axes: str | None) -> Array:
        varying = tuple(axis for axis in axes if axis is not None)
        return lax.pcast(jnp.zeros(shape, dtype), varying, to="varying")

    def at_rest(self, declared: Any) -> Any:
        if not self.zero_stage:
            return map_declared(lambda d: d.spec, declared)
        return map_declared(lambda d: d.at_rest(self.dp, self.mp), declared)

    def compute_copy(self, params: Any, declared: Any, dtype: Any) -> Any:
        def copy(d: Declaration, x: Array) -> Array:
            axis = self._zero_axis(d)
            if axis is None:
                return lax.pcast(x.astype(dtype), "dp", to="varying")
            if self.zero_stage == 3:
                return x.astype(jnp.float32)
            return lax.all_gather(x.astype(dtype), "dp", axis=axis, tiled=True)

        return map_declared(copy, declared, params)

    def collect(self, params: Any, declared: Any, dtype: Any) -> Any:
        def whole(d: Declaration, x: Array) -> Array:
            axis = self._zero_axis(d) if self.zero_stage == 3 else None
            return x if axis is None else _gather_cast(x, axis, dtype)

        return map_declared(whole, declared, params)

    def accumulator(self, params: Any, declared: Any) -> Any:
        def zeros(d: Declaration, x: Array) -> Array:
            varying = ("dp", "mp") if "mp" in tuple(d.spec) else "dp"
            return lax.pcast(jnp.zeros(x.shape, jnp.float32), varying, to="varying")

        return map_declared(zeros, declared, params)

    def mean(self, grads: Any, declared: Any) -> Any:
        def mean(d: Declaration, g: Array) -> Array:
            axis = self._zero_axis(d)
            if axis is None:
                return lax.pmean(g, "dp")
            if self.zero_stage == 1:
                g = lax.psum_scatter(g, "dp", scatter_dimension=axis, tiled=True)
            # ZeRO 3: the transpose of `collect` has already summed and scattered.
            return g / self.dp

        return map_declared(mean, declared, grads)

    def _total(self, squares: Any, axes: Any) -> Array:
        """The sum over leaves, each over the mesh axes that `axes` names for it."""
        by_axes: dict[tuple[str, ...], list[Array]] = {}
        jax.tree.map(lambda x, names: by_axes.setdefault(names, []).append(x), squares, axes)
        sums = [lax.psum(sum(xs), names) if names else sum(xs) for names, xs in by_axes.items()]
        return jnp.sum(jnp.stack(sums))

    def total(self, squares: Any, declared: Any) -> Array:
        def axes(d: Declaration) -> tuple[str, ...]:
            mp = ("mp",) if "mp" in tuple(d.spec) else ()
            return mp if self._zero_axis(d) is None else ("mp", "dp")

        return self._total(squares, map_declared(axes, declared))

    def micro(self, grads: Any, declared: Any) -> Any:
        # ZeRO 3 has already summed most leaves over dp: all replicas make one.
        return self.mean(grads, declared) if self.zero_stage == 3 else grads

    def micro_total(self, squares: Any, declared: Any) -> Array:
        if self.zero_stage == 3:
            return self.total(squares, declared)
        mp = map_declared(lambda d: ("mp",) if "mp" in tuple(d.spec) else (), declared)
        return self._total(squares, mp)

    def mean_scalar(self, x: Array) -> Array:
        return lax.pmean(x, "dp")


# What a layer or a step takes; it never asks which of the two it has.
Parallel = Auto | Manual


def param(
    par: Parallel,
    name: str,
    shape: tuple[int, ...],
    axes: Axes,
    init: hk.initializers.Initializer,
    *,
    decay: bool = False,
    summed: bool = False,
) -> Array:
    """A parameter of the current Haiku module, declared once: global shape, layout, initialiser.

    Args:
      axes: which mesh axis splits each array axis.
      decay: whether weight decay applies (the original decays matrices alone).
      summed: see `Declaration`.
    """
    declare(current_name(), name, Declaration(shape, P(*axes), decay, summed))
    return hk.get_parameter(name, par.local(shape, axes), init=init)
