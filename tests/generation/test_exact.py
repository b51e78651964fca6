"""The config key `exact`: a token has the same probability in every program, bit for bit."""

import jax
import numpy as np
import pytest

from mesh_transformer.generation.sampling_settings import sampler_settings
from mesh_transformer.mesh import apart
from mesh_transformer.mesh.apart import Exact
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import transformer
from mesh_transformer.model.loss import losses
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.conftest import random_batch
from tests.long import one_probability

GPTJ = {"exact": True, "seq": 48, "total_steps": 10}


def trained_and_scored(network: CausalTransformer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the logprobs of a batch in a program with gradients, in evaluation and in scoring."""
    config, batch = network.config, random_batch(network.config, 3)

    def loss(params):
        par = Auto(exact=Exact("cpu"))
        cast = par.compute_copy(params, transformer.declarations(config), config.dtype)
        loss_BT = losses(cast, batch["obs"], batch["target"], config, par).loss_BT
        return loss_BT.sum(), loss_BT

    (_, loss_BT), _ = jax.jit(jax.value_and_grad(loss, has_aux=True))(network.state["params"])
    evaluated = network.eval(batch)["all_loss"]
    text = np.concatenate((batch["obs"][1:2], batch["target"][1:2, -1:]), axis=1)
    scored = [network.score(text[:, begin:end], 0).logprob[0] for begin, end in ((0, 49), (0, 7))]
    assert (scored[1] == scored[0][:6]).all()
    return -np.asarray(loss_BT)[1], -evaluated[1], scored[0]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "bfloat16"},
        pytest.param({"block": "neox", "pe": "fixed"}, marks=pytest.mark.slow),
        pytest.param({"block": "geglu", "pe": "t5"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_evaluation_and_scoring_agree(small, changes):
    network = CausalTransformer(small(**GPTJ, **changes))
    for other in trained_and_scored(network)[1:]:
        np.testing.assert_array_equal(other, trained_and_scored(network)[0])


@pytest.mark.slow
def test_a_draft_changes_no_bits(small, tmp_path):
    """On one device of a virtual mesh that divides the heads of neither model."""
    keys = GPTJ | {"virtual_mesh": [1, 4], "tpu_size": 1, "n_heads": 2, "tokenizer": "gpt2"}
    draft = CausalTransformer(small(**keys, layers=1), devices=jax.devices()[:1])
    draft.save(str(tmp_path), {})
    draft.wait()
    network = CausalTransformer(small(**keys), devices=jax.devices()[:1])
    network.add_draft(str(tmp_path))
    prompt = random_batch(network.config, 1)["obs"][0, :9]
    batch = network.batch(1, guesses=2)
    settings = sampler_settings({"temp": 0.0}, 1)
    first = batch.insert([0], [prompt], [20], settings, alternatives=1)
    chosen = batch.decode(6, alternatives=1, speculate=True)
    answer = [*first.token, *chosen.token[0, : 19 - batch.left[0]]]
    text = np.concatenate((prompt, answer)).astype(np.uint32)[None]
    logprobs = np.array([*first.logprob, *chosen.logprob[0, : len(answer) - 1]])
    np.testing.assert_array_equal(network.score(text, 0).logprob[0, len(prompt) - 1 :], logprobs)


@pytest.mark.slow
def test_adapters_have_the_same_bits_in_training_and_generation(small, tmp_path):
    base = CausalTransformer(small(**GPTJ))
    base.save(str(tmp_path), {})
    base.wait()
    lora = {"lora_rank": 4, "lora_alpha": 8.0, "lora_targets": ["q", "v", "out"], "lr": 0.1}
    network = CausalTransformer(small(**GPTJ | lora, warmup_steps=0), init=False)
    network.load(str(tmp_path))
    batch = random_batch(network.config, 1, 8)
    before = network.score(batch["obs"][0], 0).logprob
    network.train(batch)
    scored = network.score(batch["obs"][0], 0).logprob
    evaluated = network.eval({name: x[0] for name, x in batch.items()})["all_loss"]
    np.testing.assert_array_equal(scored, -evaluated[:, :-1])
    assert (before != scored).any()


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout_residual": 0.1},
        {"int8_cache": True},
        {"paged_attention": "pallas"},
        {"attention_window": 8},
        {"attention": "blocks"},
        {"cores_per_replica": 2},
        {"shard_activations": True, "cores_per_replica": 2, "virtual_mesh": [1, 2]},
    ],
    ids=str,
)
def test_what_cannot_be_computed_in_blocks_is_refused(small, changes):
    with pytest.raises(InputError, match="exact is true"):
        small(exact=True, **changes)


@pytest.mark.slow
def test_functions_that_are_branches_train_too(small, monkeypatch):
    """As on TPUs, whose compiler inlines all calls."""
    monkeypatch.setattr(apart, "calls_stay", lambda platform: False)
    keys = GPTJ | {"virtual_mesh": [2, 2], "cores_per_replica": 2, "tpu_size": 4, "layers": 1}
    network = CausalTransformer(small(**keys), devices=jax.devices()[:4])
    batch = random_batch(network.config, 1, network.batch_size)
    evaluated = network.eval({name: x[0] for name, x in batch.items()})["all_loss"]
    scored = network.score(batch["obs"][0], 0).logprob
    np.testing.assert_array_equal(scored, -evaluated[:, :-1])
    assert np.isfinite(network.train(batch)["loss"])


@pytest.mark.slow
def test_a_token_has_the_same_probability_everywhere():
    results = one_probability.differences(4, 60, 6, seed=1, seq=128)
    assert not any(results)


@pytest.mark.slow
def test_by_default_it_differs_by_rounding():
    results = one_probability.differences(4, 60, 6, seed=1, seq=128, exact=False)
    assert 0 < max(results) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"cores_per_replica": 4, "virtual_mesh": [2, 4]},
        pytest.param({"block": "llama", "key_heads": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"block": "gpt2", "cores_per_replica": 4, "virtual_mesh": [2, 4], "zero": 1},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_mesh_trains_as_without_the_key(small, changes):
    rows = {}
    for exact in (True, False):
        network = CausalTransformer(small(**GPTJ | {"exact": exact}, **changes, warmup_steps=0))
        batch = random_batch(network.config, 1, network.batch_size)
        rows[exact] = [network.train(batch) for _ in range(2)]
    for ours, usual in zip(rows[True], rows[False], strict=True):
        for name in ("loss", "grad_norm"):  # f32 sums in another order
            np.testing.assert_allclose(float(ours[name]), float(usual[name]), rtol=2e-5)
