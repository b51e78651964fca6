"""The cache of a layer with a sliding window: a ring of slots for each row.

Position p is in slot p mod R, so that a row keeps its newest R positions; R is at least the window
and what a decode step may write beyond its first position.  Prompts that begin alike share no slots
of a ring.  Instead, pages of a prompt are copied to a pool of their own (`RingCache.kept`), and
from there to the rings of later rows.

Array names end in their shape: B rows of the batch, P prompts, T tokens of a part, R slots of a
ring, S slots or positions, H heads, K head size, C slots of a page, G pages, L pages of the pool.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mesh_transformer.model import paged
from mesh_transformer.model.cache import LayerCache, rows_of, write_rows


class RingCache(NamedTuple):
    """The keys and values of a layer with a sliding window, or the PartitionSpecs of its arrays.

    Attributes:
      rows: the rings, [B, H, R, K].
      kept: pages of prompts, [L, H, C, K]; None if none are kept.
    """

    rows: LayerCache
    kept: LayerCache | None = None

    @property
    def slots(self) -> int:
        """The number of slots of a ring, R."""
        return self.rows.k_BHSK.shape[2]


Cache = LayerCache | RingCache


class Part(NamedTuple):
    """Which positions of each prompt are computed, and what is copied between rings and pages.

    Attributes:
      row_P: the row of each prompt; nothing is written for rows out of range.
      begin_P: the first position that is computed.
      end_P: the end of the prompt's tokens; the positions from there on are padding.
      restored_PG: the pages that hold the positions before `begin_P`, which is then the end of the
        last one; entries before the prompt's first page are -1, and all of them if the ring holds
        these positions already.
      kept_PG: the pages to copy the prompt's pages to, or -1.
      kept_from_P: a position in the first page that is copied.
    """

    row_P: Array
    begin_P: Array
    end_P: Array
    restored_PG: Array
    kept_PG: Array
    kept_from_P: Array


def held(newest: Array, slots: int) -> Array:
    """Return the position that each slot of rows holds, [B, R]; negative if it holds none.

    Args:
      newest: the newest position of each row, [B, 1].
    """
    return newest - (newest - jnp.arange(slots)) % slots


def joined(cache: RingCache, new: LayerCache, part: Part) -> LayerCache:
    """Return the slots of the prompts' rings, then those of a part, [P, H, R + T, K] each.

    The slots of the rings hold positions before the part (see `key_positions`).

    Args:
      new: the keys and values of the part, [P, H, T, K] each.
    """
    rows, begin_P1 = rows_of(cache.rows, part.row_P), part.begin_P[:, None]
    if cache.kept is not None and part.restored_PG.shape[1]:
        pages, size = cache.kept, cache.kept.k_BHSK.shape[2]
        first_P1 = begin_P1 - part.restored_PG.shape[1] * size
        is_restored_P = part.restored_PG[:, -1] >= 0

        def restored() -> LayerCache:
            own = paged.rows_in_pages(pages, part.restored_PG)
            own = _at(own, held(begin_P1 - 1, cache.slots) - first_P1)
            where = is_restored_P[:, None, None, None]
            return jax.tree.map(lambda x, y: jnp.where(where, x, y), own, rows)

        rows = jax.lax.cond(jnp.any(is_restored_P), restored, lambda: rows)
    return jax.tree.map(lambda x, y: jnp.concatenate((x, y), axis=2), rows, new)


def key_positions(part: Part, slots: int, width: int) -> Array:
    """Return the positions of the slots that `joined` returns, [P, R + T].

    Args:
      slots: number of slots of a ring.
      width: number of tokens of a part.
    """
    begin_P1 = part.begin_P[:, None]
    return jnp.concatenate((held(begin_P1 - 1, slots), begin_P1 + jnp.arange(width)), axis=1)


def written(cache: RingCache, values: LayerCache, part: Part, before: int) -> RingCache:
    """Return the cache with the positions of a part.

    Args:
      values: what `joined` returned, or the keys and values of a part that begins at position 0.
      before: how many slots of rings `values` begins with, R or 0.
    """
    begin_P1, slots = part.begin_P[:, None], cache.slots

    def of_positions(position_PN: Array) -> LayerCache:
        index_PN = before + position_PN - begin_P1
        if before:
            index_PN = jnp.where(position_PN < begin_P1, position_PN % slots, index_PN)
        return _at(values, index_PN)

    own, kept = values, cache.kept
    if before or values.k_BHSK.shape[2] > slots:
        own = of_positions(held(part.end_P[:, None] - 1, slots))
    rows = write_rows(cache.rows, own, part.row_P, jnp.zeros_like(part.row_P))
    if kept is not None and (pages := part.kept_PG.shape[1]):
        size = kept.k_BHSK.shape[2]
        position_PS = part.kept_from_P[:, None] // size * size + jnp.arange(pages * size)
        kept = paged.write_pages(kept, of_positions(position_PS), part.kept_PG)
    return RingCache(rows, kept)


def _at(cache: LayerCache, index_PN: Array) -> LayerCache:
    """Return some slots of each row, [P, H, N, K] each; indices out of range are clipped."""
    take: Any = jax.vmap(lambda x_HSK, index_N: jnp.take(x_HSK, index_N, axis=1, mode="clip"))
    return jax.tree.map(lambda x: take(x, index_PN), cache)
