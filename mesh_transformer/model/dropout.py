"""Dropout (Srivastava 2014) with the same masks on every mesh and after every resumption.

A mask depends only on the config's seed, the step, the layer, the sequence's index in the update,
and the positions within the sequence, the heads and the width.  It does not depend on the devices.

Array names end in their shape: A microbatches, B batch, T query, S key, D model, H heads (of one
device, with `Manual`), G groups of keys.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mesh_transformer.mesh.parallel import Parallel

KEYS = 128  # keys whose masks are drawn at once, so that a block of keys has the masks of the whole
DROPOUT = 0xD809  # folded into the seed, so that the numbers are not those of the initial weights
PROBS, ATTENTION, FEED_FORWARD = range(3)  # the places in a layer, each with masks of its own


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

    def head_keys(self, heads: int, par: Parallel) -> Array:
        """Return a PRNG key per sequence and attention head, [B, H], for `drop_probs`.

        Args:
          heads: H.
        """
        key_B = _fold(self.key_B, PROBS)
        return _fold(key_B[:, None], par.rank() * heads + jnp.arange(heads))


def drop_probs(
    probs_BHTS: Array, key_BH: Array, rate: float, query: Array | int = 0, key: Array | int = 0
) -> Array:
    """Drop attention probabilities.

    Args:
      key_BH: those of `Dropout.head_keys`.
      rate: the probability that a probability becomes 0.
      query: the position of the first query.
      key: the position of the first key, a multiple of 128 (`KEYS`).
    """
    queries, keys = probs_BHTS.shape[2:]
    key_BHT = _fold(key_BH[..., None], query + jnp.arange(queries))
    key_BHTG = _fold(key_BHT[..., None], key // KEYS + jnp.arange(-(-keys // KEYS)))

    def one(group: Array) -> Array:
        return jax.random.bernoulli(group, 1 - rate, (KEYS,))

    kept_BHTS = jax.vmap(one)(key_BHTG.ravel()).reshape(*key_BHT.shape, -1)[..., :keys]
    return drop_entries(probs_BHTS, kept_BHTS, rate)
