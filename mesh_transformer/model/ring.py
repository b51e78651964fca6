"""The cache of a layer with a sliding window: a ring of slots for each row.

Position p is in slot p mod R, so that a row keeps its newest R positions; R is at least the window
and what a decode step may write beyond its first position.  Prompts that begin alike share no slots
of a ring.  Instead, pages of a prompt are copied to a pool of their own (`RingCache.kept`), and
from there to the rings of later rows.

Array names end in their shape: B rows of the batch, P prompts, T tokens of a chunk, R slots of a
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


class Chunk(NamedTuple):
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


def read(cache: RingCache, new: LayerCache, chunk: Chunk) -> LayerCache:
    """Return the slots of the prompts' rings, then those of a chunk, [P, H, R + T, K] each.

    The slots of the rings hold positions before the chunk (see `key_positions`).
    """
    rows, begin_P1 = rows_of(cache.rows, chunk.row_P), chunk.begin_P[:, None]
    if cache.kept is not None and chunk.restored_PG.shape[1]:
        pages = paged.rows_in_pages(cache.kept, chunk.restored_PG)
        first_P1 = begin_P1 - pages.k_BHSK.shape[2]
        restored = _at(pages, held(begin_P1 - 1, cache.slots) - first_P1)
        is_restored_P111 = chunk.restored_PG[:, -1:, None, None] >= 0
        rows = jax.tree.map(lambda x, y: jnp.where(is_restored_P111, x, y), restored, rows)
    return jax.tree.map(lambda x, y: jnp.concatenate((x, y), axis=2), rows, new)


def key_positions(chunk: Chunk, slots: int, width: int) -> Array:
    """Return the positions of the slots that `read` returns, [P, R + T].

    Args:
      slots: number of slots of a ring.
      width: number of tokens of a chunk.
    """
    begin_P1 = chunk.begin_P[:, None]
    return jnp.concatenate((held(begin_P1 - 1, slots), begin_P1 + jnp.arange(width)), axis=1)


def written(cache: RingCache, read: LayerCache, chunk: Chunk) -> RingCache:
    """Return the cache with the positions of a chunk.

    Args:
      read: what `read` returned.
    """
    begin_P1, slots = chunk.begin_P[:, None], cache.slots

    def of_positions(position_PN: Array) -> LayerCache:
        is_new_PN = position_PN >= begin_P1
        return _at(read, jnp.where(is_new_PN, slots + position_PN - begin_P1, position_PN % slots))

    newest_PR = held(chunk.end_P[:, None] - 1, slots)
    first_P = jnp.zeros_like(chunk.row_P)
    rows, kept = write_rows(cache.rows, of_positions(newest_PR), chunk.row_P, first_P), cache.kept
    if kept is not None and (pages := chunk.kept_PG.shape[1]):
        size = kept.k_BHSK.shape[2]
        position_PS = chunk.kept_from_P[:, None] // size * size + jnp.arange(pages * size)
        kept = paged.write_pages(kept, of_positions(position_PS), chunk.kept_PG)
    return RingCache(rows, kept)


def _at(cache: LayerCache, index_PN: Array) -> LayerCache:
    """Return some slots of each row, [P, H, N, K] each; indices out of range are clipped."""
    take: Any = jax.vmap(lambda x_HSK, index_N: jnp.take(x_HSK, index_N, axis=1, mode="clip"))
    return jax.tree.map(lambda x: take(x, index_PN), cache)
