"""Attention whose bits depend on a query and its keys alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.mesh.apart import Exact
from mesh_transformer.model import exact as exact_attention
from mesh_transformer.model.attention import MASKED, attend, causal_bias
from mesh_transformer.model.cache import LayerCache
from mesh_transformer.model.exact import attend_exactly
from tests.mesh.test_apart import normal

HEADS, SIZE, LENGTH = 3, 40, 300


def inputs(rows: int, length: int) -> tuple[jax.Array, LayerCache]:
    q_BTHK = normal(0, rows, length, HEADS, SIZE)
    return q_BTHK, LayerCache(*(normal(seed, rows, HEADS, length, SIZE) for seed in (1, 2)))


@jax.jit
def computed(
    q_BTHK: jax.Array, keys: LayerCache, bias_BHTS: jax.Array, first_BT: jax.Array
) -> jax.Array:
    return attend_exactly(q_BTHK, keys, bias_BHTS, first_BT, None, Exact("cpu"))


def causal(positions_1T: jax.Array, slots: int, window: int) -> jax.Array:
    return causal_bias(positions_1T, jnp.arange(slots)[None], window)


@pytest.mark.parametrize("window", [LENGTH, 70])
def test_results_match_plain_attention_and_its_gradient(window):
    q_BTHK, keys = inputs(2, LENGTH)
    bias_BHTS, first = causal(jnp.arange(LENGTH)[None], LENGTH, window), jnp.zeros((1, 1), int)
    expected, pull = jax.vjp(lambda *args: attend(*args, bias_BHTS), q_BTHK, keys)
    actual, own_pull = jax.vjp(lambda *args: computed(*args, bias_BHTS, first), q_BTHK, keys)
    # Sums of up to 300 terms of order 1 in another order.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
    g_BTHK = normal(3, *q_BTHK.shape)  # whose gradients are such sums, too
    for a, b in zip(*(jax.tree.leaves(f(g_BTHK)) for f in (own_pull, pull)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def parts(window: int) -> list[bool]:
    """Return for some queries whether they have the bits that they have beside all others."""
    q_BTHK, keys = inputs(2, LENGTH)
    first = jnp.zeros((1, 1), int)
    whole = computed(q_BTHK, keys, causal(jnp.arange(LENGTH)[None], LENGTH, window), first)
    results = []
    for row, begin, end, slots in ((0, 131, 132, 160), (1, 5, 50, 64), (1, 290, 300, 512)):
        more = ((0, 0), (0, 0), (0, max(0, slots - LENGTH)), (0, 0))
        own = [jnp.pad(x, more)[row : row + 1, :, :slots] for x in (keys.k_BHSK, keys.v_BHSK)]
        bias_BHTS = causal(jnp.arange(begin, end)[None], slots, window)
        part = computed(q_BTHK[row : row + 1, begin:end], LayerCache(*own), bias_BHTS, first)
        results.append(bool((part == whole[row, begin:end]).all()))
    return results


@pytest.mark.parametrize("window", [LENGTH, 70])
def test_bits_depend_neither_on_other_queries_nor_on_the_number_of_slots(window):
    assert all(parts(window))


def test_other_blocks_of_slots_have_other_bits(monkeypatch):
    q_BTHK, keys = inputs(1, LENGTH)
    args = causal(jnp.arange(LENGTH)[None], LENGTH, LENGTH), jnp.zeros((1, 1), int), None
    before = attend_exactly(q_BTHK, keys, *args, Exact("cpu"))
    monkeypatch.setattr(exact_attention, "SLOTS", 64)
    after = attend_exactly(q_BTHK, keys, *args, Exact("cpu"))
    assert np.any(np.asarray(before) != np.asarray(after))


def test_packed_texts_have_the_bits_that_each_has_alone():
    q_BTHK, keys = inputs(1, LENGTH)
    begins = np.array([0, 7, 150, 151])
    run_T = np.searchsorted(begins, np.arange(LENGTH), side="right") - 1
    same_TS = run_T[:, None] == run_T
    bias_BHTS = causal(jnp.arange(LENGTH)[None], LENGTH, LENGTH)
    bias_BHTS = jnp.where(same_TS, bias_BHTS, MASKED)
    packed = computed(q_BTHK, keys, bias_BHTS, jnp.asarray(begins[run_T])[None])
    for begin, end in zip(begins, [*begins[1:], LENGTH], strict=True):
        own = jax.tree.map(lambda x, b=begin, e=end: x[:, :, b:e], keys)
        bias_BHTS = causal(jnp.arange(end - begin)[None], end - begin, LENGTH)
        alone = computed(q_BTHK[:, begin:end], own, bias_BHTS, jnp.zeros((1, 1), int))
        np.testing.assert_array_equal(alone, packed[:, begin:end])
