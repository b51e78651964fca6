"""Features of the engine against an engine without them, on real networks with random requests."""

import dataclasses

import numpy as np
import pytest

from mesh_transformer.config import Config
from tests.conftest import SMALL
from tests.support.mixes import (
    GUESSES,
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


@pytest.mark.quick(2)
@pytest.mark.parametrize("seed", range(5))
def test_features_change_no_bit_in_fixed_shapes(networks, seed):
    features, different, _ = compare(networks, seed)
    assert not different, features


@pytest.mark.quick(1)
@pytest.mark.parametrize("networks", [(1, False, 0), (4, False, 2)], indirect=True, scope="module")
@pytest.mark.parametrize("seed", range(2))
def test_otherwise_features_change_tokens_only_where_logits_are_nearly_equal(networks, seed):
    """Chunks, kept beginnings and guesses against one request at a time without any of them."""
    network, rng = networks.network, np.random.default_rng(100 + seed)
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
