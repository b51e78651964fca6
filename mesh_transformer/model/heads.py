"""Which heads of queries, keys and values each mp shard holds.

Query heads are divided as evenly as possible.  If mp divides the key heads, each shard computes
those of its queries.  Otherwise all shards compute all keys and values (`copies_key_heads`), and
each keeps those that its queries attend to, so that a key head may be on several shards.

With `Auto`, arrays hold the heads of all shards, one shard after the other.

Array names end in their shape: B batch, T query, S key, H heads, K head size.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from mesh_transformer.config import Model
from mesh_transformer.mesh.declaration import padded_size
from mesh_transformer.mesh.parallel import Parallel


def query_heads(config: Model, shards: int) -> int:
    """Return the number of query heads per shard, including padding."""
    return padded_size(config.n_heads, shards) // shards


def key_heads(config: Model, shards: int) -> int:
    """Return the number of heads of keys and values that each shard keeps, including padding."""
    group, own = config.group, query_heads(config, shards)
    assert config.key_heads is not None
    if group == 1 or config.key_heads % shards == 0:
        return padded_size(config.key_heads, shards) // shards
    return max(_last(group, own, shard) - shard * own // group + 1 for shard in range(shards))


def _last(group: int, own: int, shard: int) -> int:
    return (shard * own + own - 1) // group


class Heads:
    """The division of one layer's heads over the shards of `par`."""

    def __init__(self, config: Model, par: Parallel):
        self.group, self.all = config.group, config.key_heads or 0
        self.copied = config.copies_key_heads
        self.queries = query_heads(config, par.shards)
        self.keys = key_heads(config, par.shards)
        self.rank: Any = par.rank() if par.mp > 1 else np.arange(par.shards // par.mp)

    def _index(self, local: Any, size: int) -> Any:
        """Return the indices of heads in an array with `size` heads per shard."""
        shards = np.arange(np.size(self.rank))[:, None]
        return (shards * size + local).reshape(-1)

    @property
    def _first(self) -> Any:
        """The number of each shard's first query head, [shards in the array, 1]."""
        return jnp.reshape(self.rank, (-1, 1)) * self.queries

    def kept(self, x_BTHK: Array) -> Array:
        """Return the keys or values that each shard keeps, of all of them."""
        if not self.copied:
            return x_BTHK
        number = self._first // self.group + np.arange(self.keys)
        return jnp.take(x_BTHK, jnp.clip(number, 0, self.all - 1).reshape(-1), axis=2)

    def of_queries(self, x_BTHK: Array) -> Array:
        """Return the keys or values that each query head attends to, of all of them.

        Those of padding are 0, so that what belongs to padding gets no gradient.
        """
        if not self.copied:
            return jnp.repeat(x_BTHK, self.group, axis=2) if self.group > 1 else x_BTHK
        number = (self._first + np.arange(self.queries)).reshape(-1) // self.group
        x_BTHK = jnp.take(x_BTHK, jnp.clip(number, 0, self.all - 1), axis=2)
        return jnp.where((number < self.all)[:, None], x_BTHK, 0)

    def by_key(self, q_BTHK: Array) -> Array:
        """Return queries in the order of the kept keys, as [B, T, keys, group, K].

        A shard may lack some of a key's queries; others are in their place.
        """
        if self.copied:
            local = np.arange(self.keys * self.group) - self._first % self.group
            index = self._index(jnp.clip(local, 0, self.queries - 1), self.queries)
            q_BTHK = jnp.take(q_BTHK, index, axis=2)
        B, T, H, K = q_BTHK.shape
        return q_BTHK.reshape(B, T, H // self.group, self.group, K)

    def by_query(self, x_BTHGK: Array) -> Array:
        """Return the results for the queries that `by_key` arranged, as [B, T, H, K]."""
        B, T, H, G, K = x_BTHGK.shape
        x_BTHK = x_BTHGK.reshape(B, T, H * G, K)
        if not self.copied:
            return x_BTHK
        local = np.arange(self.queries) + self._first % self.group
        return jnp.take(x_BTHK, self._index(local, self.keys * self.group), axis=2)
