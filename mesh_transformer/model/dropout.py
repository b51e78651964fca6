"""Dropout (Srivastava 2014) with the same masks on every mesh and after every resumption.

A mask depends only on the config's seed, the step, the layer, the sequence's index in the update,
and the positions within the sequence, the heads and the width.  It does not depend on the devices.

Array names end in their shape: A microbatches, B batch, T query, S key, D model, H heads (of one
device, with `Manual`).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mesh_transformer.mesh.parallel import Parallel

# Drops attention probabilities: (probs_BHTS, first query position, first key position) -> probs.
DropProbs = Callable[[Array, int, int], Array]
DROPOUT = 0xD809  # folded into the seed, so that the numbers are not those of the initial weights
PROBS, ATTENTION, FEED_FORWARD = range(3)  # the places in a layer, each with masks of its own


def drop_at(drop: DropProbs, query: int, key: int) -> Callable[[Array], Array]:
    """Return `drop` for the probabilities of a block that begins at these positions."""
    return lambda probs_BHTS: drop(probs_BHTS, query, key)


def sequence_keys(seed: int, step: Array, shape: tuple[int, int]) -> Array:
    """Return the PRNG keys of the sequences of an update, [A, B].

    Args:
      seed: the config's seed.
      step: number of completed updates.
      shape: (A, B), where B counts the sequences of all replicas.
    """
    root = jax.random.fold_in(jax.random.key(seed), DROPOUT)
    index_AB = jnp.arange(shape[0] * shape[1]).reshape(shape)
    return _fold(jax.random.fold_in(root, step), index_AB)


def _fold(keys: Array, numbers: Array | int) -> Array:
    """Fold numbers into PRNG keys; the shapes of the two are broadcast against each other."""
    numbers = jnp.asarray(numbers)
    shape = jnp.broadcast_shapes(keys.shape, numbers.shape)
    flat = (jnp.broadcast_to(x, shape).ravel() for x in (keys, numbers))
    return jax.vmap(jax.random.fold_in)(*flat).reshape(shape)


def drop_entries(x: Array, kept: Array, rate: float) -> Array:
    """Return x / (1 - rate) where `kept` is true, else 0.

    The factor is in f32, in which it is exact enough; rounded to bf16 it would change the mean.
    """
    return jnp.where(kept, (x.astype(jnp.float32) / (1 - rate)).astype(x.dtype), 0)


class Dropout(NamedTuple):
    """The random numbers of one microbatch, for the embedding or for one layer.

    Attributes:
      key_B: a PRNG key per sequence.
    """

    key_B: Array

    def of_layer(self, number: Array | int) -> "Dropout":
        """Return the random numbers of a layer; call this on those of the microbatch."""
        return Dropout(_fold(self.key_B, number))

    def kept(self, place: int, rate: float, length: int, width: int) -> Array:
        """Return whether each entry of activations is kept, bool [B, T, D].

        Args:
          place: the place in the layer, such as `ATTENTION`.
          rate: the probability of an entry to be dropped.
          length: T, the number of positions.
          width: D.
        """

        def one(key: Array) -> Array:
            return jax.random.bernoulli(key, 1 - rate, (length, width))

        return jax.vmap(one)(_fold(self.key_B, place))

    def drop_probs(self, rate: float, length: int, par: Parallel) -> DropProbs:
        """Return a function that drops attention probabilities.

        Args:
          rate: the probability that a probability becomes 0.
          length: number of positions per sequence.
        """
        key_B = _fold(self.key_B, PROBS)

        def drop(probs_BHTS: Array, query: int, key: int) -> Array:
            heads, queries, keys = probs_BHTS.shape[1:]
            key_BH = _fold(key_B[:, None], par.rank() * heads + jnp.arange(heads))
            key_BHT = _fold(key_BH[..., None], query + jnp.arange(queries))

            def one(row: Array) -> Array:  # all keys of one query, of which a block uses some
                return jax.random.bernoulli(row, 1 - rate, (length,))[key : key + keys]

            kept_BHTS = jax.vmap(one)(key_BHT.ravel()).reshape(probs_BHTS.shape)
            return drop_entries(probs_BHTS, kept_BHTS, rate)

        return drop
