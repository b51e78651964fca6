"""The few things that a layer or a step may ask of the mesh.

Programs run inside `shard_map`, and `Parallel` is what they see.  The replicas' side, dp, is
written out once for all: f32 reductions, and ZeRO.  mp is the fork: `Manual` writes Megatron's
collectives out, arrays are this device's blocks; `Auto` leaves mp to the compiler, arrays are
global over it.  Both answer the same questions: no layer and no step knows which one it has.
"""

import abc
import functools
from collections.abc import Callable, Iterable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from haiku.experimental import current_name
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mesh_transformer.mesh.declaration import Declaration, declare, is_spec, map_declared


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_cast(x: Array, axis: int, dtype: Any) -> Array:
    """f32 parts along `axis` joined over dp and cast; their gradient is summed in f32.

    Without the custom rule the transpose would sum the replicas' gradients in `dtype`.
    """
    return lax.all_gather(x.astype(dtype), "dp", axis=axis, tiled=True)


def gather_cast_forward(x: Array, axis: int, dtype: Any) -> tuple[Array, None]:
    return gather_cast(x, axis, dtype), None


def gather_cast_backward(axis: int, dtype: Any, _: None, g: Array) -> tuple[Array]:
    g = g.astype(jnp.float32)
    return (lax.psum_scatter(g, "dp", scatter_dimension=axis, tiled=True),)


gather_cast.defvjp(gather_cast_forward, gather_cast_backward)

Axes = tuple[str | None, ...]
GATHERED = "gathered"  # the name, for remat, of a split stream that is whole again


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(x is None or isinstance(x, str) for x in node)


class Parallel(abc.ABC):
    """What a layer or a step may ask, inside `shard_map` over the mesh axes in `axes`.

    Every value is typed with those of `axes` along which it differs between devices (`check_vma`).
    `mp` is how many parts of a layer the program sees apart, `replicas` how many gradients of one
    microbatch.  `declared` is a tree of the parameters' declarations.  `attention` is how that of a
    whole sequence is computed (`flash_attention.chosen`).

    The residual stream [B, T, D] is the same on all devices of a replica, or with `split_stream`
    (Korthikanti 2022) each holds its part of the positions.
    """

    mp = 1
    axes: tuple[str, ...] = ()

    def __init__(
        self,
        mesh: Mesh | None = None,
        zero_stage: int = 0,
        *,
        attention: str = "xla",
        split_stream: bool = False,
    ):
        self.split_stream = split_stream
        self.dp = 1 if mesh is None else mesh.shape["dp"]
        self.attention = attention
        self.zero_stage = zero_stage
        self.replicas = self.dp if zero_stage < 3 else 1

    @abc.abstractmethod
    def local(self, shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
        """The shape of this program's part of a global array split along `axes`."""

    @abc.abstractmethod
    def fan_out(self, x: Array) -> Array:
        """Megatron's f: the stream whole on every device; backward a sum over mp into it."""

    @abc.abstractmethod
    def join(self, x: Array) -> Array:
        """Megatron's g: a sum over mp of [B, T, D] into the stream; backward it is whole again."""

    @abc.abstractmethod
    def own_positions(self, x: Array) -> Array:
        """Of a whole [B, T, D] what the stream holds."""

    @abc.abstractmethod
    def sum(self, x: Array) -> Array:
        """A sum over mp forward, identity backward."""

    @abc.abstractmethod
    def max(self, x: Array) -> Array:
        """The maximum over mp; has no gradient."""

    @abc.abstractmethod
    def rank(self) -> Array | int:
        """Which mp part this program holds."""

    @abc.abstractmethod
    def gather(self, x: Array, axis: int = -1) -> Array:
        """The parts of x along `axis`, joined over mp."""

    @abc.abstractmethod
    def shard(self, x: Array, *axes: str | None) -> Array:
        """x, with a hint how the compiler should lay it out."""

    @abc.abstractmethod
    def _on_parts(self, function: Callable[[Array], Array], spec: P) -> Callable[[Array], Array]:
        """`function`, which talks to the other replicas, on each mp part of an array."""

    def on_blocks(self, function: Callable[..., Any], given: Any, found: Any) -> Callable[..., Any]:
        """`function` of each mp part of its arguments, for kernels, which know no types.

        What it returns is taken to differ between all devices.

        Args:
          given, found: the `Axes` of each argument and result, where it is a tree of all leaves.
        """
        if not self.axes:
            return function

        def untyped(x: Array) -> Array:
            # Any operation in there forgets its inputs' types; a kernel compares them, though.
            return jnp.squeeze(jnp.expand_dims(x, 0), 0)

        def split(axes: Axes) -> P:
            return P(*(None if axis in self.axes else axis for axis in axes))

        inner = jax.shard_map(
            lambda *args: function(*jax.tree.map(untyped, args)),
            in_specs=jax.tree.map(split, given, is_leaf=_is_axes),
            out_specs=jax.tree.map(split, found, is_leaf=_is_axes),
            check_vma=False,
        )
        return lambda *args: jax.tree.map(lambda x: self._differing(x, *self.axes), inner(*args))

    def within(self, specs: Any) -> Any:
        """The layouts (a tree of PartitionSpecs) as `shard_map` takes them: `axes` alone."""

        def visible(spec: P) -> P:
            return P(*(axis if axis in self.axes else None for axis in spec))

        return jax.tree.map(visible, specs, is_leaf=is_spec)

    def _differing(self, x: Array, *axes: str | None) -> Array:
        """x, typed as one that differs along those of `axes` that the program sees."""
        varying = tuple(axis for axis in self.axes if axis in axes)
        return lax.pcast(x, varying, to="varying") if varying else x

    def zeros(self, shape: tuple[int, ...], dtype: Any, *axes: str | None) -> Array:
        """Zeros of this program's shape, that differ between the parts along `axes`."""
        return self.shard(self._differing(jnp.zeros(shape, dtype), *axes), *axes)

    def _zero_axis(self, declaration: Declaration) -> int | None:
        # What is frozen has neither moments nor gradients to split: only to gather it a layer at
        # a time saves memory.
        if not self.zero_stage or (declaration.frozen and self.zero_stage < 3):
            return None
        return declaration.zero_axis(self.dp)

    def at_rest(self, declared: Any) -> Any:
        """The layouts of the state."""

        def layout(d: Declaration) -> P:
            return d.spec if self._zero_axis(d) is None else d.at_rest(self.dp)

        return map_declared(layout, declared)

    def compute_copy(self, params: Any, declared: Any, dtype: Any) -> Any:
        """Once a step: the state's parameters as the forward pass takes them, in `dtype`.

        ZeRO 3 leaves what it splits in f32, for `collect` to cast: so its gradients are f32 too.
        What is frozen has none.
        """

        def copy(d: Declaration, x: Array) -> Array:
            axis = self._zero_axis(d)
            if axis is None:
                return self._differing(x.astype(dtype), "dp")
            if self.zero_stage == 3:
                return x.astype(dtype if d.frozen else jnp.float32)
            return self._on_parts(lambda x: gather_cast(x, axis, dtype), d.spec)(x)

        return map_declared(copy, declared, params)

    def spread(self, params: Any, declared: Any) -> Any:
        """Once a microbatch: parameters that mp does not split, and whose users differ over mp.

        So their gradients are summed over mp together, in f32; each in its layer would be a word
        more.
        """

        def one(d: Declaration, x: Array) -> Array:
            everywhere = "mp" in tuple(d.spec) or not (d.adapter or self.split_stream)
            if everywhere:
                return x
            return self._differing(x.astype(jnp.float32), "mp").astype(x.dtype)

        return map_declared(one, declared, params)

    def collect(self, params: Any, declared: Any, dtype: Any) -> Any:
        """At the point of use: the parameters of one part, whole but for mp, in `dtype`."""

        def whole(d: Declaration, x: Array) -> Array:
            axis = self._zero_axis(d) if self.zero_stage == 3 else None
            if axis is not None:
                x = self._on_parts(lambda x: gather_cast(x, axis, dtype), d.spec)(x)
            # And so for its gradient: else TPUs keep some in another layout, with all-to-alls.
            return self.shard(x, *d.spec)

        return map_declared(whole, declared, params)

    def accumulator(self, params: Any, declared: Any) -> Any:
        """Zeros in f32 for the sum of gradients over microbatches."""

        def zeros(d: Declaration, x: Array) -> Array:
            return self._differing(jnp.zeros(x.shape, jnp.float32), "dp", *d.spec)

        return map_declared(zeros, declared, params)

    def mean(self, grads: Any, declared: Any) -> Any:
        """Once a step: the mean of the gradients over dp, in the state's layout."""

        def sum_over_replicas(d: Declaration, g: Array) -> Array:
            axis = self._zero_axis(d)
            if axis is not None and self.zero_stage == 3:
                return g  # the transpose of `collect` has already summed and scattered
            if axis is not None:
                return lax.psum_scatter(g, "dp", scatter_dimension=axis, tiled=True)
            return self._sum_over(g, ("dp",))

        def mean(d: Declaration, g: Array) -> Array:
            total = self._on_parts(functools.partial(sum_over_replicas, d), d.spec)(g)
            return total / self.dp

        return map_declared(mean, declared, grads)

    def _sum_over(self, x: Array, axes: tuple[str, ...]) -> Array:
        """The sum over those of `axes` that the program sees."""
        seen = tuple(axis for axis in self.axes if axis in axes)
        return lax.psum(x, seen) if seen else x

    def _total(self, squares: Any, axes: Any) -> Array:
        """The sum over leaves, each over the mesh axes that `axes` names for it."""
        by_axes: dict[tuple[str, ...], list[Array]] = {}
        jax.tree.map(lambda x, names: by_axes.setdefault(names, []).append(x), squares, axes)
        sums = [self._sum_over(sum(xs[1:], xs[0]), names) for names, xs in by_axes.items()]
        return jnp.sum(jnp.stack(sums))

    def total(self, squares: Any, declared: Any) -> Array:
        """The sum of one number a leaf, leaves in the state's layout, over all their parts."""

        def axes(d: Declaration) -> tuple[str, ...]:
            mp = ("mp",) if "mp" in tuple(d.spec) else ()
            return mp if self._zero_axis(d) is None else (*mp, "dp")

        return self._total(squares, map_declared(axes, declared))

    def micro(self, grads: Any, declared: Any) -> Any:
        """One microbatch's gradient as one of the `replicas` has it."""
        # ZeRO 3 has already summed most leaves over dp: all replicas make one.
        return self.mean(grads, declared) if self.zero_stage == 3 else grads

    def micro_total(self, squares: Any, declared: Any) -> Array:
        """As `total`, of what was computed from `micro`."""
        if self.zero_stage == 3:
            return self.total(squares, declared)
        mp = map_declared(lambda d: ("mp",) if "mp" in tuple(d.spec) else (), declared)
        return self._total(squares, mp)

    def mean_scalar(self, x: Array) -> Array:
        """The mean over dp of what each replica measured."""
        return self._sum_over(x, ("dp",)) / self.dp


def _mp_alone(axes: Iterable[Any]) -> P:
    return P(*(axis if axis == "mp" else None for axis in axes))


class Auto(Parallel):
    """dp written out, mp left to the compiler; without a mesh, one device and no collective."""

    def __init__(self, mesh: Mesh | None = None, zero_stage: int = 0, **choices: Any):
        super().__init__(mesh, zero_stage, **choices)
        self.axes = () if mesh is None else ("dp",)

    def local(self, shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
        return shape

    def fan_out(self, x: Array) -> Array:
        if not self.split_stream:
            return x
        return checkpoint_name(self.shard(x, "dp", None, None), GATHERED)

    def join(self, x: Array) -> Array:
        return self.own_positions(x)

    def own_positions(self, x: Array) -> Array:
        return self.shard(x, "dp", "mp" if self.split_stream else None, None)

    def sum(self, x: Array) -> Array:
        return x

    def max(self, x: Array) -> Array:
        return x

    def rank(self) -> Array | int:
        return 0

    def gather(self, x: Array, axis: int = -1) -> Array:
        return x

    def shard(self, x: Array, *axes: str | None) -> Array:
        if not self.axes:
            return x
        return lax.with_sharding_constraint(x, _mp_alone(axes))

    def _on_parts(self, function: Callable[[Array], Array], spec: P) -> Callable[[Array], Array]:
        if not self.axes:
            return function
        # Left to itself, the compiler would join the parts before it lets the replicas talk.
        split = _mp_alone(spec)
        return jax.shard_map(function, in_specs=split, out_specs=split, axis_names={"mp"})


class Manual(Parallel):
    """dp and mp written out: arrays are this device's blocks.

    `pcast` to varying transposes to a psum, which makes Megatron's f of it.
    """

    axes = ("dp", "mp")

    def __init__(self, mesh: Mesh, zero_stage: int = 0, **choices: Any):
        super().__init__(mesh, zero_stage, **choices)
        self.mp = mesh.shape["mp"]

    def local(self, shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
        return tuple(
            size // self.mp if axis == "mp" else size
            for size, axis in zip(shape, axes, strict=True)
        )

    def fan_out(self, x: Array) -> Array:
        if self.split_stream:
            return checkpoint_name(lax.all_gather(x, "mp", axis=1, tiled=True), GATHERED)
        return lax.pcast(x, "mp", to="varying")

    def join(self, x: Array) -> Array:
        if self.split_stream:
            return lax.psum_scatter(x, "mp", scatter_dimension=1, tiled=True)
        return lax.psum(x, "mp")

    def own_positions(self, x: Array) -> Array:
        if not self.split_stream:
            return x
        positions = x.shape[1] // self.mp
        return lax.dynamic_slice_in_dim(x, self.rank() * positions, positions, axis=1)

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

    def _on_parts(self, function: Callable[[Array], Array], spec: P) -> Callable[[Array], Array]:
        return function


def param(
    par: Parallel,
    name: str,
    shape: tuple[int, ...],
    axes: Axes,
    init: hk.initializers.Initializer,
    *,
    decay: bool = False,
    summed: bool = False,
    adapter: bool = False,
) -> Array:
    """A parameter of the current Haiku module, declared once: global shape, layout, initialiser.

    Args:
      axes: which mesh axis splits each array axis.
      decay: whether weight decay applies (the original decays matrices alone).
      summed, adapter: see `Declaration`.
    """
    declare(current_name(), name, Declaration(shape, P(*axes), decay, summed, adapter))
    return hk.get_parameter(name, par.local(shape, axes), init=init)
