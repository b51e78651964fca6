"""Detection of weights, logits and results that are NaN or infinite."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer.mesh.host_memory import is_in_host, on_device
from mesh_transformer.util import NonFiniteError

# What a batch returns in place of a token if the logits that it should be chosen from are not
# finite.  No vocabulary has this token.
NO_TOKEN = 2**32 - 1


def tokens_or_none(tokens_B: Array, logits_BV: Array) -> Array:
    """Return `tokens_B` with `NO_TOKEN` in the rows whose logits are not all finite."""
    is_finite_B = jnp.isfinite(logits_BV).all(axis=-1)
    return jnp.where(is_finite_B, tokens_B, jnp.uint32(NO_TOKEN))


def check_tokens_chosen(tokens: np.ndarray) -> None:
    """Raise NonFiniteError if some of these tokens of a batch are `NO_TOKEN`."""
    if (tokens == NO_TOKEN).any():
        raise NonFiniteError("the model's logits are NaN or infinite")


def check_finite(arrays: Sequence[Any], name: str) -> None:
    """Raise NonFiniteError if some of the values of arrays, called `name`, are not finite."""
    if not all(np.isfinite(array).all() for array in arrays):
        raise NonFiniteError(f"the model's {name} are NaN or infinite")


@contextlib.contextmanager
def blaming(bad_weights: Callable[[], str | None]) -> Iterator[None]:
    """Add the cause to the message of a NonFiniteError in the context.

    Args:
      bad_weights: a function that returns a result of `describe_bad_weights`, or None for unknown.
    """
    try:
        yield
    except NonFiniteError as error:
        cause = bad_weights()
        if cause is None:
            raise
        cause = cause or "the weights are finite, so an activation has overflowed"
        raise NonFiniteError(f"{error}: {cause}") from None


def describe_bad_weights(weights: Any, mesh: Mesh) -> str:
    """Name the first of some arrays that has values which are NaN or infinite; "" if none has.

    All processes of the mesh must call this.

    Args:
      weights: a tree of arrays, on the devices or in host memory.
    """
    leaves = [
        (path, x)
        for path, x in jax.tree_util.tree_leaves_with_path(weights)
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    compiled = _compile_counts(mesh, tuple(is_in_host(x) for _, x in leaves))
    for (path, x), bad in zip(leaves, np.asarray(compiled([x for _, x in leaves])), strict=True):
        if bad:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return (
                f"{int(bad):,} of the {x.size:,} values of the weights {name} are NaN or infinite"
            )
    return ""


@functools.cache
def _compile_counts(mesh: Mesh, in_host: tuple[bool, ...]) -> Callable[[list[Array]], Array]:
    """Return a jitted function from arrays to the number of values in each that are not finite."""

    def count(x: Array) -> Array:
        return jnp.sum(~jnp.isfinite(x), dtype=jnp.float32)  # int32 could overflow

    def count_in_host(x: Array) -> Array:
        if x.ndim < 3:
            return count(on_device(x))
        return jnp.sum(lax.map(lambda layer: count(on_device(layer)), x))

    def counts(arrays: list[Array]) -> Array:
        return jnp.stack(
            [(count_in_host if h else count)(x) for x, h in zip(arrays, in_host, strict=True)]
        )

    return jax.jit(counts, out_shardings=NamedSharding(mesh, P()))
