"""Loss masks: losses and gradients are means over the unmasked tokens, on every mesh."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import transformer
from mesh_transformer.model.loss import cross_entropy, loss_weights
from mesh_transformer.training import step
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.conftest import random_batch
from tests.training.test_step import (
    ACCUMULATION,
    BATCH,
    Run,
    fresh_state,
    largest_differences,
    mesh_of,
    on_mesh,
    run,
    small_config,
)

CONFIG = small_config(layers=1, z_loss=0.1)


def state_of(config: Config) -> step.State:
    """Return the fresh state of a config, which is the same for every mesh."""
    return fresh_state(config.replace(partitioning="jit", zero=0, cores_per_replica=1, tpu_size=1))


def masked_batch(config: Config, accumulation: int = ACCUMULATION) -> dict[str, np.ndarray]:
    """Return a batch with a random loss mask, including sequences of only ones and only zeros."""
    rng = np.random.default_rng(5)
    mask = rng.integers(0, 2, (accumulation * BATCH, config.seq)).astype(np.uint8)
    mask[0], mask[1], mask[2, :7] = 1, 0, 0
    shape = (accumulation, BATCH, config.seq)
    return random_batch(config, accumulation, BATCH) | {"loss_mask": mask.reshape(shape)}


def numpy_losses(config: Config, batch: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the losses, computed from the model's logits with NumPy in float64."""
    params = state_of(config)["params"]
    call = jax.jit(functools.partial(transformer.logits, config=config, par=Auto()))
    sums, squares, last, positions = 0.0, 0.0, [], batch["loss_mask"].astype(bool)
    for obs, target, mask in zip(batch["obs"], batch["target"], positions, strict=True):
        logits = np.asarray(call(params, obs), np.float64)
        highest = logits.max(-1)
        log_sum = highest + np.log(np.exp(logits - highest[..., None]).sum(-1))
        loss = log_sum - np.take_along_axis(logits, target[..., None].astype(int), -1)[..., 0]
        sums += loss[mask].sum()
        squares += np.square((log_sum - highest)[mask]).sum()  # the original's z-loss
        last += [row[where][-1] for row, where in zip(loss, mask, strict=True) if where.any()]
    z_loss = config.z_loss * squares / positions.sum()
    return {"loss": sums / positions.sum() + z_loss, "last_loss": np.mean(last) + z_loss}


def train_metrics(config: Config, dp: int, mp: int, batch: Any) -> dict[str, float]:
    layout = step.StateLayout(config, mesh_of(dp, mp))
    state = jax.tree.map(jax.device_put, state_of(config), layout.shardings)
    return {name: float(x) for name, x in step.compile_train(layout)(state, batch)[1].items()}


@functools.cache
def one_device() -> Run:
    return run(CONFIG, batch=masked_batch(CONFIG))


@pytest.mark.slow
def test_masked_losses_match_numpy():
    batch = masked_batch(CONFIG)
    actual = train_metrics(CONFIG, 1, 1, batch)
    # f32 rounds each of the 16 x 16 losses, which are near 5, by about 5e-7.
    for name, value in numpy_losses(CONFIG, batch).items():
        assert actual[name] == pytest.approx(value, rel=1e-6), name


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("partitioning", "dp", "mp", "zero"),
    [
        ("shard_map", 2, 4, 0),
        ("shard_map", 8, 1, 3),
        ("jit", 2, 4, 1),
    ],
)
def test_every_mesh_trains_like_one_device(partitioning, dp, mp, zero):
    actual = run(on_mesh(CONFIG, partitioning, mp, zero), dp, mp, masked_batch(CONFIG))
    differences = largest_differences(actual, one_device())
    assert max(differences.values()) < 1e-5, differences  # as tests/training/test_step.py


@pytest.mark.slow
def test_the_division_into_microbatches_does_not_matter():
    batch = masked_batch(CONFIG)
    one_microbatch = {key: x.reshape(1, -1, *x.shape[2:]) for key, x in batch.items()}
    differences = largest_differences(run(CONFIG, batch=one_microbatch), one_device())
    assert max(differences.values()) < 1e-5, differences


@pytest.mark.slow
def test_targets_at_masked_positions_have_no_effect():
    batch = masked_batch(CONFIG)
    others = random_batch(CONFIG, ACCUMULATION, BATCH, seed=1)["target"]
    changed = batch | {"target": np.where(batch["loss_mask"], batch["target"], others)}
    assert (changed["target"] != batch["target"]).any()
    for actual, expected in zip(run(CONFIG, batch=changed), one_device(), strict=True):
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.slow
def test_masked_positions_get_no_gradient():
    batch = {key: x[0] for key, x in masked_batch(CONFIG).items()}
    params = state_of(CONFIG)["params"]
    weights = loss_weights(jnp.asarray(batch["loss_mask"]), Auto())

    def loss(offset: jax.Array) -> jax.Array:
        """Return the loss with `offset` added to the logits."""
        logits = offset + transformer.logits(params, batch["obs"], CONFIG, Auto())
        result = cross_entropy(logits, batch["target"], Auto())
        return jnp.mean(weights.every_BT * result.loss_BT)

    gradient = jax.jit(jax.grad(loss))(jnp.zeros((*batch["obs"].shape, CONFIG.n_vocab)))
    np.testing.assert_array_equal(np.abs(gradient).max(-1) > 0, batch["loss_mask"].astype(bool))


@pytest.mark.slow
def test_a_mask_of_ones_equals_no_mask_and_a_mask_of_zeros_gives_zero_loss():
    batch = random_batch(CONFIG, ACCUMULATION, BATCH)
    config = on_mesh(CONFIG, "shard_map", 4, 0)
    ones = train_metrics(config, 2, 4, batch | {"loss_mask": np.ones(batch["obs"].shape, np.uint8)})
    for name, value in train_metrics(config, 2, 4, batch).items():
        assert ones[name] == pytest.approx(value, rel=1e-6), name
    none = train_metrics(
        config, 2, 4, batch | {"loss_mask": np.zeros(batch["obs"].shape, np.uint8)}
    )
    assert (none["loss"], none["last_loss"], none["grad_norm"]) == (0, 0, 0)


@pytest.mark.slow
def test_a_mask_of_the_wrong_shape_is_refused(small):
    network = CausalTransformer(small())
    batch = random_batch(network.config, 1, 2)
    mask = np.ones((1, 2, network.config.seq - 1))
    with pytest.raises(
        InputError, match=r"shape \(1, 2, 16\), but loss_mask has shape \(1, 2, 15\)"
    ):
        network.train(batch | {"loss_mask": mask})
