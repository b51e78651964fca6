"""Weights as 8-bit integers with a scale for each output column: a quarter of f32's memory.

For generation alone.  A weight moves by at most 1/254 of the largest of its column; sums, norms,
biases, embeddings and the cache stay as they are.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from mesh_transformer.mesh.declaration import Declaration, map_declared

LARGEST = 127


class Int8(NamedTuple):
    """A matrix (or its layout): `value` times `scale`, which has 1 in place of the input axis."""

    value: Any
    scale: Any


def _input_axis(declared: Declaration) -> int:
    """Along which axis of a matrix its inputs run."""
    # Those of a head group's output matrix stand beside the groups, [H, C, D].
    return 1 if len(declared.shape) == 3 and declared.spec[0] == "mp" else 0


def quantize(weights: Any, declared: Any) -> Any:
    """A tree of matrices as `Int8`; of what decay does not apply to, nothing changes."""

    def one(d: Declaration, w: Array) -> Array | Int8:
        if not d.decay:
            return w
        w = w.astype(jnp.float32)
        scale = jnp.max(jnp.abs(w), axis=_input_axis(d), keepdims=True) / LARGEST
        scale = jnp.where(scale == 0, 1, scale)
        return Int8(jnp.round(w / scale).astype(jnp.int8), scale)

    return map_declared(one, declared, weights)


def layout(declared: Any) -> Any:
    """The layouts of what `quantize` gives."""

    def one(d: Declaration) -> P | Int8:
        if not d.decay:
            return d.spec
        axis = _input_axis(d)
        return Int8(d.spec, P(*(None if i == axis else name for i, name in enumerate(d.spec))))

    return map_declared(one, declared)


def restore(weights: Any, dtype: Any, after: Array) -> Any:
    """The matrices again, at the point of use; a tree without `Int8` is itself.

    Args:
      after: what is computed before.  Without a value that seems to depend on it, the compiler
        would restore all layers at once, before the loop over tokens, and keep them.
    """
    nothing = (0 * after.ravel()[0]).astype(jnp.int8)

    def one(w: Array | Int8) -> Array:
        if not isinstance(w, Int8):
            return w
        return ((w.value + nothing).astype(jnp.float32) * w.scale).astype(dtype)

    return jax.tree.map(one, weights, is_leaf=lambda node: isinstance(node, Int8))
