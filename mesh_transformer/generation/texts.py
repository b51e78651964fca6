"""Logprobs and vectors of whole texts: pure functions that need no batch.

Array names end in their shape: B texts, T tokens of a text, S tokens that these attend to, D model,
H heads, K head size, V vocabulary, N alternatives.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mesh_transformer.config import Config
from mesh_transformer.generation.decode import Chosen
from mesh_transformer.generation.forward import context_of, forward, own_logits
from mesh_transformer.generation.sampling import top_tokens
from mesh_transformer.generation.weights import Weights
from mesh_transformer.mesh.parallel import Parallel
from mesh_transformer.model import transformer
from mesh_transformer.model.attention import LONG
from mesh_transformer.model.cache import LayerCache
from mesh_transformer.model.loss import cross_entropy


class Before(NamedTuple):
    """The keys and values of a text that all of several texts begin with."""

    caches_1HSK: tuple[LayerCache, ...]  # one per layer
    length: Any  # number of tokens of the text; the slots after it are padding


def before(
    weights: Weights,
    tokens_1S: Array,
    length: Array,
    adapter_1: Array,
    config: Config,
    par: Parallel,
) -> Before:
    """Return the keys and values of the first `length` tokens of a text, for `score`."""
    positions_1S = jnp.arange(tokens_1S.shape[1])[None]
    context = context_of(weights, positions_1S, None, None, config, par, adapter_1)
    caches: Any = forward(weights, tokens_1S, context, None, config, par)[1]
    return Before(caches, length)


def score(
    weights: Weights,
    tokens_BT: Array,
    following_BT: Array,
    text: Before | None,
    adapter_1: Array,
    alternatives: int,
    config: Config,
    par: Parallel,
) -> Chosen:
    """Return the logprob of each token in `following_BT`, and the most likely tokens in its place.

    No device holds the logits of the full vocabulary: each computes those of its own shard.

    Args:
      tokens_BT: token ids of B texts.
      following_BT: the token that follows each of `tokens_BT` in its text.
      text: what all B texts begin with, before `tokens_BT`; None if that is nothing.
      adapter_1: the number of the adapter that all texts use; 0 for none.
      alternatives: number of most likely tokens to return for each position, at least 1.

    Returns:
      A `Chosen` that contains `following_BT`, the logprobs of these tokens [B, T], and the most
      likely tokens at each position [B, T, N].
    """
    positions_1T, keys_1S = jnp.arange(tokens_BT.shape[1])[None], None
    if text is not None:
        positions_1T += text.length
        slots = jnp.arange(text.caches_1HSK[0].k_BHSK.shape[2])
        in_text_1S = jnp.where(slots < text.length, slots, -1)[None]
        keys_1S = jnp.concatenate((in_text_1S, positions_1T), axis=1)
    context = context_of(weights, positions_1T, keys_1S, None, config, par, adapter_1)
    caches = None if text is None else text.caches_1HSK
    x_BTD, _ = forward(weights, tokens_BT, context, caches, config, par)

    def scored(x_BTD: Array, following_BT: Array) -> Chosen:
        logits_BTV = own_logits(weights, x_BTD, config, par)
        loss_BT, log_sum_BT, _ = cross_entropy(logits_BTV, following_BT, par)
        # Find the most likely tokens of each shard of the vocabulary, then the most likely of all.
        top_BTN, token_BTN = top_tokens(logits_BTV, min(alternatives, logits_BTV.shape[-1]))
        token_BTN = par.gather(token_BTN + par.rank() * logits_BTV.shape[-1])
        top_BTN, at_BTN = jax.lax.top_k(par.gather(top_BTN), alternatives)
        token_BTN = jnp.take_along_axis(token_BTN, at_BTN, axis=-1)
        top_logprob_BTN = top_BTN - top_BTN[..., :1] - log_sum_BT[..., None]
        return Chosen(following_BT, -loss_BT, token_BTN.astype(jnp.uint32), top_logprob_BTN)

    length = following_BT.shape[1]
    if length <= LONG:
        return scored(x_BTD, following_BT)

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, -length % LONG), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(len(x), -1, LONG, *x.shape[2:]), 1, 0)

    # A part after the other, because the logits of a long text take more memory than all else.
    parts = jax.lax.map(lambda part: scored(*part), (split(x_BTD), split(following_BT)))
    return jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :length], parts
    )


def embed(
    weights: Weights,
    tokens_BT: Array,
    length_B: Array,
    adapter_1: Array,
    pooling: str,
    config: Config,
    par: Parallel,
) -> Array:
    """Return one f32 vector per text, [B, D], from what the output head reads at its positions.

    With the norm layernorm-desync, each shard of the head reads other values; these are averaged.

    Args:
      tokens_BT: token ids of B texts; the padding after a text is ignored.
      length_B: number of tokens of each text.
      adapter_1: as for `score`.
      pooling: "mean" for the mean over the text's positions, or "last" for its last position.
    """
    positions_1T = jnp.arange(tokens_BT.shape[1])[None]
    context = context_of(weights, positions_1T, None, None, config, par, adapter_1)
    x_BTD, _ = forward(weights, tokens_BT, context, None, config, par)
    if pooling == "last":
        x_BTD = jnp.take_along_axis(x_BTD, (length_B - 1)[:, None, None], axis=1)
        positions_1T, length_B = positions_1T[:, :1], jnp.ones_like(length_B)
    norm = transformer.transforms(config, par)["proj"]
    x_BTD = norm.apply(transformer.projection_params(weights), x_BTD, head=False)
    x_BTD = par.sum(x_BTD.astype(jnp.float32)) / par.mp
    in_text_BT = positions_1T < length_B[:, None]
    return jnp.where(in_text_BT[..., None], x_BTD, 0).sum(axis=1) / length_B[:, None]
