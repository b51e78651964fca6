"""Training with parts of the state in host memory, against training without."""

from typing import Any

import jax
import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.mesh import host_memory
from mesh_transformer.training import offload, step
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.conftest import random_batch
from tests.training.test_step import fresh_state, mesh_of, small_config

STEPS = 3
CASES = [  # optimizer, partitioning, dp, mp, ZeRO stage
    ("adam", "shard_map", 2, 4, 1),
    ("adam", "jit", 1, 1, 0),
    ("muon", "jit", 2, 4, 1),
    ("adafactor", "jit", 2, 4, 0),
    ("lion", "shard_map", 1, 4, 0),
    ("sgd", "shard_map", 2, 4, 1),
]
offloads = pytest.mark.parametrize("kind", ["moments", "params"])


def config_of(case: tuple[str, str, int, int, int], kind: str) -> Config:
    name, partitioning, dp, mp, zero = case
    return small_config(
        optimizer=name,
        partitioning=partitioning,
        cores_per_replica=mp,
        tpu_size=dp * mp,
        zero=zero,
        offload=kind,
        skip_nonfinite=True,
    )


def train(config: Config) -> tuple[Any, Any]:
    """Return the state and the metrics of the last step, on the host, after `STEPS` updates."""
    assert config.tpu_size is not None
    mesh = mesh_of(config.tpu_size // config.cores_per_replica, config.cores_per_replica)
    plain = config.replace(partitioning="jit", zero=0, cores_per_replica=1, offload="none")
    layout = step.StateLayout(config, mesh)
    state = jax.tree.map(jax.device_put, fresh_state(plain), layout.shardings)
    train_step = step.compile_train(layout)
    metrics = {}
    for _ in range(STEPS):
        state, metrics = train_step(state, random_batch(config, 2, 8))
    assert jax.tree.map(lambda x: x.sharding, state) == layout.shardings
    return jax.tree.map(np.asarray, (state, metrics))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_is_that_without_offload(case, monkeypatch):
    """The place of the arrays changes no bit, and another program only the last bits."""
    without = train(config_of(case, "none"))
    for kind in ("moments", "params"):
        config = config_of(case, kind)
        actual = train(config)
        for one, other in zip(*map(jax.tree.leaves, (actual, without)), strict=True):
            # XLA fuses the two programs differently, so f32 numbers differ by about 1e-7, and
            # adafactor's by up to 3e-6.
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-5, err_msg=kind)
        # The program that moves layers to host memory and back, against one that moves nothing.
        with monkeypatch.context() as patched:
            patched.setattr(host_memory, "HOST", "device")
            patched.setattr(offload, "on_host", lambda x: x)
            in_place = train(config)
        for one, other in zip(*map(jax.tree.leaves, (actual, in_place)), strict=True):
            np.testing.assert_array_equal(one, other, err_msg=kind)


@pytest.mark.parametrize(("kind", "keys"), [("moments", 1), ("params", 2)])
def test_trained_matrices_and_their_moments_are_in_host_memory(kind, keys):
    config = config_of(CASES[0], kind)
    layout = step.StateLayout(config, mesh_of(2, 4)).shardings
    places = jax.tree.map(lambda sharding: sharding.memory_kind, layout)
    layers = [places["opt_state"][name]["layers"] for name in ("mu", "nu")] + [
        places["params"]["layers"]
    ]
    matrices = [place for tree in layers for place in (tree["layer"]["o"], tree["layer/q"]["w"])]
    assert matrices == ["pinned_host"] * 4 + (["pinned_host"] * 2 if keys == 2 else ["device"] * 2)
    vectors = [tree["layer/norm"]["scale"] for tree in layers]
    assert {*vectors, places["step"], places["opt_state"]["count"]} == {"device"}


@pytest.mark.slow
@offloads
def test_a_skipped_step_changes_nothing(kind):
    config = config_of(CASES[1], kind).replace(skip_nonfinite=True)
    layout = step.StateLayout(config, mesh_of(1, 1))
    fresh = fresh_state(config.replace(offload="none"))
    state = jax.tree.map(jax.device_put, fresh, layout.shardings)
    state["params"]["layers"]["layer/norm"]["scale"] *= np.nan
    before = jax.tree.map(np.asarray, state)
    after, metrics = step.compile_train(layout)(state, random_batch(config, 2, 8))
    assert metrics["skipped"] == 1
    for key in ("params", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, after[key], before[key])


@pytest.mark.slow
@offloads
def test_checkpoints_do_not_depend_on_offload(kind, tmp_path):
    """A run saved with offload resumes without, and one saved without resumes with it."""
    config = config_of(("adam", "shard_map", 2, 4, 1), kind).replace(keep_n=9)
    batch = random_batch(config, 2, 8)
    for name, one, other in (("to", "none", kind), ("from", kind, "none")):
        first = CausalTransformer(config.replace(offload=one))
        first.train(batch)
        saved = jax.tree.map(np.array, first.saved_state())
        first.save(tmp_path / name)
        first.train(batch)  # while the save is in progress
        first.wait()
        first.load(tmp_path / name)
        second = CausalTransformer(config.replace(offload=other), init=False)
        assert second.restore(tmp_path / name) is not None
        jax.tree.map(np.testing.assert_array_equal, saved, second.saved_state())
        losses = [network.train(batch)["loss"] for network in (first, second)]
        np.testing.assert_allclose(*losses, rtol=1e-6)  # as above
        first.close()
        second.close()


@pytest.mark.slow
def test_evaluation_and_generation_read_parameters_from_host_memory():
    config = config_of(CASES[0], "params")
    batch = {key: rows[0] for key, rows in random_batch(config, 1, 8).items()}
    results = []
    for kind in ("none", "params"):
        network = CausalTransformer(config.replace(offload=kind))
        evaluated = network.eval(batch)
        logits = network.logits(batch["obs"])
        tokens = network.generate(batch["obs"][:, :5], np.full(8, 5), 4, {"seed": 0})
        results.append(jax.tree.map(np.asarray, (evaluated, logits, tokens)))
    # Casts are exact, and the programs after them are the same.
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.slow
def test_adapters_of_a_model_in_host_memory(tmp_path):
    """Their base is recognised, and texts have the same scores as without offload."""
    config = config_of(CASES[0], "none").replace(zero=0, skip_nonfinite=False)
    with_offload = config.replace(offload="params")
    base = CausalTransformer(config)
    base.save(tmp_path / "base")
    base.close()
    tuned = CausalTransformer(config.replace(lora_rank=2, offload="params"), init=False)
    tuned.load(tmp_path / "base")
    tuned.train(random_batch(config, 2, 8))
    tuned.save(tmp_path / "adapters")
    tuned.close()
    texts, scores = random_batch(config, 1, 4)["obs"][0], []
    for own in (config, with_offload):
        network = CausalTransformer(own, init=False)
        network.load(tmp_path / "base")
        network.add_adapters([tmp_path / "adapters"])
        scores.append(np.asarray(network.score(texts, 1, adapter=1).logprob))
    np.testing.assert_array_equal(*scores)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"offload": "params", "zero": 3}, "offload is 'params', but zero is 3"),
        ({"offload": "moments", "virtual_mesh": [2, 4]}, "but virtual_mesh is"),
        ({"offload": "all"}, "offload is str 'all', expected one of"),
    ],
)
def test_what_offload_cannot_do_is_refused(changes, problem):
    with pytest.raises(InputError, match=problem):
        config_of(CASES[0], "none").replace(**changes)
