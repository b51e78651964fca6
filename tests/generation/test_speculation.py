"""Speculation: guesses against a reference, and generated tokens with and without guesses."""

import jax
import numpy as np
import pytest

from mesh_transformer.generation.decode import _accepted
from mesh_transformer.generation.sampling import sampler_settings
from mesh_transformer.generation.speculation import draft_config, guess
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.generation.test_decode import PLACES, network_of, on_devices, random_prompts
from tests.model.test_transformer import small_config

WINDOW = 32


def reference(tokens, count):
    """Return what followed the best earlier occurrence of the last tokens, or None."""
    best = None
    for end in range(1, len(tokens) - 1):
        equal = 0
        while equal < min(3, end + 1) and tokens[end - equal] == tokens[-1 - equal]:
            equal += 1
        if equal >= 2 and (best is None or equal >= best[0]):
            best = equal, end
    if best is None:
        return None
    after = tokens[best[1] + 1 :]
    return (after * count)[:count]


@pytest.mark.quick(6)
@pytest.mark.parametrize("seed", range(20))
def test_a_guess_is_what_followed_the_last_tokens_before(seed):
    """Rows with few different tokens, shorter and longer than the ring buffer."""
    rng = np.random.default_rng(seed)
    slots, count, rows = int(rng.integers(8, 40)), int(rng.integers(1, 6)), 30
    texts = [rng.integers(0, 4, rng.integers(1, 3 * slots)).tolist() for _ in range(rows)]
    history = np.full((rows, slots), 9, np.uint32)
    for row, text in zip(history, texts, strict=True):
        for position, token in enumerate(text):
            row[position % slots] = token
    newest = np.array([len(text) - 1 for text in texts])
    actual = np.asarray(jax.jit(guess, static_argnums=2)(history, newest, count))
    found = 0
    for row, text in zip(actual.tolist(), texts, strict=True):
        expected = reference(text[-slots:], count)
        if expected is not None:
            found += 1
            assert row == expected
    assert found > 0


@pytest.mark.parametrize("guesses", [0, 1, 3])
def test_the_first_token_and_those_after_right_guesses_are_accepted(guesses):
    rng, rows = np.random.default_rng(guesses), 200
    chosen = rng.integers(0, 2, (rows, 1 + guesses)).astype(np.uint32)
    guess = rng.integers(0, 2, (rows, guesses)).astype(np.uint32)
    left = rng.integers(0, 3 + guesses, rows).astype(np.int32)
    actual = np.asarray(jax.jit(_accepted)(chosen, guess, left))
    for row in range(rows):
        right = 0
        while right < guesses and chosen[row, right] == guess[row, right]:
            right += 1
        assert actual[row] == min(1 + right, left[row])


def answers(batch, prompts, lengths, settings, speculate):
    """Return all rows' tokens, and the number of decode steps."""
    first = batch.insert(range(len(prompts)), prompts, lengths, settings)
    tokens, steps = [[token] for token in first.token.tolist()], 0
    while batch.left.any():
        left = batch.left.copy()
        chosen = batch.decode(2, speculate=speculate)
        steps += 2
        for row, made in enumerate(left - batch.left):
            tokens[row] += chosen.token[row, :made].tolist()
    assert [len(row) for row in tokens] == list(lengths)
    return tokens, steps


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("place", "guesses"), [(PLACES[0], 4), (PLACES[1], 1), (PLACES[2], 7), (PLACES[1], 4)]
)
def test_guesses_change_no_token(place, guesses):
    """All kinds of settings, repetitive and random prompts, answers beyond the window."""
    config = small_config(seq=WINDOW, n_vocab=24)
    network, rng = network_of(config, place), np.random.default_rng(guesses)
    rows = 8
    prompts = random_prompts(config, [3, 9, 31, WINDOW, 5, 12, 1, 20])
    for at in (1, 3, 5):
        prompts[at] = np.tile(prompts[at][:3], 20)[: len(prompts[at])]
    lengths = rng.integers(1, 70, rows)
    options = {
        "temp": np.array([0, 0, 0, 0, 0.7, 0.2, 1.0, 0.05]),
        "top_p": np.array([1, 1, 1, 1, 0.9, 0.3, 1.0, 1.0]),
        "repetition_penalty": np.array([1, 1, 1, 1.05, 1, 1.2, 1, 1]),
        "frequency_penalty": np.array([0, 0, 0.1, 0, 0, 0, 0.5, 0]),
        "seed": np.arange(rows),
    }
    settings = sampler_settings(options, rows)
    expected, plain_steps = answers(network.batch(rows), prompts, lengths, settings, False)
    batch = network.batch(rows, guesses=guesses)
    assert answers(batch, prompts, lengths, settings, False)[0] == expected
    actual, steps = answers(batch, prompts, lengths, settings, True)
    assert actual == expected
    assert steps < plain_steps  # greedy answers of an untrained model soon repeat themselves


def initial(config, place=PLACES[0]):
    """Return a network with the parameters that it is initialised with, the same on every mesh."""
    partitioning, dp, mp = place
    keys = {"partitioning": partitioning, "cores_per_replica": mp, "tpu_size": dp * mp}
    return CausalTransformer(config.replace(**keys), devices=jax.devices()[: dp * mp])


def add_draft(network, config, folder):
    """Give a network a draft with initial parameters."""
    draft = initial(config)
    draft.save(folder)
    draft.close()
    network.add_draft(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "changes"),
    [
        (PLACES[0], {}),  # the model itself
        (PLACES[3], {}),
        (PLACES[0], {"layers": 1, "pe": "fixed", "seq": 20}),
        (PLACES[1], {"layers": 1, "seq": 8, "block": "geglu", "d_model": 32, "int8_cache": True}),
        (PLACES[2], {"layers": 1, "seq": 2 * WINDOW, "n_heads": 3, "d_model": 48, "pe": "t5"}),
        (PLACES[1], {"layers": 1, "n_vocab": 19}),
        (PLACES[3], {"layers": 1, "n_vocab": 30, "block": "gpt2"}),
    ],
    ids=str,
)
def test_a_draft_changes_no_token(place, changes, tmp_path):
    """Windows shorter and longer than the model's, answers beyond them, heads that mp pads."""
    config = small_config(seq=WINDOW, n_vocab=24)
    network, rng, rows, guesses = initial(config, place), np.random.default_rng(3), 8, 3
    prompts = random_prompts(config, [3, 9, 31, WINDOW, 5, 12, 1, 20])
    lengths = rng.integers(1, 70, rows)
    options = {
        "temp": np.array([0, 0, 0, 0.3, 0.7, 0.2, 1.0, 0.05]),
        "top_p": np.array([1, 1, 1, 1, 0.9, 0.3, 1.0, 1.0]),
        "repetition_penalty": np.array([1, 1.2, 1, 1.05, 1, 1.2, 1, 1]),
        "frequency_penalty": np.array([0, 0, 0.1, 0, 0, 0, 0.5, 0]),
        "seed": np.arange(rows),
    }
    settings = sampler_settings(options, rows)
    expected, _ = answers(network.batch(rows), prompts, lengths, settings, False)
    add_draft(network, config.replace(**changes), tmp_path)
    batch = network.batch(rows, guesses=guesses)
    assert answers(batch, prompts, lengths, settings, False)[0] == expected
    # The rows are used again, and calls that do not guess come between those that do.
    actual, steps = answers(batch, prompts, lengths, settings, True)
    assert actual == expected
    if not changes:  # all guesses are right
        assert steps == 2 * -(-(max(lengths) - 1) // (2 * (1 + guesses)))


@pytest.mark.slow
@pytest.mark.parametrize("place", [PLACES[0], PLACES[1]])
def test_calls_that_do_not_guess_leave_the_draft_in_step(place, tmp_path):
    """The cache grows too, and the draft is added when only the weights are left."""
    config = small_config(seq=512, n_vocab=24)
    network, rows = initial(config, place), 2
    network.only_generate()
    add_draft(network, config, tmp_path)
    batch = network.batch(rows, guesses=3)
    prompts = random_prompts(config, [5, 230])
    batch.insert(range(rows), prompts, 300, sampler_settings({"temp": 0.5, "seed": 1}, rows))
    slots = on_devices(batch)._state.slots
    while batch.left.max() > 16:
        batch.decode(5)
        left = batch.left.copy()
        batch.decode(2, speculate=True)
        assert (left - batch.left).tolist() == [8, 8]
    assert on_devices(batch)._state.slots > slots


@pytest.mark.slow
def test_a_draft_that_does_not_fit_is_refused(tmp_path):
    network = initial(small_config(seq=WINDOW, n_vocab=24))
    expected = "draft has 32 tokens of the tokenizer bytes, and the model 24 of gpt2; choose"
    other = small_config(seq=WINDOW, n_vocab=32, tokenizer="bytes")
    with pytest.raises(InputError, match=expected):
        add_draft(network, other, tmp_path / "other")
    on_shards = {"partitioning": "shard_map", "cores_per_replica": 2, "tpu_size": 2}
    desync = network.config.replace(norm="layernorm-desync", **on_shards)
    for changes, expected in (
        ({"cores_per_replica": 1}, "shard_map and 1"),
        ({"partitioning": "jit"}, "jit and 2"),
    ):
        model = network.config.replace(**on_shards | changes)
        with pytest.raises(InputError, match=f"are shard_map and 2, expected {expected}, as"):
            draft_config(desync, model, "draft")
    add_draft(network, small_config(seq=2 * WINDOW, n_vocab=24), tmp_path / "longer")  # fits


@pytest.mark.slow
def test_logprobs_belong_to_the_tokens():
    config = small_config(seq=WINDOW, n_vocab=24)
    network = network_of(config)
    settings = sampler_settings({"temp": 0.0}, 2)
    prompts = [np.tile([1, 2, 3], 5), np.array([4])]

    def logprobs(speculate):
        batch = network.batch(2, guesses=3)
        batch.insert([0, 1], prompts, 17, settings)
        parts = [[], []]
        while batch.left.any():
            left = batch.left.copy()
            chosen = batch.decode(3, 2, speculate=speculate)
            for row, made in enumerate(left - batch.left):
                parts[row].append([x[row, :made] for x in chosen[1:]])
        return [[np.concatenate(x) for x in zip(*row, strict=True)] for row in parts]

    for actual, expected in zip(logprobs(True), logprobs(False), strict=True):
        for one, other in zip(actual, expected, strict=True):
            # Logprobs reach 18 here, where adjacent f32 values differ by 2e-6.
            np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("guesses", [-1, WINDOW])
def test_an_impossible_number_of_guesses_is_refused(guesses):
    network = network_of(small_config(seq=WINDOW))
    with pytest.raises(InputError, match=rf"guesses is {guesses}, expected 0 to {WINDOW - 1}"):
        network.batch(1, guesses=guesses)
