"""The attention backend `blocks`: exact causal attention whose memory is linear in the length.

A loop runs over pairs of a block of queries and a block of keys, and leaves out pairs that the mask
hides as a whole.  The forward pass updates the softmax of a block of queries with each block of
keys (online softmax, Milakov 2018; Rabe 2021).  It saves one number per query, the logarithm of the
softmax's denominator, from which the backward pass recomputes each block's probabilities
(FlashAttention-2, Dao 2023).  Everything is plain JAX, for devices without a kernel.

If positions are split over cp, keys and values go round its devices (ring attention, Liu 2023), and
so do their gradients in the backward pass.

Array names end in their shape: B batch, L positions of this device, H query heads, J key heads (a
divisor of H), N blocks, T queries of a block, S keys of a block, K head size.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer.mesh.parallel import Parallel
from mesh_transformer.model.dropout import KEYS, drop_probs
from mesh_transformer.util import InputError

ATTENDED = "attended"  # checkpoint_name of the arrays that attention saves for its backward pass
MASKED = -1e10  # not -inf: a fully masked row must stay finite
BLOCK, LONG_BLOCK = 256, 512  # positions; the first is faster on CPUs, the second on accelerators


def block_length(length: int, cp: int = 1) -> int:
    """Return the number of positions of a block, for sequences of a length.

    Args:
      cp: the number of devices that split the positions, in two chunks each (`Positions.cut`).
        Blocks then divide the chunks.

    Raises:
      InputError: if no block of a reasonable size divides them.
    """
    most = BLOCK if length < 8192 else LONG_BLOCK
    if cp == 1:
        return min(length, most)
    chunk = length // (2 * cp)
    unit = KEYS if chunk % KEYS == 0 else 1
    size = next(size for size in range(most, 0, -unit) if chunk % size == 0)
    if size < min(chunk, KEYS):
        raise InputError(
            f"sequences of {length} tokens have chunks of {chunk} with context_parallel {cp}, "
            f"which no block of {KEYS} to {most} tokens divides; use a multiple of {2 * cp * KEYS}"
        )
    return size


def check_lengths(lengths: Iterable[int], cp: int, *, drops: bool) -> None:
    """Check that a ring of `cp` devices can have sequences of some lengths.

    Args:
      drops: whether attention has dropout.

    Raises:
      InputError: if it cannot.
    """
    for length in lengths:
        if block_length(length, cp) % KEYS and drops:
            raise InputError(
                f"dropout_attention with context_parallel {cp} requires sequences that are a "
                f"multiple of {2 * cp * KEYS} tokens, but they have {length}"
            )


class Pair(NamedTuple):
    """A block of queries and one of keys.

    Attributes:
      query, key: their indices on the devices that have them.
      query_number, key_number: their numbers in the whole sequence.
    """

    query: Any
    key: Any
    query_number: Any
    key_number: Any


@functools.cache
def block_pairs(length: int, size: int, window: int, cp: int = 1) -> dict[int, Pair]:
    """Return the pairs of a block of queries and one of keys that are not masked as a whole.

    Args:
      length: of the whole sequence.
      size: of a block, the result of `block_length`.
      window: the number of positions that a query may attend to, including its own.
      cp: as in `block_length`.

    Returns:
      A dict from a distance along cp to the pairs of each device whose keys are on the device at
      that distance before it, int32 [cp, pairs].  Devices with fewer pairs get masked ones.
    """
    chunks = np.array_split(np.arange(-(-length // size)), 2 * cp)
    numbers = [np.concatenate((chunks[rank], chunks[-1 - rank])) for rank in range(cp)]
    masked = 0, 0, 0, 1  # keys after the queries

    def pairs(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        first = np.maximum(queries * size - window + 1, 0) // size
        at, to = np.nonzero((keys <= queries[:, None]) & (keys >= first[:, None]))
        return np.stack((at, to, queries[at], keys[to]), axis=-1)

    result = {}
    for distance in range(cp):
        own = [pairs(numbers[rank], numbers[rank - distance]) for rank in range(cp)]
        if most := max(map(len, own)):
            padded = np.tile(np.array(masked, np.int32), (cp, most, 1))
            for row, rows in zip(padded, own, strict=True):
                row[: len(rows)] = rows
            result[distance] = Pair(*np.moveaxis(padded, -1, 0))
    return result


def capped(x: Array, cap: float | None) -> Array:
    """Return x bounded smoothly by -cap and cap (Bello 2016), or x itself if `cap` is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def attend_in_blocks(
    window: int, cap: float | None, rate: float, par: Parallel
) -> Callable[..., Array]:
    """Return a differentiable function of q, k, v, texts and PRNG keys that computes attention.

    Its arguments are q_BLHK, k_BJLK, v_BJLK; None or, as in `attention.attend_function`, the texts
    of all positions of the whole sequences; and key_BH or None, as in `dropout.drop_probs`.  It
    returns [B, L, H, K].

    Args:
      window: as in `block_pairs`.
      cap: bound of the scores, as in `capped`.
      rate: the probability that dropout sets a probability to 0.
    """

    @jax.custom_vjp
    def run(q: Array, k: Array, v: Array, text: Array | None, keys: Array | None) -> Array:
        return forward(q, k, v, text, keys)[0]

    def blocks_of(q_BLHK: Array, text: Array | None, key_BH: Array | None) -> _Blocks:
        return _Blocks(q_BLHK, text, key_BH, window, cap, rate, par)

    def forward(
        q_BLHK: Array, k_BJLK: Array, v_BJLK: Array, text: Array | None, key_BH: Array | None
    ) -> tuple[Array, Any]:
        blocks = blocks_of(q_BLHK, text, key_BH)

        def body(k: Array, v: Array, carry: Any, pair: Pair) -> tuple[Any, None]:
            most_BHT, sum_BHT, attended_BHTK = (_block(x, pair.query) for x in carry)
            scores_BHTS = blocks.scores(_block(blocks.q, pair.query), _block(k, pair.key), pair)
            new_BHT = jnp.maximum(most_BHT, scores_BHTS.max(axis=-1))
            probs_BHTS = jnp.exp(scores_BHTS - new_BHT[..., None])
            factor_BHT = jnp.exp(most_BHT - new_BHT)
            sum_BHT = sum_BHT * factor_BHT + probs_BHTS.sum(axis=-1)
            kept_BHTS = blocks.dropped(probs_BHTS, pair).astype(v.dtype)
            added_BHTK = _with_keys("BJRS,BJSK->BJRK", kept_BHTS, _block(v, pair.key))
            attended_BHTK = attended_BHTK * factor_BHT[..., None] + added_BHTK
            new = new_BHT, sum_BHT, attended_BHTK
            return tuple(_put(x, y, pair.query) for x, y in zip(carry, new, strict=True)), None

        zeros = blocks.zeros(blocks.q)
        carry: Any = zeros[..., 0] + MASKED, zeros[..., 0], zeros
        moving, before = (blocks.split(k_BJLK), blocks.split(v_BJLK)), 0
        for distance, pairs in blocks.pairs.items():
            moving, before = par.shift(moving, distance - before), distance
            carry, _ = lax.scan(functools.partial(body, *moving), carry, pairs)
        most, total, attended = carry
        attended = (attended / total[..., None]).astype(q_BLHK.dtype)
        attended_BLHK = checkpoint_name(jnp.moveaxis(blocks.joined(attended), 1, 2), ATTENDED)
        log_sum_BHL = checkpoint_name(blocks.joined(most + jnp.log(total)), ATTENDED)
        return attended_BLHK, (q_BLHK, k_BJLK, v_BJLK, text, key_BH, attended_BLHK, log_sum_BHL)

    def backward(saved: Any, g_BLHK: Array) -> tuple[Array | None, ...]:
        q_BLHK, k_BJLK, v_BJLK, text, key_BH, attended_BLHK, log_sum_BHL = saved
        blocks = blocks_of(q_BLHK, text, key_BH)
        # The sum over keys of probabilities times their gradients.
        mean_BLH = (g_BLHK.astype(jnp.float32) * attended_BLHK.astype(jnp.float32)).sum(axis=-1)
        g_BHLK, mean_BHL = (jnp.moveaxis(x, 2, 1) for x in (g_BLHK, mean_BLH))
        g, log_sum, mean = map(blocks.split, (g_BHLK, log_sum_BHL, mean_BHL))

        def body(k: Array, v: Array, carry: Any, pair: Pair) -> tuple[Any, None]:
            q_BHTK, g_BHTK = _block(blocks.q, pair.query), _block(g, pair.query)
            k_BJSK, v_BJSK = _block(k, pair.key), _block(v, pair.key)
            scores_BHTS = blocks.scores(q_BHTK, k_BJSK, pair)
            probs_BHTS = jnp.exp(scores_BHTS - _block(log_sum, pair.query)[..., None])
            kept_BHTS = blocks.dropped(probs_BHTS, pair).astype(g_BHTK.dtype)
            d_v_BJSK = _for_keys(kept_BHTS, g_BHTK, v_BJSK)
            d_probs_BHTS = _with_keys("BJRK,BJSK->BJRS", g_BHTK, v_BJSK)
            d_probs_BHTS = blocks.dropped(d_probs_BHTS, pair)
            d_scores_BHTS = probs_BHTS * (d_probs_BHTS - _block(mean, pair.query)[..., None])
            if cap is not None:
                d_scores_BHTS *= 1 - jnp.square(scores_BHTS / cap)
            d_scores_BHTS = (d_scores_BHTS * blocks.scale).astype(q_BHTK.dtype)
            d_q_BHTK = _with_keys("BJRS,BJSK->BJRK", d_scores_BHTS, k_BJSK)
            d_k_BJSK = _for_keys(d_scores_BHTS, q_BHTK, k_BJSK)
            d_q, d_k, d_v = carry
            return (
                _put(d_q, _block(d_q, pair.query) + d_q_BHTK, pair.query),
                _put(d_k, _block(d_k, pair.key) + d_k_BJSK, pair.key),
                _put(d_v, _block(d_v, pair.key) + d_v_BJSK, pair.key),
            ), None

        (k, v), before = map(blocks.split, (k_BJLK, v_BJLK)), 0
        d_q, d_k, d_v = map(blocks.zeros, (blocks.q, k, v))
        for distance, pairs in blocks.pairs.items():
            k, v, d_k, d_v = par.shift((k, v, d_k, d_v), distance - before)
            (d_q, d_k, d_v), _ = lax.scan(functools.partial(body, k, v), (d_q, d_k, d_v), pairs)
            before = distance
        d_k, d_v = (blocks.joined(x).astype(k_BJLK.dtype) for x in (d_k, d_v))
        d_q_BLHK = jnp.moveaxis(blocks.joined(d_q), 1, 2).astype(q_BLHK.dtype)
        return (d_q_BLHK, *par.shift((d_k, d_v), -before), None, None)

    run.defvjp(forward, backward)
    return run


class _Blocks:
    """Arrays of a device's positions in blocks, [B, H, N, T, ...] each, and the blocks' scores.

    Attributes:
      q: the queries.
      pairs: the result of `block_pairs` for this device.
      scale: the factor of the scores.
    """

    def __init__(
        self,
        q_BLHK: Array,
        text: Array | None,
        key_BH: Array | None,
        window: int,
        cap: float | None,
        rate: float,
        par: Parallel,
    ):
        self.length = q_BLHK.shape[1]
        self.size = block_length(self.length * par.cp, par.cp)
        if par.cp > 1:
            check_lengths([self.length * par.cp], par.cp, drops=key_BH is not None)
        self.q = self.split(jnp.moveaxis(q_BLHK, 2, 1))
        self.texts = None if text is None else self.split(text[:, None])
        self.key_BH = key_BH
        self.window, self.cap, self.rate, self.par = window, cap, rate, par
        self.scale = q_BLHK.shape[-1] ** -0.5
        rank, length = par.cp_rank(), self.length * par.cp
        pairs = {
            distance: jax.tree.map(lambda x: jnp.asarray(x)[rank], own)
            for distance, own in block_pairs(length, self.size, window, par.cp).items()
        }
        # If the pairs did not depend on the queries, JAX would compute the masks of all pairs once,
        # outside the loop over layers, and keep them: quadratic memory.
        _, self.pairs = lax.optimization_barrier((q_BLHK[:1, :1, :1, :1], pairs))

    def split(self, x_BHL: Array) -> Array:
        """Return an array [B, H, L, ...] as [B, H, N, T, ...], with zeros in the last block."""
        padding = -x_BHL.shape[2] % self.size
        rest = [(0, 0)] * (x_BHL.ndim - 3)
        x_BHL = jnp.pad(x_BHL, ((0, 0), (0, 0), (0, padding), *rest))
        return x_BHL.reshape(*x_BHL.shape[:2], -1, self.size, *x_BHL.shape[3:])

    def joined(self, x_BHNT: Array) -> Array:
        """Undo `split`."""
        shape = x_BHNT.shape
        return x_BHNT.reshape(*shape[:2], -1, *shape[4:])[:, :, : self.length]

    def zeros(self, x: Array) -> Array:
        """Return f32 zeros like queries or keys."""
        return self.par.zeros(x.shape, jnp.float32, "dp", "mp", "cp")

    def scores(self, q_BHTK: Array, k_BJSK: Array, pair: Pair) -> Array:
        """Return the scores of a block of queries for a block of keys, f32 [B, H, T, S].

        The padding comes after all queries, which therefore do not attend to it.
        """
        scores_BHTS = _with_keys("BJRK,BJSK->BJRS", q_BHTK, k_BJSK)
        scores_BHTS = capped(scores_BHTS * self.scale, self.cap)
        index = jnp.arange(self.size)
        blocks = pair.query_number - pair.key_number
        distance_TS = blocks * self.size + index[:, None] - index
        seen_BHTS = ((distance_TS >= 0) & (distance_TS < self.window))[None, None]
        if self.texts is not None:
            query_BHT = _block(self.texts, pair.query_number)
            key_BHS = _block(self.texts, pair.key_number)
            seen_BHTS &= query_BHT[..., :, None] == key_BHS[..., None, :]
        return jnp.where(seen_BHTS, scores_BHTS, MASKED)

    def dropped(self, x_BHTS: Array, pair: Pair) -> Array:
        """Apply the dropout of probabilities."""
        if self.key_BH is None:
            return x_BHTS
        first = pair.query_number * self.size, pair.key_number * self.size
        return drop_probs(x_BHTS, self.key_BH, self.rate, *first)


def _block(x: Array, number: Array) -> Array:
    return lax.dynamic_index_in_dim(x, number, axis=2, keepdims=False)


def _put(x: Array, block: Array, number: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, block, number, axis=2)


def _with_keys(equation: str, x: Array, k_BJSK: Array) -> Array:
    """Multiply an array of query heads, [B, H, T, ...], by keys or values that they share.

    The queries of a group of heads are rows of one matrix, R of them.
    """
    rows = x.reshape(*k_BJSK.shape[:2], -1, x.shape[3])
    return _product(equation, rows, k_BJSK).reshape(*x.shape[:3], -1)


def _for_keys(x_BHTS: Array, y_BHTK: Array, k_BJSK: Array) -> Array:
    """Return the products of two arrays of query heads, summed over queries, like `k_BJSK`."""
    rows = (x.reshape(*k_BJSK.shape[:2], -1, x.shape[3]) for x in (x_BHTS, y_BHTK))
    return _product("BJRS,BJRK->BJSK", *rows)


def _product(equation: str, *arrays: Array) -> Array:
    return jnp.einsum(equation, *arrays, preferred_element_type=jnp.float32)
