"""Prompts in chunks, and beginnings that are kept: the answers of the engine on a real network."""

import jax
import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.transformer_shard import CausalTransformer
from tests.conftest import SMALL
from tests.support.mixes import PLAIN, Features, answers, random_requests, random_sizes


@pytest.fixture(scope="module", params=[1, 4], ids=["one device", "2 x 2 devices"])
def network(request):
    mesh = {"cores_per_replica": min(request.param, 2), "tpu_size": request.param}
    config = Config(**(SMALL | {"seq": 128, "n_vocab": 64} | mesh))
    return CausalTransformer(config, devices=jax.devices()[: request.param])


def compare(network, seed):
    """Return a random mix's answers with random features, and without features or neighbours."""
    rng = np.random.default_rng(seed)
    requests = random_requests(rng, network.config.n_vocab, network.config.window)
    count = len(requests)
    features, sizes = Features.random(rng), random_sizes(rng, count)
    actual = answers(network, requests, features, sizes, fixed_shapes=True)
    return actual, answers(network, requests, PLAIN, [1] * count, fixed_shapes=True)


@pytest.mark.quick(3)
@pytest.mark.parametrize("seed", range(12))
def test_features_change_no_bit_in_fixed_shapes(network, seed):
    actual, expected = compare(network, seed)
    assert actual == expected  # tokens and logprobs
