"""Which blocks of a batch's pool hold the keys and values of each row, and which are kept.

A batch with a pool stores keys and values in blocks of consecutive positions (see
`generation.pool`).  This module keeps account of them in Python.  A row gets as many blocks as its
prompt and answer need.  The blocks of a prompt are kept after its row has ended, and later prompts
that begin with the same tokens use them too.
"""

import collections

import numpy as np

from mesh_transformer.generation.pool import Pool


class NoBlockError(Exception):
    """The pool has too few free blocks."""


class Row:
    """The blocks of one row of a batch.

    Attributes:
      block_J: the numbers of the blocks, in order; -1 after the last one.
      prompt_J: the blocks that hold the prompt until it is complete.  Other rows may use these too,
        so the first ones are not those of `block_J` if the answer is written over them.
      shares: whether other rows may use its prompt's blocks, and it theirs.
      first: the first blocks of the prompt that it has given back already, and their tokens.
    """

    def __init__(self, block_J: np.ndarray, prompt_J: np.ndarray, shares: bool):
        self.block_J = block_J
        self.prompt_J = prompt_J
        self.shares = shares
        self.first: list[tuple[int, bytes | None]] = []


class Blocks:
    """The blocks in the pool of one replica: which are free, in use, or kept for later prompts.

    A block's keys and values depend on all tokens before its end.  It is found by exactly these
    tokens, so a prompt never gets the block of another one, or of another adapter (see
    `of_adapter`).  If no block is free, the kept one that was not used for the longest time is
    given away.

    Args:
      pool: the size of the pool.
      slots: number of slots of a row (see `Pool.slots`).
      keep: whether blocks are shared and kept.
    """

    def __init__(self, pool: Pool, slots: int, *, keep: bool = True):
        self.pool = pool
        self._places, self._keep = slots // pool.block, keep
        self._free = list(reversed(range(pool.blocks)))
        self._users = [0] * pool.blocks  # number of rows that use each block
        self._blocks: dict[bytes, int] = {}  # each kept block, by the tokens up to its end
        self._keys: dict[int, bytes] = {}  # the reverse
        # Kept blocks that no row uses; the one that was not used for the longest time comes first.
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def available(self) -> int:
        """Number of blocks that new rows can get, kept ones included."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Number of blocks that rows use."""
        return self.pool.blocks - self.available

    @property
    def no_row(self) -> Row:
        """A row without blocks."""
        block_J = np.full(self._places, -1, np.int32)
        return Row(block_J, block_J.copy(), shares=False)

    def needed(self, prompt: np.ndarray, positions: int, *, use_kept: bool = True) -> int:
        """Return by how many blocks `add_row`, with these arguments, reduces `available`."""
        count, twice, found = self._planned(prompt, positions, use_kept)
        return self._taken(count + twice, found)

    def find(self, prompt: np.ndarray) -> list[int]:
        """Return the kept blocks that begin a prompt, in order.

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

    def add_row(self, prompt: np.ndarray, positions: int, *, use_kept: bool = True) -> Row:
        """Return the blocks of a new row.

        A row with more positions than slots writes over its first ones.  Until its prompt is
        complete, it has further blocks for the part of the prompt there, so that these can be
        shared; or it shares none, if the pool is too small for that.

        Args:
          prompt: token ids [T].
          positions: number of positions that the row may have, those of the prompt included.
          use_kept: whether the row uses the kept blocks that begin its prompt, in place of its own.

        Raises:
          NoBlockError: if too few blocks are available; nothing is taken then.
        """
        count, twice, found = self._planned(prompt, positions, use_kept)
        needed = self._taken(count + twice, found)
        if needed > self.available:
            raise NoBlockError(f"{needed} blocks are needed, and {self.available} available")
        for block in found:  # before any is given away
            self._use(block)
        row = self.no_row
        row.prompt_J[: len(found)] = found
        row.prompt_J[len(found) : count] = [self._take() for _ in range(count - len(found))]
        row.block_J[:] = row.prompt_J
        row.block_J[:twice] = [self._take() for _ in range(twice)]
        row.shares = self._shares(prompt, positions)
        return row

    def share(self, row: Row, prompt: np.ndarray, filled: int) -> int:
        """Let a row use the kept blocks that begin its prompt, in place of its own.

        Args:
          prompt: token ids [T].
          filled: number of positions that the row holds.  If the kept blocks hold no more, the row
            stays as it is.

        Returns:
          The number of positions that the row holds now.
        """
        found = self.find(prompt) if row.shares else []
        if len(found) * self.pool.block <= filled:
            return filled
        for at, block in enumerate(found):
            old = int(row.prompt_J[at])
            if block != old:
                self._use(block)
                self._give_back(row.prompt_J[at : at + 1])
                row.prompt_J[at] = block
                row.block_J[at] = block if row.block_J[at] == old else row.block_J[at]
        return len(found) * self.pool.block

    def keep(self, row: Row, prompt: np.ndarray) -> None:
        """Keep the complete blocks of a prompt that a row now holds.

        Args:
          prompt: token ids [T], up to the last one whose keys and values are computed.
        """
        if not row.shares:
            return
        size = self.pool.block
        for at in range(len(prompt) // size):
            key, block = _key(prompt[: (at + 1) * size]), int(row.prompt_J[at])
            if key not in self._blocks and block not in self._keys:
                self._blocks[key], self._keys[block] = block, key

    def end_prompt(self, row: Row) -> None:
        """Give back the blocks that the row needed only until its prompt was complete."""
        first = row.prompt_J[row.prompt_J != row.block_J]
        row.first = [(block, self._keys.get(block)) for block in first.tolist()]
        self._give_back(first)
        row.prompt_J[:] = row.block_J
        row.shares = False

    def remove_row(self, row: Row) -> None:
        """Give back the blocks of a row."""
        if row.shares:
            self.end_prompt(row)
        self._give_back(row.block_J[row.block_J >= 0])
        row.block_J[:] = row.prompt_J[:] = -1
        # The later blocks of the prompt are useless without its first ones.
        for block, key in reversed(row.first):
            if block in self._idle and self._keys[block] == key:
                self._idle.move_to_end(block)

    def _planned(
        self, prompt: np.ndarray, positions: int, use_kept: bool
    ) -> tuple[int, int, list[int]]:
        """Return a row's number of blocks, how many it has twice, and the kept ones it can use."""
        count = min(-(-positions // self.pool.block), self._places)
        if not self._shares(prompt, positions):
            return count, 0, []
        return count, self._twice(prompt, positions), self.find(prompt) if use_kept else []

    def _taken(self, count: int, found: list[int]) -> int:
        """Return how many of `count` blocks no row uses yet, if the `found` ones are among them."""
        return count - sum(self._users[block] > 0 for block in found)

    def _shares(self, prompt: np.ndarray, positions: int) -> bool:
        """Return whether a new row may share its prompt's blocks."""
        twice = self._twice(prompt, positions)
        return self._keep and (not twice or self._places + twice <= self.pool.blocks)

    def _twice(self, prompt: np.ndarray, positions: int) -> int:
        """Return how many complete blocks of a prompt the row's answer is written over."""
        over = max(positions - self._places * self.pool.block, 0)
        return min(-(-over // self.pool.block), len(prompt) // self.pool.block)

    def _use(self, block: int) -> None:
        """Count a row that uses a kept block."""
        self._idle.pop(block, None)
        self._users[block] += 1

    def _take(self) -> int:
        """Return a free block, or the kept one that was not used for the longest time."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._blocks[self._keys.pop(block)]
        self._users[block] += 1
        return block

    def _give_back(self, blocks: np.ndarray) -> None:
        # Later blocks are useless without the earlier ones, so they are the first to be given away.
        for block in reversed(blocks.tolist()):
            self._users[block] -= 1
            if not self._users[block] and block in self._keys:
                self._idle[block] = None
            elif not self._users[block]:
                self._free.append(block)


def of_adapter(prompt: np.ndarray, adapter: int) -> np.ndarray:
    """Return a prompt for `Blocks` whose keys and values depend on a LoRA adapter.

    Args:
      prompt: token ids [T].
      adapter: the adapter's number; 0 for none.
    """
    return prompt.astype(np.int64) | adapter << 32


def _key(tokens: np.ndarray) -> bytes:
    return np.ascontiguousarray(tokens, np.int64).tobytes()
