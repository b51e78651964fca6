"""Our numbers against the original program's, f32."""

import jax
import numpy as np
import pytest

from mesh_transformer.checkpoint.original import read
from mesh_transformer.mesh.devices import named
from mesh_transformer.training import step
from mesh_transformer.transformer_shard import CausalTransformer
from tests.conftest import AS_USERS_COMPILE, DATA, original_config

ORIGINAL = DATA / "original"


def network_at_step_0(variant: str, **changes) -> CausalTransformer:
    config = original_config(variant, **changes)
    params = read(str(ORIGINAL / variant / "step_0"), config)["params"]
    # The optimizer's fresh state is zeros, so replacing the parameters is all there is to loading.
    network = CausalTransformer(config)
    shardings = named(network.mesh, step.state_specs(config, network.mesh)["params"])
    network.state["params"] = jax.tree.map(jax.device_put, params, shardings)
    return network


@pytest.mark.parametrize("variant", ["f32/mp4_ga1", "f32/t5_mp4"])
@pytest.mark.parametrize("partitioning", ["shard_map", "jit"])
def test_evaluation_is_the_original_s(variant, partitioning):
    golden = np.load(ORIGINAL / variant / "golden.npz")
    network = network_at_step_0(variant, partitioning=partitioning)
    tokens = golden["eval_tokens"]
    found = network.eval({"obs": tokens[:, :-1], "target": tokens[:, 1:]})
    logits = network.logits(tokens[:, :-1])
    # 2e-5: twenty times the original's own run to run noise of 1e-6.
    for name in ("loss", "last_loss", "all_loss"):
        np.testing.assert_allclose(found[name], golden[f"eval_step0.{name}"], atol=2e-5, rtol=0)
    np.testing.assert_array_equal(found["correct"], golden["eval_step0.correct"])
    theirs = golden["eval_step0.logits"]
    np.testing.assert_allclose(logits, theirs, atol=2e-5, rtol=0)
    # As close as the logits that they are differences of.
    logprobs = np.asarray(jax.nn.log_softmax(theirs))
    scored = network.score(tokens, 3)
    np.testing.assert_array_equal(scored.token, tokens[:, 1:])
    said = -golden["eval_step0.all_loss"]
    np.testing.assert_allclose(scored.logprob, said, atol=2e-5, rtol=0)
    own = np.take_along_axis(logprobs, scored.top_token.astype(int), axis=-1)
    for top in (own, -np.sort(-logprobs)[..., :3]):
        np.testing.assert_allclose(scored.top_logprob, top, atol=2e-5, rtol=0)


@pytest.mark.parametrize("partitioning", ["shard_map", "jit"])
def test_ten_training_steps_are_the_original_s(monkeypatch, partitioning):
    # What the original's ten steps are compared with is what users run; a CPU has no other options.
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
        # One sequence a replica: its norm is the original's per-example norm.
        names.append("grad_norm_micro")
    for name in names:
        found = np.array([float(one[name]) for one in trace])
        # 1e-4: rounding grows over ten Adam steps; the original allows itself 5e-5.
        np.testing.assert_allclose(found, golden[f"train.{name}"], rtol=1e-4, err_msg=name)
