"""Which heads of queries, keys and values each mp shard holds.

Query heads are divided as evenly as possible, and each shard computes the keys and values that its
queries attend to.  If mp does not divide the key heads, their matrices are on all shards
(`copies_key_heads`), and a key head may be computed by several.

With `Auto`, arrays hold the heads of all shards, one shard after the other.

Array names end in their shape: B batch, T query, S key, H heads, K head size.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mesh_transformer.config_model import Model
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
    first = np.arange(shards) * own
    last = np.minimum((first + own - 1) // group, config.key_heads - 1)
    return int(np.max(last - first // group)) + 1


class Heads:
    """The division of one layer's heads over the shards of `par`."""

    def __init__(self, config: Model, par: Parallel):
        self.par = par
        self.group, self.all = config.group, config.key_heads or 0
        self.copied = config.copies_key_heads
        self.queries = query_heads(config, par.shards)
        self.keys = key_heads(config, par.shards)
        rank: Any = par.rank() if par.mp > 1 else np.arange(par.shards // par.mp)
        self.rank = jnp.reshape(rank, (-1, 1))  # of each shard in the array

    @property
    def first_query(self) -> Array:
        """The number of each shard's first query head, [shards in the array, 1]."""
        return self.rank * self.queries

    @property
    def first_key(self) -> Array:
        """The number of the first key head that each shard keeps, [shards in the array, 1]."""
        return self._first_key(self.rank)

    def _first_key(self, rank: Array) -> Array:
        return jnp.minimum(rank * self.queries // self.group, self.all - self.keys)

    def kept(self, x: Array) -> Array:
        """Return the last axis's columns of the key heads that each shard keeps, of those of all.

        Each shard keeps the same number, so that some may keep one that none of its queries needs.
        """
        size = x.shape[-1] // self.all

        def of_shard(first: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, first * size, self.keys * size, axis=-1)

        x = jax.vmap(of_shard, out_axes=-2)(self.first_key[:, 0])
        x = x.reshape(*x.shape[:-2], -1)
        return self.par.shard(x, *(None,) * (x.ndim - 1), "mp")

    def shares(self, columns: int) -> Array:
        """Return, for each of the columns that `kept` returns, 1 over the shards that keep it.

        Args:
          columns: the number of columns of all key heads.
        """
        numbers = self._first_key(jnp.arange(self.par.shards)[:, None]) + np.arange(self.keys)
        copies = jnp.zeros(self.all).at[numbers].add(1)
        return self.kept(jnp.repeat(1 / copies, columns // self.all))

    def _picked(self, x_BTHK: Array, index: Array) -> Array:
        """Return each shard's heads with these indices, [shards, heads], of those that it has."""
        B, T, H, K = x_BTHK.shape
        x = x_BTHK.reshape(B, T, len(index), H // len(index), K)

        def of_shard(x_BTHK: Array, index: Array) -> Array:
            return jnp.take(x_BTHK, index, axis=2, mode="clip")

        return jax.vmap(of_shard, (2, 0), 2)(x, index).reshape(B, T, -1, K)

    def of_queries(self, x_BTHK: Array) -> Array:
        """Return the keys or values that each query head attends to, of the kept ones.

        Those of padding are 0, so that what belongs to padding gets no gradient.
        """
        if not self.copied:
            return jnp.repeat(x_BTHK, self.group, axis=2) if self.group > 1 else x_BTHK
        number = (self.first_query + np.arange(self.queries)) // self.group
        x_BTHK = self._picked(x_BTHK, number - self.first_key)
        return jnp.where((number < self.all).reshape(-1, 1), x_BTHK, 0)

    def divisible(self, x_BTHK: Array, number: int) -> Array:
        """Return keys or values that are repeated until `number` divides those of each shard."""
        own, each = x_BTHK.shape[2] // len(self.rank), self.queries
        times = number // math.gcd(own, number)
        times = times if each // own % times == 0 else each // own
        return jnp.repeat(x_BTHK, times, axis=2) if times > 1 else x_BTHK

    def by_key(self, q_BTHK: Array) -> Array:
        """Return queries in the order of the kept keys, as [B, T, keys, group, K].

        A shard may lack some of a key's queries; others are in their place.
        """
        if self.copied:
            number = self.first_key * self.group + np.arange(self.keys * self.group)
            q_BTHK = self._picked(q_BTHK, number - self.first_query)
        B, T, H, K = q_BTHK.shape
        return q_BTHK.reshape(B, T, H // self.group, self.group, K)

    def by_query(self, x_BTHGK: Array) -> Array:
        """Return the results for the queries that `by_key` arranged, as [B, T, H, K]."""
        B, T, H, G, K = x_BTHGK.shape
        x_BTHK = x_BTHGK.reshape(B, T, H * G, K)
        if not self.copied:
            return x_BTHK
        number = self.first_query + np.arange(self.queries)
        return self._picked(x_BTHK, number - self.first_key * self.group)
