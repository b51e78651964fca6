"""The matmuls of weight matrices, which may be quantized to integers of 8 or 4 bits.

Generation stores such weights, and training stores frozen ones.  With 8 bits, each output column
has a scale, and rounding changes a weight by at most 1/254 of the largest magnitude in its column.
With 4 bits, each column has a scale for every `GROUP` inputs, and rounding changes most weights by
at most 1/16 of the largest magnitude in the group, and none by more than about 1/8.  Norms, biases
and embeddings are not quantized, and the KV cache is only with `int8_cache`.  Training multiplies
with the floats that `dequantized` returns, one layer at a time.

Training may round the operands of a matmul to 8 bits just for this matmul (`rounded_matmul`), which
many accelerators compute twice as fast as in bfloat16.

Array names end in their shape, as in `layers`.
"""

import dataclasses
import functools
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from mesh_transformer.mesh.declaration import Declaration, map_declared
from mesh_transformer.model.casts import to_int8
from mesh_transformer.util import InputError

GROUP = 64  # most inputs of a matrix in 4 bits that share a scale
SMALLEST_GROUP = 16  # with fewer inputs per scale, 4 bits would save little memory
DIGITS = 3  # 8-bit integers that write an f32 number (see `_in_digits`)
MOST_ROWS_IN_DIGITS = 80
ROUNDED = "rounded"  # checkpoint_name of the products of `rounded_matmul`


class Int8(NamedTuple):
    """A quantized matrix, equal to `value` (int8) times `scale` (f32).

    `scale` has size 1 along the input axes of the matrix.  In a tree of PartitionSpecs, the fields
    hold the specs of the two arrays.
    """

    value: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, which `haiku.get_parameter` checks."""
        return self.value.shape


class Int4(NamedTuple):
    """A quantized matrix, equal to `value` (int4) times `scale` (bf16).

    The last input axis of the matrix is split in two: the groups, and the inputs of a group.
    `scale` has size 1 along the latter.  In a tree of PartitionSpecs, the fields hold the specs of
    the two arrays.
    """

    value: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, as of `Int8`."""
        shape = self.value.shape
        axis = next(axis for axis, size in enumerate(shape) if size != self.scale.shape[axis])
        return (*shape[: axis - 1], shape[axis - 1] * shape[axis], *shape[axis + 1 :])


Quantized = Int8 | Int4


def is_quantized(node: Any) -> bool:
    """Return whether a tree node is a quantized matrix; for use as JAX's `is_leaf` argument."""
    return isinstance(node, Quantized)


def quantize(weights: Any, declared: Any, bits: int) -> Any:
    """Quantize the matrices in a tree of weights to `Int8` or `Int4`.

    Arrays without weight decay (norms, biases) and adapters are returned unchanged.

    Args:
      declared: a tree with the `Declaration` of each array.
      bits: 8 or 4.
    """

    def quantized(d: Declaration, w: Array) -> Array | Quantized:
        if not _is_matrix(d):
            return w
        if d.stacked:  # one layer at a time, as the rounding is in f32
            return jax.lax.map(functools.partial(quantized, d.unstack()), w)
        inputs, _ = d.matrix_axes
        return Int8(*to_int8(w, inputs)) if bits == 8 else _to_int4(w, inputs[-1], _group(d))

    return map_declared(quantized, declared, weights)


def stored(declared: Any, bits: int) -> Any:
    """Return the declarations of the arrays that `quantize` returns with these arguments."""

    def arrays_of(d: Declaration) -> Any:
        if not _is_matrix(d):
            return d
        own, (inputs, _) = dataclasses.replace(d, quantized=True), d.matrix_axes

        def scale(d: Declaration, axes: Collection[int]) -> Declaration:
            shape = tuple(1 if axis in axes else size for axis, size in enumerate(d.shape))
            return dataclasses.replace(d, shape=shape, decay=False)

        if bits == 8:
            spec = P(*(None if axis in inputs else name for axis, name in enumerate(d.spec)))
            return Int8(own, dataclasses.replace(scale(own, inputs), spec=spec))
        last, group = inputs[-1], _group(d)
        value = dataclasses.replace(
            own,
            shape=(*d.shape[:last], d.shape[last] // group, group, *d.shape[last + 1 :]),
            spec=P(*d.spec[: last + 1], None, *d.spec[last + 1 :]),
            unit=math.lcm(d.unit, group) // group if d.spec[last] == "mp" else d.unit,
        )
        return Int4(value, scale(value, (last + 1,)))

    return map_declared(arrays_of, declared)


def dequantized(weights: Any, dtype: DTypeLike = jnp.float32) -> Any:
    """Return a tree of weights whose quantized matrices are floats of `dtype`.

    The products with the scales are rounded to f32, then to `dtype`.  Other arrays are unchanged.
    """

    def floats(w: Any) -> Any:
        if not is_quantized(w):
            return w
        product = w.value.astype(jnp.float32) * w.scale.astype(jnp.float32)
        return product.astype(dtype).reshape(w.shape)

    return jax.tree.map(floats, weights, is_leaf=is_quantized)


def check_groups(declared: Any, mp: int, key: str) -> None:
    """Raise InputError if a matrix cannot be quantized to 4 bits on a mesh with mp shards.

    Args:
      declared: the same tree as for `quantize`.
      key: the config key that is 4.
    """

    def check(d: Declaration) -> None:
        if not _is_matrix(d):
            return
        axis, group = d.matrix_axes[0][-1], _group(d)
        has = f"{key} is 4, but a matrix of the model has {d.shape[axis]} inputs"
        if group < SMALLEST_GROUP:
            raise InputError(f"{has}, expected a multiple of {SMALLEST_GROUP}; set {key} to 8")
        own = d.padded(mp)[axis] // (mp if d.spec[axis] == "mp" else 1)
        if own % group:
            raise InputError(
                f"{has}, {own} per device, expected a multiple of {group}, the size of a group; "
                f"lower cores_per_replica, or set {key} to 8"
            )

    map_declared(check, declared)


def _is_matrix(d: Declaration) -> bool:
    return d.decay and not d.adapter


def _group(d: Declaration) -> int:
    """Return how many inputs of a matrix in 4 bits share a scale; the same on every mesh."""
    return math.gcd(d.shape[d.matrix_axes[0][-1]], GROUP)


def _to_int4(w: Array, axis: int, group: int) -> Int4:
    """Round a matrix to 4-bit integers, with one scale for each `group` entries along `axis`.

    The scale has the sign with which the entry of the largest magnitude becomes -8, because there
    is no 8.  NaN and infinite entries make their scale NaN.
    """
    x = w.astype(jnp.float32).reshape(*w.shape[:axis], -1, group, *w.shape[axis + 1 :])
    most, least = jnp.max(x, axis + 1, keepdims=True), jnp.min(x, axis + 1, keepdims=True)
    scale = (jnp.where(most > -least, most, least) / -8).astype(jnp.bfloat16)
    scale += jnp.sum(0 * x, axis + 1, keepdims=True).astype(scale.dtype)  # as in `to_int8`
    scale = jnp.where(scale == 0, 1, scale)
    return Int4(jnp.clip(jnp.round(x / scale), -8, 7).astype(jnp.int4), scale)


def after(x: Array, weights: Any) -> Any:
    """Return a tree of weights whose quantized matrices depend on the array `x`.

    Otherwise the compiler for CPUs would convert the matrices of all layers to floats before the
    loop over tokens, and keep these in memory.  Matrices in 8 bits that few rows are multiplied
    with are not converted (see `_int8_dot`), and returned unchanged.  So are all matrices on TPUs,
    whose compiler does not do this, and would copy some of the matrices that depend on `x`.

    Args:
      x: the input of the layer that uses the weights, [B, T, D].
    """
    zero = (0 * x.ravel()[0]).astype(jnp.int8)
    zero = jax.lax.platform_dependent(zero, tpu=jnp.zeros_like, default=lambda zero: zero)
    int8_zero = zero
    if x.shape[0] * x.shape[1] <= MOST_ROWS_IN_DIGITS:
        int8_zero = jax.lax.platform_dependent(zero, cpu=jnp.zeros_like, default=lambda zero: zero)

    def dependent(w: Array | Quantized) -> Array | Quantized:
        if isinstance(w, Int8):
            return w._replace(value=w.value + int8_zero)
        if isinstance(w, Int4):
            return w._replace(value=w.value + zero.astype(w.value.dtype))
        return w

    return jax.tree.map(dependent, weights, is_leaf=is_quantized)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rounded_matmul(x: Array, w_DN: Array, rounded: frozenset[str]) -> Array:
    """Return the product of x, [..., D], and a matrix [D, N].

    In the passes that are named in `rounded`, both operands are rounded to 8-bit integers, each
    vector that is multiplied with its own scale (Zafrir et al. 2019), and the integers are summed
    exactly.  Each pass rounds the original values, along its own axis.

    Args:
      rounded: any of "forward", "input_gradients" and "weight_gradients".
    """
    x_MD = x.reshape(-1, x.shape[-1])
    y_MN = _product(x_MD, w_DN, (1, 0), "forward" in rounded)
    return y_MN.reshape(*x.shape[:-1], -1)


def _rounded_matmul_forward(
    x: Array, w_DN: Array, rounded: frozenset[str]
) -> tuple[Array, tuple[Array, Array]]:
    return rounded_matmul(x, w_DN, rounded), (x, w_DN)


def _rounded_matmul_backward(
    rounded: frozenset[str], saved: tuple[Array, Array], g: Array
) -> tuple[Array, Array]:
    x, w_DN = saved
    x_MD, g_MN = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    dx_MD = _product(g_MN, w_DN, (1, 1), "input_gradients" in rounded)
    dw_DN = _product(x_MD, g_MN, (0, 0), "weight_gradients" in rounded)
    return dx_MD.reshape(x.shape), dw_DN.astype(w_DN.dtype)


rounded_matmul.defvjp(_rounded_matmul_forward, _rounded_matmul_backward)


def _product(a: Array, b: Array, axes: tuple[int, int], in_int8: bool) -> Array:
    """Return the matmul of two matrices over one axis of each, in the dtype of `a`."""
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    if not in_int8:
        return jax.lax.dot_general(a, b, dimensions)
    (p, p_scale), (q, q_scale) = (to_int8(x, axis) for x, axis in zip((a, b), axes, strict=True))
    y = jax.lax.dot_general(p, q, dimensions, preferred_element_type=jnp.int32)
    scale = p_scale.reshape(-1, 1) * q_scale.reshape(1, -1)
    return (y.astype(jnp.float32) * scale).astype(a.dtype)


def project_in(
    x_BTD: Array,
    w: Array | Quantized,
    dtype: DTypeLike | None = None,
    rounded: Collection[str] = (),
) -> Array:
    """Return the product of an input [B, T, D] and a matrix [D, ...], as [B, T, ...].

    The result is rounded once, to `dtype` (default: the dtype of the inputs).  A matrix in 8 bits
    is multiplied by its scale after the matmul, which therefore reads the integers.

    Args:
      rounded: passes of training whose operands are rounded (see `rounded_matmul`).
    """
    if rounded:
        assert not isinstance(w, Quantized)
        y_BTN = rounded_matmul(x_BTD, w.reshape(len(w), -1), frozenset(rounded))
        y_BTN = checkpoint_name(y_BTN, ROUNDED)
        return y_BTN.reshape(*y_BTN.shape[:-1], *w.shape[1:])
    value, columns = _operand(w, x_BTD.dtype), w.shape[1:]
    exact = jnp.float32 if isinstance(w, Quantized) else dtype
    inputs = value.shape[: value.ndim - len(columns)]
    x = _grouped(x_BTD.reshape(-1, x_BTD.shape[-1]), w, inputs)
    y = _dot(x, value, len(inputs), exact).reshape(*x_BTD.shape[:2], *columns)
    return _scaled(y, w, dtype or x_BTD.dtype)


@jax.custom_vjp
def add_bias(y: Array, b: Array) -> Array:
    """Return y, [..., N], plus a bias [N].

    The bias's gradient is computed as a matmul, because XLA on CPUs is slow to sum over rows.
    """
    return y + b


def _add_bias_forward(y: Array, b: Array) -> tuple[Array, Array]:
    return y + b, b


def _add_bias_backward(b: Array, g: Array) -> tuple[Array, Array]:
    g_MN = g.reshape(-1, g.shape[-1])
    sums_N = jnp.ones(len(g_MN), g.dtype) @ g_MN
    return g, sums_N.astype(b.dtype)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


def project_out(x: Array, w: Array | Quantized, rounded: Collection[str] = ()) -> Array:
    """Return the product of inputs [B, T, ...] and a matrix [..., D], as [B, T, D].

    A matrix in 8 bits is multiplied by its scale after the matmul, as in `project_in`.

    Args:
      rounded: as for `project_in`.
    """
    if rounded:
        assert not isinstance(w, Quantized)
        x_BTN = x.reshape(*x.shape[:2], -1)
        y_BTD = rounded_matmul(x_BTN, w.reshape(-1, w.shape[-1]), frozenset(rounded))
        return checkpoint_name(y_BTD, ROUNDED)
    exact = jnp.float32 if isinstance(w, Quantized) else None
    value = _operand(w, x.dtype)
    x_in = _grouped(x, w, (x.shape[1], *value.shape[:-1]))
    y_BTD = _dot(x_in, value, value.ndim - 1, exact)
    return _scaled(y_BTD, w, x.dtype)


def _dot(x: Array, w: Array, axes: int, dtype: DTypeLike | None) -> Array:
    """Return the product over the last `axes` axes of x and the first of w, which may be int8."""
    if w.dtype == jnp.int8:
        return _int8_dot(x, w, axes)
    return jnp.tensordot(x, w, axes, preferred_element_type=dtype)


def _int8_dot(x: Array, w: Array, axes: int) -> Array:
    """Return the f32 product over the last `axes` axes of x and the first of w, 8-bit integers.

    The integers are exact in bfloat16.  XLA on CPUs takes several times as long to convert a matrix
    to floats as to multiply it with a few rows; there, the rows are written as integers instead.
    """

    def in_floats(x: Array, w: Array) -> Array:
        return jnp.tensordot(x, w.astype(x.dtype), axes, preferred_element_type=jnp.float32)

    if math.prod(x.shape[: x.ndim - axes]) > MOST_ROWS_IN_DIGITS:
        return in_floats(x, w)
    in_digits = functools.partial(_in_digits, axes=axes)
    return jax.lax.platform_dependent(x, w, cpu=in_digits, default=in_floats)


def _in_digits(x: Array, w: Array, axes: int) -> Array:
    """Return the same as `_int8_dot`, by exact products and sums of 8-bit integers.

    Each row of x is written as scale (d0 + d1 / 254 + d2 / 254^2), where the digits d are integers
    from -127 to 127.  It changes by less than 2^-23 times the largest magnitude in the row.  The
    sums are exact for up to 133,000 inputs.
    """
    columns = w.ndim - axes
    rows = tuple(range(x.ndim - axes, x.ndim))
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), rows, keepdims=True) / 127
    scale += jnp.sum(0 * x, rows, keepdims=True)  # NaN in a row, which the maximum may ignore
    rest, digits = x / jnp.where(scale == 0, 1, scale), []
    for _ in range(DIGITS):
        digits.append(jnp.round(rest))
        rest = 254 * (rest - digits[-1])
    sums = jnp.tensordot(
        jnp.stack(digits).astype(jnp.int8), w, axes, preferred_element_type=jnp.int32
    )
    y = jnp.zeros(sums.shape[1:], jnp.float32)
    for part in sums[::-1]:
        y = y / 254 + part.astype(jnp.float32)
    return y * scale.reshape(*x.shape[: x.ndim - axes], *(1,) * columns)


def _operand(w: Array | Quantized, dtype: DTypeLike) -> Array:
    """Return the operand of a matrix's matmul.

    Of a matrix in 8 bits, these are the integers.  A matrix in 4 bits is multiplied by its scales,
    and keeps its groups as an axis of their own: the compiler for TPUs then reads the integers in
    the matmul, and would otherwise write the matrix to memory first.
    """
    if isinstance(w, Int8):
        return w.value
    if isinstance(w, Int4):
        return w.value.astype(dtype) * w.scale.astype(dtype)
    return w


def _grouped(x: Array, w: Array | Quantized, shape: tuple[int, ...]) -> Array:
    """Return x reshaped to [len(x), *shape], for the product with the result of `_operand`.

    The compiler must not move the reshape to the matmul that computes x: the columns of that one
    would be in groups, too, which the compiler for TPUs makes a slow convolution.
    """
    return (jax.lax.optimization_barrier(x) if isinstance(w, Int4) else x).reshape(-1, *shape)


def _scaled(y: Array, w: Array | Quantized, dtype: DTypeLike) -> Array:
    """Cast the product [B, T, ...], after multiplying it by the scales of a matrix in 8 bits."""
    if isinstance(w, Int4):
        return jax.lax.optimization_barrier(y.astype(dtype))  # see `_grouped`
    if not isinstance(w, Int8):
        return y
    columns = w.shape[w.value.ndim - (y.ndim - 2) :]
    return (y * w.scale.reshape(columns)).astype(dtype)
