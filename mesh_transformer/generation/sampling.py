"""Sampling of tokens from logits, with temperature, top-p and other settings per row.

Array names end in their shape: B batch (independent rows), V vocabulary, N biased tokens.

The sampling settings are scalars or arrays [B].  They may be traced, so that one compiled program
serves every request.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

# Users import all of these from here.
from mesh_transformer.generation.sampling_settings import RANGES as RANGES
from mesh_transformer.generation.sampling_settings import SamplerSettings as SamplerSettings
from mesh_transformer.generation.sampling_settings import SamplingOptions as SamplingOptions
from mesh_transformer.generation.sampling_settings import sampler_settings as sampler_settings

REMOVED = -1e10  # logit of a removed token; finite, so that no row can become NaN
# Logits are clipped to this magnitude, so that their differences and quotients stay finite.
MAX_LOGIT = 1e30
GREEDY_BELOW = 1e-6  # lower temperatures take the most likely token
# Maximum number of rounds of rejection sampling.  On average, each redraw halves the probability of
# all tokens ranked above the drawn one.  With 50,000 tokens, fewer than one row in 1e25 needs more
# rounds.
MOST_ROUNDS = 64


def _per_row(setting: ArrayLike, logits_BV: Array) -> Array:
    """Broadcast a setting, a scalar or an array [B], to [B, 1]."""
    return jnp.broadcast_to(jnp.asarray(setting), logits_BV.shape[:1])[:, None]


def nucleus_filter(
    logits_BV: Array, top_p: ArrayLike = 0.9, top_k: ArrayLike = 0, min_p: ArrayLike = 0.0
) -> Array:
    """Return the logits in f32, with -1e10 for tokens that top-p, top-k or min-p removes.

    The nucleus is the smallest set of most likely tokens whose total probability (at temperature 1)
    exceeds `top_p`.  If `top_p` is 1 or more, the nucleus contains all tokens.  `top_k` is the
    maximum number of tokens to keep; 0 or less means no maximum.  `min_p` (Nguyen 2024) removes
    tokens that are less likely than this fraction of the most likely one, also at temperature 1.
    The most likely token is always kept.  Among equal logits, the lower token id ranks first, as in
    argmax.

    This function replaces `nucleaus_filter` of the original mesh-transformer-jax, whose `top_k`
    never removed token 0.
    """
    logits_BV = logits_BV.astype(jnp.float32)
    top_p_B1, top_k_B1, least_B1 = _limits(logits_BV, top_p, top_k, min_p)
    probability_BV = jax.nn.softmax(logits_BV)
    # The sort is stable, so that among equal logits the lower token id ranks first.
    ranked_BV = jnp.argsort(-logits_BV, axis=-1, stable=True)
    mass_BV = jnp.cumsum(jnp.take_along_axis(probability_BV, ranked_BV, axis=-1), axis=-1)
    before_BV = jnp.pad(mass_BV, ((0, 0), (1, 0)))[:, :-1]
    kept_BV = (before_BV <= top_p_B1) & (jnp.arange(logits_BV.shape[-1]) < top_k_B1)
    keep_BV = jnp.take_along_axis(kept_BV, jnp.argsort(ranked_BV, axis=-1), axis=-1)
    return jnp.where(keep_BV & (logits_BV >= least_B1), logits_BV, REMOVED)


def typical_filter(logits_BV: Array, typical_p: ArrayLike) -> Array:
    """Return the logits in f32, with -1e10 for tokens that are not typical (Meister 2022).

    A token's deviation is the difference between its information, -log(probability), and the
    entropy of the row.  The tokens with the smallest deviations are kept, until their total
    probability (at temperature 1) reaches `typical_p`; of tokens with equal deviations, all or
    none are kept.  If `typical_p` is 1 or more, all tokens are kept.  The most likely token may be
    removed.
    """
    logprob_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32))
    probability_BV = jnp.exp(logprob_BV)
    entropy_B1 = -jnp.sum(probability_BV * logprob_BV, axis=-1, keepdims=True)
    deviation_BV = jnp.abs(logprob_BV + entropy_B1)
    ranked_BV = jnp.argsort(deviation_BV, axis=-1)
    mass_BV = jnp.cumsum(jnp.take_along_axis(probability_BV, ranked_BV, axis=-1), axis=-1)
    typical_p_B1 = _per_row(typical_p, logits_BV)
    # The first token with which the total reaches `typical_p`; the last one if rounding keeps the
    # total below it.
    last_B1 = jnp.sum(mass_BV < typical_p_B1, axis=-1, keepdims=True)
    last_B1 = jnp.minimum(last_B1, logits_BV.shape[-1] - 1)
    largest_B1 = jnp.take_along_axis(
        deviation_BV, jnp.take_along_axis(ranked_BV, last_B1, axis=-1), axis=-1
    )
    keep_BV = (deviation_BV <= largest_B1) | (typical_p_B1 >= 1)
    return jnp.where(keep_BV, logits_BV.astype(jnp.float32), REMOVED)


def _limits(
    logits_BV: Array, top_p: ArrayLike, top_k: ArrayLike, min_p: ArrayLike
) -> tuple[Array, Array, Array]:
    """Return each row's thresholds for top-p, top-k and min-p, as three arrays [B, 1].

    * top-p: a token is kept only if the total probability of the tokens ranked above it is at most
      this threshold.  The threshold is infinite if `top_p` is 1 or more.
    * top-k: the maximum number of tokens to keep.  It is the vocabulary size if `top_k` is 0 or
      less.
    * min-p: the lowest logit to keep.  It is -inf if `min_p` is 0.
    """
    top_p_B1 = jnp.maximum(_per_row(top_p, logits_BV), 0).astype(jnp.float32)
    # Because of rounding, a sum of 50,000 probabilities may exceed 1 before its last term.
    top_p_B1 = jnp.where(top_p_B1 >= 1, jnp.inf, top_p_B1)
    top_k_B1 = _per_row(top_k, logits_BV)
    top_k_B1 = jnp.where(top_k_B1 > 0, top_k_B1, logits_BV.shape[-1])
    log_min_p_B1 = jnp.log(_per_row(min_p, logits_BV).astype(jnp.float32))
    return top_p_B1, top_k_B1, jnp.max(logits_BV, axis=-1, keepdims=True) + log_min_p_B1


def _argmax(logits_BV: Array) -> Array:
    """Return the first index of each row's maximum, like `jnp.argmax`, but faster on CPUs."""
    tokens_V = jnp.arange(logits_BV.shape[-1], dtype=jnp.uint32)
    is_largest_BV = logits_BV == jnp.max(logits_BV, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_largest_BV, tokens_V, tokens_V[-1]), axis=-1)


def top_tokens(logits_V: Array, count: int) -> tuple[Array, Array]:
    """Return the `count` largest logits [..., count] and their token ids, like `jax.lax.top_k`.

    To save time, only the `count` blocks of the vocabulary with the largest maxima are searched.
    These blocks contain the `count` largest logits.
    """
    vocabulary = logits_V.shape[-1]
    size = math.ceil(vocabulary**0.5)
    if count * size >= vocabulary:
        return jax.lax.top_k(logits_V, count)
    blocks_NM = _blocks(logits_V)
    _, block_C = jax.lax.top_k(jnp.max(blocks_NM, axis=-1), count)
    block_C = jnp.sort(block_C, axis=-1)  # among equal logits, the lower token id ranks first
    logits_CM = jnp.take_along_axis(blocks_NM, block_C[..., None], axis=-2)
    top_C, at_C = jax.lax.top_k(logits_CM.reshape(*block_C.shape[:-1], -1), count)
    return top_C, jnp.take_along_axis(block_C, at_C // size, axis=-1) * size + at_C % size


def _blocks(logits_V: Array) -> Array:
    """Split logits [..., V] into about sqrt(V) blocks of about sqrt(V) logits.

    The last block is padded with -inf.
    """
    vocabulary = logits_V.shape[-1]
    size = math.ceil(vocabulary**0.5)
    padding = [(0, 0)] * (logits_V.ndim - 1) + [(0, -vocabulary % size)]
    padded = jnp.pad(logits_V, padding, constant_values=-jnp.inf)
    return padded.reshape(*logits_V.shape[:-1], -1, size)


def softmax_sample(key: Array, logits_BV: Array, temp: ArrayLike = 1.0) -> Array:
    """Draw one token per row, uint32 [B], from softmax(logits / temp); temp 0 is argmax.

    Args:
      key: one typed key (`jax.random.key`), or an array of B typed keys.  With B keys, a row's
        token depends only on its own key, logits and settings, not on its index or on other rows.
        With a single key, row i uses `fold_in(key, i)`.
    """
    return _argmax(_add_gumbel_noise(key, logits_BV.astype(jnp.float32), temp))


def _add_gumbel_noise(key: Array, logits_BV: Array, temp: ArrayLike) -> Array:
    """Return scores whose argmax is a draw from softmax(logits / temp).

    In rows with a temperature of about 0, the scores are the logits themselves.  `key` is as in
    `softmax_sample`.
    """
    temp_B1 = _per_row(temp, logits_BV)
    greedy_B1 = temp_B1 < GREEDY_BELOW
    # The logits are shifted so that the largest is 0.  Dividing by a small temperature then cannot
    # make it overflow.
    scaled_BV = logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)
    scaled_BV /= jnp.where(greedy_B1, 1.0, temp_B1)
    rows_B = jnp.arange(logits_BV.shape[0])
    keys_B = key if key.ndim else jax.vmap(jax.random.fold_in, (None, 0))(key, rows_B)
    # The Gumbel-max trick, as in `jax.random.categorical`.
    noise_BV = jax.vmap(lambda k: jax.random.gumbel(k, logits_BV.shape[1:]))(keys_B)
    return jnp.where(greedy_B1, logits_BV, scaled_BV + noise_BV)


def nucleus_sample(
    key: Array,
    logits_BV: Array,
    *,
    top_p: ArrayLike = 0.9,
    top_k: ArrayLike = 0,
    min_p: ArrayLike = 0.0,
    temp: ArrayLike = 1.0,
) -> Array:
    """Draw one token per row, uint32 [B], from the tokens that top-p, top-k and min-p keep.

    The draw uses the temperature `temp`, but the nucleus is computed at temperature 1.  `key` and
    `temp` are as in `softmax_sample`; the other settings are as in `nucleus_filter`.

    This function replaces `nucleaus_sample` of the original mesh-transformer-jax.
    """
    logits_BV = finite(logits_BV.astype(jnp.float32))
    score_BV = _add_gumbel_noise(key, logits_BV, temp)

    def draw(_: ArrayLike, among_BV: ArrayLike) -> Array:
        return _argmax(jnp.where(among_BV, score_BV, -jnp.inf))

    return _draw_from_nucleus(draw, logits_BV, *_limits(logits_BV, top_p, top_k, min_p))


def _draw_from_nucleus(
    draw: Callable[[ArrayLike, ArrayLike], Array],
    logits_BV: Array,
    top_p_B1: Array,
    top_k_B1: Array,
    least_B1: Array,
) -> Array:
    """Draw one token per row from those that top-p, top-k and min-p keep, by rejection sampling.

    If one of them excludes the drawn token, the next round draws from the tokens that rank above
    it.  These include every token that may be drawn.  One or two rounds are usually enough, and the
    vocabulary need not be sorted as in `nucleus_filter`.  After `MOST_ROUNDS` rounds without
    success, a row gets its most likely token.

    Args:
      draw: function (round number, mask of the tokens to draw from) -> tokens [B].  The mask is an
        array [B, V], or True for all tokens.
      top_p_B1, top_k_B1, least_B1: the results of `_limits`.
    """
    probability_BV = jax.nn.softmax(logits_BV)
    tokens_V = jnp.arange(logits_BV.shape[-1], dtype=jnp.uint32)

    def logit(token_B1: Array) -> Array:
        return jnp.take_along_axis(logits_BV, token_B1.astype(jnp.int32), axis=-1)

    def before(token_B1: Array) -> Array:
        """Return the mask of the tokens that rank above `token_B1` in the same row."""
        logit_B1 = logit(token_B1)
        return (logits_BV > logit_B1) | ((logits_BV == logit_B1) & (tokens_V < token_B1))

    def checked(drawn: Array, round_: Array) -> tuple[Array, Array, Array]:
        before_BV = before(drawn)
        mass_B1 = jnp.sum(jnp.where(before_BV, probability_BV, 0), axis=-1, keepdims=True)
        inside_B1 = jax.lax.cond(
            jnp.any(top_k_B1 < logits_BV.shape[-1]),
            lambda: jnp.sum(before_BV, axis=-1, keepdims=True) < top_k_B1,
            lambda: top_k_B1 > 0,  # True, as no row limits the number of tokens
        )
        inside_B1 &= (mass_B1 <= top_p_B1) & (logit(drawn) >= least_B1)
        return drawn, inside_B1, round_

    def again(drawn: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        token_B1, inside_B1, round_ = drawn
        redrawn_B = draw(round_, before(token_B1))
        return checked(jnp.where(inside_B1, token_B1, redrawn_B[:, None]), round_ + 1)

    def unfinished(drawn: tuple[Array, Array, Array]) -> Array:
        return ~jnp.all(drawn[1]) & (drawn[2] < MOST_ROUNDS)

    first = checked(draw(0, True)[:, None], jnp.int32(1))
    token_B1, inside_B1, _ = jax.lax.while_loop(unfinished, again, first)
    return jnp.where(inside_B1[:, 0], token_B1[:, 0], _argmax(logits_BV))


def _draw_by_blocks(keys_B: Array, logits_BV: Array) -> Array:
    """Draw one token per row from softmax(logits): first a block of tokens, then a token in it.

    This needs about 2 sqrt(V) values of Gumbel noise per row instead of V.  Blocks share the
    noise for their places, as only one is drawn.  The largest logit of each row must be 0.
    """
    logits_BNM = _blocks(logits_BV)
    _, blocks, size = logits_BNM.shape
    noise_B = jax.vmap(lambda key: jax.random.gumbel(key, (blocks + size,)))(keys_B)
    # Because the largest logit is 0, no sum overflows, and not all sums underflow.
    mass_BN = jnp.sum(jnp.exp(logits_BNM), axis=-1)
    block_B = _argmax(jnp.log(mass_BN) + noise_B[:, :blocks])
    logits_BM = jnp.take_along_axis(logits_BNM, block_B[:, None, None], axis=1)[:, 0]
    token_B = block_B * size + _argmax(logits_BM + noise_B[:, blocks:])
    return jnp.minimum(token_B, logits_BV.shape[1] - 1)  # with NaN it could point into the padding


def finite(logits_BV: Array) -> Array:
    """Return the logits with NaN replaced by `REMOVED` and the rest clipped to +-`MAX_LOGIT`."""
    clipped_BV = jnp.clip(logits_BV, -MAX_LOGIT, MAX_LOGIT)
    return jnp.where(jnp.isnan(logits_BV), REMOVED, clipped_BV)


def penalize(logits_BV: Array, seen_BV: Array, penalty: ArrayLike) -> Array:
    """Apply the repetition penalty (Keskar 2019) to the tokens that each row has already seen.

    Positive logits are divided by the penalty and negative ones multiplied by it, so that a penalty
    above 1 lowers both.  As in Hugging Face's `generate`, the prompt's tokens count as seen.

    Args:
      seen_BV: whether the row's prompt or answer contains each token.
      penalty: one number for all rows, or an array [B].
    """
    penalty_B1 = _per_row(penalty, logits_BV)
    lowered_BV = jnp.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    return jnp.where(seen_BV, lowered_BV, logits_BV)


def adjusted(logits_BV: Array, settings: SamplerSettings, seen_BV: Array, count_BV: Array) -> Array:
    """Apply the repetition penalty, the presence and frequency penalties, and the logit bias.

    As in OpenAI's API, a token that the answer contains n times loses `presence` + n * `frequency`.

    Args:
      seen_BV: whether the row's prompt or answer contains each token.
      count_BV: how many times the row's answer contains each token.
    """
    logits_BV = penalize(logits_BV, seen_BV, settings.penalty_B)
    logits_BV -= jnp.where(count_BV > 0, settings.presence_B[:, None], 0)
    logits_BV -= settings.frequency_B[:, None] * count_BV
    rows_B1 = jnp.arange(len(logits_BV))[:, None]
    return logits_BV.at[rows_B1, settings.biased_BN].add(settings.bias_BN)


def choose(
    logits_BV: Array,
    settings: SamplerSettings,
    generated_B: Array,
    occurrences: Callable[[], tuple[Array, Array]],
    allowed_BW: Array | None = None,
) -> Array:
    """Choose each row's next token, uint32 [B].

    The penalties and biases of `adjusted` are applied first, then `typical_filter`, then top-p,
    top-k and min-p to what it keeps, and then the temperature.  Operations that no row's settings
    require are skipped at run time.

    The draw of token number n of a row's answer (from 0) depends on the random key
    `fold_in(key(seed), n)`.  A draw uses only about 2 sqrt(V) random numbers, because generating
    one for each token of the vocabulary would take longer than the layers of a small model.

    A row with NaN logits still gets a token in bounded time, and does not affect other rows.

    Args:
      generated_B: number of tokens chosen so far in each row, which is the n of the random key.
      occurrences: returns `seen_BV` and `count_BV` (see `adjusted`), which are computed only if a
        row needs them.
      allowed_BW: the tokens to choose from, as bits of uint32 words: for token t, bit t mod 32 of
        word t // 32.  None allows all tokens.
    """
    logits_BV = finite(logits_BV)
    unchanged_B = (settings.penalty_B == 1) & (settings.presence_B == 0)
    unchanged_B &= (settings.frequency_B == 0) & jnp.all(settings.bias_BN == 0, axis=-1)
    logits_BV = jax.lax.cond(
        jnp.all(unchanged_B),
        lambda: logits_BV,
        lambda: adjusted(logits_BV, settings, *occurrences()),
    )
    allowed_BV = True
    if allowed_BW is not None:
        bits_BW32 = (allowed_BW[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        allowed_BV = bits_BW32.reshape(len(allowed_BW), -1)[:, : logits_BV.shape[-1]] == 1
        # Other tokens rank below all of these, also if a row's logits are all NaN.
        logits_BV = jnp.where(allowed_BV, jnp.maximum(logits_BV, REMOVED), 2 * REMOVED)
    greedy_B = settings.temp_B < GREEDY_BELOW

    def drawn(logits_BV: Array) -> Array:
        typical_p_B = jnp.where(greedy_B, 1, settings.typical_p_B)
        logits_BV = jax.lax.cond(
            jnp.any(typical_p_B < 1),
            lambda: typical_filter(logits_BV, typical_p_B),
            lambda: logits_BV,
        )
        keys_B = jax.vmap(lambda seed, made: jax.random.fold_in(jax.random.key(seed), made))(
            settings.seed_B, generated_B
        )
        temp_B1 = jnp.where(greedy_B, 1, settings.temp_B)[:, None]
        # Shifted and scaled as in `_add_gumbel_noise`.
        scaled_BV = (logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)) / temp_B1

        def draw(round_: ArrayLike, among_BV: ArrayLike) -> Array:
            round_keys_B = jax.vmap(jax.random.fold_in, (0, None))(keys_B, round_)
            may_BV = jnp.logical_and(among_BV, allowed_BV)
            return _draw_by_blocks(round_keys_B, jnp.where(may_BV, scaled_BV, -jnp.inf))

        top_p_B = jnp.where(greedy_B, 1, settings.top_p_B)
        top_k_B = jnp.where(greedy_B, 0, settings.top_k_B)
        min_p_B = jnp.where(greedy_B, 0, settings.min_p_B)
        limits = _limits(logits_BV, top_p_B, top_k_B, min_p_B)
        return jax.lax.cond(
            jnp.any((top_p_B < 1) | (top_k_B > 0) | (min_p_B > 0)),
            lambda: _draw_from_nucleus(draw, logits_BV, *limits),
            lambda: draw(0, True),
        )

    def unused(_: Array) -> Array:
        return settings.seed_B  # any array with the shape and dtype of tokens; no row uses it

    argmax_B = jax.lax.cond(jnp.any(greedy_B), _argmax, unused, logits_BV)
    drawn_B = jax.lax.cond(jnp.all(greedy_B), unused, drawn, logits_BV)
    return jnp.where(greedy_B, argmax_B, drawn_B)
