"""Scores of texts that all begin alike, whose beginning is computed once."""

import numpy as np
import pytest

from mesh_transformer.util import InputError
from tests.generation.test_decode import EVERYWHERE, network_of
from tests.model.test_transformer import small_config


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(EVERYWHERE)))
def test_scores_after_a_beginning_are_those_of_whole_texts(number):
    (block, pe), place = EVERYWHERE[number]
    window = (None, 7)[number // 3 % 2]
    config = small_config(block=block, pe=pe, seq=48, attention_window=window, layers=3)
    network, rng = network_of(config, place), np.random.default_rng(4)
    for begin, width, alternatives in ((30, 17, 5), (1, 47, 0), (47, 2, 3)):
        beginning = rng.integers(0, config.n_vocab, begin)
        tokens = rng.integers(0, config.n_vocab, (3, width))
        actual = network.score(tokens, alternatives, beginning)
        whole = np.concatenate((np.tile(beginning, (3, 1)), tokens), axis=1)
        expected = network.score(whole, alternatives)
        for name, value in actual._asdict().items():
            # Logprobs reach 18 here, where adjacent f32 values differ by 2e-6.
            np.testing.assert_allclose(
                value, getattr(expected, name)[:, begin:], rtol=1e-5, atol=1e-5
            )


@pytest.mark.slow
def test_a_beginning_is_computed_once_per_set_of_weights():
    config = small_config(seq=16)
    network = network_of(config)
    generator, calls = network._generator, []
    compute = generator._before
    generator._before = lambda *args: calls.append(args[2]) or compute(*args)
    tokens = np.arange(8).reshape(2, 4)
    first = network.score(tokens, 0, np.array([5, 6]))
    network.score(tokens[:1], 0, np.array([5, 6]))
    assert calls == [2]
    network.score(tokens, 0, np.array([5, 7]))
    network.score(tokens, 0, np.array([5, 7, 0]))
    assert calls == [2, 2, 3]
    network.state = network_of(config.replace(d_model=config.d_model)).state
    np.testing.assert_array_equal(network.score(tokens, 0, np.array([5, 6])).logprob, first.logprob)
    assert calls == [2, 2, 3, 2]


def test_a_beginning_must_fit():
    config = small_config(seq=16)
    network = network_of(config)
    with pytest.raises(InputError, match=r"tokens has shape \(1, 14\), expected .* T from 1 to 13"):
        network.score(np.zeros((1, 14), int), 0, np.zeros(4, int))
    with pytest.raises(InputError, match=r"beginning has shape \(0,\), expected \[T\] with T from"):
        network.score(np.zeros((1, 2), int), 0, np.zeros(0, int))
    with pytest.raises(InputError, match="beginning holds token id"):
        network.score(np.zeros((1, 2), int), 0, np.array([config.n_vocab]))
