"""Speculation: guesses of a row's next tokens, which one decode step then checks together.

A guess is what followed the most recent earlier occurrence of the row's last tokens (prompt lookup,
Saxena 2023), or the tokens that a smaller model, the draft, generates (Leviathan 2022).
`decode.decode` keeps the guessed tokens that it would have chosen itself, so guesses change how
many tokens a step generates, but not which.

Array names end in their shape: B rows of the batch, S slots, G guessed tokens.
"""

import jax.numpy as jnp
from jax import Array

from mesh_transformer.config import Config
from mesh_transformer.util import InputError

LONGEST = 3  # number of last tokens that an earlier occurrence is compared with
SHORTEST = 2  # number of them that must be equal


def guess(history_BS: Array, newest_B: Array, count: int) -> Array:
    """Guess the `count` tokens after each row's newest one, uint32 [B, G].

    Of the earlier occurrences of the row's last tokens, the one with the most equal tokens (from 2
    to 3) is used, and of these the most recent one.  If it ends less than `count` tokens before
    the row's end, the tokens after it are repeated.  Without an occurrence, the guess is arbitrary.

    Args:
      history_BS: the tokens of each row; position p is in slot p mod S.
      newest_B: the position of each row's newest token.
    """
    if not count:
        return history_BS[:, :0]
    slots = history_BS.shape[1]
    newest_B1 = newest_B[:, None]
    position_BS = newest_B1 - (newest_B1 - jnp.arange(slots)) % slots
    oldest_B1 = jnp.maximum(newest_B1 - slots + 1, 0)
    equal_BS = jnp.ones(history_BS.shape, bool)
    length_BS = jnp.zeros(history_BS.shape, jnp.int32)  # number of equal tokens
    for back in range(LONGEST):
        token_B1 = jnp.take_along_axis(history_BS, (newest_B1 - back) % slots, axis=1)
        equal_BS &= jnp.roll(history_BS, back, axis=1) == token_B1
        equal_BS &= position_BS - back >= oldest_B1
        length_BS += equal_BS
    usable_BS = (position_BS < newest_B1) & (length_BS >= SHORTEST)
    score_BS = jnp.where(usable_BS, length_BS * slots + position_BS - oldest_B1, -1)
    found_B1 = jnp.argmax(score_BS, axis=1, keepdims=True)
    end_B1 = jnp.take_along_axis(position_BS, found_B1, axis=1)
    distance_B1 = jnp.maximum(newest_B1 - end_B1, 1)
    after_BG = end_B1 + 1 + jnp.arange(count) % distance_B1
    return jnp.take_along_axis(history_BS, after_BG % slots, axis=1)


def check_guesses(guesses: int, window: int) -> None:
    """Raise InputError unless a decode step can guess so many tokens."""
    if not 0 <= guesses < window:
        raise InputError(
            f"generate: guesses is {guesses}, expected 0 to {window - 1}, as the window has "
            f"{window} tokens"
        )


def check_vocabulary(draft: Config, model: Config, where: str) -> None:
    """Raise InputError if a draft has another tokenizer than the model.

    With the same tokenizer, the vocabularies may be padded to different sizes (`n_vocab`).

    Args:
      draft, model, where: as for `draft_config`.
    """
    if draft.n_vocab != model.n_vocab and draft.tokenizer != model.tokenizer:
        raise InputError(
            f"{where}: the draft has {draft.n_vocab} tokens of the tokenizer {draft.tokenizer}, "
            f"and the model {model.n_vocab} of {model.tokenizer}; choose a draft with the model's "
            "tokenizer"
        )


def within_window(draft: Config, model: Config) -> Config:
    """Return a draft's config with the model's window, if that is shorter.

    The cache does not keep what is out of the model's window, which `exact` would require.
    """
    return draft.replace(attention_window=min(draft.window, model.window), exact=False)


def draft_config(draft: Config, model: Config, where: str) -> Config:
    """Return the config with which a draft, which guesses tokens, runs on the mesh of a model.

    Args:
      draft: the draft's own config.
      model: the config of the model whose tokens are guessed.
      where: where the draft is stored, for error messages.

    Raises:
      InputError: if the tokenizers differ, or if the draft cannot be split as the model is.
    """
    check_vocabulary(draft, model, where)
    mp = model.cores_per_replica
    own = (draft.partitioning, draft.shards)
    if draft.norm == "layernorm-desync" and own != (model.partitioning, mp):
        raise InputError(
            f"{where}: with the draft's norm layernorm-desync, partitioning and cores_per_replica "
            f"are {own[0]} and {own[1]}, expected {model.partitioning} and {mp}, as the model's; "
            "choose another draft"
        )
    return draft.for_inference().replace(
        cores_per_replica=mp,
        context_parallel=model.context_parallel,
        tpu_size=model.tpu_size,
        virtual_mesh=model.virtual_mesh if model.exact else None,
        exact=model.exact,
        partitioning=model.partitioning,
        zero=0,
        attention=model.attention,
        paged_attention="xla",
        shard_activations=False,
        offload="none",
    )
