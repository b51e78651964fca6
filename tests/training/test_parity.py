"""Evaluation and training against results of the original program, in f32."""

import jax
import numpy as np
import pytest

from mesh_transformer.checkpoint.original import read
from mesh_transformer.training import step
from mesh_transformer.transformer_shard import CausalTransformer
from tests.conftest import AS_USERS_COMPILE, DATA, original_config

ORIGINAL = DATA / "original"


def network_at_step_0(variant: str, **changes) -> CausalTransformer:
    config = original_config(variant, **changes)
    params = read(str(ORIGINAL / variant / "step_0"), config)["params"]
    # Fresh optimizer state is all zeros, so only the parameters need to be replaced.
    network = CausalTransformer(config)
    shardings = step.StateLayout(config, network.mesh).shardings["params"]
    network.state["params"] = jax.tree.map(jax.device_put, params, shardings)
    return network


@pytest.mark.quick(1)
@pytest.mark.parametrize("variant", ["f32/mp4_ga1", "f32/t5_mp4"])
@pytest.mark.parametrize("partitioning", ["shard_map", "jit"])
def test_evaluation_matches_the_original(variant, partitioning):
    golden = np.load(ORIGINAL / variant / "golden.npz")
    network = network_at_step_0(variant, partitioning=partitioning)
    tokens = golden["eval_tokens"]
    actual = network.eval({"obs": tokens[:, :-1], "target": tokens[:, 1:]})
    logits = network.logits(tokens[:, :-1])
    # The tolerance 2e-5 is twenty times the original's difference between runs, 1e-6.
    for name in ("loss", "last_loss", "all_loss"):
        np.testing.assert_allclose(actual[name], golden[f"eval_step0.{name}"], atol=2e-5, rtol=0)
    np.testing.assert_array_equal(actual["correct"], golden["eval_step0.correct"])
    expected_logits = golden["eval_step0.logits"]
    np.testing.assert_allclose(logits, expected_logits, atol=2e-5, rtol=0)
    # Log probabilities are differences of logits, so they have the same tolerance.
    logprobs = np.asarray(jax.nn.log_softmax(expected_logits))
    scored = network.score(tokens, 3)
    np.testing.assert_array_equal(scored.token, tokens[:, 1:])
    expected_logprobs = -golden["eval_step0.all_loss"]
    np.testing.assert_allclose(scored.logprob, expected_logprobs, atol=2e-5, rtol=0)
    logprobs_of_top_tokens = np.take_along_axis(logprobs, scored.top_token.astype(int), axis=-1)
    for top in (logprobs_of_top_tokens, -np.sort(-logprobs)[..., :3]):
        np.testing.assert_allclose(scored.top_logprob, top, atol=2e-5, rtol=0)


@pytest.mark.quick(1)
@pytest.mark.parametrize("partitioning", ["shard_map", "jit"])
def test_ten_training_steps_match_the_original(monkeypatch, partitioning):
    # Compile as users do.  This replaces all compiler options, which is correct because on CPUs the
    # library sets none.
    monkeypatch.setattr(step, "compiler_options", lambda *_: AS_USERS_COMPILE)
    variant = "f32/mp4_ga1"
    golden = np.load(ORIGINAL / variant / "golden.npz")
    network = network_at_step_0(variant, partitioning=partitioning, original_bias_copies=4)
    trace = [
        network.train({"obs": tokens[..., :-1], "target": tokens[..., 1:]})
        for tokens in golden["train_tokens"]
    ]
    names = ["loss", "last_loss", "grad_norm"]
    if partitioning == "shard_map":
        # Each replica has one sequence, so its norm is the original's per-example norm.
        names.append("grad_norm_micro")
    for name in names:
        actual = np.array([float(metrics[name]) for metrics in trace])
        # Rounding errors grow over ten Adam steps; the original's own tolerance is 5e-5.
        np.testing.assert_allclose(actual, golden[f"train.{name}"], rtol=1e-4, err_msg=name)
