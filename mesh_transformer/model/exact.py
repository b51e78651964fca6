"""Attention whose results have the same bits for every number of queries, rows and slots.

Array names end in their shape: B rows, T query, S slots, H heads, K head size, J blocks of slots.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mesh_transformer.mesh.apart import Exact
from mesh_transformer.model import paged
from mesh_transformer.model.attention import MASKED, attend
from mesh_transformer.model.cache import LayerCache

SLOTS = 128  # that are read together


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attend_exactly(
    q_BTHK: Array,
    rows: LayerCache,
    bias_BHTS: Array,
    first_BT: Array,
    cap: float | None,
    exact: Exact,
) -> Array:
    """Compute `attend` over rows with slots of their own, with the same bits for every shape.

    A result depends on the query, on the keys and values that it attends to and on their order: not
    on the number of queries, rows or slots.  Queries are computed in blocks of `exact.rows`, and
    the slots of a text in blocks of `SLOTS` from its first one; masked ones add exactly 0.
    The gradient is that of `attention.attend`.

    Args:
      first_BT: the slot of the first token of each query's text; earlier ones must be masked.
    """
    (B, T, H, K), slots = q_BTHK.shape, rows.k_BHSK.shape[2]
    queries, width = exact.rows, SLOTS
    more, places = -T % queries, -(-slots // width)
    # A block may begin at any slot.
    padding = ((0, 0), (0, 0), (0, more), (0, (places + 1) * width - slots))
    bias_BHTS = jnp.pad(bias_BHTS, padding, constant_values=MASKED)
    bias_BHTS = jnp.broadcast_to(bias_BHTS, (B, *bias_BHTS.shape[1:]))
    rows = jax.tree.map(lambda x: jnp.pad(x, (*padding[:2], padding[3], (0, 0))), rows)
    q_BTHK = jnp.pad(q_BTHK, (padding[0], padding[2], *padding[:2]))
    first_BT = jnp.broadcast_to(first_BT, (B, T))
    first_BT = jnp.pad(first_BT, (padding[0], padding[2]), mode="edge")
    blocks = (T + more) // queries

    def block(number: Array) -> Array:
        row, begin = number // blocks, number % blocks * queries

        def cut(x: Array, axis: int, begin: Array, size: int) -> Array:
            x = jax.lax.dynamic_slice_in_dim(x, row, 1)
            return jax.lax.dynamic_slice_in_dim(x, begin, size, axis)

        q_1THK, bias_1HTS = cut(q_BTHK, 1, begin, queries), cut(bias_BHTS, 2, begin, queries)
        first_T = cut(first_BT, 1, begin, queries)[0]

        def of_text(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            """Compute the queries of the next text that has some in this block."""
            before, y_1THK = carry
            first = jnp.min(jnp.where(first_T > before, first_T, slots))
            is_own_T = first_T == first
            own_1HTS = jnp.where(is_own_T[:, None], bias_1HTS, MASKED)
            is_seen_S = jnp.roll((own_1HTS > MASKED / 2).any((0, 1, 2)), -first)
            is_seen_J = is_seen_S.reshape(-1, width).any(1)
            begin = jnp.argmax(is_seen_J)
            end = jnp.maximum(len(is_seen_J) - jnp.argmax(is_seen_J[::-1]), begin + 1)

            def read(at: Array) -> tuple[LayerCache, Array]:
                slot = first + at * width
                part = jax.tree.map(lambda x: cut(x, 2, slot, width), rows)
                return part, jax.lax.dynamic_slice_in_dim(own_1HTS, slot, width, 3)

            new_1THK = paged.in_turn(q_1THK, read, end, cap, begin, exact)
            return first, jnp.where(is_own_T[:, None, None], new_1THK, y_1THK)

        last = jnp.max(first_T)
        begun = (jnp.min(first_T) - 1, q_1THK * 0)
        return jax.lax.while_loop(lambda carry: carry[0] < last, of_text, begun)[1][0]

    y = jax.lax.map(block, jnp.arange(B * blocks))
    return y.reshape(B, T + more, H, K)[:, :T]


def _exact_forward(
    q_BTHK: Array, rows: LayerCache, bias_BHTS: Array, first_BT: Array, *how: Any
) -> tuple[Array, Any]:
    return attend_exactly(q_BTHK, rows, bias_BHTS, first_BT, *how), (q_BTHK, rows, bias_BHTS)


def _exact_backward(cap: float | None, exact: Exact, saved: Any, g_BTHK: Array) -> Any:
    def run(q_BTHK: Array, rows: LayerCache, bias_BHTS: Array) -> Array:
        return attend(q_BTHK, rows, bias_BHTS, cap=cap)

    return *jax.vjp(run, *saved)[1](g_BTHK), None


attend_exactly.defvjp(_exact_forward, _exact_backward)
