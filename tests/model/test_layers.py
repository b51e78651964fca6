"""Every part of a layer against a simple reference implementation."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mesh_transformer.config import Config
from mesh_transformer.families import NORMS
from mesh_transformer.mesh.parallel import Auto, Manual
from mesh_transformer.model import layers
from mesh_transformer.model.attention import MASKED, attend, causal_bias, rotate
from mesh_transformer.model.cache import LayerCache
from mesh_transformer.model.ends import (
    Embedding,
    Projection,
    RelativePosition,
    lookup,
    t5_bucket,
)
from mesh_transformer.model.norms import Norm
from mesh_transformer.util import InputError
from tests.conftest import SMALL


def normal(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=scale, size=shape).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("dims", [2, 6, 8])
def test_rotary_embedding_matches_a_complex_rotation_of_pairs(dims):
    x = normal(0, 2, 5, 3, 8)
    positions = np.random.default_rng(1).integers(0, 2048, (2, 5))
    expected = x.astype(np.float64)
    pairs = expected[..., 0:dims:2] + 1j * expected[..., 1:dims:2]
    for pair in range(dims // 2):
        angle = positions * 10000.0 ** (-2 * pair / dims)
        pairs[..., pair] *= np.exp(1j * angle)[:, :, None]
    expected[..., 0:dims:2], expected[..., 1:dims:2] = pairs.real, pairs.imag
    actual = rotate(jnp.asarray(x), jnp.asarray(positions), dims)
    # In f32, an angle near 2048 is accurate to 1e-4.
    np.testing.assert_allclose(actual, expected, atol=5e-4)
    np.testing.assert_array_equal(actual[..., dims:], x[..., dims:])


def test_rotary_scores_depend_only_on_the_distance():
    q, k = (jnp.asarray(normal(seed, 1, 1, 1, 8)) for seed in (2, 3))

    def score(query: int, key: int) -> float:
        rotated = (rotate(x, jnp.asarray([[at]]), 8) for x, at in ((q, query), (k, key)))
        return float(functools.reduce(lambda a, b: jnp.sum(a * b), rotated))

    # 1e-4 covers the rounding of the angles, as above but for small positions.
    assert score(7, 3) == pytest.approx(score(107, 103), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-3)


def test_rotary_embedding_keeps_the_dtype():
    x = jnp.asarray(normal(0, 1, 2, 1, 8), jnp.bfloat16)
    assert rotate(x, jnp.asarray([[0, 1]]), 4).dtype == jnp.bfloat16


def test_t5_buckets_match_the_paper():
    """Use integers instead of the logarithm: bucket 16 + i starts where (d/16)^16 = 8^i."""

    def bucket(distance: int) -> int:
        if distance < 16:
            return max(distance, 0)
        return next(
            i for i in range(31, 15, -1) if i == 16 or distance**16 >= 16**16 * 8 ** (i - 16)
        )

    distances = np.arange(-5, 3000)
    np.testing.assert_array_equal(
        t5_bucket(jnp.asarray(distances)), [bucket(int(d)) for d in distances]
    )


def test_the_relative_bias_is_the_table_entry_for_head_and_bucket():
    config = Config.from_dict(SMALL | {"pe": "t5"})
    part = hk.without_apply_rng(hk.transform(lambda q, k: RelativePosition(config, Auto())(q, k)))
    positions = jnp.arange(16)[None]
    params = part.init(jax.random.key(0), positions, positions)
    bias = part.apply(params, positions, positions)
    table = np.asarray(params["relative"]["rel_embedding"])
    assert table.shape == (8, 32)
    for query, key in ((5, 5), (5, 0), (15, 2)):
        np.testing.assert_array_equal(bias[0, :, query, key], table[:, query - key])


@pytest.mark.parametrize("window", [16, 3])
def test_attention_matches_a_numpy_implementation(window):
    q, k, v = (normal(seed, 2, 6, 3, 4) for seed in range(3))
    extra = normal(3, 1, 3, 6, 6)
    positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
    bias = causal_bias(positions, positions, window) + extra
    k_BHSK, v_BHSK = (jnp.moveaxis(jnp.asarray(x), 1, 2) for x in (k, v))
    actual = attend(jnp.asarray(q), LayerCache(k_BHSK, v_BHSK), bias)
    for row in range(2):
        for head in range(3):
            for at in range(6):
                seen = slice(max(at - window + 1, 0), at + 1)
                logits = k[row, seen, head] @ q[row, at, head] / 2 + extra[0, head, at, seen]
                expected = softmax(logits) @ v[row, seen, head]
                # The sums are of six terms in f32.
                np.testing.assert_allclose(actual[row, at, head], expected, atol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("queries", [1, 2, 6])
def test_attention_to_8_bit_keys_and_values_is_that_to_their_products_with_the_scales(queries):
    q, k, v = (jnp.asarray(normal(seed, 2, 3, 6, 4)) for seed in range(3))
    q_BTHK = jnp.moveaxis(q, 1, 2)[:, -queries:]
    cache = LayerCache(k, 100 * v).in_8_bits()
    assert cache.k_BHSK.dtype == cache.v_BHSK.dtype == jnp.int8
    restored = LayerCache(cache.k_BHSK * cache.k_scale_BHS1, cache.v_BHSK * cache.v_scale_BHS1)
    for exact, rounded in zip((k, 100 * v), restored[:2], strict=True):
        # Half a quantization step, and the rounding errors of f32.
        assert np.all(abs(exact - rounded) <= abs(exact).max(-1, keepdims=True) / 254 * (1 + 1e-4))
    positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
    bias = causal_bias(positions[:, -queries:], positions, 5)
    # Sums of six terms in f32, of values up to 300.
    np.testing.assert_allclose(
        attend(q_BTHK, cache, bias), attend(q_BTHK, restored, bias), atol=3e-4, rtol=1e-5
    )


def test_a_fully_masked_row_stays_finite():
    bias = jnp.full((1, 1, 1, 4), MASKED)
    k, v = (jnp.asarray(normal(seed, 1, 1, 4, 2)) for seed in (0, 1))
    actual = attend(jnp.ones((1, 1, 1, 2)), LayerCache(k, v), bias)
    np.testing.assert_allclose(actual[0, 0, 0], v[0, 0].mean(axis=0), rtol=1e-6)


def test_the_mask_hides_padding_later_tokens_and_tokens_outside_the_window():
    keys = jnp.asarray([[-2, -1, 0, 1, 2, 3]])
    bias = np.asarray(causal_bias(jnp.asarray([[2]]), keys, window=2))
    np.testing.assert_array_equal(bias[0, 0, 0] == 0, [False, False, False, True, True, False])
    assert set(bias.ravel()) <= {0.0, np.float32(MASKED)}


def reference_norm(kind: str, x: np.ndarray, params: dict[str, np.ndarray]) -> np.ndarray:
    x = x.astype(np.float64)
    scale, offset = params.get("scale", np.ones(())), params.get("offset", np.zeros(()))
    scale = scale + NORMS[kind].plus_one
    if NORMS[kind].centered:
        variance = x.var(axis=-1, keepdims=True)
        x = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(variance + 1e-5)
    elif NORMS[kind].root_mean:
        x = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + 1e-5)
    else:
        x = x / (np.sqrt(np.square(x).sum(axis=-1, keepdims=True)) + 1e-5)
    return x * scale + offset


@pytest.mark.parametrize("kind", [name for name, kind in NORMS.items() if not kind.per_shard])
def test_norms_match_a_float64_reference(kind):
    names = ("scale", "offset") if NORMS[kind].offset else ("scale",) if NORMS[kind].scaled else ()
    shapes = dict.fromkeys(names, () if NORMS[kind].scalar else (64,))
    config = Config.from_dict(SMALL | {"norm": kind, "cores_per_replica": 4})
    part = hk.without_apply_rng(hk.transform(lambda x: Norm(config, Auto())(x)))
    x = normal(0, 2, 3, 64, scale=3.0) + 1
    fresh = part.init(jax.random.key(0), jnp.asarray(x)).get("norm", {})
    assert {name: leaf.shape for name, leaf in fresh.items()} == shapes
    gain = 1.0 if NORMS[kind].centered or NORMS[kind].root_mean else 8.0  # the original's sqrt(D)
    gain -= NORMS[kind].plus_one
    assert np.all(np.asarray(fresh.get("scale", gain)) == gain)
    assert not np.any(np.asarray(fresh.get("offset", 0.0)))
    params = {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    actual = part.apply({"norm": jax.tree.map(jnp.asarray, params)}, jnp.asarray(x))
    # f32 against float64, with sums of 64 terms.
    np.testing.assert_allclose(actual, reference_norm(kind, x, params), atol=2e-5)
    assert part.apply({"norm": params}, jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def test_desync_has_a_norm_on_each_shard_and_is_refused_elsewhere():
    config = Config.from_dict(SMALL | {"norm": "layernorm-desync", "cores_per_replica": 4})
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(1, 4), ("dp", "mp"))
    x = normal(0, 2, 3, 64, scale=3.0) + 1
    params = {name: normal(i, 4, 64) for i, name in enumerate(("scale", "offset"), 1)}

    def normed(x, params, par):
        part = hk.without_apply_rng(hk.transform(lambda x: Norm(config, par)(x)))
        return part.apply({"norm": params}, x)

    actual = jax.shard_map(
        lambda x, params: normed(x, params, Manual(mesh))[None],
        mesh=mesh,
        in_specs=(P(), P("mp")),
        out_specs=P("mp"),
    )(jnp.asarray(x), params)
    for shard, own in enumerate(actual):
        expected = reference_norm("layernorm", x, {k: v[shard] for k, v in params.items()})
        np.testing.assert_allclose(own, expected, atol=2e-5)
    with pytest.raises(InputError, match=r"partitioning shard_map and cores_per_replica 4$"):
        normed(jnp.asarray(x), params, Auto())


@pytest.mark.parametrize("pe", ["rotary", "fixed"])
def test_embedding_looks_up_tokens_and_adds_bias_and_position(pe):
    config = Config.from_dict(SMALL | {"pe": pe})
    part = hk.without_apply_rng(hk.transform(lambda t, p: Embedding(config, Auto())(t, p)))
    tokens = np.random.default_rng(0).integers(0, 128, (2, 16))
    positions = np.broadcast_to(np.arange(16)[::-1], (2, 16))
    shapes = jax.eval_shape(part.init, jax.random.key(0), tokens, positions)["embedding"]
    params = {name: normal(i, *leaf.shape) for i, (name, leaf) in enumerate(shapes.items())}
    expected = params["w"][tokens] + params["b"]
    if pe == "fixed":
        expected = expected + params["pos_embs"][positions]
    actual = part.apply(
        {"embedding": jax.tree.map(jnp.asarray, params)}, jnp.asarray(tokens), positions
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_the_gradient_of_a_frequent_token_is_summed_in_f32():
    table = jnp.zeros((3, 4), jnp.bfloat16)
    rows = jnp.ones((1, 8192), jnp.int32)
    terms = jnp.full((1, 8192, 4), 0.01, jnp.bfloat16)
    (gradient,) = jax.vjp(lambda w: lookup(w, rows), table)[1](terms)
    expected = 8192 * float(terms[0, 0, 0])
    # The f32 sum is rounded to bf16 once, an error of up to 2**-8.  A sum in bf16 would stop at 4.
    np.testing.assert_allclose(np.asarray(gradient[1], np.float32), expected, rtol=2**-8)
    assert not np.asarray(gradient[0], np.float32).any()


def test_logits_are_not_rounded_to_the_compute_dtype():
    config = Config.from_dict(SMALL | {"dtype": "bfloat16"})
    part = hk.without_apply_rng(hk.transform(lambda x: Projection(config, Auto())(x)))
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (2, 4, config.d_model), jnp.bfloat16)
    params = part.init(keys[1], x)
    params["projection/head"]["w"] = jax.random.normal(keys[2], (config.d_model, config.n_vocab))
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    logits = part.apply(params, x)
    assert logits.dtype == jnp.float32
    normed = hk.without_apply_rng(hk.transform(lambda x: Norm(config, Auto())(x)))
    inputs = normed.apply({"norm": params["projection/norm"]}, x).astype(jnp.float32)
    expected = inputs @ params["projection/head"]["w"].astype(jnp.float32)
    # Each logit is an f32 sum of 64 products of order 1.  Rounded to bf16, a logit of 8 would have
    # an error of up to 2e-2.
    np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("factor", [0.22, 0.0721687836, 1.0])
def test_a_factor_is_not_rounded_to_the_dtype_of_activations(factor):
    """As in torch.  Rounded to bf16, 0.22 (Granite's) is 0.12 percent less, in every layer."""
    x = jax.random.normal(jax.random.key(3), (500,), jnp.bfloat16)
    expected = (x.astype(jnp.float32) * factor).astype(jnp.bfloat16)
    np.testing.assert_array_equal(layers._times(x, factor), expected)
