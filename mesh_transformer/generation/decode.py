"""Generation with a KV cache: pure functions on a batch whose rows are at different positions.

A row's keys and values are stored in S slots: position p is stored in slot p mod S.  When the slots
are full, each new position overwrites the oldest one.  Layers with a sliding window may have fewer
slots of their own (see `model.ring`).  `prefill` inserts prompts or pieces of prompts while the
other rows wait, and `decode` generates tokens in all rows.  The layers are unrolled, and each has
its own arrays, because a loop over stacked arrays would copy each layer's slice.

The slots of a row are either an array of its own, or in pages of C slots from a pool that all rows
share (see `model.paged`).  `serving.pages.Pages` decides which pages a row gets.

A smaller model, the draft, may guess tokens (see `_guess`).  Its keys and values are in arrays of
its own, but in the same slots and pages, so that a row or page that holds those of the model also
holds those of the draft.

Array names end in their shape: B rows of the batch, P inserted prompts, T tokens of a prompt or
of a step, S slots, D model, H heads, K head size, V vocabulary, M tokens per call, N alternatives,
G guesses, C slots of a page, J pages of a row, L pages of the pool.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mesh_transformer.config import Config
from mesh_transformer.generation.finite import tokens_or_none
from mesh_transformer.generation.forward import (
    context_of,
    forward,
    full_logits,
    in_ring,
    own_logits,
)
from mesh_transformer.generation.sampling import choose, top_tokens
from mesh_transformer.generation.sampling_settings import SamplerSettings, sampler_settings
from mesh_transformer.generation.speculation import guess
from mesh_transformer.generation.weights import DRAFT, Weights
from mesh_transformer.mesh.parallel import Parallel
from mesh_transformer.model import paged, ring
from mesh_transformer.model.cache import LayerCache, write_rows
from mesh_transformer.model.heads import key_heads
from mesh_transformer.model.layer_values import layer_values
from mesh_transformer.model.loss import cross_entropy
from mesh_transformer.model.ring import Cache, Part, RingCache

# The settings of idle rows: greedy decoding, which is the fastest, and no penalty or bias.
IDLE = sampler_settings({"top_p": 1.0, "temp": 0.0, "seed": 0}, ())


class Prompts(NamedTuple):
    """Prompts to insert into a batch, left-aligned; the padding after a prompt is ignored.

    The keys and values before position `begin_P` are not computed: they are in the cache, from an
    earlier piece of the same prompt or, in pages, from another prompt.
    """

    tokens_PS: Any
    length_P: Any
    row_P: Any  # each prompt's row within its replica; a prompt with a row out of range is dropped
    begin_P: Any
    page_PJ: Any  # the pages that hold the row's slots, or -1; J is 0 without a pool
    prompt_PJ: Any  # the pages that hold the prompt; where they differ, it is copied to `page_PJ`
    restored_PG: Any  # see `ring.Part`, also for the next one; G may be 0
    kept_PG: Any
    settings: SamplerSettings
    allowed_PW: Any = None  # the tokens that each answer may begin with; see `sampling.choose`


class Chosen(NamedTuple):
    """Generated or scored tokens and, if requested, their logprobs and the most likely tokens.

    Logprobs are computed from the model's unmodified logits, so they do not depend on the sampling
    settings.
    """

    token: Any  # [B], or [B, M]; `finite.NO_TOKEN` where the logits are not finite
    logprob: Any = None  # of `token`, in nats
    top_token: Any = None  # the most likely tokens, [..., N]
    top_logprob: Any = None  # of `top_token`, in nats


class DecodeState(NamedTuple):
    """The state of a batch during generation: KV caches, last tokens and sampling settings."""

    # One per layer; [L, H, C, K] with a pool of pages, except for a `RingCache`.
    caches: tuple[Cache, ...]
    page_BJ: Any  # the pages that hold each row's slots, or -1; None without a pool
    length_B: Any  # number of tokens in the cache, which is the position of the pending token
    token_B: Any  # the pending token: chosen, but not yet in the cache
    generated_B: Any  # number of tokens chosen so far
    seen_BV: Any  # whether the row's prompt or answer contains each token
    count_BV: Any  # how many times the row's answer contains each token
    history_BS: Any  # the tokens in the cache and the pending token; position p is in slot p mod S
    settings: SamplerSettings
    draft_caches: tuple[Cache, ...] = ()  # those of the draft, if there is one

    @property
    def slots(self) -> int:
        """The number of positions in each row's KV cache, S."""
        return self.history_BS.shape[1]


def empty(
    config: Config,
    rows: int,
    slots: int,
    pages: int = 0,
    page: int = 1,
    kept: int = 0,
    ring_slots: int = 0,
    mp: int = 1,
    draft: Config | None = None,
) -> DecodeState:
    """Return the state of a batch with `rows` rows, no prompts, and `slots` cache slots per row.

    The arrays are global; jit this function with `out_shardings` to choose their sharding.

    Args:
      pages: number of pages of the pool; 0 for no pool.
      page: number of slots per page, a divisor of `slots`.
      kept: number of pages for what is kept of prompts in layers with a ring.
      ring_slots: number of slots of a row in layers with a sliding window; 0 if they have no ring.
      mp: the number of shards that the heads are split over.
      draft: the config of the draft; None for none.
    """

    def cache(own: Config, count: int, positions: int) -> LayerCache:
        shape = (count, mp * key_heads(own, mp), positions, own.d_head)
        one = LayerCache(jnp.zeros(shape, own.dtype), jnp.zeros(shape, own.dtype))
        return one.in_8_bits() if own.int8_cache else one

    def caches(own: Config, ring_slots: int) -> tuple[Cache, ...]:
        usual = cache(own, *((pages, page) if pages else (rows, slots)))
        if not ring_slots:
            return (usual,) * own.layers
        prompts = cache(own, kept, page) if kept else None
        sliding = RingCache(cache(own, rows, min(ring_slots, slots)), prompts)
        return tuple(sliding if x.is_sliding else usual for x in layer_values(own))

    return DecodeState(
        caches(config, ring_slots),
        jnp.full((rows, slots // page), -1) if pages else None,
        length_B=jnp.zeros(rows, jnp.int32),
        token_B=jnp.zeros(rows, jnp.uint32),
        generated_B=jnp.zeros(rows, jnp.int32),
        seen_BV=jnp.zeros((rows, config.n_vocab), bool),
        count_BV=jnp.zeros((rows, config.n_vocab), jnp.int32),
        history_BS=jnp.zeros((rows, slots), jnp.uint32),
        settings=jax.tree.map(lambda value: jnp.full((rows, *value.shape), value), IDLE),
        draft_caches=() if draft is None else caches(draft, 0),
    )


def grow(state: DecodeState, slots: int, ring_slots: int) -> DecodeState:
    """Return the same batch state with a larger KV cache, of `slots` slots per row.

    The state must have no pool.
    No row may hold more tokens than the old cache has slots per row.  Such a row has already
    overwritten its oldest positions, and the others would be in the wrong slots of the larger ring
    buffer.

    Args:
      ring_slots: as for `empty`.
    """

    def grown(cache: Cache) -> Cache:
        size = min(ring_slots, slots) if isinstance(cache, RingCache) else slots

        def padded(x: Array) -> Array:
            return jnp.pad(x, ((0, 0), (0, 0), (0, size - x.shape[2]), (0, 0)))

        return jax.tree.map(padded, cache)

    return state._replace(
        caches=tuple(map(grown, state.caches)),
        draft_caches=tuple(map(grown, state.draft_caches)),
        history_BS=jnp.pad(state.history_BS, ((0, 0), (0, slots - state.slots))),
    )


def _chosen(
    own_BTV: Array, logits_BTV: Array, token_BT: Array, alternatives: int | None, par: Parallel
) -> Chosen:
    """Return `token_BT` as a `Chosen`, with the logprobs that `alternatives` asks for.

    Args:
      own_BTV: the logits of this device's shard of the vocabulary.
      logits_BTV: those of the full vocabulary.
    """
    if alternatives is None:
        return Chosen(token_BT)
    loss_BT, log_sum_BT, _ = cross_entropy(own_BTV, token_BT, par)
    top_BTN, top_token_BTN = top_tokens(logits_BTV, min(alternatives, logits_BTV.shape[-1]))
    top_logprob_BTN = top_BTN - top_BTN[..., :1] - log_sum_BT[..., None]
    return Chosen(token_BT, -loss_BT, top_token_BTN.astype(jnp.uint32), top_logprob_BTN)


def prefill(
    weights: Weights,
    state: DecodeState,
    prompts: Prompts,
    alternatives: int | None,
    width: int,
    draft: Config | None,
    config: Config,
    par: Parallel,
) -> tuple[DecodeState, Chosen]:
    """Put prompts into rows of the batch, and choose the first token of each prompt's answer.

    The previous contents of these rows are discarded.

    Args:
      prompts: S is the number of slots that the prompts' tokens attend to, which is `width` or that
        of the cache.
      alternatives: number of most likely tokens to return with their logprobs; the chosen tokens'
        logprobs are then returned too.  None returns no logprobs.
      width: number of positions to compute, from `begin_P` on; those from S on are padding, and are
        not stored.  If it is S, `begin_P` counts as 0.
      draft: the config of the draft, which gets the prompts too; None for none.

    Returns:
      The new state and the chosen tokens [P].
    """
    tokens_PS, length_P, row_P, _, page_PJ, _, _, _, settings, allowed_PW = prompts
    count, slots = tokens_PS.shape
    last_P1D, caches = _insert(weights, state.caches, prompts, width, config, par)
    draft_caches = state.draft_caches
    if draft is not None:
        _, draft_caches = _insert(weights[DRAFT], draft_caches, prompts, width, draft, par)

    def put(rows: Array, values: Array, *index: Any) -> Array:
        return rows.at[(row_P, *index)].set(values, mode="drop")

    own_P1V = own_logits(weights, last_P1D, config, par)
    logits_PV = full_logits(own_P1V, config, par)
    prompt_rows = jnp.arange(count)[:, None]
    in_prompt_PS = jnp.arange(slots)[None] < length_P[:, None]
    seen_PV = jnp.zeros((count, config.n_vocab), bool)
    seen_PV = seen_PV.at[prompt_rows, tokens_PS.astype(jnp.int32)].max(in_prompt_PS)
    generated_P = jnp.zeros_like(length_P)
    count_PV = jnp.zeros((count, config.n_vocab), jnp.int32)
    token_P = choose(logits_PV, settings, generated_P, lambda: (seen_PV, count_PV), allowed_PW)
    token_P = tokens_or_none(token_P, logits_PV)
    answered_PV = seen_PV.at[prompt_rows[:, 0], token_P].set(True)
    counted_PV = count_PV.at[prompt_rows[:, 0], token_P].set(1)
    history_BS = put(state.history_BS, tokens_PS, slice(slots))
    state = DecodeState(
        caches,
        None if state.page_BJ is None else put(state.page_BJ, page_PJ),
        put(state.length_B, length_P),
        put(state.token_B, token_P),
        put(state.generated_B, generated_P + 1),
        put(state.seen_BV, answered_PV),
        put(state.count_BV, counted_PV),
        put(history_BS, token_P, length_P % state.slots),
        jax.tree.map(put, state.settings, settings),
        draft_caches,
    )
    chosen = _chosen(own_P1V, logits_PV[:, None], token_P[:, None], alternatives, par)
    return state, jax.tree.map(lambda x: x[:, 0], chosen)


def _insert(
    weights: Weights,
    caches: tuple[Cache, ...],
    prompts: Prompts,
    width: int,
    config: Config,
    par: Parallel,
) -> tuple[Array, tuple[Cache, ...]]:
    """Compute `width` positions of each prompt, and put their keys and values into the caches.

    Returns:
      The residual stream of each prompt's last token, [P, 1, D], and the new caches.
    """
    tokens_PS, length_P, row_P, begin_P, page_PJ, prompt_PJ, _, _, settings, _ = prompts
    tokens_PS = _known(tokens_PS, config)
    slots, is_paged = tokens_PS.shape[1], page_PJ.shape[1] > 0  # without a pool, J is 0
    copied_PJ = jnp.where(page_PJ == prompt_PJ, -1, page_PJ)
    slots_1S = jnp.arange(slots)[None]
    part = Part(row_P, begin_P, length_P, prompts.restored_PG, prompts.kept_PG, begin_P)
    if width == slots:  # prompts are computed from their first token, without the cache
        begin_P = jnp.zeros_like(begin_P)
        part = part._replace(begin_P=begin_P)
        context = context_of(weights, slots_1S, None, None, config, par, settings.adapter_B)
        x_PTD, new_caches = forward(weights, tokens_PS, context, None, config, par)

        def filled(old: Cache, new: Cache) -> Cache:
            assert isinstance(new, LayerCache)
            if isinstance(old, RingCache):
                return ring.written(old, new.like(old.rows), part, 0)
            if not is_paged:
                return write_rows(old, new.like(old), row_P, begin_P)
            return paged.write_pages(old, new.like(old), prompt_PJ, copied_PJ)

        caches = tuple(map(filled, caches, new_caches))
    else:
        table = None
        if is_paged:
            table = paged.Table(prompt_PJ, jnp.minimum(begin_P + width, length_P), copied_PJ)
        positions_PT = begin_P[:, None] + jnp.arange(width)  # the last ones may have no slot
        tokens_PT = jnp.take_along_axis(tokens_PS, jnp.minimum(positions_PT, slots - 1), axis=1)
        context = context_of(
            weights, positions_PT, slots_1S, begin_P, config, par, settings.adapter_B, row_P, table
        )
        ring_context = None
        if (ring_slots := _ring_slots(caches)) is not None:
            keys_PS = ring.key_positions(part, ring_slots, width)
            ring_context = in_ring(context, keys_PS, None, config, part)
        x_PTD, caches = forward(weights, tokens_PT, context, caches, config, par, ring_context)
    return jnp.take_along_axis(x_PTD, (length_P - 1 - begin_P)[:, None, None], axis=1), caches


def _ring_slots(caches: tuple[Cache, ...]) -> int | None:
    """Return the number of slots of a row's ring, or None if no layer has rings."""
    return next((cache.slots for cache in caches if isinstance(cache, RingCache)), None)


def _step(
    weights: Weights,
    state: DecodeState,
    left_B: Array,
    allowed_BW: Array | None,
    alternatives: int | None,
    guesses: int,
    draft: Config | None,
    config: Config,
    par: Parallel,
) -> tuple[DecodeState, Chosen, Array]:
    """Add each row's pending token to the cache, and choose the next tokens of each active row.

    Of the guessed tokens, those that are chosen are added to the cache too.  For the arguments, see
    `decode`; rows with 0 in `left_B` stay as they are.

    Returns:
      The new state, the chosen tokens [B, 1 + guesses], and how many of them each row has
      generated; the others are meaningless.
    """
    active_B = left_B > 0
    guess_BG, draft_caches = _guess(weights, state, active_B, guesses, draft, par)
    tokens_BT = jnp.concatenate((state.token_B[:, None], guess_BG), axis=1)
    # Idle rows use the settings `IDLE`, so that their old settings do not slow down other rows.
    settings = jax.tree.map(
        lambda x, idle: jnp.where(active_B.reshape(-1, *[1] * idle.ndim), x, idle),
        state.settings,
        IDLE,
    )
    x_BTD, caches = _append(weights, state, tokens_BT, active_B, config, par)
    own_BTV = own_logits(weights, x_BTD, config, par)
    logits_NV = own_NV = full_logits(own_BTV, config, par)  # N: all positions of all rows
    if config.n_vocab != state.seen_BV.shape[1]:  # a draft's, which has other padding
        more = state.seen_BV.shape[1] - config.n_vocab
        logits_NV = jax.lax.pad(logits_NV, -jnp.inf, ((0, 0, 0), (0, more, 0)))
    chosen_N = choose(
        logits_NV,
        jax.tree.map(lambda x: jnp.repeat(x, 1 + guesses, axis=0), settings),
        (state.generated_B[:, None] + jnp.arange(1 + guesses)).reshape(-1),
        lambda: _occurrences(state, guess_BG),
        None if allowed_BW is None else jnp.repeat(allowed_BW, 1 + guesses, axis=0),
    )
    chosen_BT = tokens_or_none(chosen_N, own_NV).reshape(tokens_BT.shape)
    chosen_BT = jnp.where(active_B[:, None], chosen_BT, tokens_BT[:, :1])
    added_B = _accepted(chosen_BT, guess_BG, left_B)
    state = _add(state, chosen_BT, added_B)._replace(caches=caches, draft_caches=draft_caches)
    logits_BTV = own_NV.reshape(*chosen_BT.shape, -1)
    return state, _chosen(own_BTV, logits_BTV, chosen_BT, alternatives, par), added_B


def _occurrences(state: DecodeState, guess_BG: Array) -> tuple[Array, Array]:
    """Return what each position has seen, and how often, if all guesses before it are right.

    Returns:
      Both as [B * (1 + G), V]: the positions of the pending token and of the guesses of each row.
    """
    if not guess_BG.shape[1]:
        return state.seen_BV, state.count_BV
    vocabulary = state.seen_BV.shape[1]
    is_guess_BGV = guess_BG[..., None] == jnp.arange(vocabulary, dtype=guess_BG.dtype)
    more_BGV = jnp.cumsum(is_guess_BGV, axis=1, dtype=jnp.int32)
    more_BTV = jnp.pad(more_BGV, ((0, 0), (1, 0), (0, 0)))
    seen_BTV = state.seen_BV[:, None] | (more_BTV > 0)
    count_BTV = state.count_BV[:, None] + more_BTV
    return seen_BTV.reshape(-1, vocabulary), count_BTV.reshape(-1, vocabulary)


def _accepted(chosen_BT: Array, guess_BG: Array, left_B: Array) -> Array:
    """Return how many of the chosen tokens each row adds, [B]: at most `left_B`.

    The first one counts, and each one after a right guess.  For example:

        tokens run through the model   pending  a  b  c     (a, b, c are guesses)
        tokens chosen after these      a        b  x  y     -> 3: a, b and x
    """
    is_right_BG = jnp.cumprod(chosen_BT[:, :-1] == guess_BG, axis=1, dtype=jnp.int32)
    return jnp.minimum(1 + is_right_BG.sum(axis=1), left_B)


def _add(state: DecodeState, chosen_BT: Array, added_B: Array) -> DecodeState:
    """Add the first `added_B` chosen tokens to each row's history; the last one is now pending.

    The caches must already hold the tokens before the pending one.
    """
    next_T = jnp.arange(chosen_BT.shape[1])
    is_added_BT = next_T < added_B[:, None]
    newest_BT = jnp.maximum(added_B - 1, 0)[:, None]
    rows_B1 = jnp.arange(len(added_B))[:, None]
    # Where nothing is added, the slot is out of range, so that nothing is written.
    following_BT = state.length_B[:, None] + 1 + next_T
    slot_BT = jnp.where(is_added_BT, following_BT % state.slots, state.slots)
    return state._replace(
        length_B=state.length_B + added_B,
        token_B=jnp.take_along_axis(chosen_BT, newest_BT, axis=1)[:, 0],
        generated_B=state.generated_B + added_B,
        seen_BV=state.seen_BV.at[rows_B1, chosen_BT].max(is_added_BT),
        count_BV=state.count_BV.at[rows_B1, chosen_BT].add(is_added_BT.astype(jnp.int32)),
        history_BS=state.history_BS.at[rows_B1, slot_BT].set(chosen_BT, mode="drop"),
    )


def _append(
    weights: Weights,
    state: DecodeState,
    tokens_BT: Array,
    active_B: Array,
    config: Config,
    par: Parallel,
) -> tuple[Array, tuple[Cache, ...]]:
    """Run the layers on the T tokens that follow those in the cache of each row.

    Args:
      active_B: whether each row generates; what the others get is meaningless.

    Returns:
      The residual stream x_BTD, and the caches with the keys and values of these tokens.
    """
    positions_BT = state.length_B[:, None] + jnp.arange(tokens_BT.shape[1])
    # The position that each slot holds: the newest one stored in this slot, up to the position of
    # the last new token.  It is negative if the slot is empty.
    newest_B1 = positions_BT[:, -1:]
    key_positions_BS = ring.held(newest_B1, state.slots)
    slot_BT = positions_BT % state.slots
    adapter_B = jnp.where(active_B, state.settings.adapter_B, IDLE.adapter_B)
    table = None
    if state.page_BJ is not None:
        # The pages of idle rows may belong to others by now, so nothing is written to them.
        own_BJ = jnp.where(active_B[:, None], state.page_BJ, -1)
        used_B = jnp.where(active_B, jnp.minimum(newest_B1[:, 0] + 1, state.slots), 1)
        table = paged.Table(own_BJ, used_B)
    context = context_of(
        weights, positions_BT, key_positions_BS, slot_BT, config, par, adapter_B, table=table
    )
    ring_context = None
    if (ring_slots := _ring_slots(state.caches)) is not None:
        keys_BS = ring.held(newest_B1, ring_slots)
        ring_context = in_ring(context, keys_BS, positions_BT % ring_slots, config)
    tokens_BT = _known(tokens_BT, config)
    return forward(weights, tokens_BT, context, state.caches, config, par, ring_context)


def _known(tokens: Array, config: Config) -> Array:
    """Replace the tokens that a model's embedding lacks, if it is the draft of a larger one."""
    return jnp.minimum(tokens, config.n_vocab - 1)


def _guess(
    weights: Weights,
    state: DecodeState,
    active_B: Array,
    guesses: int,
    draft: Config | None,
    par: Parallel,
) -> tuple[Array, tuple[Cache, ...]]:
    """Guess the tokens that follow the pending token of each row: the draft's, or looked up.

    The draft chooses tokens as the model does, with the row's settings and random numbers, so that
    it often chooses the same ones, also where they are drawn.

    Returns:
      The guesses [B, guesses], and the draft's caches with the pending token and all guesses.
    """
    if draft is None:
        return guess(state.history_BS, state.length_B, guesses), state.draft_caches
    own, one_B = weights[DRAFT], active_B.astype(jnp.int32)

    def step(state: DecodeState, _: None) -> tuple[DecodeState, Array]:
        state, chosen = _step(own, state, one_B, None, None, 0, None, draft, par)[:2]
        return state, chosen.token[:, 0]

    ahead = state._replace(caches=state.draft_caches, draft_caches=())
    ahead, guess_GB = jax.lax.scan(step, ahead, length=guesses)
    _, caches = _append(own, ahead, ahead.token_B[:, None], active_B, draft, par)
    return guess_GB.T, caches


def decode(
    weights: Weights,
    state: DecodeState,
    left_B: Array,
    steps: Array,
    allowed_BW: Array | None,
    alternatives: int | None,
    most: int,
    guesses: int,
    draft: Config | None,
    config: Config,
    par: Parallel,
) -> tuple[DecodeState, Chosen, Array]:
    """Make `steps` decode steps, each of which generates one token per row, or more with guesses.

    Args:
      left_B: number of tokens that each row may still generate, int32; a row with 0 generates none.
      steps: number of steps, at most `most`; may be traced, so one program serves any number.
      allowed_BW: the tokens that each row may generate (see `sampling.choose`); None for all.
      alternatives: as for `prefill`.
      most: maximum number of steps, a Python int.
      guesses: number of tokens to guess per step (see `speculation`); a step generates from 1 to
        1 + `guesses` tokens per row.  The state must have at least `config.window` + `guesses`
        slots, or as many as any row has positions.
      draft: the config of the draft, which guesses the tokens, and whose weights are
        `weights[DRAFT]`; None to look the guesses up.

    Returns:
      The new state, the tokens [B, most * (1 + guesses)], and how many each row has generated,
      [B].  In each row, only these are valid.
    """
    width = 1 + guesses

    def step(state: DecodeState, left_B: Array) -> tuple[DecodeState, Chosen, Array]:
        return _step(weights, state, left_B, allowed_BW, alternatives, guesses, draft, config, par)

    shapes = jax.eval_shape(step, state, left_B)[1]
    chosen = jax.tree.map(
        lambda x: par.zeros(
            (x.shape[0], most * width, *x.shape[2:]), x.dtype, "dp", *(None,) * (x.ndim - 1)
        ),
        shapes,
    )

    def body(
        at: Array, carry: tuple[DecodeState, Chosen, Array]
    ) -> tuple[DecodeState, Chosen, Array]:
        state, chosen, made_B = carry
        state, new, added_B = step(state, left_B - made_B)
        rows_B1 = jnp.arange(len(made_B))[:, None]
        place_BT = made_B[:, None] + jnp.arange(width)  # later steps replace what is not added

        def put(buffer: Array, x: Array) -> Array:
            if not guesses:
                return buffer.at[:, at].set(x[:, 0])
            return buffer.at[rows_B1, place_BT].set(x)

        return state, jax.tree.map(put, chosen, new), made_B + added_B

    return jax.lax.fori_loop(0, steps, body, (state, chosen, jnp.zeros_like(left_B)))
