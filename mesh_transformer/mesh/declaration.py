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
        axis split over mp.  ZeRO does not split parameters that have no such axis or that are not
        split over mp; most of these are small.

        Args:
          dp: number of data-parallel replicas.
        """
        axes = tuple(self.spec)
        if "mp" not in axes:
            return None
        free = [
            axis
            for axis in range(self.stacked, len(axes))
            if axes[axis] is None and self.shape[axis] % dp == 0
        ]
        return max(free, key=lambda axis: self.shape[axis], default=None)

    def at_rest(self, dp: int) -> P:
        """Return the PartitionSpec that this parameter has between steps with ZeRO.

        The parameter's Adam moments have the same PartitionSpec.

        Args:
          dp: number of data-parallel replicas.
        """
        split = self.zero_axis(dp)
        return P(*("dp" if axis == split else name for axis, name in enumerate(self.spec)))


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


def partition(declared: Any, tree: Any) -> tuple[Any, Any]:
    """Split a nested dict of parameters into two: the trained ones, and the frozen ones.

    Args:
      declared: the `Declaration` of each leaf, in the structure of `tree`.
      tree: the nested dict.

    Returns:
      A nested dict with the trained leaves, and one with the frozen leaves.
    """
    trained, frozen = {}, {}
    for name, node in declared.items():
        if is_declaration(node):
            (frozen if node.frozen else trained)[name] = tree[name]
            continue
        for part, subtree in zip((trained, frozen), partition(node, tree[name]), strict=True):
            if subtree:
                part[name] = subtree
    return trained, frozen


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
