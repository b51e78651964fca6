"""The mesh, and the few things a layer or a step may ask of it.

`Manual` runs inside `shard_map`: arrays are this device's blocks, collectives are written out.
`Auto` runs under `jit` (or on one device): arrays are global, the compiler adds the collectives.
Both answer the same questions, so that no layer and no step knows which one it has.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from haiku.experimental import current_name
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer.config import Config
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
      InputError: when the devices do not divide into replicas of that size, or a weight that
        ZeRO splits does not divide by dp.
    """
    devices = jax.devices() if devices is None else devices
    mp = config.cores_per_replica
    if len(devices) % mp:
        raise InputError(
            f"config: cores_per_replica is {mp}, but there are {len(devices)} "
            f"{devices[0].platform} devices; set cores_per_replica to a divisor of their number"
        )
    return Mesh(np.asarray(devices).reshape(-1, mp), ("dp", "mp"))


def zero(spec: P) -> P:
    """The layout at rest under ZeRO: what mp splits, dp splits further."""
    return P(*(("mp", "dp") if axis == "mp" else axis for axis in spec))


def named(mesh: Mesh, specs: Any) -> Any:
    """The tree of PartitionSpecs as NamedShardings on `mesh`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)


def _is_spec(node: Any) -> bool:
    return isinstance(node, P)


def _sharded_axis(spec: P) -> int | None:
    """Which array axis mp splits."""
    axes = tuple(spec)
    return axes.index("mp") if "mp" in axes else None


@dataclass(frozen=True)
class Declaration:
    """All that a parameter says of itself; layouts, decay and conversion follow from it.

    `summed` marks a bias that the original adds on every shard before its psum (so that its
    shards hold b / mp each).
    """

    shape: tuple[int, ...]
    spec: P
    decay: bool
    summed: bool


_declarations: ContextVar[dict[str, dict[str, Declaration]] | None] = ContextVar(
    "declarations", default=None
)


@contextlib.contextmanager
def record_declarations() -> Iterator[dict[str, dict[str, Declaration]]]:
    """Collects what `param` declares meanwhile, in the structure of Haiku's parameters."""
    token = _declarations.set({})
    try:
        found = _declarations.get()
        assert found is not None
        yield found
    finally:
        _declarations.reset(token)


class Parallel(Protocol):
    """What a layer or a step may ask.  `specs` are the parameters' mp layouts."""

    mp: int
    replicas: int

    def local(self, shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
        """The shape of this program's part of a global array split along `axes`."""
        ...

    def fan_out(self, x: Array) -> Array:
        """Megatron's f: identity forward, a sum over mp backward."""
        ...

    def sum(self, x: Array) -> Array:
        """Megatron's g: a sum over mp forward, identity backward."""
        ...

    def max(self, x: Array) -> Array:
        """The maximum over mp; has no gradient."""
        ...

    def rank(self) -> Array | int:
        """Which mp part this program holds."""
        ...

    def gather(self, x: Array, axis: int = -1) -> Array:
        """The parts of x along `axis`, joined over mp."""
        ...

    def shard(self, x: Array, *axes: str | None) -> Array:
        """x, with a hint how the compiler should lay it out."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: Any, *axes: str | None) -> Array:
        """Zeros of this program's shape, that differ between the parts along `axes`."""
        ...

    def compute_copy(self, params: Any, specs: Any) -> Any:
        """Once a step: the state's parameters as the forward pass takes them."""
        ...

    def collect(self, params: Any, specs: Any) -> Any:
        """At the point of use: the parameters of one layer, whole but for mp (ZeRO 3)."""
        ...

    def accumulator(self, params: Any, specs: Any) -> Any:
        """Zeros in f32 for the sum of gradients over microbatches."""
        ...

    def mean(self, grads: Any, specs: Any) -> Any:
        """Once a step: the mean of the gradients over dp, in the state's layout."""
        ...

    def total(self, squares: Any, specs: Any) -> Array:
        """The sum of one number a leaf, leaves in the state's layout, over all their parts."""
        ...

    def micro(self, grads: Any, specs: Any) -> Any:
        """One microbatch's gradient as one of the `replicas` has it."""
        ...

    def micro_total(self, squares: Any, specs: Any) -> Array:
        """As `total`, of what was computed from `micro`."""
        ...

    def mean_scalar(self, x: Array) -> Array:
        """The mean over dp of what each replica measured."""
        ...


class Auto:
    """Global arrays under `jit` over a mesh, or on one device where `mesh` is None."""

    mp = 1
    replicas = 1

    def __init__(self, mesh: Mesh | None = None, zero_stage: int = 0):
        self.mesh = mesh
        self.zero_stage = zero_stage

    def _constrain(self, tree: Any, specs: Any) -> Any:
        if self.mesh is None:
            return tree
        return lax.with_sharding_constraint(tree, named(self.mesh, specs))

    def _at_rest(self, specs: Any) -> Any:
        return jax.tree.map(zero, specs, is_leaf=_is_spec) if self.zero_stage else specs

    def local(self, shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
        return shape

    def fan_out(self, x: Array) -> Array:
        return x

    def sum(self, x: Array) -> Array:
        return x

    def max(self, x: Array) -> Array:
        return x

    def rank(self) -> Array | int:
        return 0

    def gather(self, x: Array, axis: int = -1) -> Array:
        return x

    def shard(self, x: Array, *axes: str | None) -> Array:
        return self._constrain(x, P(*axes))

    def zeros(self, shape: tuple[int, ...], dtype: Any, *axes: str | None) -> Array:
        return self.shard(jnp.zeros(shape, dtype), *axes)

    def compute_copy(self, params: Any, specs: Any) -> Any:
        return self._constrain(params, specs) if self.zero_stage < 3 else params

    def collect(self, params: Any, specs: Any) -> Any:
        return self._constrain(params, specs) if self.zero_stage == 3 else params

    def accumulator(self, params: Any, specs: Any) -> Any:
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return self._constrain(zeros, self._at_rest(specs))

    def mean(self, grads: Any, specs: Any) -> Any:
        return self._constrain(grads, self._at_rest(specs))

    def total(self, squares: Any, specs: Any) -> Array:
        return jnp.sum(jnp.stack(jax.tree.leaves(squares)))

    def micro(self, grads: Any, specs: Any) -> Any:
        return grads

    def micro_total(self, squares: Any, specs: Any) -> Array:
        return self.total(squares, specs)

    def mean_scalar(self, x: Array) -> Array:
        return x


class Manual:
    """This device's blocks inside `shard_map` over a (dp, mp) mesh.

    Every value is typed with the axes along which it differs between devices (`check_vma`);
    `pcast` to varying transposes to a psum, which makes Megatron's f of it.
    """

    def __init__(self, mesh: Mesh, zero_stage: int = 0):
        self.mp = mesh.shape["mp"]
        self.dp = mesh.shape["dp"]
        self.zero_stage = zero_stage
        self.replicas = self.dp if zero_stage < 3 else 1

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

    def _gather_dp(self, x: Array, spec: P) -> Array:
        axis = _sharded_axis(spec)
        return x if axis is None else lax.all_gather(x, "dp", axis=axis, tiled=True)

    def compute_copy(self, params: Any, specs: Any) -> Any:
        def copy(x: Array, spec: P) -> Array:
            if self.zero_stage == 0 or _sharded_axis(spec) is None:
                return lax.pcast(x, "dp", to="varying")
            return self._gather_dp(x, spec) if self.zero_stage == 1 else x

        return jax.tree.map(copy, params, specs)

    def collect(self, params: Any, specs: Any) -> Any:
        return jax.tree.map(self._gather_dp, params, specs) if self.zero_stage == 3 else params

    def accumulator(self, params: Any, specs: Any) -> Any:
        def zeros(x: Array, spec: P) -> Array:
            varying = "dp" if _sharded_axis(spec) is None else ("dp", "mp")
            return lax.pcast(jnp.zeros(x.shape, jnp.float32), varying, to="varying")

        return jax.tree.map(zeros, params, specs)

    def mean(self, grads: Any, specs: Any) -> Any:
        def mean(g: Array, spec: P) -> Array:
            axis = _sharded_axis(spec)
            if axis is None or self.zero_stage == 0:
                return lax.pmean(g, "dp")
            if self.zero_stage == 1:
                g = lax.psum_scatter(g, "dp", scatter_dimension=axis, tiled=True)
            # ZeRO 3: the transpose of `collect` has already summed and scattered.
            return g / self.dp

        return jax.tree.map(mean, grads, specs)

    def _total(self, squares: Any, specs: Any, axes: tuple[str, ...]) -> Array:
        pairs = list(
            zip(jax.tree.leaves(squares), jax.tree.leaves(specs, is_leaf=_is_spec), strict=True)
        )
        split = [x for x, spec in pairs if _sharded_axis(spec) is not None]
        whole = [x for x, spec in pairs if _sharded_axis(spec) is None]
        return lax.psum(jnp.sum(jnp.stack(split)), axes) + jnp.sum(jnp.stack(whole))

    def total(self, squares: Any, specs: Any) -> Array:
        return self._total(squares, specs, ("mp", "dp") if self.zero_stage else ("mp",))

    def micro(self, grads: Any, specs: Any) -> Any:
        # ZeRO 3 has already summed most leaves over dp: all replicas make one.
        return self.mean(grads, specs) if self.zero_stage == 3 else grads

    def micro_total(self, squares: Any, specs: Any) -> Array:
        if self.zero_stage == 3:
            return self.total(squares, specs)
        return self._total(squares, specs, ("mp",))

    def mean_scalar(self, x: Array) -> Array:
        return lax.pmean(x, "dp")


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
    declarations = _declarations.get()
    if declarations is not None:
        module = declarations.setdefault(current_name(), {})
        module[name] = Declaration(shape, P(*axes), decay, summed)
    return hk.get_parameter(name, par.local(shape, axes), init=init)
