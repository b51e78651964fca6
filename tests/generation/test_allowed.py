"""Batches in which some rows may generate only some of the tokens."""

import numpy as np
import pytest

from mesh_transformer.generation.sampling import sampler_settings
from tests.generation.test_decode import PLACES, by_token, network_of, random_prompts
from tests.model.test_transformer import small_config
from tests.support.mixes import bits_of

ROWS, CALLS = 6, 12
# At very high temperatures, all tokens are equally likely.
TEMPERATURES = [0.0, 0.0, 0.8, 1e30, 1.3, 0.9]
OPTIONS = {
    "temp": np.array(TEMPERATURES),
    "top_p": np.array([1, 1, 0.9, 1, 0.6, 1]),
    "typical_p": np.array([1, 1, 1, 1, 1, 0.5]),
    "repetition_penalty": np.array([1, 1.3, 1, 1, 1.2, 1]),
    "seed": np.arange(ROWS),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "speculate"),
    [(PLACES[0], False), (PLACES[1], True), (PLACES[2], False), (PLACES[0], True)],
)
def test_only_allowed_tokens_are_generated_and_other_rows_stay_as_they_are(place, speculate):
    config = small_config(seq=64, n_vocab=40)
    network, rng = network_of(config, place), np.random.default_rng(4)
    prompts, lengths = random_prompts(config, [3, 9, 20, 5, 30, 8]), [40] * ROWS
    settings = sampler_settings(OPTIONS, ROWS)
    batches = [network.batch(ROWS, None, 3 * speculate) for _ in range(2)]
    limited = (0, 2, 3, 5)

    def sets() -> dict[int, np.ndarray]:
        """Return a random set of tokens for each limited row, often of one or two tokens."""
        return {row: rng.permutation(40)[: rng.choice([1, 2, 9])] for row in limited}

    def allowed(tokens: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        return {row: bits_of(some, 40) for row, some in tokens.items()}

    free, batch = batches
    free.insert(range(ROWS), prompts, lengths, settings)
    tokens = sets()
    first = batch.insert(
        range(ROWS), prompts, lengths, settings, alternatives=40, allowed=allowed(tokens)
    )
    assert all(first.token[row] in tokens[row] for row in limited)
    # The greedy row's token is the most likely of those that it may generate.
    logprobs = by_token(first.top_token, first.top_logprob)
    assert first.token[0] == tokens[0][np.argmax(logprobs[0][tokens[0]])]
    answers: dict[int, list[int]] = {row: [] for row in (1, 4)}
    for _ in range(CALLS):
        tokens, left = sets(), batch.left.copy()
        chosen = batch.decode(2, speculate=speculate, allowed=allowed(tokens))
        made = left - batch.left
        for row in limited:
            assert made[row] == 1
            assert chosen.token[row, 0] in tokens[row]
        for row, answer in answers.items():
            answer += chosen.token[row, : made[row]].tolist()
    for row, answer in answers.items():
        expected: list[int] = []
        while len(expected) < len(answer):
            expected += free.decode(1).token[row].tolist()
        assert answer == expected
        free.insert(range(ROWS), prompts, lengths, settings)  # for the next row


@pytest.mark.slow
def test_no_limit_changes_no_bit():
    """Also of the logprobs, although the program is another one."""
    config = small_config()
    network = network_of(config)
    prompts, settings = random_prompts(config, [3, 9]), sampler_settings({"seed": [1, 2]}, 2)
    results = []
    for allowed in (None, {}):
        batch = network.batch(2)
        batch.insert(range(2), prompts, 20, settings, allowed=allowed)
        results.append(batch.decode(19, 4, allowed=allowed))
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(actual, expected)
