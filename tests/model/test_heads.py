"""The division of heads over mp shards, against a count head by head."""

import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model.heads import Heads


@pytest.mark.parametrize(
    ("heads", "keys", "mp"),
    [(3, 1, 2), (8, 1, 4), (8, 2, 8), (9, 3, 2), (9, 3, 8), (12, 2, 5), (64, 8, 16), (64, 8, 3)],
)
def test_each_shard_has_the_keys_of_its_queries_and_no_more(heads, keys, mp):
    """All shards have the same number of keys, the most that any of them needs."""
    sizes = {"layers": 1, "n_vocab": 2, "d_model": 8, "n_heads": heads, "head_size": 4}
    config = Config(**sizes, key_heads=keys, block="llama", cores_per_replica=mp)
    par = Auto()
    par.shards = mp  # one device with the heads of all shards
    split, group, own = Heads(config, par), heads // keys, -(-heads // mp)
    key_of_query = np.arange(mp * own) // group
    needed = [set(numbers[numbers < keys]) for numbers in key_of_query.reshape(mp, own)]
    assert split.keys == max(map(len, needed))
    key_of_kept = np.asarray(split.kept(jnp.arange(keys)))
    assert all(map(set.issubset, needed, key_of_kept.reshape(mp, -1).tolist()))

    x_BTHK = np.random.default_rng(0).normal(size=(2, 5, keys, 4)).astype(np.float32)
    kept = split.kept(jnp.asarray(x_BTHK.reshape(2, 5, -1))).reshape(2, 5, -1, 4)
    np.testing.assert_array_equal(kept, x_BTHK[:, :, key_of_kept])
    # Each key counts once in a sum over all shards, up to the rounding of 16 fractions.
    once = np.bincount(key_of_kept, np.asarray(split.shares(keys)))
    np.testing.assert_allclose(once, 1, rtol=1e-6)

    queries = np.zeros((2, 5, mp * own, 4), np.float32)
    queries[:, :, :heads] = x_BTHK[:, :, key_of_query[:heads]]
    np.testing.assert_array_equal(split.of_queries(kept), queries)
    # Each query is beside its key, to which it is equal here, and comes back from there.
    by_key = split.by_key(jnp.asarray(queries))
    beside = jnp.where(by_key == kept[:, :, :, None], by_key, 0)
    np.testing.assert_array_equal(split.by_query(beside)[:, :, :heads], queries[:, :, :heads])
