"""Copies between the rows of a batch and its pool of blocks; see `decode`.

Array names end in their shape: P prompts, B rows, S slots, H heads, K head size, J blocks of a row,
L blocks of the pool, C positions of a block.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from mesh_transformer.model.attention import LayerCache, write_rows

Caches = tuple[LayerCache, ...]  # one per layer


def load(caches: Caches, pool: Caches | None, row_P: Array, load_PJ: Array) -> Caches:
    """Return the caches after copying blocks of the pool to rows.

    Args:
      row_P: the row of each prompt.
      load_PJ: for each block of a prompt, the block of the pool, or -1 to copy none.
    """
    if pool is None:
        return caches
    rows, block = len(caches[0].k_BHSK), pool[0].k_BHSK.shape[2]

    def body(at: Array, caches: Caches) -> Caches:
        load_P = load_PJ[:, at]
        to_P = jnp.where(load_P >= 0, row_P, rows)  # out of range, so that it is not written
        slot_P = jnp.full_like(row_P, at * block)
        return tuple(
            write_rows(cache, jax.tree.map(lambda x: x[load_P], blocks), to_P, slot_P)
            for cache, blocks in zip(caches, pool, strict=True)
        )

    return _for_each_used(load_PJ, body, caches)


def save(pool: Caches | None, caches: Caches, row_P: Array, save_PJ: Array) -> Caches | None:
    """Return the pool after copying blocks of rows to it; the arguments are as for `load`."""
    if pool is None:
        return None
    blocks, block = len(pool[0].k_BHSK), pool[0].k_BHSK.shape[2]

    def body(at: Array, pool: Caches) -> Caches:
        save_P = save_PJ[:, at]
        to_P = jnp.where(save_P >= 0, save_P, blocks)  # out of range, so that it is not written

        def part(cache_BHSK: Array) -> Array:
            part_BHCK = jax.lax.dynamic_slice_in_dim(cache_BHSK, at * block, block, axis=2)
            return part_BHCK[row_P]

        return tuple(
            write_rows(old, jax.tree.map(part, cache), to_P, jnp.zeros_like(to_P))
            for old, cache in zip(pool, caches, strict=True)
        )

    return _for_each_used(save_PJ, body, pool)


def _for_each_used(
    numbers_PJ: Array,
    body: Callable[[Array, Caches], Caches],
    caches: Caches,
) -> Caches:
    """Return the result of `body` for each block that any prompt uses, in a loop over `caches`.

    Args:
      numbers_PJ: the blocks of the pool, or -1.
      body: a function of the block's number within a prompt and the caches so far.
    """
    used_J = jnp.any(numbers_PJ >= 0, axis=0)
    places_J = jnp.arange(len(used_J))
    begin = jnp.min(jnp.where(used_J, places_J, len(used_J)), initial=len(used_J))
    end = jnp.max(jnp.where(used_J, places_J + 1, 0), initial=0)
    return jax.lax.fori_loop(begin, end, body, caches)
