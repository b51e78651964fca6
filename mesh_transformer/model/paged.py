"""A KV cache in pages: each row has a table of the pages that hold its slots.

A page holds `C` consecutive slots, so slot s of a row is in the page of its table's entry s // C.
Rows take only as many pages as they need, and rows whose texts begin alike can share pages.  The
entries without a page are -1: nothing is written there, and what is read there must be masked.

Array names end in their shape: B rows, P prompts, T query, S slots, H heads, K head size, J entries
of a row's table, C slots of a page, G pages that are read together.  The arrays of the cache are
[L, H, C, K], or [L, H, C, 1] for scales, where L is the number of pages.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mesh_transformer.mesh.apart import Exact, kept_apart
from mesh_transformer.mesh.parallel import Parallel
from mesh_transformer.model import cache as caches
from mesh_transformer.model.attention import MASKED, masked, on_matrix_unit, scores_of
from mesh_transformer.model.cache import LayerCache, write_at, write_in_turn, write_rows

# Attention reads as many pages of each row together as hold this number of slots.  A smaller
# number reads less beyond the end of the longest row, and makes more steps.
SLOTS_TOGETHER = 256
# The same for all rows together: so much stays in a TPU's vector memory until it is used.
SLOTS_OF_ALL_ROWS = 8192
# The same for a chunk of a prompt, for all of its positions together: fewer steps for narrow ones.
SLOTS_OF_CHUNK, MOST_SLOTS_OF_CHUNK = 16384, 1024

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
      used_B: the number of first slots that each row attends to at most.
      copied_BJ: for a chunk of a prompt, the pages to copy those of `page_BJ` to, or -1; elsewhere
        None.
    """

    page_BJ: Array
    used_B: Array
    copied_BJ: Array | None = None


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


def write_part(cache: LayerCache, new: LayerCache, page_PJ: Array, slot_P: Array) -> LayerCache:
    """Return the cache with consecutive slots of each row replaced.

    Args:
      new: the keys and values to write, [P, H, T, K] each, as in the cache.
      slot_P: the first slot of each row to write to; nothing is written where a row has no page.
    """
    size, width = cache.k_BHSK.shape[2], new.k_BHSK.shape[2]
    place_PG = slot_P[:, None] // size + jnp.arange(-(-width // size) + 1)
    page_PG = jnp.take_along_axis(page_PJ, place_PG, axis=1, mode="fill", fill_value=-1)
    rows = rows_in_pages(cache, page_PG)
    return write_pages(
        cache, write_rows(rows, new, jnp.arange(len(slot_P)), slot_P % size), page_PG
    )


def write_pages(cache: LayerCache, rows: LayerCache, *to: Array) -> LayerCache:
    """Return the cache with whole pages replaced.

    Args:
      rows: the contents of the rows' first slots, [P, H, S, K] each, as in the cache.
      to: arrays [P, J] of the pages to write each row to, or -1 for what is not written.
    """
    size = cache.k_BHSK.shape[2]
    padding = (0, -rows.k_BHSK.shape[2] % size)
    rows = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), padding, (0, 0))), rows)

    def part(_: LayerCache, at: Array) -> LayerCache:
        return jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, at * size, size, axis=2), rows
        )

    for page_PJ in to:
        cache = _write_pages(cache, part, write_rows, page_PJ[:, : rows.k_BHSK.shape[2] // size])
    return cache


def copy_pages(cache: LayerCache, page_PJ: Array, to_PJ: Array) -> LayerCache:
    """Return the cache with the contents of pages copied to others, or to none where that is -1."""

    def part(cache: LayerCache, at: Array) -> LayerCache:
        return rows_in_pages(cache, jax.lax.dynamic_slice_in_dim(page_PJ, at, 1, axis=1))

    return _write_pages(cache, part, write_in_turn, to_PJ)


def _write_pages(
    cache: LayerCache,
    part: Callable[[LayerCache, Array], LayerCache],
    write: Callable[..., LayerCache],
    page_PJ: Array,
) -> LayerCache:
    """Write to pages, one of each row after the other.

    Args:
      part: a function from the cache and an index along J to the contents of these pages.
      write: `write_rows`, or a function like it.
    """
    count = len(cache.k_BHSK)

    def body(at: Array, cache: LayerCache) -> LayerCache:
        page_P = page_PJ[:, at]
        to_P = jnp.where(page_P < 0, count, page_P)  # out of range, so that it is not written
        return write(cache, part(cache, at), to_P, jnp.zeros_like(to_P))

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
    bias: Array | Callable[[Array], Array],
    cap: float | None = None,
    *,
    by_rows: bool = False,
) -> Array:
    """Compute softmax attention of T queries over the slots of each row, as [B, T, H, K].

    The slots are read in turn, with a running maximum and sum of the softmax (Milakov and
    Gimelshein 2018).  How many are read does not change the result: the later ones are masked, so
    they add exactly 0.  Compiled for TPUs, what is read together stays in vector memory, so that
    the cache is read once.

    Masked keys may be NaN (see `LayerCache.like`).

    Args:
      bias: as for `attention.attend`, where S is J * C.  Or a function from the numbers of some
        slots [1, S] to the bias of these, so that there is never one of all slots.
      cap: see `attention.capped`.
      by_rows: whether to read, on CPUs, no more slots of a row than it has.  Otherwise, and on
        other devices, rows are read together, as many slots of each as the longest one has.
    """

    def alone(q_BTHK: Array, cache: LayerCache, table: Table, bias_BHTS: Array) -> Array:
        def row(own: tuple[Array, Array, Array, Array]) -> Array:
            q_1THK, page_1J, used_1, bias_1HTS = (x[None] for x in own)
            return _attend(q_1THK, cache, Table(page_1J, used_1), bias_1HTS, cap)[0]

        return jax.lax.map(row, (q_BTHK, table.page_BJ, table.used_B, bias_BHTS))

    def together(q_BTHK: Array, cache: LayerCache, table: Table, bias_BHTS: Array) -> Array:
        return _attend(q_BTHK, cache, table, bias_BHTS, cap)

    if callable(bias) or len(q_BTHK) == 1 or not by_rows:
        return _attend(q_BTHK, cache, table, bias, cap)
    bias = jnp.broadcast_to(bias, (len(q_BTHK), *bias.shape[1:]))
    return jax.lax.platform_dependent(q_BTHK, cache, table, bias, cpu=alone, default=together)


def _attend(
    q_BTHK: Array,
    cache: LayerCache,
    table: Table,
    bias: Array | Callable[[Array], Array],
    cap: float | None,
) -> Array:
    """Compute `attend` for all rows together: as many slots of each row as the longest one has."""
    page_BJ, size = table.page_BJ, cache.k_BHSK.shape[2]
    places = page_BJ.shape[1]
    together = slots_together(len(q_BTHK), size) // size
    if callable(bias):
        most = min(SLOTS_OF_CHUNK // math.prod(q_BTHK.shape[:2]), MOST_SLOTS_OF_CHUNK)
        together = max(together, most // size)
    together = min(together, places)
    more = -places % together
    page_BJ = jnp.pad(page_BJ, ((0, 0), (0, more)))
    width = together * size
    if not callable(bias):
        padding = ((0, 0), (0, 0), (0, 0), (0, more * size))
        bias = jnp.pad(bias, padding, constant_values=MASKED)

    def read(at: Array) -> tuple[LayerCache, Array]:
        page_BG = jax.lax.dynamic_slice_in_dim(page_BJ, at * together, together, axis=1)
        if callable(bias):
            own = bias(at * width + jnp.arange(width)[None])
        else:
            own = jax.lax.dynamic_slice_in_dim(bias, at * width, width, axis=3)
        return rows_in_pages(cache, page_BG), own

    return in_turn(q_BTHK, read, -(-jnp.max(table.used_B) // width), cap)


def write_and_attend(
    q_BTHK: Array,
    cache: LayerCache,
    new: LayerCache,
    slot_B1: Array,
    table: Table,
    par: Parallel,
    cap: float | None = None,
) -> tuple[Array, LayerCache]:
    """Compute `write` of one slot per row, then `attend`, with JAX's kernel for TPUs.

    Every query attends to the `used_B` first slots of its row.

    The kernel masks by addition, so that a NaN in a masked slot would spread.  Therefore masked
    keys of the written page become 0, and unused entries of a table name the row's first page.

    Args:
      q_BTHK: the queries of one position; T is the number of those that share a head of keys.
      new: as for `write`; T is 1.
    """
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    size, used_B = cache.k_BHSK.shape[2], table.used_B
    place_B1 = slot_B1 // size
    page_B1 = jnp.take_along_axis(table.page_BJ, place_B1, axis=1)
    page = caches.write(rows_in_pages(cache, page_B1), new, slot_B1 % size)
    is_used_BS = place_B1 * size + jnp.arange(size) < used_B[:, None]
    page = page._replace(k_BHSK=jnp.where(is_used_BS[:, None, :, None], page.k_BHSK, 0))
    to_B = jnp.where(page_B1[:, 0] < 0, len(cache.k_BHSK), page_B1[:, 0])
    cache = caches.write_in_turn(cache, page, to_B, jnp.zeros_like(to_B))
    is_used_BJ = jnp.arange(table.page_BJ.shape[1]) * size < used_B[:, None]
    page_BJ = jnp.maximum(jnp.where(is_used_BJ, table.page_BJ, table.page_BJ[:, :1]), 0)

    def attend(q_BTHK: Array, k_LHCK: Array, v_LHCK: Array, page_BJ: Array, used_B: Array) -> Array:
        B, T, H, K = q_BTHK.shape
        # For the kernel each head of a row is a row, and that of a page a page, so that the cache
        # need not be transposed.
        page_BHJ = page_BJ[:, None] * H + jnp.arange(H)[:, None]
        y_BHTK = paged_attention(
            (jnp.moveaxis(q_BTHK, 1, 2).astype(jnp.float32) * K**-0.5).reshape(B * H, T, K),
            *(x.reshape(1, -1, size, K) for x in (k_LHCK, v_LHCK)),
            jnp.repeat(used_B, H),
            page_BHJ.reshape(B * H, -1),
            attn_logits_soft_cap=cap,
            pages_per_compute_block=math.gcd(page_BJ.shape[1], max(SLOTS_TOGETHER // size, 1)),
        ).reshape(B, H, T, K)
        return jnp.moveaxis(y_BHTK, 1, 2).astype(q_BTHK.dtype)

    heads, queries = (None, "mp"), (None, None, "mp")
    run = par.on_blocks(attend, (queries, heads, heads, (), ()), queries)
    return run(q_BTHK, cache.k_BHSK, cache.v_BHSK, page_BJ, used_B), cache


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
    return in_turn(q_BTHK, read, -(-used // width), cap)


_Running = tuple[Array, Array, Array]  # largest score, sum of exponentials, sum of values


def in_turn(
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
      turns: the end of the range of turns, which begins with `first`.
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

    def run(q_BTHK: Array) -> Array:
        # Begun with values of q, so that the loop carries arrays of one sharding.
        zero_BHTK = jnp.moveaxis(q_BTHK, 1, 2).astype(jnp.float32) * 0
        begin = (zero_BHTK[..., :1] - jnp.inf, zero_BHTK[..., :1], zero_BHTK)
        return end(
            jax.lax.fori_loop(first, turns, lambda at, carry: step(carry, *read(at), q_BTHK), begin)
        )

    return on_matrix_unit(run, q_BTHK)
