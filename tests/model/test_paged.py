"""A cache in pages against one with a row per text, on random arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.model import attention, paged
from mesh_transformer.model.attention import causal_bias
from mesh_transformer.model.cache import LayerCache

ROWS, HEADS, WIDTH, SIZE, PLACES = 3, 2, 128, 16, 4
SLOTS = SIZE * PLACES
LENGTHS = np.array([5, SLOTS, 40])


def random_caches(seed, in_8_bits=False):
    """Return a cache with rows, the same in pages in random order, and the rows' pages."""
    rng = np.random.default_rng(seed)
    shape = (ROWS, HEADS, SLOTS, WIDTH)
    rows = LayerCache(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2)))
    rows = rows.in_8_bits() if in_8_bits else rows
    page_BJ = rng.permutation(20)[: ROWS * PLACES].reshape(ROWS, PLACES).astype(np.int32)

    def in_pages(x):
        filled = np.asarray(rng.integers(-9, 9, (20, HEADS, SIZE, x.shape[-1])), x.dtype)
        parts = np.asarray(x).reshape(ROWS, HEADS, PLACES, SIZE, -1)
        filled[page_BJ] = np.moveaxis(parts, 2, 1)
        return jnp.asarray(filled)

    return rows, jax.tree.map(in_pages, rows), jnp.asarray(page_BJ)


def assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_rows_are_read_and_written_in_pages(in_8_bits):
    rows, cache, page_BJ = random_caches(0, in_8_bits)
    assert_equal(paged.rows_in_pages(cache, page_BJ), rows)
    other, _, _ = random_caches(1, in_8_bits)
    new = jax.tree.map(lambda x: x[:, :, :2], other)
    slot_BT = jnp.array([[3, 4], [15, 16], [63, SLOTS]])  # the last one is not written
    written = paged.write(cache, new, page_BJ, slot_BT)
    expected = jax.tree.map(
        lambda x, n: x.at[jnp.arange(ROWS)[:, None], :, slot_BT].set(
            jnp.moveaxis(n, 2, 1), mode="drop"
        ),
        rows,
        new,
    )
    assert_equal(paged.rows_in_pages(written, page_BJ), expected)
    used = np.zeros(20, bool)
    used[np.asarray(page_BJ)] = True
    assert_equal(*(jax.tree.map(lambda x: x[~used], c) for c in (written, cache)))
    some_BJ = page_BJ.at[0, 1].set(-1).at[2, :2].set(-1)
    replaced = paged.rows_in_pages(paged.write_pages(cache, other, some_BJ), page_BJ)
    is_new = np.repeat(np.asarray(some_BJ) >= 0, SIZE, axis=1)[:, None, :, None]
    assert_equal(replaced, jax.tree.map(lambda x, n: jnp.where(is_new, n, x), rows, other))


@pytest.mark.slow
@pytest.mark.parametrize("limit", [("SLOTS_TOGETHER", 2 * SIZE), ("SLOTS_OF_ALL_ROWS", 4 * SIZE)])
@pytest.mark.parametrize(("queries", "in_8_bits"), [(1, False), (3, False), (1, True)])
def test_attention_in_pages_is_that_of_rows(queries, in_8_bits, limit, monkeypatch):
    rows, cache, page_BJ = random_caches(2, in_8_bits)
    rng = np.random.default_rng(3)
    shape = (ROWS, queries, HEADS, WIDTH)
    q_BTHK = jnp.asarray(rng.normal(size=shape), jnp.float32)
    positions_BT = (LENGTHS - queries)[:, None] + np.arange(queries)
    bias_BHTS = causal_bias(jnp.asarray(positions_BT), jnp.arange(SLOTS)[None], SLOTS)
    expected = attention.attend(q_BTHK, rows, bias_BHTS)
    # Fewer slots at a time than there are, so that the running maximum counts.
    limit, most = limit
    monkeypatch.setattr(paged, limit, most)
    table = paged.Table(page_BJ, jnp.asarray(LENGTHS, jnp.int32))
    actual = paged.attend(q_BTHK, cache, table, bias_BHTS)
    # Sums of up to 64 terms of order 1 in f32, in another order.
    np.testing.assert_allclose(actual, expected, atol=2e-6)
    longer = table._replace(used_B=jnp.full(ROWS, SLOTS))
    # Slots that are masked add exactly 0.
    assert_equal(paged.attend(q_BTHK, cache, longer, bias_BHTS), actual)
