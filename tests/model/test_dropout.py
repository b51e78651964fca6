"""Dropout: its masks, their independence of the mesh, and its expectation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.families import BLOCKS
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import transformer
from mesh_transformer.model.dropout import Dropout, drop_entries, drop_probs, sequence_keys
from mesh_transformer.model.loss import train_loss
from mesh_transformer.transformer_shard import CausalTransformer
from tests.conftest import SMALL, random_batch

DROPS = {"dropout_embedding": 0.2, "dropout_attention": 0.3, "dropout_residual": 0.25}


def config_of(**changes) -> Config:
    return Config(**(SMALL | DROPS | changes))


def losses_of(config: Config, devices: int, steps: int = 3):
    """Return (metrics of some steps, the final parameters)."""
    network = CausalTransformer(config, devices=jax.devices()[:devices])
    rows = []
    for seed in range(steps):
        metrics = network.train(random_batch(config, 2, 8, seed=seed))
        rows.append([float(metrics[name]) for name in ("loss", "last_loss", "grad_norm")])
    return np.array(rows), jax.tree.map(np.asarray, network.saved_state()["params"])


ODD = {"n_heads": 5, "d_model": 40, "head_size": 7, "shard_activations": True}
LONG = {"attention": "blocks", "seq": 264, "loss_chunk": 64}  # two blocks of attention


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "partitioning", "dp", "mp", "changes"),
    [
        ("gptj", "shard_map", 8, 1, {"zero": 3}),
        ("neox", "jit", 2, 4, LONG),
        ("geglu", "shard_map", 1, 8, LONG | ODD),
    ],
)
def test_masks_do_not_depend_on_the_mesh(block, partitioning, dp, mp, changes):
    """Another mask anywhere changes the loss by far more than the tolerance."""
    changes = {"block": block, "per_replica_batch": 8 // dp} | changes
    alone = {name: x for name, x in changes.items() if name not in ("zero", "shard_activations")}
    config = config_of(partitioning=partitioning, cores_per_replica=mp, tpu_size=8, **changes)
    actual, params = losses_of(config, 8)
    expected, expected_params = losses_of(config_of(**alone), 1)
    # Sums in another order, over a few Adam steps.
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-4), params, expected_params
    )


def test_every_place_step_layer_sequence_and_position_has_masks_of_its_own():
    config = config_of(layers=3)
    masks = {}
    for step in (0, 1):
        keys = sequence_keys(config.seed, jnp.int32(step), (2, 3))
        for microbatch in range(2):
            batch = Dropout(keys[microbatch])
            for layer in range(3):
                own = batch.of_layer(layer)
                for place in range(3):
                    mask = np.asarray(own.kept(place, 0.5, 32, 64))
                    assert mask.dtype == bool
                    for row in range(3):
                        masks[step, microbatch, layer, place, row] = mask[row]
    flat = np.array([mask.ravel() for mask in masks.values()])
    # The share of equal entries of two masks is 1/2 with standard deviation 1/2/sqrt(2048): 6
    # standard deviations, for 5,778 pairs.
    equal = (flat[:, None, :] == flat[None, :, :]).mean(axis=-1)
    assert np.abs(equal[~np.eye(len(flat), dtype=bool)] - 0.5).max() < 6 * 0.5 / np.sqrt(2048)


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.3])
def test_the_factor_of_what_is_kept_is_exact_on_average(rate):
    """1 / (1 - rate) rounded to bf16 would change the mean by up to 0.2 %."""
    x = np.random.default_rng(0).uniform(1, 2, 100_000).astype(jnp.bfloat16)
    kept = np.arange(len(x)) % 3 > 0
    dropped = np.asarray(drop_entries(jnp.asarray(x), jnp.asarray(kept), rate))
    assert dropped.dtype == jnp.bfloat16
    assert not dropped[~kept].any()
    actual = dropped[kept].astype(np.float64).sum() / x[kept].astype(np.float64).sum()
    # Each entry is rounded by at most 2^-8 of itself: on average over 66,666, by about 1e-5.
    assert actual == pytest.approx(1 / (1 - rate), rel=1e-4)


@pytest.mark.slow
def test_heads_and_queries_have_masks_of_their_own():
    own = Dropout(sequence_keys(config_of().seed, jnp.int32(5), (1, 2))[0])
    key_BH = own.head_keys(4, Auto())
    whole = np.asarray(drop_probs(jnp.ones((2, 4, 64, 300)), key_BH, 0.25))
    assert set(np.unique(whole)) == {0, np.float32(1 / 0.75)}
    for groups in (whole[..., :128], whole[..., 128:256]):
        rows = groups.reshape(-1, 128)
        assert len(np.unique(rows, axis=0)) == len(rows)
    assert len(np.unique(whole[..., :256].reshape(-1, 128), axis=0)) == 2 * 4 * 64 * 2
    # 153,600 draws: 6 standard deviations.
    assert abs(whole.mean() - 1) < 6 * np.sqrt(0.25 / 0.75 / whole.size)
    # One block of queries, with some of the keys.
    part = drop_probs(jnp.ones((2, 4, 16, 150)), key_BH, 0.25, query=32, key=128)
    np.testing.assert_array_equal(part, whole[:, :, 32:48, 128:278])


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_the_expected_loss_of_small_rates_is_that_without_dropout(block):
    """The mean over masks changes the loss only in the second order of the perturbation."""
    config = config_of(block=block, **dict.fromkeys(DROPS, 1e-3))
    params = transformer.init(config, jax.random.key(1))
    batch = random_batch(config, 4)

    @jax.jit
    def loss(key):
        return train_loss(params, batch["obs"], batch["target"], config, Auto(), key_B=key)[0]

    keys = jax.vmap(lambda step: sequence_keys(config.seed, step, (1, 4))[0])(jnp.arange(400))
    drawn = np.asarray(jax.lax.map(loss, keys), np.float64)
    plain = float(train_loss(params, batch["obs"], batch["target"], config, Auto())[0])
    assert drawn.std() > 1e-4  # so that the next line says something
    assert abs(drawn.mean() - plain) < 5 * drawn.std() / np.sqrt(400) + 1e-4


@pytest.mark.slow
def test_a_resumed_run_has_the_masks_of_the_uninterrupted_one(tmp_path):
    config = config_of()
    batches = [random_batch(config, 2, 4, seed=seed) for seed in range(4)]
    expected = CausalTransformer(config, devices=jax.devices()[:1])
    for batch in batches:
        expected.train(batch)
    first = CausalTransformer(config, devices=jax.devices()[:1])
    for batch in batches[:2]:
        first.train(batch)
    first.save(tmp_path / "model")
    first.close()
    second = CausalTransformer(config, devices=jax.devices()[:1], init=False)
    assert second.restore(tmp_path / "model") is not None
    for batch in batches[2:]:
        second.train(batch)
    second.close()
    jax.tree.map(np.testing.assert_array_equal, second.saved_state(), expected.saved_state())


@pytest.mark.slow
def test_evaluation_and_generation_drop_nothing():
    plain, dropping = (
        CausalTransformer(config, devices=jax.devices()[:1])
        for config in (Config(**SMALL), config_of())
    )
    batch = random_batch(plain.config, 3)
    results = [
        (
            network.eval(batch)["all_loss"],
            network.logits(batch["obs"]),
            network.generate(batch["obs"][:, :4], [4, 4, 4], 5, {"seed": 1}),
        )
        for network in (plain, dropping)
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)
