"""Batches whose rows use different LoRA adapters of one model."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.families import BLOCKS
from mesh_transformer.generation.sampling import sampler_settings
from mesh_transformer.transformer_shard import CausalTransformer, load
from mesh_transformer.util import InputError, NonFiniteError
from tests.conftest import SMALL
from tests.generation.test_int4 import restored

# Adapters of different ranks, scales and targets (the last is for the numbers of targets).
KINDS = [{"lora_rank": 2, "lora_alpha": 6.0}, {"lora_rank": 3}, {"lora_rank": 1, "lora_alpha": 9.0}]
MESHES = [("jit", 1, 1), ("shard_map", 2, 4), ("jit", 2, 4)]
PROMPTS = [5, 12, 3, 20, 9]
CHOSEN = [0, 1, 2, 3, 1]
ONE = pytest.mark.parametrize("checkpoints", ["gptj"], indirect=True)  # block


def config_of(block: str, place: tuple[str, int, int], **changes: Any) -> Config:
    partitioning, dp, mp = place
    mesh = {"partitioning": partitioning, "cores_per_replica": mp, "tpu_size": dp * mp}
    values = {"block": block, "dtype": "float32", "seq": 64, "gradient_accumulation_steps": 1}
    return Config(**(SMALL | values | mesh | changes))


def random_factors(state: Any, seed: int) -> Any:
    """Return a state whose adapters change the model: their second factors are nonzero too."""
    rng = np.random.default_rng(seed)
    for module in state["params"]["layers"].values():
        for name, x in module.items():
            values = rng.normal(scale=0.3, size=x.shape).astype(np.float32)
            module[name] = jax.device_put(values, x.sharding)
    return state


@pytest.fixture(scope="module")
def checkpoints(request, tmp_path_factory) -> tuple[str, Path, list[Path]]:
    """Return the block, a base model, and checkpoints of three adapters that were trained on it."""
    folder, block = tmp_path_factory.mktemp(request.param), request.param
    base = CausalTransformer(config_of(block, MESHES[0]))
    base.save(folder / "base")
    base.close()
    targets = BLOCKS[block].lora_targets
    paths = []
    for number, kind in enumerate(KINDS):
        own = targets[number % len(targets) :] if number else targets
        config = config_of(block, MESHES[0], **kind, lora_targets=list(own))
        network = CausalTransformer(config, init=False)
        network.load(folder / "base")
        network.state = random_factors(network.state, number)
        paths.append(folder / f"adapter_{number}")
        network.save(paths[-1])
        network.close()
    return block, folder / "base", paths


def network_of(checkpoints, place, **changes: Any) -> CausalTransformer:
    block, base, paths = checkpoints
    network = load(base, config_of(block, place, **changes))
    network.add_adapters(paths)
    return network


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoints", "place"),
    [
        *(("gptj", place) for place in MESHES),
        ("geglu", MESHES[1]),
        ("gpt2", MESHES[2]),
        ("neox", MESHES[1]),
    ],
    indirect=["checkpoints"],
)
def test_each_row_generates_as_the_model_with_its_adapter_merged(checkpoints, place):
    block, base, paths = checkpoints
    network = network_of(checkpoints, place)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, network.config.n_vocab, length) for length in PROMPTS]
    rows = len(prompts) + 1  # the last row stays idle
    settings = sampler_settings({"temp": 0.0, "adapter": np.array(CHOSEN)}, len(prompts))
    batch = network.batch(rows)
    first = batch.insert(range(len(prompts)), prompts, 12, settings, alternatives=4)
    later = batch.decode(11, 4)
    tokens = np.concatenate((first.token[:, None], later.token[: len(prompts)]), axis=1)
    logprobs = np.concatenate((first.logprob[:, None], later.logprob[: len(prompts)]), axis=1)

    def padded(text: np.ndarray) -> np.ndarray:
        """Return a batch of one text, of the same shape for all: one program."""
        return np.pad(text, (0, max(PROMPTS) + 12 - len(text)))[None]

    seen = set()
    for path, number in ((base, 0), *zip(paths, (1, 2, 3), strict=True)):
        merged = load(path, config_of(block, MESHES[0]))
        for row in np.flatnonzero(np.equal(CHOSEN, number)):
            text, end = padded(np.concatenate((prompts[row], tokens[row]))), len(prompts[row]) + 11
            expected, answer = merged.score(text, 1), slice(end - 12, end)
            # f32 sums in another order: logits of about 1, a few hundred terms.
            np.testing.assert_allclose(
                logprobs[row], expected.logprob[0, answer], rtol=0, atol=2e-5
            )
            assert (tokens[row] == expected.top_token[0, answer, 0]).mean() > 0.9  # but for ties
            actual = network.score(text, 1, adapter=number).logprob
            np.testing.assert_allclose(actual, expected.logprob, rtol=0, atol=2e-5)
            vectors = [
                model.embed(text, [end + 1], "last", adapter)
                for model, adapter in ((network, number), (merged, 0))
            ]
            np.testing.assert_allclose(*vectors, rtol=0, atol=2e-5)
        seen.add(float(merged.score(padded(prompts[1]), 1).logprob.sum()))
        merged.close()
    assert len(seen) == 4  # the adapters differ
    network.close()


@pytest.mark.slow
@ONE
def test_a_row_does_not_depend_on_the_adapters_of_others(checkpoints):
    network = network_of(checkpoints, MESHES[0])
    prompts = [np.arange(7), np.arange(9)]
    results = []
    for other in (0, 1, 3):
        batch = network.batch(2)
        options = {"adapter": np.array([2, other]), "seed": np.array([3, 4])}
        batch.insert(range(2), prompts, 9, sampler_settings(options, 2))
        chosen = batch.decode(8, 3)
        results.append([x[0] for x in chosen])
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(actual, expected)
    network.close()


@pytest.mark.slow
@ONE
def test_adapters_are_not_quantized_with_the_model(checkpoints):
    exact, network = (network_of(checkpoints, MESHES[0], int8_weights=x) for x in (False, True))
    prompt = np.arange(12)[None]
    for adapter in range(4):
        pair = [model.score(prompt, 1, adapter=adapter).logprob for model in (exact, network)]
        error = np.sqrt(np.mean(np.square(pair[0] - pair[1])))
        assert 0 < error < 0.05 * np.std(pair[0])
    for model in (exact, network):
        model.close()


@pytest.mark.slow
@ONE
def test_adapters_are_applied_to_a_model_in_4_bits(checkpoints):
    """Its answers are those of the rounded matrices with the exact adapters."""
    network = network_of(checkpoints, MESHES[0], weight_bits=4)
    exact = network_of(checkpoints, MESHES[0])
    params = restored(exact.state["params"], exact.config)
    exact.state["params"] = jax.tree.map(jnp.asarray, params)
    tokens = np.random.default_rng(2).integers(0, exact.config.n_vocab, (4, 12))
    for adapter in range(4):
        actual, expected = (
            model.score(tokens, 1, adapter=adapter).logprob for model in (network, exact)
        )
        # f32 sums in another order, as above.
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)
    options = {"temp": 0.0, "adapter": np.arange(4)}
    answers = [model.generate(tokens, [12] * 4, 8, options) for model in (network, exact)]
    np.testing.assert_array_equal(*answers)
    for model in (exact, network):
        model.close()


@pytest.mark.slow
@ONE
def test_adapters_that_are_not_finite_are_refused_and_named(checkpoints, tmp_path):
    """They would also change the rows that do not use them: 0 times NaN is NaN."""
    block, base, paths = checkpoints
    config = config_of(block, MESHES[0], **KINDS[0], lora_targets=list(BLOCKS[block].lora_targets))
    damaged = CausalTransformer(config, init=False)
    damaged.load(base)
    state = random_factors(damaged.state, 0)
    module, values = next(iter(state["params"]["layers"].items()))
    name = next(iter(values))
    values[name] = values[name].at[1, 0, 0].set(np.nan)
    damaged.state = state
    damaged.save(tmp_path / "bad")
    network = network_of(checkpoints, MESHES[0])
    line = f"bad.*: 1 of the .* values of the weights layers/{module}/{name} are NaN or infinite"
    with pytest.raises(NonFiniteError, match=line):
        network.add_adapters([paths[1], tmp_path / "bad"])
    assert (network.generate(np.ones((2, 3), int), [3, 3], 4, {"adapter": [0, 1]}) < 128).all()
    for each in (damaged, network):
        each.close()


@pytest.mark.slow
@ONE
def test_wrong_adapters_are_one_line(checkpoints, tmp_path):
    block, base, paths = checkpoints
    network = network_of(checkpoints, MESHES[0])
    with pytest.raises(InputError, match=r"adapter is 4, expected 0 for none, or up to 3"):
        network.generate(np.ones((1, 3), int), [3], 4, {"adapter": 4})
    with pytest.raises(InputError, match="holds a whole model, expected LoRA adapters"):
        network.add_adapters([base])
    other = CausalTransformer(config_of(block, MESHES[0], seed=99))
    with pytest.raises(InputError, match="its adapters were trained on another model"):
        other.add_adapters(paths)
    with pytest.raises(InputError, match="nothing"):
        network.load(tmp_path / "nothing")
    network.generate(np.ones((1, 3), int), [3], 4, {"adapter": 1})  # they are still there
    for replace in (lambda: network.load(base), lambda: network.restore(base), network.init):
        replace()
        with pytest.raises(InputError, match=r"adapter is 1, expected 0 for none$"):
            network.generate(np.ones((1, 3), int), [3], 4, {"adapter": 1})
        if replace != network.init:
            network.add_adapters(paths[:1])
    most, targets = network.config.d_model, list(BLOCKS[block].lora_targets)
    wide = CausalTransformer(
        config_of(block, MESHES[0], lora_rank=most - 1, lora_targets=targets), init=False
    )
    wide.load(base)
    wide.save(tmp_path / "wide")
    wide.wait()
    with pytest.raises(InputError, match=f"sum to .*, expected at most d_model .{most}"):
        network.add_adapters([paths[0], tmp_path / "wide"])  # of ranks 2 and d_model - 1
    with pytest.raises(InputError, match=r"adapter is 1, expected 0 for none$"):
        other.generate(np.ones((1, 3), int), [3], 4, {"adapter": 1})
    tuned = load(
        paths[0],
        config_of(
            block,
            MESHES[0],
            lora_rank=2,
            lora_alpha=6.0,
            lora_targets=list(BLOCKS[block].lora_targets),
        ),
    )
    with pytest.raises(InputError, match="the model has some itself; load its base model"):
        tuned.add_adapters(paths)
