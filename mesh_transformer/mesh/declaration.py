"""Parameter declarations: global shape, layout over mp, and the properties derived from them."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True)
class Declaration:
    """The properties of one parameter that layouts, weight decay and conversion depend on.

    Attributes:
      shape: the global shape.
      spec: the layout over mp.
      decay: whether weight decay applies.
      summed: whether this is a bias that the original adds on every shard before its psum, so that
        each of the original's shards holds b / mp.
      adapter: whether this is a LoRA factor.
      frozen: whether training leaves it unchanged, as all but the adapters in a LoRA run.
      stacked: whether the first axis is that of the layers.
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
        """Return the axis that ZeRO splits over dp.

        This is the longest axis, other than the layers' and the one split over mp, whose size dp
        divides.  None if there is no such axis, and for parameters that mp does not split: these,
        and those with no axis besides the one split over mp, are small.
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
        """Return the layout under ZeRO of this parameter's part of the state between steps."""
        split = self.zero_axis(dp)
        return P(*("dp" if axis == split else name for axis, name in enumerate(self.spec)))


def is_spec(node: Any) -> bool:
    """Whether a node is a PartitionSpec; an `is_leaf` for trees of them."""
    return isinstance(node, P)


def is_declaration(node: Any) -> bool:
    """Whether a node is a Declaration; an `is_leaf` for trees of them."""
    return isinstance(node, Declaration)


def map_declared(function: Callable[..., Any], declared: Any, *trees: Any) -> Any:
    """Apply `jax.tree.map` to a tree of declarations and other trees of the same structure."""
    return jax.tree.map(function, declared, *trees, is_leaf=is_declaration)


def partition(declared: Any, tree: Any) -> tuple[Any, Any]:
    """Split nested dicts into two: the trained leaves and the frozen leaves."""
    trained, frozen = {}, {}
    for name, node in declared.items():
        if is_declaration(node):
            (frozen if node.frozen else trained)[name] = tree[name]
            continue
        for part, subtree in zip((trained, frozen), partition(node, tree[name]), strict=True):
            if subtree:
                part[name] = subtree
    return trained, frozen


def joined(one: Any, other: Any) -> Any:
    """Merge two nested dicts without common leaves; the inverse of `partition`."""
    both = {name: joined(one[name], other[name]) for name in one.keys() & other.keys()}
    return one | other | both


_declarations: ContextVar[dict[str, dict[str, Declaration]] | None] = ContextVar(
    "declarations", default=None
)


@contextlib.contextmanager
def record_declarations() -> Iterator[dict[str, dict[str, Declaration]]]:
    """Collect what `param` declares inside the context, as {module: {name: declaration}}."""
    declared: dict[str, dict[str, Declaration]] = {}
    token = _declarations.set(declared)
    try:
        yield declared
    finally:
        _declarations.reset(token)


def declare(module: str, name: str, declaration: Declaration) -> None:
    """Record a parameter's declaration, if inside `record_declarations`; else does nothing."""
    declarations = _declarations.get()
    if declarations is not None:
        declarations.setdefault(module, {})[name] = declaration
