"""Parameter declarations: shape, sharding over mp, and how training treats each parameter.

mp is the model-parallel mesh axis, and dp the data-parallel one.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P


def padded_size(size: int, mp: int, unit: int = 1) -> int:
    """Return an axis's size on a mesh that splits it over mp in whole units, padding included."""
    return -(-size // (unit * mp)) * unit * mp


def resized(x: Array, shape: tuple[int, ...]) -> Array:
    """Cut the ends of x's axes, or append zeros to them, so that x gets the shape `shape`."""
    if x.shape == shape:  # also of scalars, which jnp.pad refuses
        return x
    x = x[tuple(slice(size) for size in shape)]
    return jnp.pad(x, [(0, size - own) for size, own in zip(shape, x.shape, strict=True)])


@dataclass(frozen=True)
class Declaration:
    """Properties of a parameter that determine its sharding, training and checkpoint conversion.

    Attributes:
      shape: the global shape.  If mp does not divide an axis that it splits, the array on the mesh
        is longer (see `padded`), and filled with zeros.
      spec: the PartitionSpec over mp.
      decay: whether weight decay applies to the parameter.
      summed: whether this is a bias that the original mesh-transformer-jax stores once per mp
        shard.  The original sums these copies over mp, so each copy is this library's bias divided
        by mp.
      adapter: whether this is one of the two factors of a LoRA adapter.
      fanned_out: whether the parameter, which mp does not split, is applied to activations after
        `Parallel.fan_out`, so that each mp shard computes only a part of its gradient.
      frozen: whether training leaves the parameter unchanged.  In a LoRA run, all parameters except
        the adapters are frozen.
      stacked: whether the first axis of the array is the layer axis, along which the parameters of
        all layers are stacked.
      unit: the axis that mp splits is split in multiples of this size, such as that of a head.
      quantized: whether this is an array of a quantized matrix, which is never cast.
    """

    shape: tuple[int, ...]
    spec: P
    decay: bool
    summed: bool
    adapter: bool = False
    fanned_out: bool = False
    frozen: bool = False
    stacked: bool = False
    unit: int = 1
    quantized: bool = False

    def padded(self, mp: int) -> tuple[int, ...]:
        """Return the global shape of the parameter's array on a mesh with mp shards.

        Zeros are appended to the axis that mp splits, until mp divides it in whole units.  They
        stay zero in training, because their gradients are zero.
        """
        return tuple(
            padded_size(size, mp, self.unit) if axis == "mp" else size
            for size, axis in zip(self.shape, self.spec, strict=True)
        )

    def unpadded_spec(self, spec: P, mesh: Mapping[str, int]) -> P:
        """Return a PartitionSpec for the array without padding, whose mp axis mp does not divide.

        If possible, mp splits another axis.

        Args:
          spec: the PartitionSpec of the padded array.
          mesh: the sizes of the mesh axes.
        """
        axes = [None if axis == "mp" else axis for axis in spec]
        for index in sorted(range(len(axes)), key=lambda index: -self.shape[index]):
            names = tuple(axis for axis in (axes[index], "mp") if axis is not None)
            split = spec[index] != "mp" and not (self.stacked and index == 0)
            if split and self.shape[index] % math.prod(mesh[name] for name in names) == 0:
                axes[index] = names if len(names) > 1 else "mp"
                break
        return P(*axes)

    def stack(self, layers: int) -> "Declaration":
        """Return the declaration of the array in which this parameter is stacked over all layers.

        The layer axis is the first axis of that array.

        Args:
          layers: number of layers.
        """
        spec = P(None, *self.spec)
        return replace(self, shape=(layers, *self.shape), spec=spec, stacked=True)

    def unstack(self) -> "Declaration":
        """Return the declaration of one layer's slice of this stacked parameter."""
        assert self.stacked
        spec = P(*tuple(self.spec)[1:])
        return replace(self, shape=self.shape[1:], spec=spec, stacked=False)

    def zero_axis(self, dp: int) -> int | None:
        """Return the array axis that ZeRO splits over dp, or None if ZeRO does not split the array.

        The axis is the longest one whose size is a multiple of dp, excluding the layer axis and the
        axis split over mp.  ZeRO does not split parameters that have no such axis or, except for
        matrices that are copied to all mp shards, are not split over mp; most of these are small.

        Args:
          dp: number of data-parallel replicas.
        """
        axes = tuple(self.spec)
        is_copied_matrix = self.fanned_out and self.decay and not self.adapter
        if "mp" not in axes and not is_copied_matrix:
            return None
        free = [
            axis
            for axis in range(self.stacked, len(axes))
            if axes[axis] is None and self.shape[axis] % dp == 0
        ]
        return max(free, key=lambda axis: self.shape[axis], default=None)

    def at_rest(self, dp: int) -> P:
        """Return the PartitionSpec that this parameter has between steps with ZeRO.

        Args:
          dp: number of data-parallel replicas.
        """
        split = self.zero_axis(dp)
        return P(*("dp" if axis == split else name for axis, name in enumerate(self.spec)))

    @property
    def matrix_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes that are the inputs of this matrix, and those that are its outputs.

        The layer axis is neither.
        """
        axes = range(self.stacked, len(self.shape))
        inputs = count_input_axes(tuple(self.spec)[self.stacked :])
        return tuple(axes[:inputs]), tuple(axes[inputs:])

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The numbers of inputs and outputs of this matrix, in one layer."""
        inputs, outputs = (math.prod(self.shape[a] for a in axes) for axes in self.matrix_axes)
        return inputs, outputs


def count_input_axes(axes: tuple[str | None, ...]) -> int:
    """Return how many of a matrix's axes, from the first, are inputs; the others are outputs.

    If mp splits the first axis, all axes but the last are inputs.  Otherwise, only the first is.

    Args:
      axes: for each axis, the mesh axis that splits it, or None.
    """
    return len(axes) - 1 if axes[0] == "mp" else 1


@dataclass(frozen=True)
class Moment:
    """An array of the optimizer's state, which has some or all axes of a parameter.

    Attributes:
      parameter: the parameter's declaration.
      axes: the parameter's axes that the array has, ascending.
    """

    parameter: Declaration
    axes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(self.parameter.shape[axis] for axis in self.axes)

    def spec(self, parameter: P) -> P:
        """Return the PartitionSpec of this array if its parameter has the spec `parameter`."""
        return P(*(tuple(parameter)[axis] for axis in self.axes))

    @property
    def declaration(self) -> Declaration:
        """The parameter's declaration, with the shape and spec of this array."""
        spec, stacked = self.spec(self.parameter.spec), self.parameter.stacked and 0 in self.axes
        return replace(self.parameter, shape=self.shape, spec=spec, stacked=stacked)


def is_spec(node: Any) -> bool:
    """Return whether a tree node is a PartitionSpec; for use as JAX's `is_leaf` argument."""
    return isinstance(node, P)


def is_declaration(node: Any) -> bool:
    """Return whether a tree node is a Declaration; for use as JAX's `is_leaf` argument."""
    return isinstance(node, Declaration)


def map_declared(function: Callable[..., Any], declared: Any, *trees: Any) -> Any:
    """Map `function` over a tree of declarations and other trees of the same structure.

    This is `jax.tree.map` with declarations as leaves.
    """
    return jax.tree.map(function, declared, *trees, is_leaf=is_declaration)


def partition(
    declared: Any, tree: Any, where: Callable[[Declaration], bool] = lambda d: d.frozen
) -> tuple[Any, Any]:
    """Split a nested dict of parameters into two, by default the trained and the frozen ones.

    Args:
      declared: the `Declaration` of each leaf, in the structure of `tree`.
      tree: the nested dict.
      where: a condition on a leaf's declaration.

    Returns:
      A nested dict with the leaves for which `where` is false, and one with the other leaves.
    """
    rest, selected = {}, {}
    for name, node in declared.items():
        if is_declaration(node):
            (selected if where(node) else rest)[name] = tree[name]
            continue
        parts = partition(node, tree[name], where)
        for part, subtree in zip((rest, selected), parts, strict=True):
            if subtree:
                part[name] = subtree
    return rest, selected


def select(tree: Any, like: Any) -> Any:
    """Return the leaves of the nested dict `tree` that the nested dict `like` has, too."""
    if not isinstance(like, dict):
        return tree
    return {name: select(tree[name], node) for name, node in like.items()}


def combine(one: Any, other: Any) -> Any:
    """Merge two nested dicts that have no leaves in common; the inverse of `partition`."""
    both = {name: combine(one[name], other[name]) for name in one.keys() & other.keys()}
    return one | other | both


_declarations: ContextVar[dict[str, dict[str, Declaration]] | None] = ContextVar(
    "declarations", default=None
)


@contextlib.contextmanager
def record_declarations() -> Iterator[dict[str, dict[str, Declaration]]]:
    """Record the parameters that are declared inside this context manager.

    The context manager yields a dict of the form {module: {name: declaration}}.  Each call of
    `mesh.parallel.param` inside the context adds an entry to it.
    """
    declared: dict[str, dict[str, Declaration]] = {}
    token = _declarations.set(declared)
    try:
        yield declared
    finally:
        _declarations.reset(token)


def declare(module: str, name: str, declaration: Declaration) -> None:
    """Record the declaration of a parameter of the Haiku module called `module`.

    This does nothing outside `record_declarations`.
    """
    declarations = _declarations.get()
    if declarations is not None:
        declarations.setdefault(module, {})[name] = declaration
