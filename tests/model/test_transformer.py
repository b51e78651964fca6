"""The whole model: initial weights, declarations, loss, causality and rematerialisation."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.config_checks import MATMULS
from mesh_transformer.families import BLOCKS
from mesh_transformer.mesh.declaration import is_declaration, map_declared
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import transformer
from mesh_transformer.model.loss import train_loss
from tests.conftest import SMALL


def small_config(**changes: Any) -> Config:
    return Config.from_dict(SMALL | changes)


@functools.cache
def weights(config: Config) -> Any:
    """Return random weights, different in every part of the model, without compiling anything.

    The weights are large enough that attention is far from uniform and no two logits are close.
    The biases are small; otherwise they alone would select the same token at every position.
    """
    rng = np.random.default_rng(4)
    kind = config.norm_kind
    gain = 1.0 if kind.centered or kind.root_mean else config.d_model**0.5
    gain -= kind.plus_one

    def draw(path: Any, declared: Any) -> np.ndarray:
        noise = rng.normal(size=declared.shape).astype(np.float32)
        if declared.decay:
            return 0.3 * noise
        return 0.02 * noise + (gain if path[-1].key == "scale" else 0)

    declared = transformer.declarations(config)
    return jax.tree_util.tree_map_with_path(draw, declared, is_leaf=is_declaration)


def base_of(config: Config) -> Config:
    """Return the config without mesh and window settings, which identifies its weights."""
    return config.replace(
        partitioning="shard_map", cores_per_replica=1, tpu_size=1, attention_window=config.seq
    )


def full_pass(config: Config, base: Config) -> Any:
    """Return a function from tokens to logits, with the weights of `base`, on one device."""
    run = jax.jit(lambda params, tokens: transformer.logits(params, tokens, config, Auto()))
    return lambda tokens: run(weights(base), np.asarray(tokens, np.uint32))


KINDS = [("gptj", "rotary"), ("gptj", "fixed"), ("gptj", "t5"), ("geglu", "rotary")]
KINDS += [("gpt2", "fixed"), ("neox", "rotary"), ("llama", "rotary")]


@pytest.mark.slow
@pytest.mark.parametrize("block", ["gptj", "geglu"])
def test_initial_weights_have_the_standard_deviations_of_the_original(block):
    config = small_config(block=block, d_model=128, n_vocab=256, layers=4, pe="fixed")
    params = jax.jit(functools.partial(transformer.init, config))(jax.random.key(0))
    output = 2 / config.layers / math.sqrt(config.d_model)
    fan_in = config.d_model**-0.5
    layer, modules = params["layers"]["layer"], params["layers"]
    sigmas = [
        (params["embed"]["embedding"]["w"], config.n_vocab**-0.5),
        (params["embed"]["embedding"]["pos_embs"], 0.02),
        (params["proj"]["projection/head"]["w"], fan_in),
    ]
    if block == "gptj":
        sigmas += [(modules[f"layer/{name}"]["w"], fan_in) for name in ("q", "k", "v", "fc")]
        sigmas += [(layer["o"], output), (layer["out"], output)]
    else:
        sigmas += [(layer["fused_in"], fan_in), (layer["fused_out"], output)]
    for leaf, sigma in sigmas:
        # Truncation at two sigma reduces a normal distribution's standard deviation to 0.8796.
        assert np.std(leaf) == pytest.approx(0.87962566 * sigma, rel=0.05)
        assert 1.9 * sigma < np.abs(leaf).max() <= 2 * sigma * (1 + 1e-6)
        assert abs(np.mean(leaf)) < 5 * sigma / math.sqrt(leaf.size)
    biases = [params["embed"]["embedding"]["b"], params["proj"]["projection/head"]["b"], layer["b"]]
    assert not any(np.any(bias) for bias in biases)
    first = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    second = jax.tree.map(lambda leaf: leaf[1], params["layers"])
    for name in ("o", "out") if block == "gptj" else ("fused_in", "fused_out"):
        assert not np.array_equal(first["layer"][name], second["layer"][name])


@pytest.mark.parametrize("norm", ["layernorm", "layernorm-desync", "scalenorm-bias"])
@pytest.mark.parametrize(("block", "pe"), KINDS)
def test_declarations_match_the_parameters(block, pe, norm):
    config = small_config(block=block, pe=pe, norm=norm, cores_per_replica=4)
    shapes = jax.eval_shape(functools.partial(transformer.init, config), jax.random.key(0))
    declared = transformer.declarations(config)

    def check(path: Any, leaf: Any, declaration: Any) -> None:
        name = jax.tree_util.keystr(path)
        assert declaration.shape == leaf.shape, name
        assert leaf.dtype == jnp.float32, name
        assert len(declaration.spec) == len(leaf.shape), name
        assert declaration.stacked == ("layers" in name), name
        sizes = [size // 4 for size, axis in zip(leaf.shape, declaration.spec, strict=True) if axis]
        assert all(sizes), name
        # Only matrices decay: a stacked matrix has three axes, geglu's has four.
        is_bias = name.endswith(("b']", "['scale']", "['offset']"))
        assert declaration.decay == (not is_bias), name
        # These biases are added after the sum over mp.
        after_sum = name in ("['embed']['embedding']['b']", "['layers']['layer']['b']")
        assert declaration.summed == after_sum, name

    jax.tree_util.tree_map_with_path(check, shapes, declared)
    assert jax.tree.structure(map_declared(lambda d: 0, declared)) == jax.tree.structure(shapes)


def test_the_training_loss_adds_the_z_loss_to_the_mean():
    config = small_config(z_loss=0.3)
    rng = np.random.default_rng(6)
    tokens, targets = rng.integers(0, 128, (2, 2, 16)).astype(np.uint32)
    run = jax.jit(functools.partial(train_loss, config=config, par=Auto()))
    loss, last = run(weights(base_of(config)), tokens, targets)
    logits = np.asarray(full_pass(config, base_of(config))(tokens), np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(axis=-1))
    token_loss = log_sum - np.take_along_axis(shifted, targets[..., None].astype(int), 2)[..., 0]
    z_loss = 0.3 * np.square(log_sum).mean()
    # f32 against float64.
    np.testing.assert_allclose(loss, token_loss.mean() + z_loss, rtol=1e-5)
    np.testing.assert_allclose(last, token_loss[:, -1].mean() + z_loss, rtol=1e-5)


def test_logits_do_not_depend_on_later_tokens():
    config = small_config()
    run = full_pass(config, base_of(config))
    tokens = np.random.default_rng(7).integers(0, 128, (1, 16))
    changed = tokens.copy()
    changed[0, 9] = (tokens[0, 9] + 1) % 128
    before, after = np.asarray(run(tokens)), np.asarray(run(changed))
    np.testing.assert_array_equal(before[0, :9], after[0, :9])
    assert np.all(np.any(before[0, 9:] != after[0, 9:], axis=-1))


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("block", "int8_matmuls"),
    [*((block, []) for block in BLOCKS), ("gptj", list(MATMULS))],
)
def test_remat_dots_saves_only_the_results_of_matmuls(small, block, int8_matmuls):
    """Count the values saved for the backward pass; with "full" these are only layer inputs."""

    def saved(policy: str) -> int:
        config = small(block=block, remat=policy, int8_matmuls=int8_matmuls)
        params = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
        tokens = jnp.zeros((1, config.seq), jnp.int32)
        loss = lambda p: train_loss(p, tokens, tokens, config, Auto())[0]  # noqa: E731
        backward = jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params)
        return sum(leaf.size for leaf in jax.tree.leaves(backward))

    config = small(block=block)
    # q, k, v and the feed-forward's 4 D (8 D for geglu), for every token and layer.
    widths = (3 + 8 if block in ("geglu", "llama") else 3 + 4) * config.d_model
    assert saved("dots") - saved("full") >= config.layers * config.seq * widths
    # Attention's two matmuls: one score per head and pair of positions, and the heads' outputs.
    attention = config.n_heads * config.seq**2 + config.seq * config.d_model
    assert saved("none") - saved("dots") == config.layers * attention
