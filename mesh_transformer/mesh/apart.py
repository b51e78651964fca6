"""Functions that compile to the same code, and give the same bits, wherever they are called.

`kept_apart` separates a function from what calls it.  `by_rows` also gives it the same shapes
everywhere: it computes a fixed number of rows at a time, so that the result for a row depends
neither on the other rows nor on their number.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from mesh_transformer.mesh.jax_versions import varying_axes

ROWS_ON_CPU, ROWS = 16, 128  # rows that are computed together


class Exact(NamedTuple):
    """How `by_rows` computes on a platform.

    Attributes:
      platform: that of the devices, such as "cpu".
    """

    platform: str

    @property
    def rows(self) -> int:
        """The number of rows that are computed together."""
        return ROWS_ON_CPU if self.platform == "cpu" else ROWS


def calls_stay(platform: str) -> bool:
    """Return whether the compiler for a platform can be told not to inline a call."""
    return platform == "cpu"


def kept_apart(function: Callable[..., Any], platform: str) -> Callable[..., Any]:
    """Return `function` such that the compiler does not merge it with what calls it.

    XLA compiles it as a function of its own, in the same way wherever it is called.
    """
    if calls_stay(platform):

        def kept_apart(*args: Any) -> Any:  # `is_kept_apart` knows the name
            with set_xla_metadata(inlineable=None):  # not for the functions that it calls
                return function(*args)

        return set_xla_metadata(inlineable="false")(jax.jit(kept_apart))

    # The compiler for TPUs inlines all calls, but not a branch that it cannot predict.
    def branch(*args: Any) -> Any:
        runs = lax.optimization_barrier(jnp.bool(True))
        shapes = jax.eval_shape(function, *args)
        return lax.cond(runs, function, lambda *_: jax.tree.map(_zeros, shapes), *args)

    return branch


def is_kept_apart(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a call of a function that `kept_apart` returned for CPUs."""
    return eqn.params.get("name") == kept_apart.__name__


def _zeros(shape: Any) -> Array:
    """Return zeros of the type of a result, which inside `shard_map` names mesh axes."""
    axes = tuple(sorted(varying_axes(shape)))
    zeros = jnp.zeros(shape.shape, shape.dtype)
    return lax.pcast(zeros, axes, to="varying") if axes else zeros


def by_rows(function: Callable[..., Any], exact: Exact) -> Callable[..., Any]:
    """Return `function` such that the result for a row depends on nothing but this row.

    The gradient is that of `function` itself, whose own rounding depends on the number of rows.

    Args:
      function: a function of trees of arrays [B, T, ...], to a tree of such arrays.  A result at an
        index (b, t) must be a function of the arguments there.  Arrays that it closes over must
        have no such axes.

    Returns:
      The same function.  The arguments' first two axes may also have the size 1.
    """

    def run(*args: Any) -> Any:
        B, T = jnp.broadcast_shapes(*(x.shape[:2] for x in jax.tree.leaves(args)))
        args = jax.tree.map(lambda x: jnp.broadcast_to(x, (B, T, *x.shape[2:])), args)
        rows, blocks = exact.rows, -(-B * T // exact.rows)

        def cut(x: Array) -> Array:
            x = x.reshape(B * T, *x.shape[2:])
            x = jnp.pad(x, ((0, blocks * rows - B * T), *((0, 0),) * (x.ndim - 1)))
            return x.reshape(blocks, 1, rows, *x.shape[1:])

        def whole(x: Array) -> Array:
            x = x.reshape(blocks * rows, *x.shape[3:])
            return x[: B * T].reshape(B, T, *x.shape[1:])

        cuts = jax.tree.map(cut, args)
        compute, consts = _of_blocks(function, jax.tree.map(lambda x: x[0], cuts), exact.platform)
        return jax.tree.map(whole, compute(consts, cuts))

    return run


def _of_blocks(
    function: Callable[..., Any], example: tuple[Any, ...], platform: str
) -> tuple[Callable[[list[Any], tuple[Any, ...]], Any], list[Any]]:
    """Return a function (constants, arguments) that maps `function` over blocks, and its constants.

    `example` has the arguments for one block.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*example)

    def block(consts: list[Any], args: tuple[Any, ...]) -> Any:
        ends = jaxpr_as_fun(closed.replace(consts=consts))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), ends)

    @jax.custom_vjp
    def compute(consts: list[Any], args: tuple[Any, ...]) -> Any:
        apart = kept_apart(block, platform)
        return lax.map(lambda own: apart(consts, own), args)

    def forward(consts: list[Any], args: tuple[Any, ...]) -> tuple[Any, Any]:
        return compute(consts, args), (consts, args)

    def backward(saved: Any, g: Any) -> Any:
        return jax.vjp(jax.vmap(block, (None, 0)), *saved)[1](g)

    compute.defvjp(forward, backward)
    return compute, list(closed.consts)
