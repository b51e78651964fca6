"""A KV cache in pages: each row has a table of the pages that hold its slots.

A page holds `C` consecutive slots, so slot s of a row is in the page of its table's entry s // C.
Rows take only as many pages as they need, and rows whose texts begin alike can share pages.  The
entries without a page are -1: nothing is written there, and what is read there must be masked.

Array names end in their shape: B rows, P prompts, T query, S slots, H heads, K head size, J entries
of a row's table, C slots of a page, G pages that are read together.  The arrays of the cache are
[L, H, C, K], or [L, H, C, 1] for scales, where L is the number of pages.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mesh_transformer.mesh.apart import Exact, kept_apart
from mesh_transformer.model.attention import MASKED, masked, scores_of
from mesh_transformer.model.attention import attend as plain_attend
from mesh_transformer.model.cache import LayerCache, write_at, write_rows

# Attention reads as many pages of each row together as hold this number of slots.  A smaller
# number reads less beyond the end of the longest row, and makes more steps.
SLOTS_TOGETHER = 256
EXACT_SLOTS = 128  # slots that `attend_exactly` reads together
# The same for all rows together: so much stays in a TPU's vector memory until it is used.
SLOTS_OF_ALL_ROWS = 8192

# Dimension numbers for gathering pages of [L, H, C, K] as [P, H, J, C, K], so that no axes need be
# exchanged afterwards.  H is a batching dimension, as in `cache.write_at`.
_PAGES = jax.lax.GatherDimensionNumbers(
    offset_dims=(3, 4),
    collapsed_slice_dims=(0,),
    start_index_map=(0,),
    operand_batching_dims=(1,),
    start_indices_batching_dims=(1,),
)


class Table(NamedTuple):
    """The pages that hold the slots of each row.

    Attributes:
      page_BJ: the numbers of the pages, or -1.
      used_B: in a decode step, the number of first slots that each row attends to at most.
      written: for a chunk of a prompt, where to write the contents of these slots (see
        `write_pages`); elsewhere None.
    """

    page_BJ: Array
    used_B: Array | None = None
    written: tuple[Array, ...] | None = None


def rows_in_pages(cache: LayerCache, page_PJ: Array) -> LayerCache:
    """Return the keys and values in some pages, [P, H, J * C, K] each."""

    heads = cache.k_BHSK.shape[1]
    index_PHJ1 = jnp.repeat(page_PJ[:, None, :, None], heads, axis=1)

    def rows(x: Array) -> Array:
        _, _, size, width = x.shape
        x_PHJCK = jax.lax.gather(x, index_PHJ1, _PAGES, (1, 1, size, width), mode="clip")
        return x_PHJCK.reshape(*x_PHJCK.shape[:2], -1, width)

    return jax.tree.map(rows, cache)


def write(cache: LayerCache, new: LayerCache, page_BJ: Array, slot_BT: Array) -> LayerCache:
    """Return the cache with the keys and values of one or several slots per row replaced.

    Args:
      new: the keys and values to write, [B, H, T, K] each, as in the cache.
      slot_BT: the slots; nothing is written to slots from J * C on.
    """
    size, count = cache.k_BHSK.shape[2], len(cache.k_BHSK)
    page_BT = jnp.take_along_axis(page_BJ, slot_BT // size, axis=1, mode="fill", fill_value=count)
    return write_at(cache, new, jnp.where(page_BT < 0, count, page_BT), slot_BT % size)


def write_pages(cache: LayerCache, rows: LayerCache, *to: Array) -> LayerCache:
    """Return the cache with whole pages replaced.

    Args:
      rows: the contents of the rows' first slots, [P, H, S, K] each, as in the cache.
      to: arrays [P, J] of the pages to write each row to, or -1 for what is not written.
    """
    size = cache.k_BHSK.shape[2]
    padding = (0, -rows.k_BHSK.shape[2] % size)
    rows = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), padding, (0, 0))), rows)
    for page_PJ in to:
        cache = _write_pages(cache, rows, page_PJ[:, : rows.k_BHSK.shape[2] // size])
    return cache


def _write_pages(cache: LayerCache, rows: LayerCache, page_PJ: Array) -> LayerCache:
    size, count = cache.k_BHSK.shape[2], len(cache.k_BHSK)

    def body(at: Array, cache: LayerCache) -> LayerCache:
        part = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, at * size, size, axis=2), rows
        )
        page_P = page_PJ[:, at]
        to_P = jnp.where(page_P < 0, count, page_P)  # out of range, so that it is not written
        return write_rows(cache, part, to_P, jnp.zeros_like(to_P))

    is_written_J = jnp.any(page_PJ >= 0, axis=0)
    place_J = jnp.arange(len(is_written_J))
    first = jnp.min(jnp.where(is_written_J, place_J, len(place_J)))
    end = jnp.max(jnp.where(is_written_J, place_J + 1, 0))
    return jax.lax.fori_loop(first, end, body, cache)


def slots_together(rows: int, size: int) -> int:
    """Return the number of slots of each row that attention reads together.

    Args:
      size: number of slots of a page.
    """
    return max(min(SLOTS_TOGETHER, SLOTS_OF_ALL_ROWS // rows) // size, 1) * size


def attend(
    q_BTHK: Array,
    cache: LayerCache,
    table: Table,
    bias_BHTS: Array,
    cap: float | None = None,
) -> Array:
    """Compute softmax attention of T queries over the slots of each row, as [B, T, H, K].

    The slots are read in turn, with a running maximum and sum of the softmax (Milakov and
    Gimelshein 2018).  How many are read does not change the result: the later ones are masked, so
    they add exactly 0.  Compiled for TPUs, what is read together stays in vector memory, so that
    the cache is read once.

    Masked keys may be NaN (see `LayerCache.like`).

    Args:
      bias_BHTS: as for `attention.attend`; S is J * C.
      cap: see `attention.capped`.
    """
    page_BJ, size = table.page_BJ, cache.k_BHSK.shape[2]
    places = page_BJ.shape[1]
    together = min(slots_together(len(q_BTHK), size) // size, places)
    more = -places % together
    page_BJ = jnp.pad(page_BJ, ((0, 0), (0, more)))
    padding = ((0, 0), (0, 0), (0, 0), (0, more * size))
    bias_BHTS = jnp.pad(bias_BHTS, padding, constant_values=MASKED)
    width = together * size

    def read(at: Array) -> tuple[LayerCache, Array]:
        page_BG = jax.lax.dynamic_slice_in_dim(page_BJ, at * together, together, axis=1)
        bias = jax.lax.dynamic_slice_in_dim(bias_BHTS, at * width, width, axis=3)
        return rows_in_pages(cache, page_BG), bias

    assert table.used_B is not None
    return _attend_in_turn(q_BTHK, read, -(-jnp.max(table.used_B) // width), cap)


def attend_to_rows(
    q_BTHK: Array, cache: LayerCache, used_B: Array, bias_BHTS: Array, cap: float | None = None
) -> Array:
    """Compute `attend` over rows with slots of their own.

    Args:
      used_B: the number of first slots that each row attends to at most.
    """
    slots = cache.k_BHSK.shape[2]
    width = min(slots_together(len(q_BTHK), 1), slots)

    def read(at: Array) -> tuple[LayerCache, Array]:
        first = jnp.minimum(at * width, slots - width)  # the last part may begin earlier

        def part(x: Array, axis: int) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, first, width, axis)

        bias, is_new_S = part(bias_BHTS, 3), first + jnp.arange(width) >= at * width
        rows = jax.tree.map(lambda x: part(x, 2), cache)
        return rows, jnp.where(is_new_S, bias, MASKED)

    used = jnp.minimum(jnp.max(used_B), slots)
    return _attend_in_turn(q_BTHK, read, -(-used // width), cap)


_Running = tuple[Array, Array, Array]  # largest score, sum of exponentials, sum of values


def _attend_in_turn(
    q_BTHK: Array,
    read: Callable[[Array], tuple[LayerCache, Array]],
    turns: Array,
    cap: float | None,
    first: Array | int = 0,
    exact: Exact | None = None,
) -> Array:
    """Compute softmax attention over slots that are read in turn; see `attend`.

    Args:
      read: a function from the number of a turn to the keys and values, and their bias.
      turns: the number of turns, of which those before `first` are left out.
      exact: if it is given, a turn is computed alike wherever it is.
    """

    def step(carry: _Running, part: LayerCache, bias: Array, q_BTHK: Array) -> _Running:
        most_BHT1, sum_BHT1, y_BHTK = carry
        scores_BHTS = masked(scores_of(q_BTHK, part, cap), bias)
        new_BHT1 = jnp.maximum(most_BHT1, scores_BHTS.max(axis=-1, keepdims=True))
        probs_BHTS, shrink_BHT1 = jnp.exp(scores_BHTS - new_BHT1), jnp.exp(most_BHT1 - new_BHT1)
        sum_BHT1 = sum_BHT1 * shrink_BHT1 + probs_BHTS.sum(axis=-1, keepdims=True)
        if part.v_scale_BHS1 is not None:
            probs_BHTS *= jnp.swapaxes(part.v_scale_BHS1, 2, 3)
        own_BHTK = jnp.einsum(
            "BHTS,BHSK->BHTK",
            probs_BHTS.astype(q_BTHK.dtype),
            part.v_BHSK.astype(q_BTHK.dtype),
            preferred_element_type=jnp.float32,
        )
        return new_BHT1, sum_BHT1, y_BHTK * shrink_BHT1 + own_BHTK

    def end(carry: _Running) -> Array:
        _, sum_BHT1, y_BHTK = carry
        return jnp.moveaxis(y_BHTK / sum_BHT1, 1, 2).astype(q_BTHK.dtype)

    if exact is not None:
        step, end = (kept_apart(function, exact.platform) for function in (step, end))
    # Begun with values of q, so that the loop carries arrays of one sharding.
    zero_BHTK = jnp.moveaxis(q_BTHK, 1, 2).astype(jnp.float32) * 0
    begin = (zero_BHTK[..., :1] - jnp.inf, zero_BHTK[..., :1], zero_BHTK)
    return end(
        jax.lax.fori_loop(first, turns, lambda at, carry: step(carry, *read(at), q_BTHK), begin)
    )


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
    the slots of a text in blocks of `EXACT_SLOTS` from its first one; a masked one adds exactly 0.
    The gradient is that of `attention.attend`.

    Args:
      first_BT: the slot of the first token of each query's text.
    """
    (B, T, H, K), slots = q_BTHK.shape, rows.k_BHSK.shape[2]
    queries, width = exact.rows, EXACT_SLOTS
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

            new_1THK = _attend_in_turn(q_1THK, read, end, cap, begin, exact)
            return first, jnp.where(is_own_T[:, None, None], new_1THK, y_1THK)

        last = jnp.max(first_T)
        begun = (jnp.min(first_T) * 0 - 1, q_1THK * 0)
        return jax.lax.while_loop(lambda carry: carry[0] < last, of_text, begun)[1][0]

    y = jax.lax.map(block, jnp.arange(B * blocks))
    return y.reshape(B, T + more, H, K)[:, :T]


def _exact_forward(
    q_BTHK: Array, rows: LayerCache, bias_BHTS: Array, first_BT: Array, *how: Any
) -> tuple[Array, Any]:
    return attend_exactly(q_BTHK, rows, bias_BHTS, first_BT, *how), (q_BTHK, rows, bias_BHTS)


def _exact_backward(cap: float | None, exact: Exact, saved: Any, g_BTHK: Array) -> Any:
    def run(q_BTHK: Array, rows: LayerCache, bias_BHTS: Array) -> Array:
        return plain_attend(q_BTHK, rows, bias_BHTS, cap=cap)

    return *jax.vjp(run, *saved)[1](g_BTHK), None


attend_exactly.defvjp(_exact_forward, _exact_backward)
