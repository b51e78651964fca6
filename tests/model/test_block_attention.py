"""Attention in blocks: its results, gradients and memory, against plain attention."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from mesh_transformer.config import Config
from mesh_transformer.mesh.devices import make_mesh
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import attention, block_attention
from mesh_transformer.model.block_attention import attend_in_blocks
from mesh_transformer.model.cache import LayerCache
from mesh_transformer.model.dropout import Dropout, drop_probs, sequence_keys
from mesh_transformer.performance.hlo import planned_memory
from mesh_transformer.training.step import StateLayout, compile_train
from tests.conftest import SMALL, random_batch


def random_inputs(seed: int, batch: int, length: int, heads: int, size: int) -> list[Array]:
    """Return q_BLHK, k_BHLK, v_BHLK and the gradient of the result."""
    keys = jax.random.split(jax.random.key(seed), 4)
    q, k, v, g = (2 * jax.random.normal(key, (batch, length, heads, size)) for key in keys)
    return [q, jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2), g]


def with_gradients(function: Any, inputs: list[Array]) -> list[Array]:
    result, pull = jax.vjp(function, *inputs[:3])
    return [result, *pull(inputs[3].astype(result.dtype))]


@pytest.mark.quick(2)
@pytest.mark.parametrize("seed", range(24))
def test_results_and_gradients_are_those_of_plain_attention(monkeypatch, seed: int) -> None:
    """Compare a random length, window, cap, packing and dropout, with blocks of 128 positions."""
    monkeypatch.setattr(block_attention, "BLOCK", 128)
    rng = np.random.default_rng(seed)
    batch, heads, length = 2, 3, int(rng.integers(1, 600))
    window = int(rng.integers(1, length + 1)) if rng.random() < 0.5 else length
    cap = float(rng.uniform(1, 10)) if rng.random() < 0.5 else None
    texts = np.sort(rng.integers(0, 4, (batch, length)), axis=1) if rng.random() < 0.5 else None
    rate, key_BH = 0.0, None
    if rng.random() < 0.5:
        rate = 0.3
        keys = sequence_keys(seed, jnp.int32(1), (1, batch))
        key_BH = Dropout(keys[0]).head_keys(heads, Auto())

    def in_blocks(q: Array, k: Array, v: Array) -> Array:
        return attend_in_blocks(window, cap, rate, Auto())(q, k, v, texts, key_BH)

    def plain(q: Array, k: Array, v: Array) -> Array:
        positions = jnp.arange(length)[None]
        bias = attention.causal_bias(positions, positions, window)
        if texts is not None:
            bias = jnp.where((texts[:, :, None] != texts[:, None])[:, None], -1e10, bias)
        drop = None
        if key_BH is not None:
            drop = functools.partial(drop_probs, key_BH=key_BH, rate=rate)
        return attention.attend(q, LayerCache(k, v), bias, drop, cap)

    inputs = random_inputs(seed, batch, length, heads, 16)
    results = with_gradients(plain, inputs)
    largest = max(float(jnp.abs(x).max()) for x in results)
    for actual, expected in zip(with_gradients(in_blocks, inputs), results, strict=True):
        # f32 sums of up to 600 products in another order; numbers of a wrong mask differ by 0.1.
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * max(1, largest))


@pytest.mark.parametrize("seed", range(10))
def test_pairs_are_those_with_a_visible_key(monkeypatch, seed: int) -> None:
    """Each device has, at each distance along cp, the pairs of its blocks that the mask shows."""
    monkeypatch.setattr(block_attention, "BLOCK", 8)
    monkeypatch.setattr(block_attention, "KEYS", 1)
    rng = np.random.default_rng(seed)
    cp = int(2 ** rng.integers(0, 4))
    length = int(2 * cp * rng.integers(1, 30))
    window = int(rng.integers(1, length + 1))
    size = block_attention.block_length(length, cp)
    blocks = -(-length // size)
    distance = np.subtract.outer(np.arange(blocks * size), np.arange(blocks * size))
    seen = ((distance >= 0) & (distance < window)).reshape(blocks, size, blocks, size)
    expected = {(int(q), int(k)) for q, k in np.argwhere(seen.any(axis=(1, 3)))}
    found = []
    for own in block_attention.block_pairs(length, size, window, cp).values():
        counts = set()
        for rank in range(cp):
            rows = np.stack([x[rank] for x in own], axis=1)
            rows = rows[rows[:, 2] >= rows[:, 3]]  # the others are padding
            found += [(int(q), int(k)) for q, k in rows[:, 2:]]
            counts.add(len(rows))
        if window == length and cp > 1:
            assert len(counts) == 1  # equal work
    assert len(found) == len(expected)
    assert set(found) == expected


def test_bfloat16_rounds_as_plain_attention_does() -> None:
    """Both must be about as far from the results in f32."""
    inputs = random_inputs(0, 2, 600, 2, 32)
    positions = jnp.arange(600)[None]
    bias = attention.causal_bias(positions, positions, 600)

    def in_blocks(q: Array, k: Array, v: Array) -> Array:
        return attend_in_blocks(600, None, 0.0, Auto())(q, k, v, None, None)

    def plain(q: Array, k: Array, v: Array) -> Array:
        return attention.attend(q, LayerCache(k, v), bias)

    exact = with_gradients(plain, inputs)
    narrow = [x.astype(jnp.bfloat16) for x in inputs]

    def errors(function: Any) -> list[float]:
        results = with_gradients(function, narrow)
        assert {x.dtype for x in results} == {jnp.dtype(jnp.bfloat16)}
        pairs = zip(results, exact, strict=True)
        return [float(jnp.sqrt(jnp.mean(jnp.square(x - y)))) for x, y in pairs]

    for own, other in zip(errors(in_blocks), errors(plain), strict=True):
        assert own < 1.2 * other


@pytest.mark.parametrize("window", [None, 300])
def test_memory_is_linear_in_the_length(window: int | None) -> None:
    """Compare the compiler's count of temporary bytes of the forward and backward pass."""

    def temporary(length: int) -> int:
        def both(*inputs: Array) -> list[Array]:
            run = attend_in_blocks(window or length, None, 0.0, Auto())
            return with_gradients(lambda q, k, v: run(q, k, v, None, None), list(inputs))

        shapes = [(1, length, 2, 32), (1, 2, length, 32), (1, 2, length, 32), (1, length, 2, 32)]
        arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        analysis = jax.jit(both).lower(*arguments).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    lengths = np.array([16384, 32768, 65536])
    sizes = np.array([temporary(length) for length in lengths])
    # Few arrays of 2 * 32 floats per position; the scores of two blocks have 2 MB.
    assert sizes[-1] < 65536 * 2 * 32 * 4 * 6
    slopes = np.diff(sizes) / np.diff(lengths)
    np.testing.assert_allclose(slopes, slopes[0], rtol=0.05)


@pytest.mark.parametrize("packed", [False, True])
def test_memory_of_a_training_step_is_linear_in_the_length(packed: bool) -> None:
    """In loops over layers, JAX must not keep the masks of all blocks for the backward pass."""

    def planned(length: int) -> int:
        config = Config(**SMALL | {"attention": "blocks", "seq": length, "tpu_size": 1})
        layout = StateLayout(config, make_mesh(config, jax.devices()[:1]))
        batch = random_batch(config, 1, 1)
        if packed:
            batch["segment_ids"] = np.zeros_like(batch["obs"])
        train: Any = compile_train(layout)
        return planned_memory(train.lower(layout.abstract, batch).compile())

    lengths = np.array([8192, 16384, 32768])
    slopes = np.diff([planned(int(length)) for length in lengths]) / np.diff(lengths)
    # The masks of all pairs of blocks would have 1.1 GB at 16,384 tokens, and 4.4 GB at 32,768.
    np.testing.assert_allclose(slopes[1], slopes[0], rtol=0.05)
