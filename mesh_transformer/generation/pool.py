"""The pool of pages that holds the keys and values of a batch's rows, and places in it.

A batch with a pool stores keys and values in pages of consecutive positions (see `model.paged`).
"""

from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from mesh_transformer.config import Config
from mesh_transformer.config_model import Model
from mesh_transformer.model.attention import LANES, tpu_obstacle
from mesh_transformer.model.heads import key_heads
from mesh_transformer.util import InputError

PAGE = 16  # default number of positions per page
KERNEL_PAGE = 64  # the same with paged_attention "pallas", which copies pages one by one
# The kernel keeps the tables in scalar memory, 1 MiB of 4 bytes each, and other numbers.
MOST_ENTRIES = 250_000
# See `server_pool`.
USUAL_TOKENS, KEPT_ROWS = 2048, 4


class Pool(NamedTuple):
    """The size of a batch's pool.

    Attributes:
      pages: number of pages per data-parallel replica.
      page: number of positions per page.
      kept: number of pages per replica for beginnings of prompts in layers with rings.
      has_rings: whether layers with a sliding window store no pages, but what their window needs,
        in a ring of slots for each row.
    """

    pages: int
    page: int
    kept: int = 0
    has_rings: bool = True

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
      ring_slots: number of slots of each row in layers with a sliding window; 0 if these layers
        have no rings.
      keeps: whether the pool has pages for beginnings of prompts in these layers.
    """

    in_pages: bool = False
    ring_slots: int = 0
    keeps: bool = False


IN_ROWS = Storage()  # each row and layer has as many slots


def storage(config: Model, guesses: int, pool: Pool | None) -> Storage:
    """Return how a batch stores keys and values.

    Args:
      guesses: number of tokens that a decode step may guess.
    """
    slots = _ring_slots(config, guesses)
    if slots == 0 or (pool is not None and not pool.has_rings):
        return Storage(pool is not None)
    return Storage(pool is not None, slots, pool is not None and pool.kept > 0)


def _ring_slots(config: Model, guesses: int) -> int:
    """Return the number of slots of a ring; 0 if rings would be no smaller than other rows."""
    if config.sliding_window is None or config.exact:  # then a position has the same slot always
        return 0
    slots = Pool(0, PAGE).slots(min(config.sliding_window, config.window) + guesses)
    return slots if slots < most_slots(config.window, guesses, None) else 0


def most_tokens(config: Model, guesses: int, pool: Pool) -> int | None:
    """Return how many tokens the prompt and answer of one row may have in a pool.

    None stands for no limit: a pool that holds a window has room for every row, as a longer answer
    is written over the first positions.
    """
    room = pool.pages * pool.page
    return None if room >= most_slots(config.window, guesses, pool) else room - guesses


def pages_behind(config: Model, page: int) -> int:
    """Return how many pages before a position the window of a sliding layer may reach into."""
    return -(-(min(config.sliding_window or 1, config.window) - 1) // page)


def page_size(config: Model) -> int:
    """Return the default number of positions per page."""
    return KERNEL_PAGE if config.paged_attention == "pallas" else PAGE


def server_pool(
    config: Model,
    rows: int,
    guesses: int = 0,
    *,
    tokens: int | None = None,
    kept_tokens: int | None = None,
    page: int | None = None,
) -> Pool:
    """Return the pool of a server's replica.

    Layers with a sliding window have rings if these and what is kept for them take less memory than
    pages.

    Args:
      rows: number of rows per replica.
      guesses: number of tokens that a decode step may guess.
      tokens: number of tokens, of rows and kept prompts together, that the pool has room for.  None
        gives every row 2048 tokens (`USUAL_TOKENS`) or those of the window, and all rows together
        at least those of the window.
      kept_tokens: number of tokens of prompts to keep room for beside the rows; None for as many as
        4 rows (`KEPT_ROWS`) have.
      page: number of tokens per page; None for the default.

    Raises:
      InputError: if the pool has no room for one page.
    """
    page = page or page_size(config)
    usual, any_page = min(config.window, USUAL_TOKENS), Pool(0, page)
    kept = KEPT_ROWS * usual if kept_tokens is None else kept_tokens
    least = most_slots(config.window, guesses, any_page)
    if tokens is None:
        tokens = max(rows * most_slots(usual, guesses, any_page) + kept, least)
    if tokens < page:
        raise InputError(
            f"the cache has room for {tokens} tokens, expected at least {page}, a page; raise "
            "--cache-tokens"
        )
    pool = Pool(tokens // page, page)
    slots = _ring_slots(config, guesses)
    for_rings = min(kept // page + pages_behind(config, page), pool.pages) if kept else 0
    if slots and rows * slots + for_rings * page < pool.pages * page:
        return pool._replace(kept=for_rings)
    return pool._replace(has_rings=False)


def check_kernel(config: Config, mesh: Mesh, rows: int, guesses: int, pool: Pool) -> None:
    """Check that attention over pages can use the backend that `paged_attention` names.

    Args:
      rows: number of rows per replica.
      guesses: number of tokens that a decode step may guess.

    Raises:
      InputError: if it cannot.
    """
    if config.paged_attention == "xla":
        return
    slots, heads = most_slots(config.window, guesses, pool), key_heads(config, mesh.shape["mp"])
    obstacles = {
        "does not support pe 't5'": config.pe == "t5",
        "does not support int8_cache": config.int8_cache,
        "does not support sliding_window": config.sliding_window is not None,
        f"requires a head size that is a multiple of {LANES}, but it is {config.d_head}": (
            config.d_head % LANES
        ),
        "requires batches without guesses (--speculate), and an attention_window of whole pages of "
        f"{pool.page} tokens, but it is {config.window}": slots > config.window,
        f"has room for {MOST_ENTRIES:,} pages in its tables, but {rows} rows of {slots} tokens and "
        f"{heads} key heads have more": rows * heads * slots > MOST_ENTRIES * pool.page,
    }
    own = next((reason for reason, applies in obstacles.items() if applies), None)
    if obstacle := own or tpu_obstacle(config, mesh.devices.flat[0]):
        raise InputError(f"config: paged_attention is 'pallas', which {obstacle}; set it to 'xla'")


class Chunks(NamedTuple):
    """Which positions of each of P prompts to compute, and the pages that hold its positions.

    Attributes:
      begin_P: the first position to compute.  Earlier positions must be in the row, from an earlier
        call, or in pages that the row shares; then `restored_PG` must have those of its window.
      page_PJ: the numbers of the row's pages in the pool, in order; -1 after the last one.
      prompt_PJ: the pages that hold the prompt.  Where these are not the row's, the prompt is
        copied to the row's pages.
      restored_PG: the pages that fill the rings of each row, if it shares the positions before
        `begin_P`; -1 elsewhere.  None if no layer has a sliding window.
      kept_PG: the pages that what rings need of a prompt is copied to, for later rows; or -1.
    """

    begin_P: np.ndarray
    page_PJ: np.ndarray
    prompt_PJ: np.ndarray
    restored_PG: np.ndarray | None = None
    kept_PG: np.ndarray | None = None
