"""Quantization of weights to 8-bit integers, with one scale per output column.

Only generation uses it.  Quantized matrices take a quarter of the memory of f32.  Rounding changes
a weight by at most 1/254 of the largest magnitude in its column.  Norms, biases and embeddings are
not quantized, and the KV cache is only with `int8_cache`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from mesh_transformer.mesh.declaration import Declaration, map_declared
from mesh_transformer.util import to_int8


class Int8(NamedTuple):
    """A quantized matrix, equal to `value` (int8) times `scale` (f32).

    `scale` has size 1 along the input axis of the matrix.  In a tree of PartitionSpecs, the fields
    hold the specs of the two arrays.
    """

    value: Any
    scale: Any


def _input_axis(declared: Declaration) -> int:
    """Return the axis of a weight matrix that indexes the inputs of its matmul."""
    # An output matrix that is divided by head groups has the shape [H, C, D]: groups, inputs per
    # group, outputs.
    return 1 if len(declared.shape) == 3 and declared.spec[0] == "mp" else 0


def quantize(weights: Any, declared: Any) -> Any:
    """Quantize the matrices in a tree of weights to `Int8`.

    Arrays without weight decay (norms, biases) are returned unchanged.

    Args:
      declared: a tree with the `Declaration` of each array.
    """

    def quantized(d: Declaration, w: Array) -> Array | Int8:
        if not d.decay:
            return w
        return Int8(*to_int8(w, axis=_input_axis(d)))

    return map_declared(quantized, declared, weights)


def layout(declared: Any) -> Any:
    """Return the PartitionSpecs of the arrays that `quantize` returns.

    Args:
      declared: the same tree as for `quantize`.
    """

    def spec_of(d: Declaration) -> P | Int8:
        if not d.decay:
            return d.spec
        axis = _input_axis(d)
        return Int8(d.spec, P(*(None if i == axis else name for i, name in enumerate(d.spec))))

    return map_declared(spec_of, declared)


def restore(weights: Any, dtype: Any, after: Array) -> Any:
    """Dequantize the `Int8` matrices in a tree of weights to `dtype`; other arrays are unchanged.

    Args:
      after: the input of the layer that uses the weights.  The result is made to depend on this
        array.  Otherwise the compiler would dequantize all layers before the loop over tokens, and
        keep the dequantized weights in memory.
    """
    zero = (0 * after.ravel()[0]).astype(jnp.int8)

    def restored(w: Array | Int8) -> Array:
        if not isinstance(w, Int8):
            return w
        return ((w.value + zero).astype(jnp.float32) * w.scale).astype(dtype)

    return jax.tree.map(restored, weights, is_leaf=lambda node: isinstance(node, Int8))
