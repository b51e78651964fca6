"""The pool of blocks that holds the keys and values of a batch's rows, and places in it.

A batch with a pool stores keys and values in blocks of consecutive positions (see `model.paged`).
"""

from typing import NamedTuple

import numpy as np

from mesh_transformer.util import InputError

BLOCK = 16  # default number of positions per block


class Pool(NamedTuple):
    """The size of a batch's pool.

    Attributes:
      blocks: number of blocks per data-parallel replica.
      block: number of positions per block.
    """

    blocks: int
    block: int

    def slots(self, positions: int) -> int:
        """Return the number of slots of a row that can hold this many positions."""
        return -(-positions // self.block) * self.block


def most_slots(window: int, guesses: int, pool: Pool | None) -> int:
    """Return the largest number of slots that a row needs, however long its answer is.

    Args:
      guesses: number of tokens that a decode step may guess.
      pool: the size of the batch's pool; None if it has none.
    """
    if pool is None and not guesses:
        return window
    # A step writes its guesses over the oldest positions, which must be out of the window.
    return (pool or Pool(0, BLOCK)).slots(window + guesses)


def pool_of(tokens: int, positions: int, block: int = BLOCK) -> Pool:
    """Return a pool for this number of tokens.

    Args:
      positions: number of positions that a row may have at once.

    Raises:
      InputError: if the pool has no room for one row with so many positions.
    """
    pool = Pool(tokens // block, block)
    if tokens < pool.slots(positions):
        raise InputError(
            f"the cache has room for {tokens} tokens, expected at least {pool.slots(positions)}, "
            "enough for one request; raise --cache-tokens"
        )
    return pool


class Chunks(NamedTuple):
    """Which positions of each of P prompts to compute, and the blocks that hold its positions.

    Attributes:
      begin_P: the first position to compute.  Earlier positions must be in the row, from an earlier
        call, or in blocks that the row shares.
      block_PJ: the numbers of the row's blocks in the pool, in order; -1 after the last one.
      prompt_PJ: the blocks that hold the prompt.  Where these are not the row's, the prompt is
        copied to the row's blocks.
    """

    begin_P: np.ndarray
    block_PJ: np.ndarray
    prompt_PJ: np.ndarray
