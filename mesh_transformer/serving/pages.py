"""Which pages of a batch's pool hold the keys and values of each row, and which are kept.

A batch with a pool stores keys and values in pages of consecutive positions (see
`generation.pool`).  This module keeps account of them in Python.  A row gets as many pages as its
prompt and answer need.  The pages of a prompt are kept after its row has ended, and later prompts
that begin with the same tokens use them too.
"""

import collections
import hashlib
from collections.abc import Sequence

import numpy as np

from mesh_transformer.generation.pool import Chunks, Pool


class NoPageError(Exception):
    """The pool has too few free pages."""


class Prompt:
    """The tokens of a prompt, and a key for each of its complete pages.

    Keys and values in a page depend on all tokens before its end, and on the LoRA adapter.  So does
    its key: the SHA-256 digest of the previous page's key and the page's tokens.  Each is computed
    once, so that the time for all pages is linear in the length.

    Args:
      tokens: token ids [T].
      adapter: the adapter's number; 0 for none.
    """

    def __init__(self, tokens: np.ndarray, adapter: int = 0):
        self.tokens = tokens
        self._keys = [adapter.to_bytes(8, "little")]  # of no pages, then of each page

    def __len__(self) -> int:
        return len(self.tokens)

    def key(self, pages: int, size: int) -> bytes:
        """Return the key of the last of the prompt's first `pages` pages.

        Args:
          size: number of tokens of a page, the same in all calls.
        """
        for page in range(len(self._keys) - 1, pages):
            tokens = np.ascontiguousarray(self.tokens[page * size : (page + 1) * size], np.int64)
            self._keys.append(hashlib.sha256(self._keys[-1] + tokens.tobytes()).digest())
        return self._keys[pages]


class Row:
    """The pages of one row of a batch.

    Attributes:
      page_J: the numbers of the pages, in order; -1 after the last one.
      prompt_J: the pages that hold the prompt until it is complete.  Other rows may use these too,
        so the first ones are not those of `page_J` if the answer is written over them.
      shares: whether other rows may use its prompt's pages, and it theirs.
      returned: the first pages of the prompt, if it has given these back, and their keys.
      restored: the pages in `KeptPages` to copy to the row's rings in the next call.
      kept: pages in `KeptPages` that the next call copies pages of the prompt to, and their keys.
    """

    def __init__(self, page_J: np.ndarray, prompt_J: np.ndarray, shares: bool):
        self.page_J = page_J
        self.prompt_J = prompt_J
        self.shares = shares
        self.returned: list[tuple[int, bytes | None]] = []
        self.restored: list[int] = []
        self.kept: list[tuple[int, bytes]] = []


class KeptPages:
    """Where pages of prompts are kept for layers with a sliding window (see `model.ring`).

    Rows get copies of these pages.  If none is free, the one that was not used for the longest
    time is given away, but not one that the next call of a row copies.

    Args:
      pages: number of pages.
      behind: number of pages before a position that its window may reach into.
    """

    def __init__(self, pages: int, behind: int):
        self.behind = behind
        self._free = list(range(pages))
        self._pages: collections.OrderedDict[bytes, int] = collections.OrderedDict()
        self._readers: collections.Counter[int] = collections.Counter()

    def has(self, key: bytes) -> bool:
        """Return whether the page with this key is kept."""
        return key in self._pages

    def read(self, keys: Sequence[bytes]) -> list[int]:
        """Return the kept pages with these keys, which stay as they are until `end_read`."""
        pages = [self._pages[key] for key in keys]
        for key in reversed(keys):  # the later ones are useless without those before
            self._pages.move_to_end(key)
        self._readers.update(pages)
        return pages

    def end_read(self, pages: Sequence[int]) -> None:
        """Let pages that `read` returned be evicted."""
        self._readers.subtract(pages)

    def take(self) -> int | None:
        """Return a page to write to, which is not kept until `keep`; None if there is none."""
        if self._free:
            return self._free.pop()
        unread = (key for key, page in self._pages.items() if not self._readers[page])
        key = next(unread, None)
        return None if key is None else self._pages.pop(key)

    def keep(self, page: int, key: bytes) -> None:
        """Keep a page from `take`, or make it free if another one with this key is kept."""
        if key in self._pages:
            self._free.append(page)
        else:
            self._pages[key] = page


class HostPages:
    """Contents of pages in host memory, by their keys.

    When there is no room, those that were not used for the longest time are dropped.

    Args:
      most_bytes: maximum number of bytes.
    """

    def __init__(self, most_bytes: int):
        self._most, self.bytes = most_bytes, 0
        self._contents: collections.OrderedDict[bytes, list[np.ndarray]] = collections.OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._contents

    def get(self, key: bytes) -> list[np.ndarray]:
        """Return the contents of a page, the arrays of all layers."""
        self._contents.move_to_end(key)
        return self._contents[key]

    def put(self, key: bytes, arrays: list[np.ndarray]) -> None:
        """Add the contents of a page, unless they are there."""
        if key in self._contents:
            self._contents.move_to_end(key)
            return
        size = sum(x.nbytes for x in arrays)
        if size > self._most:
            return
        while self.bytes + size > self._most:
            _, dropped = self._contents.popitem(last=False)
            self.bytes -= sum(x.nbytes for x in dropped)
        self._contents[key] = arrays
        self.bytes += size


class Pages:
    """The pages in the pool of one replica: which are free, in use, or kept for later prompts.

    A page is found by its key, which depends on all tokens before its end and on the adapter (see
    `Prompt`).  If no page is free, the kept one that was not used for the longest time is evicted.

    Args:
      pool: the size of the pool.
      slots: number of slots of a row (see `Pool.slots`).
      keep: whether pages are shared and kept.
      behind: number of pages that the window of a layer with rings may reach into; 0 without any.

    Attributes:
      evicted: {page: its key} of pages that are no longer kept, but not written over yet.
    """

    def __init__(self, pool: Pool, slots: int, *, keep: bool = True, behind: int = 0):
        self.evicted: dict[int, bytes] = {}
        self.pool = pool
        self._for_rings = KeptPages(pool.kept, behind)
        self._places, self._keep = slots // pool.page, keep
        self._free = list(reversed(range(pool.pages)))
        self._users = [0] * pool.pages  # number of rows that use each page
        self._pages: dict[bytes, int] = {}  # each kept page, by its key
        self._keys: dict[int, bytes] = {}  # the reverse
        # Kept pages that no row uses; the one that was not used for the longest time comes first.
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def available(self) -> int:
        """Number of pages that new rows can get, kept ones included."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Number of pages that rows use."""
        return self.pool.pages - self.available

    @property
    def no_row(self) -> Row:
        """A row without pages."""
        page_J = np.full(self._places, -1, np.int32)
        return Row(page_J, page_J.copy(), shares=False)

    def needed(self, prompt: Prompt, positions: int, *, use_kept: bool = True) -> int:
        """Return by how many pages `add_row`, with these arguments, reduces `available`."""
        count, overwritten, kept = self._plan(prompt, positions, use_kept)
        return self._new_pages(count + overwritten, kept)

    def find(self, prompt: Prompt) -> list[int]:
        """Return the kept pages that begin a prompt, in order.

        Only as many count as a row can use: layers with a sliding window need the pages in
        `KeptPages` that the window of the next position reaches into.

        At least one token of the prompt is in none of these pages, because its logits must be
        computed.
        """
        kept, count, run = [], 0, 0
        for end in range(1, (len(prompt) - 1) // self.pool.page + 1):
            key = self._key(prompt, end)
            page = self._pages.get(key)
            if page is None:
                break
            kept.append(page)
            run = run + 1 if self._for_rings.has(key) else 0
            if run >= min(self._for_rings.behind, len(kept)):  # those that a window reaches into
                count = len(kept)
        return kept[:count]

    def add_row(self, prompt: Prompt, positions: int, *, use_kept: bool = True) -> Row:
        """Return the pages of a new row.

        A row with more positions than slots writes over its first ones.  Until its prompt is
        complete, it has further pages for the part of the prompt there, so that these can be
        shared; or it shares none, if the pool is too small for that.

        For example, with 2 slots per page and 4 per row, a prompt of 4 tokens and an answer of 1
        have 5 positions, and the last one is written over slot 0.  The prompt is in two pages, say
        7 and 3; the row's own first page is another one, say 5:

            prompt_J = [7, 3]   until the prompt is complete; 7 may be shared
            page_J   = [5, 3]   afterwards; 7 is kept for later prompts, and 5 is written over

        Args:
          positions: number of positions that the row may have, those of the prompt included.
          use_kept: whether the row uses the kept pages that begin its prompt, in place of its own.

        Raises:
          NoPageError: if too few pages are available; nothing is taken then.
        """
        count, overwritten, kept = self._plan(prompt, positions, use_kept)
        needed = self._new_pages(count + overwritten, kept)
        if needed > self.available:
            raise NoPageError(f"{needed} pages are needed, and {self.available} available")
        for page in kept:  # before any is evicted
            self._add_user(page)
        row = self.no_row
        self._restore(row, prompt, len(kept))
        row.prompt_J[: len(kept)] = kept
        row.prompt_J[len(kept) : count] = [self._take_page() for _ in range(count - len(kept))]
        row.page_J[:] = row.prompt_J
        row.page_J[:overwritten] = [self._take_page() for _ in range(overwritten)]
        row.shares = self._can_share(len(prompt), positions)
        return row

    def share(self, row: Row, prompt: Prompt, filled: int) -> int:
        """Let a row use the kept pages that begin its prompt, in place of its own.

        Args:
          filled: number of positions that the row holds.  If the kept pages hold no more, the row
            stays as it is.

        Returns:
          The number of positions that the row holds now.
        """
        following = min(filled // self.pool.page + 1, len(prompt) // self.pool.page)
        if not row.shares or self._key(prompt, following) not in self._pages:
            return filled
        kept = self.find(prompt)
        if len(kept) * self.pool.page <= filled:
            return filled
        for at, page in enumerate(kept):
            old = int(row.prompt_J[at])
            if page != old:
                self._add_user(page)
                self._give_back(row.prompt_J[at : at + 1])
                row.prompt_J[at] = page
                row.page_J[at] = page if row.page_J[at] == old else row.page_J[at]
        self._restore(row, prompt, len(kept))
        return len(kept) * self.pool.page

    def insertion(self, row: Row, prompt: Prompt, begin: int, end: int) -> Chunks:
        """Return the argument of `Batch.insert` that computes a part of one prompt.

        Args:
          begin: the first position to compute, from `share`.
          end: the end of these positions.
        """
        size, behind = self.pool.page, self._for_rings.behind
        row.kept = []
        restored_G = np.full(behind, -1, np.int32)
        restored_G[behind - len(row.restored) :] = row.restored
        kept_G = np.full(len(row.page_J) if behind else 0, -1, np.int32)
        first = begin // size
        for at in range(first, end // size if behind and row.shares else first):
            key = self._key(prompt, at + 1)
            if not self._for_rings.has(key) and (page := self._for_rings.take()) is not None:
                row.kept.append((page, key))
                kept_G[at - first] = page
        page_J = row.page_J if end == len(prompt) else row.prompt_J
        pages = page_J, row.prompt_J, restored_G, kept_G
        return Chunks(np.array([begin], np.int32), *(each[None] for each in pages))

    def keep(self, row: Row, prompt: Prompt, begin: int, end: int) -> None:
        """Keep the complete pages of a prompt that a row now holds.

        Args:
          begin: the first position whose keys and values were computed; see `insertion`.
          end: the end of these positions.
        """
        self._end_restoring(row)
        for page, key in reversed(row.kept):  # the later ones are useless without those before
            self._for_rings.keep(page, key)
        row.kept = []
        if not row.shares:
            return
        for at in range(begin // self.pool.page, end // self.pool.page):
            key, page = self._key(prompt, at + 1), int(row.prompt_J[at])
            if key not in self._pages and page not in self._keys:
                self._pages[key], self._keys[page] = page, key

    def end_prompt(self, row: Row) -> None:
        """Give back the pages that the row needed only until its prompt was complete."""
        first = row.prompt_J[row.prompt_J != row.page_J]
        row.returned = [(page, self._keys.get(page)) for page in first.tolist()]
        self._give_back(first)
        row.prompt_J[:] = row.page_J
        row.shares = False

    def remove_row(self, row: Row) -> None:
        """Give back the pages of a row."""
        self._end_restoring(row)
        if row.shares:
            self.end_prompt(row)
        self._give_back(row.page_J[row.page_J >= 0])
        row.page_J[:] = row.prompt_J[:] = -1
        # The later pages of the prompt are useless without its first ones.
        for page, key in reversed(row.returned):
            if page in self._idle and self._keys[page] == key:
                self._idle.move_to_end(page)

    def _key(self, prompt: Prompt, pages: int) -> bytes:
        return prompt.key(pages, self.pool.page)

    def _restore(self, row: Row, prompt: Prompt, count: int) -> None:
        """Let the next call fill a row's rings from the first `count` pages of its prompt."""
        self._end_restoring(row)
        ends = range(max(count - self._for_rings.behind, 0) + 1, count + 1)
        row.restored = self._for_rings.read([self._key(prompt, end) for end in ends])

    def _end_restoring(self, row: Row) -> None:
        self._for_rings.end_read(row.restored)
        row.restored = []

    def _plan(self, prompt: Prompt, positions: int, use_kept: bool) -> tuple[int, int, list[int]]:
        """Return a row's number of pages, how many are written over, and the kept ones to use."""
        count = min(-(-positions // self.pool.page), self._places)
        if not self._can_share(len(prompt), positions):
            return count, 0, []
        overwritten = self._overwritten_pages(len(prompt), positions)
        return count, overwritten, self.find(prompt) if use_kept else []

    def _new_pages(self, count: int, kept: list[int]) -> int:
        """Return how many of `count` pages no row uses yet, if the `kept` ones are among them."""
        return count - sum(self._users[page] > 0 for page in kept)

    def _can_share(self, tokens: int, positions: int) -> bool:
        """Return whether a new row may share the pages of its prompt, which has `tokens` tokens."""
        overwritten = self._overwritten_pages(tokens, positions)
        return self._keep and (not overwritten or self._places + overwritten <= self.pool.pages)

    def _overwritten_pages(self, tokens: int, positions: int) -> int:
        """Return how many complete pages of a prompt the row's answer is written over."""
        over = max(positions - self._places * self.pool.page, 0)
        return min(-(-over // self.pool.page), tokens // self.pool.page)

    def _add_user(self, page: int) -> None:
        """Count a row that uses a kept page."""
        self._idle.pop(page, None)
        self._users[page] += 1

    def _take_page(self) -> int:
        """Return a free page, or the kept one that was not used for the longest time."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self.evicted[page] = key = self._keys.pop(page)
            del self._pages[key]
        self._users[page] += 1
        return page

    def _give_back(self, pages: np.ndarray) -> None:
        # Later pages are useless without the earlier ones, so they are evicted first.
        for page in reversed(pages.tolist()):
            self._users[page] -= 1
            if not self._users[page] and page in self._keys:
                self._idle[page] = None
            elif not self._users[page]:
                self._free.append(page)
