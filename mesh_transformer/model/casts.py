"""Casts of arrays and trees of arrays to other number formats."""

import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")


def _cast(tree: Tree, dtype: str) -> Tree:
    def cast(leaf: jax.Array) -> jax.Array:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree)


def to_f32(tree: Tree) -> Tree:
    """Cast the floating-point leaves of a tree to float32; leave integers unchanged."""
    return _cast(tree, "float32")


def to_bf16(tree: Tree) -> Tree:
    """Cast the floating-point leaves of a tree to bfloat16; leave integers unchanged."""
    return _cast(tree, "bfloat16")


def to_int8(x: jax.Array, axis: int | tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Round an array to 8-bit integers, with one scale for all entries along `axis`.

    An entry changes by at most 1/254 of the largest magnitude of those that share its scale.  NaN
    and infinite entries make their scale NaN.

    Returns:
      The integers (int8), and the scales (f32, with size 1 along `axis`) to multiply them by.
    """
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=axis, keepdims=True) / 127
    scale += jnp.sum(0 * x, axis=axis, keepdims=True)  # the maximum may ignore NaN
    scale = jnp.where(scale == 0, 1, scale)
    return jnp.round(x / scale).astype(jnp.int8), scale


def packed_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Return the bytes of an array on a device, where 4-bit integers are stored in pairs.

    `Array.nbytes` counts a whole byte for each of them.
    """
    size = math.prod(shape)
    return -(-size // 2) if jnp.dtype(dtype) == jnp.int4 else size * jnp.dtype(dtype).itemsize
