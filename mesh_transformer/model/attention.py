"""Attention as plain functions: rotary positions, the mask, the softmax, and a cache's one write.

Array names end in their shape: B batch, T query, S cache or key, H heads this program sees, K head
size, R rotated part of a head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

# From q_BTHK, k_BHSK and v_BHSK to what each query reads, [B, T, H, K].
Attend = Callable[[Array, Array, Array], Array]
MASKED = -1e10  # not -inf: a fully masked row must stay finite
LANES = 128  # splash attention takes sequences in multiples of a TPU's lanes
# `blocks` cuts a sequence into so many: one pass is (1 + 1/8) / 2 of the work of `xla`'s, in an
# eighth of the memory; twice as many would save little more, and take as much again to compile.
BLOCKS = 8


# Writes [B, H, K] into a cache_BHSK; index_BHI is row and slot, for each head of each row.
_ONE_POSITION = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(2,),
    inserted_window_dims=(0, 2),
    scatter_dims_to_operand_dims=(0, 2),
    operand_batching_dims=(1,),
    scatter_indices_batching_dims=(1,),
)


class LayerCache(NamedTuple):
    """One layer's keys and values (or their layout), in the order that attention reads."""

    k_BHSK: Any
    v_BHSK: Any


def block_length(length: int) -> int:
    """Queries of one of `BLOCKS`; a short sequence has fewer blocks."""
    return max(-(-length // BLOCKS), LANES)


def rotate(x_BTHK: Array, positions_BT: Array, dims: int) -> Array:
    """Rotary embedding (Su 2021) on interleaved pairs of the first `dims` of each head, in f32."""
    frequency_R = 10000.0 ** (-np.arange(0, dims, 2) / dims)
    angle_BTR = positions_BT[..., None].astype(jnp.float32) * frequency_R.astype(np.float32)
    sin, cos = jnp.sin(angle_BTR)[:, :, None], jnp.cos(angle_BTR)[:, :, None]
    turned, rest = x_BTHK[..., :dims].astype(jnp.float32), x_BTHK[..., dims:]
    even, odd = turned[..., ::2], turned[..., 1::2]
    pairs = jnp.stack((even * cos - odd * sin, odd * cos + even * sin), axis=-1)
    return jnp.concatenate((pairs.reshape(turned.shape).astype(x_BTHK.dtype), rest), axis=-1)


def causal_bias(positions_BT: Array, key_positions_BS: Array, window: int) -> Array:
    """0 where a query sees a key, else `MASKED`; keys at negative positions are padding.

    Returns bias_BHTS with H = 1.
    """
    distance_BTS = positions_BT[:, :, None] - key_positions_BS[:, None, :]
    seen_BTS = (distance_BTS >= 0) & (distance_BTS < window) & (key_positions_BS >= 0)[:, None, :]
    return jnp.where(seen_BTS, 0.0, MASKED)[:, None].astype(jnp.float32)


def attend(q_BTHK: Array, k_BHSK: Array, v_BHSK: Array, bias_BHTS: Array) -> Array:
    """Softmax attention of T queries over S keys; heads are those this program holds.

    `bias` already holds the masks and any relative position term.  The logits and the softmax
    are f32, the matmuls' inputs in the compute dtype.
    """
    scale = q_BTHK.shape[-1] ** -0.5
    if q_BTHK.shape[1] == 1:  # without T: with it, XLA for CPUs transposes a single row's keys
        logits_BHS = jnp.einsum(
            "BHK,BHSK->BHS", q_BTHK[:, 0], k_BHSK, preferred_element_type=jnp.float32
        )
        logits_BHTS = logits_BHS[:, :, None]
    else:
        logits_BHTS = jnp.einsum(
            "BTHK,BHSK->BHTS", q_BTHK, k_BHSK, preferred_element_type=jnp.float32
        )
    weights_BHTS = jax.nn.softmax(logits_BHTS * scale + bias_BHTS).astype(v_BHSK.dtype)
    return jnp.einsum("BHTS,BHSK->BTHK", weights_BHTS, v_BHSK)


def write(cache: LayerCache, new: LayerCache, slot_B: Array) -> LayerCache:
    """The cache with one position a row (S = 1 in `new`) written at `slot_B`, in place."""
    if len(slot_B) == 1:
        # Twice the same: of a single update, as a row is where a device has one head, XLA for CPUs
        # makes one for which it copies the cache.
        new, slot_B = jax.tree.map(lambda x: jnp.concatenate((x, x)), (new, slot_B))
        rows_B = jnp.zeros(2, jnp.int32)
    else:
        rows_B = jnp.arange(len(slot_B))
    # Head by head: with a row's heads as one update TPUs hold the caches in another order, a copy
    # of all.  And H a batching dimension: were it an index, the compiler's own partitioning
    # (`Auto`) would gather what is to be written over mp.
    index_BI = jnp.stack((rows_B, slot_B), axis=-1)
    index_BHI = jnp.broadcast_to(index_BI[:, None], (*new.k_BHSK.shape[:2], 2))

    def written(cache_BHSK: Array, new_BHSK: Array) -> Array:
        new_BHK = new_BHSK[:, :, 0].astype(cache_BHSK.dtype)
        return jax.lax.scatter(cache_BHSK, index_BHI, new_BHK, _ONE_POSITION)

    return jax.tree.map(written, cache, new)
