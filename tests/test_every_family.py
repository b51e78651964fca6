"""Every model type, loaded from a folder that torch saved, in all that is done with a model.

The oracle is the torch model, or lm-eval's own model around it.
"""

import jax
import numpy as np
import pytest
from transformers import AutoModelForCausalLM

torch = pytest.importorskip("torch")

import mesh_transformer
from mesh_transformer.checkpoint import conversion
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.evaluation import harness
from mesh_transformer.evaluation.harness import Harness
from mesh_transformer.generation.sampling import sampler_settings
from tests.evaluation.test_tasks import SEQ, hf_scores, tasks
from tests.generation.test_decode import by_token
from tests.support import made_tasks
from tests.support.live_server import Live
from tests.support.torch_models import FAMILIES, SEQUENTIAL, torch_model

__all__ = ["tasks"]  # a fixture

VOCAB = 64
MESHES = {"one": (1, 1, "shard_map"), "2x4": (8, 4, "shard_map"), "2x4 jit": (8, 4, "jit")}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp(request.param)
    torch_model(request.param, layers=2, heads=4, vocab=VOCAB, seq=SEQ).save_pretrained(path)
    made_tasks.save_tokenizer(path)
    return str(path)


def load(folder, mesh="2x4", **changes):
    devices, mp, partitioning = MESHES[mesh]
    keys = {"tpu_size": devices, "cores_per_replica": mp, "partitioning": partitioning}
    return mesh_transformer.load(folder, changes=keys | {"dtype": "float32"} | changes)


def torch_logits(folder, tokens):
    network = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return network(torch.tensor(tokens)).logits.numpy()


def greedy(folder, prompt, count):
    tokens = [*prompt]
    for _ in range(count):
        tokens.append(int(torch_logits(folder, [tokens])[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "mesh"),
    [
        ("gptj", "one"),
        ("gptj", "2x4 jit"),
        ("gpt2", "2x4"),
        ("gpt_neox", "2x4 jit"),
        (SEQUENTIAL, "2x4 jit"),
    ],
    indirect=["folder"],
)
def test_answers_over_http_are_torchs(folder, mesh):
    network, tokenizer = load(folder, mesh), load_tokenizer(folder)
    live = Live(network, tokenizer, None, rows=4)
    try:
        rng = np.random.default_rng(0)
        for length in (1, 5, 11):
            prompt = rng.integers(1, VOCAB, length).tolist()
            answer = live.ask(prompt=prompt, max_tokens=SEQ - length, temperature=0)
            expected = greedy(folder, prompt, SEQ - length)
            end = expected.index(0) if 0 in expected else None  # the token <|endoftext|>
            assert answer["choices"][0]["text"] == tokenizer.decode(expected[:end])
    finally:
        live.close()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["one", "2x4"])
def test_embeddings_are_torchs_last_hidden_states(folder, mesh):
    rng = np.random.default_rng(4)
    lengths = [9, 1, 5]
    tokens = rng.integers(0, VOCAB, (3, 9))
    model = AutoModelForCausalLM.from_pretrained(folder).eval().base_model
    with torch.no_grad():
        hidden = [
            model(torch.tensor(t[None, :n]))[0][0] for t, n in zip(tokens, lengths, strict=True)
        ]
    network = load(folder, mesh)
    for pooling, pooled in (("mean", lambda x: x.mean(0)), ("last", lambda x: x[-1])):
        actual = network.embed(tokens, lengths, pooling)
        expected = [pooled(states).numpy() for states in hidden]
        # Normed values of order 1, in f32.
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_8_bit_weights_change_the_logprobs_little(folder):
    def logprobs(network):
        prompt = np.random.default_rng(1).integers(0, VOCAB, 20)
        settings = sampler_settings({"temp": 0.0}, 2)
        chosen = network.batch(2).insert([0, 1], [prompt] * 2, 1, settings, alternatives=VOCAB)
        return by_token(chosen.top_token, chosen.top_logprob)

    exact, rounded = logprobs(load(folder)), logprobs(load(folder, int8_weights=True))
    error = np.sqrt(np.mean((rounded - exact) ** 2)) / exact.std()
    assert 0 < error < 0.02  # the bound in docs/generation.md


@pytest.mark.slow
def test_adapters_are_trained_and_merged_into_a_folder_for_torch(folder, tmp_path):
    data = np.random.default_rng(2).integers(0, VOCAB, 400)
    keys = {"lora_rank": 2, "lr": 0.05, "warmup_steps": 0, "total_steps": 3}
    network = load(folder, per_replica_batch=2, **keys)
    before = jax.tree.map(np.asarray, network.state["frozen"])
    mesh_transformer.fit(network, data, tmp_path / "adapters")
    jax.tree.map(np.testing.assert_array_equal, before, network.state["frozen"])
    tokens = np.random.default_rng(3).integers(0, VOCAB, (2, 12))
    actual = np.asarray(network.logits(tokens))
    assert np.abs(actual - torch_logits(folder, tokens)).max() > 0.05  # it has learnt something
    adapters, merged = str(tmp_path / "adapters"), str(tmp_path / "merged")
    conversion.convert(adapters, "native", merged, "hf", base=folder, dtype=np.float32)
    # 1e-4: logits of up to some tens in f32.
    np.testing.assert_allclose(actual, torch_logits(merged, tokens), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["gptj", "gpt_neox"], indirect=True)
def test_lm_eval_scores_are_those_of_its_own_model(folder, tasks, monkeypatch):
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")  # a forked process would break JAX's threads
    network = load(folder)
    actual = harness.metric_values(Harness(network.config, tasks).results(network))
    # In a batch, lm-eval's model goes on after the end of a text, as these folders name no token
    # for it.
    expected = hf_scores(folder, made_tasks.NAMES, rows=1)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        # Word perplexities are in the thousands, so their tolerance is relative: 1e-4.
        assert actual[name] == pytest.approx(value, rel=1e-4 * (value > 1), abs=1e-4), name
