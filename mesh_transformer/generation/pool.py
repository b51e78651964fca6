"""The pool of pages that holds the keys and values of a batch's rows, and places in it.

A batch with a pool stores keys and values in pages of consecutive positions (see `model.paged`).
"""

from typing import NamedTuple

import numpy as np

from mesh_transformer.util import InputError

PAGE = 16  # default number of positions per page


class Pool(NamedTuple):
    """The size of a batch's pool.

    Attributes:
      pages: number of pages per data-parallel replica.
      page: number of positions per page.
    """

    pages: int
    page: int

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
    """

    begin_P: np.ndarray
    page_PJ: np.ndarray
    prompt_PJ: np.ndarray
