"""8-bit weights and caches: rounding errors, logits, meshes and memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mesh_transformer.generation import programs
from mesh_transformer.generation.batch import MOST_STEPS
from mesh_transformer.generation.sampling import sampler_settings
from mesh_transformer.generation.weights import weights_of
from mesh_transformer.mesh.declaration import Declaration
from mesh_transformer.model import matrices, transformer
from tests.conftest import AS_USERS_COMPILE
from tests.generation.test_decode import (
    PLACES,
    by_token,
    compiled_decode,
    full_logprobs,
    network_of,
    on_devices,
    random_prompts,
)
from tests.model.test_transformer import small_config
from tests.training.test_parity import network_at_step_0

MATRICES = [
    (Declaration((12, 8), P(None, "mp"), True, False), (0,)),
    (Declaration((8, 12), P("mp", None), True, False), (0,)),
    (Declaration((12, 4, 6), P(None, "mp", None), True, False), (0,)),
    (Declaration((4, 6, 12), P("mp", None, None), True, False), (0, 1)),
]


@pytest.mark.quick(3)
@pytest.mark.parametrize(("declared", "inputs"), MATRICES)
def test_the_quantization_error_is_bounded_by_the_column_maximum(declared, inputs):
    w = np.random.default_rng(1).standard_cauchy(declared.shape).astype(np.float32)
    w[(slice(None),) * len(inputs) + (0,) * (w.ndim - len(inputs))] = 0  # a column of zeros
    quantized = matrices.quantize({"w": jnp.asarray(w)}, {"w": declared}, 8)["w"]
    actual = np.asarray(quantized.value * quantized.scale)
    assert quantized.value.dtype == jnp.int8
    largest = np.abs(w).max(axis=inputs, keepdims=True)
    # Half a quantization step, and the rounding errors of f32.
    assert np.all(np.abs(actual - w) <= largest / 254 * (1 + 1e-4))
    assert np.all(actual[w == 0] == 0)
    arrays = matrices.stored({"w": declared}, 8)["w"]
    assert tuple(arrays.value.spec) == tuple(declared.spec)
    assert all(arrays.scale.spec[axis] is None for axis in inputs)


@pytest.mark.slow
def test_a_matmul_of_a_quantized_matrix_is_that_of_its_values():
    """Also with several input or output axes."""
    rng = np.random.default_rng(3)

    def random(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    for shape in ((12, 8), (12, 4, 6)):
        declared = Declaration(shape, P(None, "mp", None)[: len(shape)], True, False)
        w = matrices.quantize({"w": random(*shape)}, {"w": declared}, 8)["w"]
        x = random(2, 3, 12)
        expected = matrices.project_in(x, w.value * w.scale)
        # Up to 12 terms are summed; only the order of two roundings differs.
        np.testing.assert_allclose(matrices.project_in(x, w), expected, rtol=1e-5, atol=1e-5)
        in_bf16 = matrices.project_in(x.astype(jnp.bfloat16), w, jnp.float32)
        assert in_bf16.dtype == jnp.float32
    for shape in ((8, 12), (4, 6, 12)):
        declared = Declaration(shape, P("mp", None, None)[: len(shape)], True, False)
        w = matrices.quantize({"w": random(*shape)}, {"w": declared}, 8)["w"]
        x = random(2, 3, *shape[:-1])
        expected = matrices.project_out(x, w.value * w.scale)
        # Up to 24 terms are summed, as above.
        np.testing.assert_allclose(matrices.project_out(x, w), expected, rtol=1e-5, atol=1e-5)
        assert matrices.project_out(x.astype(jnp.bfloat16), w).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "rows", [1, matrices.MOST_ROWS_IN_DIGITS, matrices.MOST_ROWS_IN_DIGITS + 1]
)
def test_a_matmul_with_8_bits_is_as_exact_as_f32(rows):
    """Rows of many magnitudes, of zeros, and with numbers that are not finite."""
    rng = np.random.default_rng(rows)
    w = rng.integers(-127, 128, (3000, 7)).astype(np.int8)
    x = (rng.standard_cauchy((rows, 3000)) * 10.0 ** rng.integers(-9, 9, (rows, 1))).astype(
        np.float32
    )
    x[1:3] = 0
    exact = x.astype(np.float64) @ w
    product = jax.jit(functools.partial(matrices._int8_dot, axes=1))
    # An f32 number is rounded by 2^-24, and so is each of a few sums.
    scale = np.abs(x).max(1, keepdims=True) * np.abs(w.astype(np.float64)).sum(0)
    assert np.all(np.abs(product(x, w) - exact) <= 2**-22 * scale)
    assert np.all(np.asarray(product(x, w))[1:3] == 0)
    x[-1, 5] = np.nan
    x[:-1][-1:, 6] = np.inf
    actual = np.asarray(product(x, w))
    np.testing.assert_array_equal(np.isfinite(actual).all(1), np.isfinite(x).all(1))
    np.testing.assert_array_equal(np.isfinite(actual).any(1), np.isfinite(x).all(1))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["f32/mp4_ga1", "f32/t5_mp4"])
def test_logits_of_the_original_models_change_little(variant):
    """At step 0, the RMS error is less than 2 % of the logprobs' standard deviation."""
    exact = network_at_step_0(variant)
    network = network_at_step_0(variant, int8_weights=True)
    vocabulary, rows = network.config.n_vocab, network.dp
    prompt = np.random.default_rng(2).integers(0, vocabulary, 20)

    def logprobs(model: Any) -> np.ndarray:
        chosen = model.batch(rows).insert(
            range(rows),
            [prompt] * rows,
            1,
            sampler_settings({"temp": 0.0}, rows),
            alternatives=vocabulary,
        )
        return by_token(chosen.top_token, chosen.top_logprob)

    expected, actual = logprobs(exact), logprobs(network)
    error = np.sqrt(np.mean(np.square(actual - expected)))
    assert 0 < error < 0.02 * np.std(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "place"),
    [
        ("gptj", PLACES[1]),
        ("geglu", PLACES[2]),
        ("gpt2", PLACES[1]),
        ("neox", PLACES[2]),
        ("llama", PLACES[2]),
    ],
)
def test_a_mesh_generates_the_same_tokens_as_one_device(block, place):
    copied = {"key_heads": 2} if block == "llama" else {}  # mp is 4
    config = small_config(block=block, int8_weights=True, **copied)
    prompts = np.stack(random_prompts(config, [6, 6]))
    tokens = [
        network_of(config, mesh).generate(prompts, [6, 4], 8, {"temp": 0.0})
        for mesh in (PLACES[0], place)
    ]
    np.testing.assert_array_equal(tokens[0], tokens[1])


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES[:3])
def test_logits_with_an_8_bit_cache_are_close_to_those_of_a_full_pass(place):
    """Prompts and answers beyond the window, so that the cache's ring buffer wraps around."""
    config = small_config(int8_cache=True, layers=3, seq=24)
    prompts, steps = random_prompts(config, [5, 20]), 12
    batch = network_of(config, place).batch(2)
    settings = sampler_settings({"temp": 1.0, "top_p": 1.0, "seed": [1, 2]}, 2)
    first = batch.insert(range(2), prompts, steps, settings)
    later = batch.decode(steps - 1, alternatives=config.n_vocab)
    actual = by_token(later.top_token, later.top_logprob)
    tokens = np.concatenate((first.token[:, None], later.token), axis=1)
    texts = [np.concatenate(pair) for pair in zip(prompts, tokens, strict=True)]
    padded = np.stack([np.pad(text, (0, 32 - len(text))) for text in texts])
    logprobs = full_logprobs(config, padded)
    expected = [
        row[len(prompt) : len(prompt) + steps - 1]
        for row, prompt in zip(logprobs, prompts, strict=True)
    ]
    error = np.sqrt(np.mean(np.square(actual - expected)))
    assert 0 < error < 0.02 * np.std(expected)


@pytest.mark.slow
def test_an_8_bit_cache_takes_a_quarter_of_the_memory():
    config = small_config(seq=512, head_size=100, layers=6)
    sizes, temporary = {}, {}
    for in_8_bits in (False, True):
        batch = network_of(config.replace(int8_cache=in_8_bits)).batch(3)
        _, memory = compiled_decode(batch)
        sizes[in_8_bits] = sum(x.nbytes for x in jax.tree.leaves(on_devices(batch)._state.caches))
        assert memory.alias_size_in_bytes >= sizes[in_8_bits]  # written in place
        temporary[in_8_bits] = memory.temp_size_in_bytes
    # For each head of 100 entries there is a scale of 4 bytes.
    assert sizes[True] == sizes[False] * (100 + 4) // 400
    # On CPUs, the keys and the values of one layer are converted to f32 at a time.
    assert temporary[True] < temporary[False] + sizes[False] / 6


@pytest.mark.slow
def test_int8_weights_take_a_quarter_of_the_memory_even_during_decoding():
    config = small_config(d_model=128, n_heads=8, layers=6)

    def memory(**changes: Any) -> tuple[int, int]:
        network = network_of(config.replace(**changes))
        rows = on_devices(network.batch(1))
        run: Any = programs.compile_decode(rows._generator.layout, None, MOST_STEPS)
        analysis = (
            run.lower(
                rows._weights,
                rows._state,
                np.ones(1, np.int32),
                np.int32(1),
                None,
            )
            .compile(AS_USERS_COMPILE)
            .memory_analysis()
        )
        layers = sum(leaf.nbytes for leaf in jax.tree.leaves(rows._weights["layers"]))
        return layers, analysis.temp_size_in_bytes

    exact, _ = memory()
    small, temporary = memory(int8_weights=True)
    # Biases and norms stay in f32; at this width they are an eightieth of the parameters.
    assert small < 0.27 * exact
    # No matrix is converted to floats.
    assert temporary < exact / 6 / 4


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("block", ["gptj", "gpt2"])
def test_what_is_not_quantized_has_the_dtype_of_the_computation(block, bits):
    """Otherwise the sums of bf16 activations and f32 biases would be in f32."""
    config = small_config(block=block, weight_bits=bits, dtype="bfloat16")
    params = jax.eval_shape(functools.partial(transformer.init, config), jax.random.key(0))
    shapes = jax.eval_shape(functools.partial(weights_of, config=config), params)
    leaves = jax.tree.leaves(shapes, is_leaf=matrices.is_quantized)
    quantized = [(x.value.dtype, x.scale.dtype) for x in leaves if matrices.is_quantized(x)]
    in_8, in_4 = (jnp.int8, jnp.float32), (jnp.int4, jnp.bfloat16)
    assert quantized.count(in_8 if bits == 8 else in_4) == 6 * config.layers + (bits == 8)
    assert quantized.count(in_8) == len(quantized) - (bits == 4) * 6 * config.layers
    assert all(x.dtype == jnp.bfloat16 for x in leaves if not matrices.is_quantized(x))
    assert len(quantized) == 6 * config.layers + 1
