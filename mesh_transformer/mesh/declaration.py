"""Parameter declarations: shape, layout over mp, and how training treats each parameter."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True)
class Declaration:
    """Properties of one parameter, which determine its layout, weight decay and conversion.

    Attributes:
      shape: the global shape.
      spec: the PartitionSpec over mp.
      decay: whether weight decay applies to the parameter.
      summed: whether this is a bias that the original mesh-transformer-jax stores once per shard.
        The original adds these copies in a psum over mp, so each copy is 1 / mp of the bias
        that is stored here.
      adapter: whether this is a LoRA factor.
      frozen: whether training leaves the parameter unchanged.  In a LoRA run, all parameters
        except the adapters are frozen.
      stacked: whether the parameters of all layers are stacked along the first axis.
    """

    shape: tuple[int, ...]
    spec: P
    decay: bool
    summed: bool
    adapter: bool = False
    frozen: bool = False
    stacked: bool = False

    def stack(self, layers: int) -> "Declaration":
        """Return the declaration of this parameter stacked over all layers on a new first axis."""
        spec = P(None, *self.spec)
        return replace(self, shape=(layers, *self.shape), spec=spec, stacked=True)

    def unstack(self) -> "Declaration":
        """Return the declaration of one layer's part of a stacked parameter."""
        assert self.stacked
        spec = P(*tuple(self.spec)[1:])
        return replace(self, shape=self.shape[1:], spec=spec, stacked=False)

    def zero_axis(self, dp: int) -> int | None:
        """Return the axis that ZeRO splits over dp, or None if ZeRO does not split this parameter.

        The axis is the longest one whose size is a multiple of dp, excluding the layer axis and
        the axis split over mp.  ZeRO does not split parameters that have no such axis or that are
        not split over mp; most of these are small.
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
        """Return the ZeRO PartitionSpec of this parameter and its Adam moments between steps."""
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
    """Split the nested dicts `tree` into two: its trained leaves, and its frozen leaves.

    `declared` contains the `Declaration` of each leaf and has the same structure as `tree`.
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
    """Return a context manager that yields a dict of the parameters declared inside the context.

    The dict has the form {module: {name: declaration}}.  `param` adds the declarations to it.
    """
    declared: dict[str, dict[str, Declaration]] = {}
    token = _declarations.set(declared)
    try:
        yield declared
    finally:
        _declarations.reset(token)


def declare(module: str, name: str, declaration: Declaration) -> None:
    """Record a parameter's declaration, if called inside `record_declarations`."""
    declarations = _declarations.get()
    if declarations is not None:
        declarations.setdefault(module, {})[name] = declaration
