"""The pool of pages that holds the keys and values of a batch's rows, and places in it.

A batch with a pool stores keys and values in pages of consecutive positions (see `model.paged`).
"""

from typing import NamedTuple

import numpy as np

from mesh_transformer.config import Model
from mesh_transformer.util import InputError

PAGE = 16  # default number of positions per page


class Pool(NamedTuple):
    """The size of a batch's pool.

    Attributes:
      pages: number of pages per data-parallel replica.
      page: number of positions per page.
      kept: number of pages per replica for beginnings of prompts in layers with rings.
    """

    pages: int
    page: int
    kept: int = 0

    def slots(self, positions: int) -> int:
        """Return the number of slots of a row that can hold this many positions."""
        return -(-positions // self.page) * self.page


def most_slots(window: int, guesses: int, pool: Pool | None) -> int:
    """Return the largest number of slots that a row needs, however long its answer is.

    Args:
      guesses: number of tokens that a decode step may guess.
      pool: the size of the batch's pool; None if it has none.
    """
    if pool is None and not guesses:
        return window
    # A step writes its guesses over the oldest positions, which must be out of the window.
    return (pool or Pool(0, PAGE)).slots(window + guesses)


class Storage(NamedTuple):
    """How a batch stores keys and values, as far as its compiled programs depend on it.

    Attributes:
      in_pages: whether the rows share a pool of pages; otherwise, each has slots of its own.
      ring: number of slots of each row in layers with a sliding window (see `model.ring`); 0 if
        these layers store as much as the others.
      keeps: whether the pool has pages for beginnings of prompts in these layers.
    """

    in_pages: bool = False
    ring: int = 0
    keeps: bool = False


IN_ROWS = Storage()  # each row and layer has as many slots


def storage(config: Model, rows: int, guesses: int, pool: Pool | None) -> Storage:
    """Return how a batch stores keys and values.

    Layers with a sliding window have rings if these are smaller than what other layers store.

    Args:
      rows: number of rows per replica.
      guesses: number of tokens that a decode step may guess.
    """
    if pool is None:
        room = most_slots(config.window, guesses, None)
    else:
        room = pool.pages * pool.page // rows
    ring = Pool(0, PAGE).slots((config.sliding_window or room) + guesses)
    if ring >= room:
        return Storage(pool is not None)
    return Storage(pool is not None, ring, pool is not None and pool.kept > 0)


def pool_of(tokens: int, positions: int, page: int = PAGE) -> Pool:
    """Return a pool for this number of tokens.

    Args:
      positions: number of positions that a row may have at once.

    Raises:
      InputError: if the pool has no room for one row with so many positions.
    """
    pool = Pool(tokens // page, page)
    if tokens < pool.slots(positions):
        raise InputError(
            f"the cache has room for {tokens} tokens, expected at least {pool.slots(positions)}, "
            "enough for one request; raise --cache-tokens"
        )
    return pool


class Chunks(NamedTuple):
    """Which positions of each of P prompts to compute, and the pages that hold its positions.

    Attributes:
      begin_P: the first position to compute.  Earlier positions must be in the row, from an earlier
        call, or in pages that the row shares.
      page_PJ: the numbers of the row's pages in the pool, in order; -1 after the last one.
      prompt_PJ: the pages that hold the prompt.  Where these are not the row's, the prompt is
        copied to the row's pages.
      restored_PG, kept_PG: see `ring.Chunk`; None for none.
    """

    begin_P: np.ndarray
    page_PJ: np.ndarray
    prompt_PJ: np.ndarray
    restored_PG: np.ndarray | None = None
    kept_PG: np.ndarray | None = None
