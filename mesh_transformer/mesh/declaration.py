"""What a parameter declares of itself: global shape, layout over mp, and what follows from them."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True)
class Declaration:
    """All that a parameter says of itself; layouts, decay and conversion follow from it.

    `spec` is its layout over mp.  `summed` marks a bias that the original adds on every shard
    before its psum (so that its shards hold b / mp each); `adapter` what LoRA adds to a model, of
    which it is all that is trained, the rest is `frozen`; `stacked` a leading axis of layers.
    """

    shape: tuple[int, ...]
    spec: P
    decay: bool
    summed: bool
    adapter: bool = False
    frozen: bool = False
    stacked: bool = False

    def stack(self, layers: int) -> "Declaration":
        """The same parameter of all layers, one above the other."""
        spec = P(None, *self.spec)
        return replace(self, shape=(layers, *self.shape), spec=spec, stacked=True)

    def unstack(self) -> "Declaration":
        """One layer's of a stacked one."""
        assert self.stacked
        spec = P(*tuple(self.spec)[1:])
        return replace(self, shape=self.shape[1:], spec=spec, stacked=False)

    def zero_axis(self, dp: int) -> int | None:
        """Which axis ZeRO splits over dp: the longest that dp divides, beside mp's own.

        None for what mp does not split or splits alone, which is small, and where none divides.
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
        """The layout of the state under ZeRO."""
        split = self.zero_axis(dp)
        return P(*("dp" if axis == split else name for axis, name in enumerate(self.spec)))


def is_spec(node: Any) -> bool:
    """Whether a node of a tree of PartitionSpecs is one."""
    return isinstance(node, P)


def is_declaration(node: Any) -> bool:
    """For tree functions over trees of declarations."""
    return isinstance(node, Declaration)


def map_declared(function: Callable[..., Any], declared: Any, *trees: Any) -> Any:
    """`jax.tree.map` over a tree of declarations and others of its structure."""
    return jax.tree.map(function, declared, *trees, is_leaf=is_declaration)


def partition(declared: Any, tree: Any) -> tuple[Any, Any]:
    """The leaves of nested dicts that are trained, and those that are frozen, as two of them."""
    trained, frozen = {}, {}
    for name, node in declared.items():
        if is_declaration(node):
            (frozen if node.frozen else trained)[name] = tree[name]
            continue
        for part, found in zip((trained, frozen), partition(node, tree[name]), strict=True):
            if found:
                part[name] = found
    return trained, frozen


def joined(one: Any, other: Any) -> Any:
    """The nested dicts of which `partition` made two."""
    both = {name: joined(one[name], other[name]) for name in one.keys() & other.keys()}
    return one | other | both


_declarations: ContextVar[dict[str, dict[str, Declaration]] | None] = ContextVar(
    "declarations", default=None
)


@contextlib.contextmanager
def record_declarations() -> Iterator[dict[str, dict[str, Declaration]]]:
    """Collects what `param` declares meanwhile, in the structure of Haiku's parameters."""
    found: dict[str, dict[str, Declaration]] = {}
    token = _declarations.set(found)
    try:
        yield found
    finally:
        _declarations.reset(token)


def declare(module: str, name: str, declaration: Declaration) -> None:
    """Notes what a parameter declares, where `record_declarations` listens."""
    declarations = _declarations.get()
    if declarations is not None:
        declarations.setdefault(module, {})[name] = declaration
