"""Embeddings of texts: independence of the mesh and of padding, and refused arguments."""

import jax
import numpy as np
import pytest

from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.generation.test_decode import PLACES, network_of
from tests.model.test_transformer import small_config


def check_agreement(one, other):
    """Compare the embeddings of two networks with each other, and with those of a text alone."""
    rng = np.random.default_rng(1)
    tokens, lengths = rng.integers(0, one.config.n_vocab, (3, 12)), [12, 1, 7]
    for pooling in ("mean", "last"):
        expected, actual = (network.embed(tokens, lengths, pooling) for network in (one, other))
        assert expected.shape == (3, one.config.d_model)
        assert expected.dtype == np.float32
        # Normed values of order 1, with sums in another order.
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)
        short = other.embed(tokens[2:, :7], [7], pooling)
        np.testing.assert_allclose(short, expected[2:], rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES[1:3])
def test_embeddings_depend_on_neither_mesh_nor_padding(place):
    config = small_config(norm="rmsnorm")
    check_agreement(network_of(config), network_of(config, place))


@pytest.mark.slow
def test_embeddings_average_what_the_shards_of_the_head_read():
    networks = []
    for mp, kind in ((4, "layernorm-desync"), (1, "layernorm")):
        network = CausalTransformer(small_config(norm=kind, cores_per_replica=mp, tpu_size=2 * mp))
        norm = network.state["params"]["proj"]["projection/norm"]
        for seed, name in enumerate(sorted(norm)):  # at first all shards are equal
            x = np.random.default_rng(seed).normal(size=(4, 64)).astype(np.float32)
            own = x if mp == 4 else x.mean(axis=0)
            norm[name] = jax.device_put(own, norm[name].sharding)
        networks.append(network)
    check_agreement(*networks)


def test_wrong_arguments_are_refused():
    network = network_of(small_config())
    tokens = np.ones((2, 4), int)
    for lengths, pooling, problem in [
        ([1, 2, 3], "mean", r"lengths has dtype int64 and shape \(3,\), expected 2 integers"),
        ([1.5, 2], "mean", "lengths has dtype float64"),
        ([0, 2], "mean", "lengths has values from 0 to 2, expected 1 to 4"),
        ([5, 2], "last", "lengths has values from 2 to 5, expected 1 to 4"),
        ([1, 2], "first", "pooling is 'first', expected one of mean, last"),
    ]:
        with pytest.raises(InputError, match=problem):
            network.embed(tokens, lengths, pooling)
    with pytest.raises(InputError, match="tokens has dtype float64"):
        network.embed(tokens / 2, [1, 2])
