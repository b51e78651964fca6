"""What a parameter declares of itself: global shape, layout over mp, and what follows from them."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True)
class Declaration:
    """All that a parameter says of itself; layouts, decay and conversion follow from it.

    `spec` is its layout over mp.  `summed` marks a bias that the original adds on every shard
    before its psum (so that its shards hold b / mp each); `stacked` a leading axis of layers.
    """

    shape: tuple[int, ...]
    spec: P
    decay: bool
    summed: bool
    stacked: bool = False

    def stack(self, layers: int) -> "Declaration":
        """The same parameter of all layers, one above the other."""
        spec = P(None, *self.spec)
        return Declaration((layers, *self.shape), spec, self.decay, self.summed, True)

    def unstack(self) -> "Declaration":
        """One layer's of a stacked one."""
        assert self.stacked
        return Declaration(self.shape[1:], P(*tuple(self.spec)[1:]), self.decay, self.summed)

    def zero_axis(self, dp: int, mp: int) -> int | None:
        """Which axis ZeRO splits over dp: mp's where it divides further, else another.

        None for what mp does not split, which is small, and where no axis divides.
        """
        axes = tuple(self.spec)
        if "mp" not in axes:
            return None
        split = axes.index("mp")
        others = [axis for axis in range(self.stacked, len(axes)) if axis != split]
        if self.shape[split] % (dp * mp) == 0:
            return split
        return next((axis for axis in others if self.shape[axis] % dp == 0), None)

    def at_rest(self, dp: int, mp: int) -> P:
        """The layout of the state under ZeRO."""
        axis = self.zero_axis(dp, mp)
        if axis is None:
            return self.spec
        axes: list[Any] = list(self.spec)
        axes[axis] = ("mp", "dp") if axes[axis] == "mp" else "dp"
        return P(*axes)


def is_declaration(node: Any) -> bool:
    """For tree functions over trees of declarations."""
    return isinstance(node, Declaration)


def map_declared(function: Callable[..., Any], declared: Any, *trees: Any) -> Any:
    """`jax.tree.map` over a tree of declarations and others of its structure."""
    return jax.tree.map(function, declared, *trees, is_leaf=is_declaration)


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
