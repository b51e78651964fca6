"""The attention backend `blocks`: exact causal attention whose memory is linear in the length.

A loop runs over pairs of a block of queries and a block of keys, and leaves out pairs that the mask
hides as a whole.  The forward pass updates the softmax of a block of queries with each block of
keys (online softmax, Milakov 2018; Rabe 2021).  It saves one number per query, the logarithm of the
softmax's denominator, from which the backward pass recomputes each block's probabilities
(FlashAttention-2, Dao 2023).  Everything is plain JAX, for devices without a kernel.

Array names end in their shape: B batch, L positions, H heads, N blocks, T queries of a block, S
keys of a block, K head size.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer.mesh.parallel import Parallel
from mesh_transformer.model.dropout import drop_probs

ATTENDED = "attended"  # checkpoint_name of the arrays that attention saves for its backward pass
MASKED = -1e10  # not -inf: a fully masked row must stay finite
BLOCK, LONG_BLOCK = 256, 512  # positions; the first is faster on CPUs, the second on accelerators


def block_length(length: int) -> int:
    """Return the number of positions of a block, for sequences of a length."""
    return min(length, BLOCK if length < 8192 else LONG_BLOCK)


def block_pairs(length: int, window: int) -> np.ndarray:
    """Return the blocks of queries and keys of which some pair is not masked, int32 [pairs, 2].

    Args:
      window: the number of positions that a query may attend to, including its own.
    """
    size = block_length(length)
    return np.array(
        [
            (query, key)
            for query in range(-(-length // size))
            for key in range(max(0, query * size - window + 1) // size, query + 1)
        ],
        np.int32,
    )


def attend_in_blocks(
    window: int, cap: float | None, rate: float, par: Parallel
) -> Callable[..., Array]:
    """Return a differentiable function of q, k, v, texts and PRNG keys that computes attention.

    Its arguments are q_BLHK, k_BHLK, v_BHLK; text_BL or None, as in `attention.attend_function`;
    and key_BH or None, as in `dropout.drop_probs`.  It returns [B, L, H, K].

    Args:
      window: as in `block_pairs`.
      cap: bound of the scores, as in `attention.capped`.
      rate: the probability that dropout sets a probability to 0.
    """

    @jax.custom_vjp
    def run(q: Array, k: Array, v: Array, text: Array | None, keys: Array | None) -> Array:
        return forward(q, k, v, text, keys)[0]

    def forward(
        q_BLHK: Array, k_BHLK: Array, v_BHLK: Array, text_BL: Array | None, key_BH: Array | None
    ) -> tuple[Array, Any]:
        blocks = _Blocks(q_BLHK, k_BHLK, v_BHLK, text_BL, key_BH, window, cap, rate)

        def body(carry: Any, pair: Any) -> tuple[Any, None]:
            query, key = pair
            most_BHT, sum_BHT, attended_BHTK = (_block(x, query) for x in carry)
            scores_BHTS = blocks.scores(query, key)
            new_BHT = jnp.maximum(most_BHT, scores_BHTS.max(axis=-1))
            probs_BHTS = jnp.exp(scores_BHTS - new_BHT[..., None])
            factor_BHT = jnp.exp(most_BHT - new_BHT)
            sum_BHT = sum_BHT * factor_BHT + probs_BHTS.sum(axis=-1)
            added_BHTK = _product(
                "BHTS,BHSK->BHTK", blocks.dropped(probs_BHTS, query, key), _block(blocks.v, key)
            )
            attended_BHTK = attended_BHTK * factor_BHT[..., None] + added_BHTK
            new = new_BHT, sum_BHT, attended_BHTK
            return tuple(_put(x, y, query) for x, y in zip(carry, new, strict=True)), None

        shape = blocks.q.shape
        start = (
            par.zeros(shape[:-1], jnp.float32, "dp", "mp") + MASKED,
            par.zeros(shape[:-1], jnp.float32, "dp", "mp"),
            par.zeros(shape, jnp.float32, "dp", "mp"),
        )
        most, total, attended = lax.scan(body, start, blocks.pairs)[0]
        attended = (attended / total[..., None]).astype(q_BLHK.dtype)
        attended_BLHK = checkpoint_name(jnp.moveaxis(blocks.joined(attended), 1, 2), ATTENDED)
        log_sum_BHL = checkpoint_name(blocks.joined(most + jnp.log(total)), ATTENDED)
        saved = (q_BLHK, k_BHLK, v_BHLK, text_BL, key_BH, attended_BLHK, log_sum_BHL)
        return attended_BLHK, saved

    def backward(saved: Any, g_BLHK: Array) -> tuple[Array | None, ...]:
        q_BLHK, k_BHLK, v_BHLK, text_BL, key_BH, attended_BLHK, log_sum_BHL = saved
        blocks = _Blocks(q_BLHK, k_BHLK, v_BHLK, text_BL, key_BH, window, cap, rate)
        # The sum over keys of probabilities times their gradients.
        mean_BLH = (g_BLHK.astype(jnp.float32) * attended_BLHK.astype(jnp.float32)).sum(axis=-1)
        g_BHLK, mean_BHL = (jnp.moveaxis(x, 2, 1) for x in (g_BLHK, mean_BLH))
        g, log_sum, mean = map(blocks.split, (g_BHLK, log_sum_BHL, mean_BHL))

        def body(carry: Any, pair: Any) -> tuple[Any, None]:
            query, key = pair
            q_BHTK, g_BHTK = _block(blocks.q, query), _block(g, query)
            k_BHSK, v_BHSK = _block(blocks.k, key), _block(blocks.v, key)
            scores_BHTS = blocks.scores(query, key)
            probs_BHTS = jnp.exp(scores_BHTS - _block(log_sum, query)[..., None])
            d_v_BHSK = _product("BHTS,BHTK->BHSK", blocks.dropped(probs_BHTS, query, key), g_BHTK)
            d_probs_BHTS = _product("BHTK,BHSK->BHTS", g_BHTK, v_BHSK)
            d_probs_BHTS = blocks.dropped(d_probs_BHTS, query, key).astype(jnp.float32)
            d_scores_BHTS = probs_BHTS * (d_probs_BHTS - _block(mean, query)[..., None])
            if cap is not None:
                d_scores_BHTS *= 1 - jnp.square(scores_BHTS / cap)
            d_scores_BHTS = (d_scores_BHTS * blocks.scale).astype(q_BHTK.dtype)
            d_q_BHTK = _product("BHTS,BHSK->BHTK", d_scores_BHTS, k_BHSK)
            d_k_BHSK = _product("BHTS,BHTK->BHSK", d_scores_BHTS, q_BHTK)
            d_q, d_k, d_v = carry
            return (
                _put(d_q, _block(d_q, query) + d_q_BHTK, query),
                _put(d_k, _block(d_k, key) + d_k_BHSK, key),
                _put(d_v, _block(d_v, key) + d_v_BHSK, key),
            ), None

        zeros = [par.zeros(blocks.q.shape, jnp.float32, "dp", "mp") for _ in range(3)]
        d_q, d_k, d_v = lax.scan(body, tuple(zeros), blocks.pairs)[0]
        return (
            jnp.moveaxis(blocks.joined(d_q), 1, 2).astype(q_BLHK.dtype),
            blocks.joined(d_k).astype(k_BHLK.dtype),
            blocks.joined(d_v).astype(v_BHLK.dtype),
            None,
            None,
        )

    run.defvjp(forward, backward)
    return run


class _Blocks:
    """Queries, keys and values in blocks of positions, [B, H, N, T, K] each, and their scores.

    Attributes:
      pairs: the numbers of the blocks of queries and of keys, [pairs] each.
      scale: the factor of the scores.
    """

    def __init__(
        self,
        q_BLHK: Array,
        k_BHLK: Array,
        v_BHLK: Array,
        text_BL: Array | None,
        key_BH: Array | None,
        window: int,
        cap: float | None,
        rate: float,
    ):
        self.length = q_BLHK.shape[1]
        self.size = block_length(self.length)
        self.q, self.k, self.v = map(self.split, (jnp.moveaxis(q_BLHK, 2, 1), k_BHLK, v_BHLK))
        self.texts = None if text_BL is None else self.split(text_BL[:, None])
        self.key_BH = key_BH
        self.window, self.cap, self.rate = window, cap, rate
        self.scale = q_BLHK.shape[-1] ** -0.5
        self.pairs = tuple(block_pairs(self.length, window).T)

    def split(self, x_BHL: Array) -> Array:
        """Return an array [B, H, L, ...] as [B, H, N, T, ...], with zeros in the last block."""
        number = -(-self.length // self.size)
        padding = number * self.size - self.length
        rest = [(0, 0)] * (x_BHL.ndim - 3)
        x_BHL = jnp.pad(x_BHL, ((0, 0), (0, 0), (0, padding), *rest))
        return x_BHL.reshape(*x_BHL.shape[:2], number, self.size, *x_BHL.shape[3:])

    def joined(self, x_BHNT: Array) -> Array:
        """Undo `split`."""
        shape = x_BHNT.shape
        return x_BHNT.reshape(*shape[:2], -1, *shape[4:])[:, :, : self.length]

    def scores(self, query: Array, key: Array) -> Array:
        """Return the scores of a block of queries for a block of keys, f32 [B, H, T, S].

        The padding comes after all queries, which therefore do not attend to it.
        """
        scores_BHTS = _product("BHTK,BHSK->BHTS", _block(self.q, query), _block(self.k, key))
        scores_BHTS *= self.scale
        if self.cap is not None:
            scores_BHTS = self.cap * jnp.tanh(scores_BHTS / self.cap)
        index = jnp.arange(self.size)
        distance_TS = (query - key) * self.size + index[:, None] - index
        seen_BHTS = ((distance_TS >= 0) & (distance_TS < self.window))[None, None]
        if self.texts is not None:
            query_BHT, key_BHS = _block(self.texts, query), _block(self.texts, key)
            seen_BHTS &= query_BHT[..., :, None] == key_BHS[..., None, :]
        return jnp.where(seen_BHTS, scores_BHTS, MASKED)

    def dropped(self, x_BHTS: Array, query: Array, key: Array) -> Array:
        """Apply the dropout of probabilities, in the compute dtype."""
        x_BHTS = x_BHTS.astype(self.v.dtype)
        if self.key_BH is None:
            return x_BHTS
        return drop_probs(x_BHTS, self.key_BH, self.rate, query * self.size, key * self.size)


def _block(x: Array, number: Array) -> Array:
    return lax.dynamic_index_in_dim(x, number, axis=2, keepdims=False)


def _put(x: Array, block: Array, number: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, block, number, axis=2)


def _product(equation: str, *arrays: Array) -> Array:
    return jnp.einsum(equation, *arrays, preferred_element_type=jnp.float32)
