"""The KV cache of a layer, and how positions of its rows are written and read.

Array names end in their shape: B batch row, P some rows, T new position, S slot of the cache, H
heads, K head size, I the number of axes that an index addresses.  H is the number of heads of one
device (with `Manual`) or of the whole model (with `Auto`); see `Parallel`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mesh_transformer.model.casts import to_int8

# Dimension numbers for scattering new_BHK into cache_BHSK.  The indices, index_BHI, are a
# (row, slot) pair for each batch row and head.
_ONE_POSITION = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(2,),
    inserted_window_dims=(0, 2),
    scatter_dims_to_operand_dims=(0, 2),
    operand_batching_dims=(1,),
    scatter_indices_batching_dims=(1,),
)


# Dimension numbers for scattering new_PHTK into cache_BHSK.  The indices, index_PI, are a (row,
# slot) pair for each new row.
_POSITIONS = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(1, 2, 3), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 2)
)


class LayerCache(NamedTuple):
    """One layer's keys and values, [B, H, S, K] each, or the PartitionSpecs of these arrays.

    If there are scales (f32), a key is `k_BHSK` (int8) times its scale, and a value likewise.
    """

    k_BHSK: Any
    v_BHSK: Any
    k_scale_BHS1: Any = None
    v_scale_BHS1: Any = None

    def in_8_bits(self) -> "LayerCache":
        """Return the cache with keys and values rounded to int8, with a scale for each."""
        k_BHSK, k_scale_BHS1 = to_int8(self.k_BHSK, axis=-1)
        v_BHSK, v_scale_BHS1 = to_int8(self.v_BHSK, axis=-1)
        return LayerCache(k_BHSK, v_BHSK, k_scale_BHS1, v_scale_BHS1)

    def like(self, cache: "LayerCache") -> "LayerCache":
        """Return these keys and values as `cache` stores them.

        They are in 8 bits if those of `cache` are.  Where a value is NaN or infinite, the key
        becomes NaN and the value 0.  The tokens that attend to it then still get NaN, from their
        scores.  Tokens that the mask hides it from do not, as scores are masked by selection (see
        `attention.attend_to_cache`), but values are multiplied by a probability of 0.  So the
        results of a text that has overflowed do not spread to later texts in the same slots.
        """
        is_finite_BHS1 = jnp.isfinite(self.v_BHSK).all(axis=-1, keepdims=True)
        k_BHSK = jnp.where(is_finite_BHS1, self.k_BHSK, jnp.nan)
        stored = LayerCache(k_BHSK, jnp.where(is_finite_BHS1, self.v_BHSK, 0))
        return stored if cache.k_scale_BHS1 is None else stored.in_8_bits()


def write(cache: LayerCache, new: LayerCache, slots: Array) -> LayerCache:
    """Return the cache with the keys and values of one or several positions per row replaced.

    Args:
      new: the keys and values to write, as in the cache; S is the number of positions, T.
      slots: the positions in the cache (indices along S) to write to, [B, T].
    """
    row_BT = jnp.broadcast_to(jnp.arange(len(slots))[:, None], slots.shape)
    return write_at(cache, new, row_BT, slots)


def write_at(cache: LayerCache, new: LayerCache, row_BT: Array, slot_BT: Array) -> LayerCache:
    """Return the cache with single positions replaced.

    Args:
      new: the keys and values to write, [B, H, T, K] each, as in the cache.
      row_BT: the row of the cache of each position; nothing is written to rows out of range.
      slot_BT: the position in that row (index along S).
    """
    for at in range(slot_BT.shape[1]):
        one = jax.tree.map(lambda x, at=at: x[:, :, at : at + 1], new)
        cache = _write_one(cache, one, row_BT[:, at], slot_BT[:, at])
    return cache


def write_rows(cache: LayerCache, new: LayerCache, row_P: Array, slot_P: Array) -> LayerCache:
    """Return the cache with consecutive positions of some rows replaced.

    Args:
      new: the keys and values to write, [P, H, T, K] each, as in the cache.
      row_P: the rows to write to; nothing is written for rows out of range.
      slot_P: the position in the cache (index along S) of the first of the T positions, all of
        which must lie within the cache.
    """
    if cache.k_scale_BHS1 is not None:
        return write_in_turn(cache, new, row_P, slot_P)
    index_PI = jnp.stack((row_P, slot_P), axis=-1)

    def scatter(cache_BHSK: Array, new_PHTK: Array) -> Array:
        values = new_PHTK.astype(cache_BHSK.dtype)
        return jax.lax.scatter(cache_BHSK, index_PI, values, _POSITIONS, mode="drop")

    return jax.tree.map(scatter, cache, new)


def write_chunk(cache: LayerCache, new: LayerCache, row_P: Array, slot_P: Array) -> LayerCache:
    """Do as `write_rows`, but write nothing for positions beyond the end of the cache."""
    slots, width = cache.k_BHSK.shape[2], new.k_BHSK.shape[2]
    first_P = jnp.minimum(slot_P, slots - width)

    def joined(x_BHSK: Array, new_PHTK: Array) -> Array:
        def one(row: Array, first: Array, slot: Array, new_HTK: Array) -> Array:
            shape = (1, *new_HTK.shape)
            old_HTK = jax.lax.dynamic_slice(x_BHSK, (row, 0, first, 0), shape)[0]
            is_new_T1 = jnp.arange(width)[:, None] >= slot - first
            return jnp.where(is_new_T1, jnp.roll(new_HTK, slot - first, axis=1), old_HTK)

        each_P = row_P, first_P, slot_P, new_PHTK
        return jnp.stack([one(*each) for each in zip(*each_P, strict=True)])

    return write_rows(cache, jax.tree.map(joined, cache, new), row_P, first_P)


def _write_one(cache: LayerCache, new: LayerCache, row_B: Array, slot_B: Array) -> LayerCache:
    """Return the cache with some positions replaced, in the rows `row_B` and slots `slot_B`."""
    if cache.k_scale_BHS1 is not None:
        return write_in_turn(cache, new, row_B, slot_B)
    if len(slot_B) > 1:
        # For the scatter, the compiler for TPU7x copies the whole cache for each row and head, and
        # that for v5e some caches once.  For the loop over a single row, that for v3 copies it.
        return jax.lax.platform_dependent(
            cache, new, row_B, slot_B, tpu=write_in_turn, default=_scatter_one
        )
    return _scatter_one(cache, new, row_B, slot_B)


def _scatter_one(cache: LayerCache, new: LayerCache, row_B: Array, slot_B: Array) -> LayerCache:
    """Do as `_write_one`, all rows at once."""
    if len(slot_B) == 1:
        # On a device with one head, writing one row is a single update.  XLA on CPUs turns it into
        # an operation that copies the whole cache.  Writing the row twice avoids that.
        new, row_B, slot_B = jax.tree.map(lambda x: jnp.concatenate((x, x)), (new, row_B, slot_B))
    # Each head is a separate update.  If all heads of a row were one update, the caches would be
    # copied to another layout on TPUs.  H is a batching dimension.  If it were indexed, the
    # compiler's partitioning (`Auto`) would all-gather the new entries over mp.
    index_BI = jnp.stack((row_B, slot_B), axis=-1)
    index_BHI = jnp.broadcast_to(index_BI[:, None], (*new.k_BHSK.shape[:2], 2))

    def scatter(cache_BHSK: Array, new_BHSK: Array) -> Array:
        new_BHK = new_BHSK[:, :, 0].astype(cache_BHSK.dtype)
        return jax.lax.scatter(cache_BHSK, index_BHI, new_BHK, _ONE_POSITION)

    return jax.tree.map(scatter, cache, new)


def write_in_turn(cache: LayerCache, new: LayerCache, row_P: Array, slot_P: Array) -> LayerCache:
    """Do as `write_rows`, one row after the other.

    For a scatter of int8, or a loop that also reads the cache, the compilers for TPUs copy the
    whole cache in every iteration.
    """
    is_row_P = row_P < len(cache.k_BHSK)
    order_P = jnp.argsort(~is_row_P)  # rows out of range come last, and are not reached

    def body(turn: Array, cache: LayerCache) -> LayerCache:
        at = order_P[turn]

        def put(cache_BHSK: Array, new_PHTK: Array) -> Array:
            new_1HTK = jax.lax.dynamic_slice_in_dim(new_PHTK, at, 1).astype(cache_BHSK.dtype)
            return jax.lax.dynamic_update_slice(cache_BHSK, new_1HTK, (row_P[at], 0, slot_P[at], 0))

        return jax.tree.map(put, cache, new)

    return jax.lax.fori_loop(0, is_row_P.sum(), body, cache)


def rows_of(cache: LayerCache, row_P: Array) -> LayerCache:
    """Return the keys and values of some rows, [P, H, S, K] each."""

    def rows(cache_BHSK: Array) -> Array:
        # For a gather, the compiler for TPUs copies the whole cache.
        each = [jax.lax.dynamic_slice_in_dim(cache_BHSK, row, 1) for row in row_P]
        return jnp.concatenate(each)

    return jax.tree.map(rows, cache)
