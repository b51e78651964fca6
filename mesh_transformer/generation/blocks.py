"""Reuse of prompts that begin with the same tokens: which blocks of a batch's pool hold them.

A batch's pool holds the keys and values of blocks of prompt tokens (see `decode`).  This module
keeps account of it in Python: callers ask which blocks begin a prompt, and where to save new ones.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Pool(NamedTuple):
    """The size of a batch's pool.

    Attributes:
      blocks: number of blocks per data-parallel replica, at least 1.
      block: number of positions per block.
    """

    blocks: int
    block: int


class Chunks(NamedTuple):
    """Which positions of each of P prompts to compute, and which blocks of the pool to copy.

    Position p of a prompt belongs to its block p // `Pool.block`.  Before the prompt's tokens are
    computed, blocks are copied from the pool to its row; afterwards, blocks are copied from the row
    to the pool.

    Attributes:
      begin_P: the first position to compute.  Earlier positions must be in the row, from an earlier
        call, or in the blocks to copy.
      load_PJ: for each block of the prompt, the number of the pool's block to copy from, or -1.
      save_PJ: for each block of the prompt, the number of the pool's block to copy to, or -1.
    """

    begin_P: np.ndarray
    load_PJ: np.ndarray
    save_PJ: np.ndarray


class Prefixes:
    """An index of the blocks in the pool of one replica, by the tokens that they end.

    A block's keys and values depend on all tokens before its end.  It is found by exactly these
    tokens, so a prompt never gets the block of another one, or of another adapter (see
    `of_adapter`).  If the pool is full, the block that
    was not used for the longest time is replaced.

    Args:
      pool: the size of the pool.
    """

    def __init__(self, pool: Pool):
        self.pool = pool
        # The number of each block, by the prompt's tokens up to the block's end; the block that was
        # not used for the longest time comes first.
        self._blocks: collections.OrderedDict[bytes, int] = collections.OrderedDict()

    def __len__(self) -> int:
        """Return the number of blocks that hold tokens."""
        return len(self._blocks)

    def find(self, prompt: np.ndarray) -> list[int]:
        """Return the pool's blocks that begin a prompt, in order.

        At least one token of the prompt is in none of these blocks, because its logits must be
        computed.

        Args:
          prompt: token ids [T].
        """
        found = []
        for end in range(self.pool.block, len(prompt), self.pool.block):
            block = self._blocks.get(_key(prompt[:end]))
            if block is None:
                break
            found.append(block)
        return found

    def use(
        self, prompt: np.ndarray, begin: int, others: Sequence[np.ndarray] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Choose blocks for a prompt whose positions from `begin` on are about to be computed.

        The blocks before `begin` count as used now.  For the blocks from `begin` on, the index
        counts on the caller to save them.

        Args:
          prompt: token ids [T], up to the last token that will be computed.
          begin: number of tokens before.
          others: prompts that are inserted by the same call.  Their blocks are not replaced,
            because a call must not save two blocks to the same place.

        Returns:
          For each complete block of the prompt, the block of the pool to load or -1, and the block
          of the pool to save it to or -1.
        """
        size, keys = self.pool.block, self._keys(prompt)
        kept = set(keys).union(*map(self._keys, others))
        # Later blocks are useless without the earlier ones, so they are the first to be replaced.
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)
        load, save = np.full((2, len(keys)), -1, np.int32)
        for index, key in enumerate(keys):
            if (index + 1) * size <= begin:
                load[index] = self._blocks.get(key, -1)
            elif key not in self._blocks:
                block = self._free(kept)
                if block is None:
                    break
                save[index] = self._blocks[key] = block
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)
        return load, save

    def _keys(self, prompt: np.ndarray) -> list[bytes]:
        """Return the keys of a prompt's complete blocks."""
        size = self.pool.block
        return [_key(prompt[:end]) for end in range(size, len(prompt) + 1, size)]

    def _free(self, kept: set[bytes]) -> int | None:
        """Return a block that is not in use, or the one least recently used; None if all are kept.

        Args:
          kept: the keys of blocks that must not be replaced.
        """
        if len(self._blocks) < self.pool.blocks:
            return len(self._blocks)
        oldest = next(iter(self._blocks))
        return None if oldest in kept else self._blocks.pop(oldest)


def of_adapter(prompt: np.ndarray, adapter: int) -> np.ndarray:
    """Return a prompt for `Prefixes` whose keys and values depend on a LoRA adapter.

    Args:
      prompt: token ids [T].
      adapter: the adapter's number; 0 for none.
    """
    return prompt.astype(np.int64) | adapter << 32


def _key(tokens: np.ndarray) -> bytes:
    return np.ascontiguousarray(tokens, np.int64).tobytes()
