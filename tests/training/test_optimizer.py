"""The optimizer against optax, and the gradient noise scale."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from mesh_transformer.config import Config
from mesh_transformer.mesh.declaration import Declaration
from mesh_transformer.training.metrics import NoiseScale
from mesh_transformer.training.optimizer import Optimizer
from mesh_transformer.training.schedule import gpt3_schedule, learning_rate
from tests.conftest import SMALL

DECLARED = {
    "matrix": Declaration((6, 5), P(None, "mp"), decay=True, summed=False),
    "gain": Declaration((5,), P(None), decay=False, summed=False),
    "bias": Declaration((5,), P(None), decay=False, summed=True),
}


def config_with(**changes: Any) -> Config:
    values = {"warmup_steps": 3, "anneal_steps": 6, "clip_norm": 2.0, "weight_decay": 0.3}
    return Config.from_dict(SMALL | values | changes)


def random_tree(rng: np.random.Generator, scale: float = 1.0) -> Any:
    return {
        name: jnp.asarray(rng.normal(scale=scale, size=declared.shape), jnp.float32)
        for name, declared in DECLARED.items()
    }


def norm_of(optimizer: Optimizer, grads: Any) -> jax.Array:
    return jnp.sqrt(jnp.asarray(sum(jax.tree.leaves(optimizer.squares(grads)))))


def optax_chain(config: Config, decayed: Any) -> Any:
    schedule = gpt3_schedule(config.warmup_steps, config.anneal_steps, config.lr, config.end_lr)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(b1=config.adam_b1, b2=config.adam_b2, eps=config.adam_eps),
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
        optax.scale_by_schedule(lambda count: -schedule(jnp.asarray(count))),
    )


def apply_updates(params: Any, updates: Any) -> Any:
    return optax.apply_updates(params, updates)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.01, 10.0], ids=["unclipped", "clipped"])
def test_the_optimizer_matches_an_optax_chain(scale):
    config, rng = config_with(), np.random.default_rng(0)
    optimizer = Optimizer(config, DECLARED)
    chain = optax_chain(config, {name: d.decay for name, d in DECLARED.items()})
    params = random_tree(rng)
    expected: Any = params
    state, chain_state = optimizer.init(params), chain.init(expected)
    for step in range(8):
        grads = random_tree(rng, scale)
        norm = norm_of(optimizer, grads)
        assert (norm > config.clip_norm) == (scale > 1)
        params, state = optimizer.update(
            grads, state, params, learning_rate(config, jnp.asarray(step)), norm
        )
        updates, chain_state = chain.update(grads, chain_state, expected)
        expected = apply_updates(expected, updates)
        # The f32 operations are the same, except for the order of a few products.
        for name in DECLARED:
            np.testing.assert_allclose(params[name], expected[name], rtol=1e-6, atol=1e-7)


def test_original_bias_copies_updates_a_bias_like_a_sum_of_copies():
    """The reference has the original's copies: each is bias / 4 and gets the bias's gradient."""
    copies = 4
    config, rng = config_with(original_bias_copies=copies), np.random.default_rng(1)
    optimizer = Optimizer(config, DECLARED)
    decayed = {"matrix": True, "gain": False, "bias": [False] * copies}
    chain = optax_chain(config, decayed)

    def with_copies(tree: dict[str, Any], divisor: int) -> dict[str, Any]:
        return tree | {"bias": [tree["bias"] / divisor] * copies}

    params = random_tree(rng)
    expected: Any = with_copies(params, copies)
    state, chain_state = optimizer.init(params), chain.init(expected)
    for step in range(5):
        grads = random_tree(rng)
        norm = norm_of(optimizer, grads)
        np.testing.assert_allclose(norm, optax.tree.norm(with_copies(grads, 1)), rtol=1e-6)
        params, state = optimizer.update(
            grads, state, params, learning_rate(config, jnp.asarray(step)), norm
        )
        updates, chain_state = chain.update(with_copies(grads, 1), chain_state, expected)
        expected = apply_updates(expected, updates)
    summed = expected | {"bias": sum(expected["bias"])}
    # The sum of four quarters is rounded differently.
    for name in DECLARED:
        np.testing.assert_allclose(params[name], summed[name], rtol=1e-5, atol=1e-6)


def test_zero_gradients_do_not_divide_by_zero():
    optimizer = Optimizer(config_with(weight_decay=0.0), DECLARED)
    params = random_tree(np.random.default_rng(2))
    grads = jax.tree.map(jnp.zeros_like, params)
    updated, _ = optimizer.update(
        grads, optimizer.init(params), params, jnp.float32(1e-2), norm_of(optimizer, grads)
    )
    jax.tree.map(np.testing.assert_array_equal, updated, params)


def test_bf16_moments_and_bf16_parameters_keep_their_dtype():
    optimizer = Optimizer(config_with(bf16_optimizer=True), DECLARED)
    params = random_tree(np.random.default_rng(3))
    stored = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    grads = random_tree(np.random.default_rng(4))
    updated, state = optimizer.update(
        grads, optimizer.init(stored), stored, jnp.float32(1e-2), norm_of(optimizer, grads)
    )
    for tree in (updated, state["mu"], state["nu"]):
        assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("replicas", "accumulation"), [(1, 8), (4, 1), (2, 4)], ids=["accumulated", "dp", "both"]
)
def test_the_noise_scale_estimates_a_known_mean_and_covariance(replicas, accumulation):
    rng = np.random.default_rng(5)
    mean = rng.normal(size=50)
    spread = rng.uniform(1, 5, size=50)  # standard deviations of one sequence's gradient entries
    per_replica = 2
    parts = replicas * accumulation
    noise = NoiseScale(alpha=0.001, small=per_replica, big=per_replica * parts)
    metrics: dict[str, float] = {}
    for _ in range(5000):
        grads = mean + spread * rng.normal(size=(parts, 50)) / math.sqrt(per_replica)
        small = np.square(grads).sum(axis=1).mean()
        metrics = noise.update(small, np.square(grads.mean(axis=0)).sum())
    square, trace = np.square(mean).sum(), np.square(spread).sum()
    # The averages cover about 1000 steps, and the relative error of one estimate is below 1.
    np.testing.assert_allclose(metrics["noise/grad_square"], square, rtol=0.15)
    np.testing.assert_allclose(metrics["noise/covariance_trace"], trace, rtol=0.05)
    np.testing.assert_allclose(metrics["noise/scale"], trace / square, rtol=0.15)


def test_a_single_estimate_matches_the_formula_of_mccandlish():
    noise = NoiseScale(alpha=0.1, small=1, big=4)
    metrics = noise.update(7.0, 4.0)
    # |G|^2 = (4 * 4 - 1 * 7) / 3; trace = (7 - 4) / (1 - 1/4).
    assert metrics == {
        "noise/grad_square": 3.0,
        "noise/covariance_trace": 4.0,
        "noise/scale": 4.0 / 3.0,
    }


def test_the_noise_scale_omits_metrics_it_cannot_estimate():
    assert NoiseScale(0.1, small=2, big=2).update(3.0, 3.0) == {}
    assert NoiseScale(0.1, small=1, big=2).update(math.nan, 3.0) == {}
    # A negative estimate of a square is noise, and its ratio would be meaningless.
    assert "noise/scale" not in NoiseScale(0.1, small=1, big=2).update(9.0, 1.0)


def test_the_noise_scale_resumes_from_its_state():
    first = NoiseScale(0.1, small=1, big=4)
    first.update(7.0, 4.0)
    second = NoiseScale(0.1, small=1, big=4)
    second.restore(first.state())
    assert second.update(6.0, 5.0) == first.update(6.0, 5.0)
