"""A cache in pages against one with a row per text, on random arrays."""

import contextlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from mesh_transformer.config import Config
from mesh_transformer.generation.pool import check_kernel, server_pool
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import attention, paged
from mesh_transformer.model.attention import causal_bias
from mesh_transformer.model.cache import LayerCache
from mesh_transformer.util import InputError
from tests.model.test_attention import CPU, V3, V5E

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
    by_rows = paged.attend(q_BTHK, cache, table, bias_BHTS, by_rows=True)
    np.testing.assert_allclose(by_rows, expected, atol=2e-6)
    assert_equal(paged.attend(q_BTHK, cache, longer, bias_BHTS, by_rows=True), by_rows)


@pytest.mark.parametrize(("group", "cap"), [(1, None), (3, 5.0)])
def test_the_kernel_writes_and_attends_as_plain_code_does(group, cap):
    """Interpret the kernel, on a cache that is NaN or infinite wherever no text is."""
    _, cache, page_BJ = random_caches(4)
    cache = jax.tree.map(lambda x: x.astype(jnp.bfloat16), cache)
    rng = np.random.default_rng(5)
    # The rows end in their first, third and second page; the second one has gone round, and is
    # written at slot 36; the last one is idle.
    position_B1, used_B = np.array([[4], [SLOTS + 36], [31], [20]]), np.array([5, SLOTS, 32, 1])
    table_BJ = np.full((4, PLACES), -1, np.int32)
    table_BJ[0, :1], table_BJ[1], table_BJ[2, :3] = page_BJ[0, :1], page_BJ[1], page_BJ[2, :3]
    is_text = np.zeros((20, SIZE), bool)
    for row, used in enumerate(used_B[:3]):
        is_text[np.asarray(page_BJ)[row, : -(-used // SIZE)]] = True
        if used < SLOTS:
            is_text[page_BJ[row, (used - 1) // SIZE], (used - 1) % SIZE :] = False
    bad = jnp.where(rng.random((20, HEADS, SIZE, 1)) < 0.5, jnp.nan, jnp.inf)
    keys = jnp.where(is_text[:, None, :, None], cache.k_BHSK, bad.astype(jnp.bfloat16))
    cache = cache._replace(k_BHSK=keys)
    new = LayerCache(*(jnp.asarray(rng.normal(size=(4, HEADS, 1, WIDTH)), jnp.bfloat16),) * 2)
    q_BTHK = jnp.asarray(rng.normal(size=(4, group, HEADS, WIDTH)), jnp.float32)
    table = paged.Table(jnp.asarray(table_BJ), jnp.asarray(used_B, jnp.int32))
    slot_B1 = jnp.asarray(position_B1 % SLOTS)

    bias_BHTS = jnp.where(jnp.arange(SLOTS) < used_B[:, None, None, None], 0.0, attention.MASKED)
    bias_BHTS = jnp.repeat(bias_BHTS, group, axis=2)
    expected_cache = paged.write(cache, new, table.page_BJ, slot_B1)
    expected = paged.attend(q_BTHK, expected_cache, table, bias_BHTS, cap)
    with pltpu.force_tpu_interpret_mode():
        actual, written = paged.write_and_attend(q_BTHK, cache, new, slot_B1, table, Auto(), cap)
    # Sums of up to 64 terms of order 1 in f32, in another order.
    np.testing.assert_allclose(actual[:3], expected[:3], atol=5e-6)
    # Only keys that no text has may differ.
    rows = [paged.rows_in_pages(c, table.page_BJ[:3]) for c in (written, expected_cache)]
    is_used = np.arange(SLOTS) < used_B[:3, None]
    for one, other in zip(*map(jax.tree.leaves, rows), strict=True):
        one, other = (np.moveaxis(np.asarray(x, np.float32), 2, 1)[is_used] for x in (one, other))
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("in_pages", [False, True])
def test_tpus_compute_a_single_query_twice(in_pages, monkeypatch):
    rows, cache, page_BJ = random_caches(6)
    q_BTHK = jnp.asarray(np.random.default_rng(7).normal(size=(ROWS, 1, HEADS, WIDTH)), jnp.float32)
    bias_BHTS = causal_bias(LENGTHS[:, None] - 1, jnp.arange(SLOTS)[None], SLOTS)

    def run(q_BTHK):
        if in_pages:
            table = paged.Table(page_BJ, jnp.asarray(LENGTHS, jnp.int32))
            return paged.attend(q_BTHK, cache, table, bias_BHTS)
        return attention.attend_to_cache(q_BTHK, rows, bias_BHTS)

    traced, doubled = jax.jit(run).trace(q_BTHK), f"tensor<{ROWS}x2x{HEADS}x{WIDTH}xf32>"
    lowered = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda", "tpu")}
    assert [p for p, text in lowered.items() if doubled in text] == ["tpu"]
    expected = run(q_BTHK)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, tpu, **_: tpu(*args))
    # Sums of up to 128 terms of order 1 in f32, in another order.
    np.testing.assert_allclose(run(q_BTHK), expected, atol=5e-6)


LLAMA = {"layers": 1, "d_model": 512, "n_heads": 4, "n_vocab": 16, "paged_attention": "pallas"}


@pytest.mark.parametrize(
    ("where", "changes", "words"),
    [
        (CPU, {}, "requires a TPU, but the devices are 'cpu'"),
        (V3, {}, "requires a TPU v4 or later"),
        (V5E, {"dtype": "float32"}, "supports only bfloat16"),
        (V5E, {"int8_cache": True}, "does not support int8_cache"),
        (V5E, {"pe": "t5"}, "does not support pe 't5'"),
        (V5E, {"sliding_window": 64}, "does not support sliding_window"),
        (V5E, {"n_heads": 8}, "head size that is a multiple of 128, but it is 64"),
        (V5E, {}, "requires batches without guesses"),
        (V5E, {"seq": 2040}, "whole pages of 64 tokens, but it is 2040"),
        (V5E, {"seq": 8192}, "250,000 pages in its tables, but 1024 rows of 8192 tokens and 4 key"),
        (V5E, {}, None),
        (CPU, {"paged_attention": "xla", "int8_cache": True}, None),
    ],
)
def test_the_kernel_is_refused_with_the_reason(where, changes, words):
    guesses = 2 if words and "guesses" in words else 0
    config = Config.from_dict(LLAMA | changes)
    mesh: Any = SimpleNamespace(devices=np.array([where]), shape={"mp": 1})
    expected = pytest.raises(InputError, match=words) if words else contextlib.nullcontext()
    with expected:
        check_kernel(config, mesh, 1024, guesses, server_pool(config, 1))
