"""Collectives and array layouts for model code, with two ways to partition over the mesh.

The mesh has two axes, dp (data parallel) and mp (model parallel), and a third one if the positions
of sequences are split: cp (context parallel).  Model code runs inside `shard_map`, or on a single
device without it, and accesses the mesh only through a `Parallel`.  Collectives over dp and cp are
always explicit: f32 reductions, and ZeRO's gathers and scatters.  The two subclasses of `Parallel`
differ in how they partition over mp:

* `Manual` also makes Megatron's collectives over mp explicit.  Model code sees this device's shard
  of each array.
* `Auto` lets the compiler partition over mp.  Model code sees arrays that are split over dp and cp.

The code of layers and training steps works with either subclass.
"""

import abc
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from mesh_transformer.mesh import haiku as hk
from mesh_transformer.mesh.apart import Exact, by_rows
from mesh_transformer.mesh.declaration import (
    Declaration,
    declare,
    is_spec,
    map_declared,
    padded_size,
)
from mesh_transformer.mesh.positions import Positions


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_cast(x: Array, axis: int, dtype: Any) -> Array:
    """Cast f32 shards to `dtype` and all-gather them over dp along the array axis `axis`.

    The gradient of x is summed over dp in f32.  Without this custom gradient rule, JAX would sum it
    in `dtype`.
    """
    return lax.all_gather(x.astype(dtype), "dp", axis=axis, tiled=True)


def gather_cast_forward(x: Array, axis: int, dtype: Any) -> tuple[Array, None]:
    return gather_cast(x, axis, dtype), None


def gather_cast_backward(axis: int, dtype: Any, _: None, g: Array) -> tuple[Array]:
    g = g.astype(jnp.float32)
    return (lax.psum_scatter(g, "dp", scatter_dimension=axis, tiled=True),)


gather_cast.defvjp(gather_cast_forward, gather_cast_backward)

Axes = tuple[str | None, ...]  # for each axis of an array, the mesh axis that splits it or None
GATHERED = "gathered"  # checkpoint_name of a split residual stream after its all-gather


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(x is None or isinstance(x, str) for x in node)


class Parallel(Positions):
    """Collectives for code inside a `shard_map` over the mesh axes in `axes`, if there are any.

    The type of each array lists the mesh axes along which the array varies, that is, differs
    between devices (see `check_vma` of `shard_map`).  The residual stream [B, T, D] is replicated
    over mp, and T counts the positions of `cut`.  With `split_stream`, it is instead split by
    position over mp (sequence parallelism, Korthikanti 2022).

    In all methods, `declared` is a tree with the `Declaration` of each parameter.  A training step
    converts parameters and gradients in this order; "split" means along the axis that ZeRO splits
    over dp (`Declaration.zero_axis`):

        method          ZeRO 0               ZeRO 1               ZeRO 3
        at_rest         f32                  f32, split           f32, split
        compute_copy    cast                 cast and gathered    trained: f32, frozen: cast; split
        collect         -                    -                    cast and gathered, by layer
        (backward)      own gradients        own gradients        f32, summed over dp, split
        mean            summed over dp       summed, split        divided by dp

    Attributes:
      axes: the mesh axes over which collectives are explicit; the compiler partitions over the
        other mesh axes.
      mp: size of the mesh axis mp; 1 if the compiler partitions over mp.
      shards: size of the mesh axis mp, also if the compiler partitions over mp.
      dp: number of data-parallel replicas.
      cp: number of devices that the positions of each sequence are split over.
      replicas: number of separate gradients per microbatch: `dp`, or 1 with ZeRO 3, whose backward
        pass already sums over dp.
      attention: the backend for attention over a whole sequence (`attention_backend`).
      ring: whether attention over positions that are split over cp exchanges keys and values, not
        heads for positions.
      zero_stage: 0 (no ZeRO), 1 or 3.
      split_stream: whether the residual stream is split by position over mp.
      exact: how results are made independent of other rows (see `by_rows`); None if they are not.
    """

    _explicit: tuple[str, ...]  # `axes` on a mesh

    def __init__(
        self,
        mesh: Mesh | AbstractMesh | None = None,
        zero_stage: int = 0,
        *,
        attention: str = "xla",
        ring: bool = True,
        split_stream: bool = False,
        exact: Exact | None = None,
    ):
        self.split_stream = split_stream
        self.exact = exact
        names = () if mesh is None else mesh.axis_names
        self.axes = tuple(axis for axis in self._explicit if axis in names)
        self.cp = 1 if mesh is None else mesh.shape.get("cp", 1)
        self.dp = 1 if mesh is None else mesh.shape["dp"]
        self.shards = 1 if mesh is None else mesh.shape["mp"]
        self.mp = self.shards if "mp" in self.axes else 1
        self.attention, self.ring = attention, ring
        self.zero_stage = zero_stage
        self.replicas = self.dp if zero_stage < 3 else 1

    def local_size(self, size: int, unit: int = 1) -> int:
        """Return the local size of an axis that is split over mp: its size inside the `shard_map`.

        The axis is padded, if necessary, so that each shard has the same number of whole units.

        Args:
          size: the global size, without padding.
          unit: the size of a unit, such as that of a head.
        """
        return padded_size(size, self.shards, unit) // self.mp

    @abc.abstractmethod
    def fan_out(self, x: Array) -> Array:
        """Prepare activations x, [B, T, D], as input of matmuls whose weights are split over mp.

        This is Megatron's operator f: the identity, whose backward pass sums the gradient over mp.
        With `split_stream`, it instead all-gathers x over mp along T, and the backward pass
        reduce-scatters the gradient.
        """

    @abc.abstractmethod
    def join(self, x: Array) -> Array:
        """Sum x, [B, T, D], over mp, and return the sum in the layout of the residual stream.

        This is Megatron's operator g: an all-reduce, whose backward pass is the identity.  With
        `split_stream`, it instead reduce-scatters x along T, and the backward pass all-gathers the
        gradient.
        """

    @abc.abstractmethod
    def own_positions(self, x: Array) -> Array:
        """Return x, [B, T, D], at the positions that this device's residual stream contains.

        x must contain all positions of `cut`.  Without `split_stream`, so does the residual stream,
        and x is returned unchanged.
        """

    @abc.abstractmethod
    def sum(self, x: Array) -> Array:
        """Sum x over mp; the backward pass is the identity."""

    @abc.abstractmethod
    def max(self, x: Array) -> Array:
        """Return the elementwise maximum of x over mp, which cannot be differentiated."""

    @abc.abstractmethod
    def rank(self) -> Array | int:
        """Return this device's index along mp; 0 if the compiler partitions over mp."""

    @abc.abstractmethod
    def gather(self, x: Array, axis: int = -1) -> Array:
        """All-gather the shards of x over mp and concatenate them along the array axis `axis`."""

    @abc.abstractmethod
    def _on_parts(self, function: Callable[[Array], Array], spec: P) -> Callable[[Array], Array]:
        """Wrap a function that calls collectives over dp, so that it runs on each mp shard.

        It maps an array with the PartitionSpec `spec` to one with the same sharding over mp.
        """

    def by_rows(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` or, if the config sets `exact`, `apart.by_rows` of it."""
        return function if self.exact is None else by_rows(function, self.exact)

    def on_blocks(
        self, function: Callable[..., Any], in_axes: Any, out_axes: Any
    ) -> Callable[..., Any]:
        """Wrap `function` to run on each mp shard of its arguments, with `check_vma` disabled.

        Unlike `_on_parts`, which is for collectives over dp, this is for kernels that do not
        declare along which mesh axes their outputs vary.  All results are typed as varying along
        all axes.

        Args:
          in_axes: for each argument, a tuple with the mesh axis that splits each array axis, or
            None.  If an argument is a tree, its tuple applies to all leaves.
          out_axes: the same for each result.
        """
        if not self.axes:
            return function

        def untyped(x: Array) -> Array:
            # Kernels compare the varying axes of their inputs.  With check_vma disabled, every
            # operation drops the varying axes from its result; this one has no other effect.
            return jnp.squeeze(jnp.expand_dims(x, 0), 0)

        inner = jax.shard_map(
            lambda *args: function(*jax.tree.map(untyped, args)),
            in_specs=jax.tree.map(self._left_to_compiler, in_axes, is_leaf=_is_axes),
            out_specs=jax.tree.map(self._left_to_compiler, out_axes, is_leaf=_is_axes),
            check_vma=False,
        )
        return lambda *args: jax.tree.map(lambda x: self._as_varying(x, *self.axes), inner(*args))

    def _left_to_compiler(self, axes: Iterable[str | None]) -> P:
        """Return the PartitionSpec with the mesh axes that the compiler partitions over."""
        return P(*(None if axis in self._explicit else axis for axis in axes))

    def restrict_specs(self, specs: Any) -> Any:
        """Remove all mesh axes except `self.axes` from PartitionSpecs, as `shard_map` requires."""

        def visible(spec: P) -> P:
            return P(*(axis if axis in self.axes else None for axis in spec))

        return jax.tree.map(visible, specs, is_leaf=is_spec)

    def _as_varying(self, x: Array, *axes: str | None) -> Array:
        """Return x typed as varying along the mesh axes `axes`.

        Axes that are not in `self.axes` are ignored.
        """
        varying = tuple(axis for axis in self.axes if axis in axes)
        return lax.pcast(x, varying, to="varying") if varying else x

    def zeros(self, shape: tuple[int, ...], dtype: Any, *axes: str | None) -> Array:
        """Return zeros that are split over the mesh axes in `axes` and typed as varying along them.

        Args:
          shape: the local shape.
          axes: for each array axis, the mesh axis that splits it, or None.
        """
        return self.shard(self._as_varying(jnp.zeros(shape, dtype), *axes), *axes)

    def _zero_axis(self, declaration: Declaration) -> int | None:
        # Frozen parameters have no moments or gradients to split.  Splitting the parameters
        # themselves saves memory only with ZeRO 3, which gathers them one layer at a time.
        if not self.zero_stage or (declaration.frozen and self.zero_stage < 3):
            return None
        return declaration.zero_axis(self.dp)

    def at_rest(self, declared: Any) -> Any:
        """Return the PartitionSpec that each parameter has between steps."""

        def layout(d: Declaration) -> P:
            return d.spec if self._zero_axis(d) is None else d.at_rest(self.dp)

        return map_declared(layout, declared)

    def compute_copy(self, params: Any, declared: Any, dtype: Any) -> Any:
        """Cast the parameters to `dtype` for the forward pass; call this once per step.

        Arrays of quantized matrices keep their dtype, here and in `collect`.

        With ZeRO 1, the parameters that ZeRO splits over dp are also all-gathered.  With ZeRO 3,
        they stay split until `collect` gathers them.  Until then the trained ones also stay in f32,
        so that their gradients are in f32.  Frozen ones, unlike trained ones (see `mark_varying`),
        are typed as varying over cp here.
        """

        def copy(d: Declaration, x: Array) -> Array:
            axis, own = self._zero_axis(d), x.dtype if d.quantized else dtype
            if d.frozen:
                x = self._as_varying(x, "cp")
            if axis is None:
                # In this order, a gradient with respect to x is summed over dp in f32.
                return self._as_varying(x, "dp").astype(own)
            if self.zero_stage == 3:
                return x.astype(own if d.frozen else jnp.float32)
            return self._on_parts(lambda x: gather_cast(x, axis, dtype), d.spec)(x)

        return map_declared(copy, declared, params)

    def mark_varying(self, params: Any, declared: Any) -> Any:
        """Type replicated parameters as varying, to sum all their gradients at once.

        JAX all-reduces the gradient of a replicated parameter over mp or cp at the point where the
        parameter's type changes to varying.  By default, that point is inside every layer.  If this
        method is called once per microbatch, there is only one all-reduce per microbatch, in f32.

        For cp, the method affects all parameters.  For mp, it affects those that mp does not split
        and that are LoRA adapters or declared with `fanned_out` or, with `split_stream`, all.
        """

        def one(d: Declaration, x: Array) -> Array:
            affected = d.adapter or d.fanned_out or self.split_stream
            over_mp = affected and "mp" not in tuple(d.spec)
            if self.cp == 1 and not over_mp:
                return x
            axes = ("cp", "mp") if over_mp else ("cp",)
            return self._as_varying(x.astype(jnp.float32), *axes).astype(x.dtype)

        return map_declared(one, declared, params)

    def collect(self, params: Any, declared: Any, dtype: Any) -> Any:
        """Return the parameters in `dtype`, all-gathered over dp but still split over mp.

        Call this right before using the parameters.

        Args:
          params: the result of `compute_copy`, or a part of it.
        """

        def whole(d: Declaration, x: Array) -> Array:
            axis = self._zero_axis(d) if self.zero_stage == 3 else None
            if axis is not None:
                own = x.dtype if d.quantized else dtype
                x = self._on_parts(lambda x: gather_cast(x, axis, own), d.spec)(x)
            # This also constrains the gradients.  Without it, TPUs would keep some gradients in
            # another layout and convert them by all-to-alls.
            return self.shard(x, *d.spec)

        return map_declared(whole, declared, params)

    def accumulator(self, params: Any, declared: Any) -> Any:
        """Return f32 zeros to which the gradients of all microbatches are added."""

        def zeros(d: Declaration, x: Array) -> Array:
            return self._as_varying(jnp.zeros(x.shape, jnp.float32), "dp", *d.spec)

        return map_declared(zeros, declared, params)

    def mean(self, grads: Any, declared: Any) -> Any:
        """Return the mean of the gradients over dp, in the sharding that `at_rest` returns."""

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
        """Sum x over the mesh axes `axes`; axes that are not in `self.axes` are ignored."""
        seen = tuple(axis for axis in self.axes if axis in axes)
        return lax.psum(x, seen) if seen else x

    def _total(self, squares: Any, declared: Any, *, over_dp: bool) -> Array:
        """Compute `total` or, unless `over_dp`, the sum over the shards of this replica alone."""
        by_axes: dict[tuple[str, ...], list[Array]] = {}

        def add(d: Declaration, x: Array) -> None:
            mp = ("mp",) if "mp" in tuple(d.spec) else ()
            is_split = over_dp and self._zero_axis(d) is not None
            by_axes.setdefault((*mp, "dp") if is_split else mp, []).append(x)

        map_declared(add, declared, squares)
        sums = [self._sum_over(sum(xs[1:], xs[0]), names) for names, xs in by_axes.items()]
        return jnp.sum(jnp.stack(sums))

    def total(self, squares: Any, declared: Any) -> Array:
        """Sum one scalar per parameter over all parameters and all of their shards.

        Args:
          squares: one scalar per parameter, such as the sum of squares of the parameter's gradient.
            Each scalar is computed from this device's shard, in the layout that `at_rest` returns.
        """
        return self._total(squares, declared, over_dp=True)

    def microbatch_grads(self, grads: Any, declared: Any) -> Any:
        """Return one microbatch's gradients on this replica; with ZeRO 3, their mean over dp.

        With ZeRO 3, the backward pass sums over dp, so there are no gradients of a single replica.
        """
        # With ZeRO 3 the backward pass has already summed most leaves over dp.  `mean` sums the
        # other leaves and divides all of them by dp.
        return self.mean(grads, declared) if self.zero_stage == 3 else grads

    def microbatch_total(self, squares: Any, declared: Any) -> Array:
        """Same as `total`, for scalars computed from the result of `microbatch_grads`.

        Except with ZeRO 3, the result differs between replicas.
        """
        return self._total(squares, declared, over_dp=self.zero_stage == 3)

    def mean_over_dp(self, x: Array) -> Array:
        """Return the mean over dp of an array that differs between replicas."""
        return self._sum_over(x, ("dp",)) / self.dp


class Auto(Parallel):
    """A `Parallel` that partitions over dp and cp explicitly and leaves mp to the compiler.

    Without a mesh, the program runs on one device and has no collectives.
    """

    _explicit = ("dp", "cp")

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
        return lax.with_sharding_constraint(x, self._left_to_compiler(axes))

    def _on_parts(self, function: Callable[[Array], Array], spec: P) -> Callable[[Array], Array]:
        if not self.axes:
            return function
        # Without this shard_map, the compiler would gather the shards over mp before each
        # collective over dp.
        split = self._left_to_compiler(spec)
        return jax.shard_map(function, in_specs=split, out_specs=split, axis_names={"mp"})


class Manual(Parallel):
    """A `Parallel` that partitions over all axes explicitly; each array is this device's shard."""

    _explicit = ("dp", "cp", "mp")

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
    init: hk.Initializer,
    *,
    decay: bool = False,
    summed: bool = False,
    adapter: bool = False,
    fanned_out: bool = False,
    unit: int = 1,
) -> Array:
    """Declare a parameter of the current Haiku module, and return it with its local shape.

    The local shape is the parameter's shape inside the `shard_map` (see `Parallel.local_size`).
    `Declaration` explains the other arguments.

    Args:
      shape: the global shape, without padding.
      axes: for each array axis, the mesh axis that splits it, or None.
      decay: whether weight decay applies; as in mesh-transformer-jax, set this for matrices only.
    """
    declaration = Declaration(shape, P(*axes), decay, summed, adapter, fanned_out, unit=unit)
    declare(hk.current_name(), name, declaration)
    local = tuple(
        par.local_size(size, unit) if axis == "mp" else size
        for size, axis in zip(shape, axes, strict=True)
    )
    return hk.get_parameter(name, local, init=init)
