"""Features of the engine against an engine without them, on real networks with random requests."""

import dataclasses

import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.serving.metrics import Metrics
from tests.conftest import SMALL
from tests.support.mixes import (
    CHUNK,
    GUESSES,
    ROWS,
    Networks,
    answers,
    compare,
    random_requests,
    random_sizes,
)


@pytest.fixture(
    scope="module",
    params=[(1, False, 0), (4, False, 2), (1, True, 2)],
    ids=["one device", "2 x 2 devices", "8-bit cache"],
)  # number of devices, int8_cache, adapters
def networks(request):
    devices, int8_cache, adapters = request.param
    mesh = {"cores_per_replica": min(devices, 2), "tpu_size": devices, "int8_cache": int8_cache}
    config = Config(**(SMALL | {"seq": 128, "n_vocab": 64} | mesh))
    return Networks(config, devices, adapters)


# One case per kind of networks, as the seeds have most programs in common.
@pytest.mark.slow
def test_features_change_no_bit_in_fixed_shapes(networks):
    for seed, guesser in (*((seed, None) for seed in range(5)), (11, "draft"), (11, "itself")):
        features, different, _ = compare(networks, seed, guesser)
        assert not different, (seed, features)


@pytest.mark.slow
@pytest.mark.parametrize("networks", [(1, False, 0)], indirect=True, scope="module")
@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_all_guesses_of_the_model_as_its_own_draft_are_right(networks, temp):
    """They are chosen with the same settings and random numbers, also in rows that were reused."""
    network, rng, metrics = networks.by_guesser["itself"], np.random.default_rng(5), Metrics(ROWS)
    requests = random_requests(rng, network.config)
    for request in requests:
        settings = dataclasses.replace(request["settings"], temp=temp)
        request |= {"settings": settings, "length": 60, "stop": frozenset(), "constraint": None}
    sizes = random_sizes(rng, len(requests))
    # All calls guess.
    options = {"fixed_shapes": True, "speculate": GUESSES, "kept_tokens": 40 * CHUNK}
    answers(network, requests, sizes, metrics, **options)

    def value(name: str) -> float:
        sample = metrics.registry.get_sample_value(f"mesh_transformer_{name}_total")
        assert sample is not None
        return sample

    # The first token of an answer, and those of its last call, are not guessed or not counted.
    assert value("guessed_tokens") > 20 * len(requests)
    assert value("right_guesses") == value("guessed_tokens")


@pytest.mark.slow
@pytest.mark.parametrize("networks", [(1, False, 0), (4, False, 2)], indirect=True, scope="module")
@pytest.mark.parametrize(("seed", "guesser"), [(0, "lookup"), (1, "lookup"), (2, "draft")])
def test_otherwise_features_change_tokens_only_where_logits_are_nearly_equal(
    networks, seed, guesser
):
    """Chunks, kept beginnings and guesses against one request at a time without any of them."""
    network, rng = networks.by_guesser[guesser], np.random.default_rng(100 + seed)
    requests = random_requests(rng, network.config, networks.adapters)
    for request in requests:
        plain = {"temp": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0}
        greedy = dataclasses.replace(request["settings"], **plain)
        request |= {"logprobs": True, "settings": greedy}
    sizes = random_sizes(rng, len(requests))
    with_features = answers(network, requests, sizes, speculate=GUESSES)
    plain = answers(network, requests, [1] * len(requests), kept_tokens=0)
    for actual, expected in zip(with_features, plain, strict=True):
        for one, other in zip(actual, expected, strict=False):
            # In f32, the logits of this model, of up to 5, differ by a few units of 5e-7.
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            if one.number != other.number:
                break
