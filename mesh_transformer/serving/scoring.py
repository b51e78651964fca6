"""What the model thinks of the tokens of a given text."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mesh_transformer.util import bucket

SMALLEST = 16  # texts are padded to this width times a power of two: few compilations


class Scored(NamedTuple):
    """Of M tokens: each, its logprob in nats, and the N likeliest in its place, best first."""

    token: Any  # [M]
    logprob: Any  # [M]
    top_token: Any  # [M, N]
    top_logprob: Any  # [M, N]


def score(network: Any, text: np.ndarray, alternatives: int) -> Scored:
    """Each token of a text but the first, given those before it.

    Args:
      network: has `logits` and `config`; see `engine.Network`.
      text: token ids [T], at most `config.seq`.
    """
    padded = np.zeros((1, bucket(len(text), SMALLEST, network.config.seq)), np.int32)
    padded[0, : len(text)] = text
    logits_TV = jnp.asarray(network.logits(padded))[0]
    following = np.append(padded[0, 1:], 0)
    found = _scored(logits_TV, following, alternatives)
    return Scored(*(np.asarray(x)[: len(text) - 1] for x in found))


@functools.partial(jax.jit, static_argnums=2)
def _scored(logits_TV: Array, following_T: Array, alternatives: int) -> Scored:
    logprob_TV = jax.nn.log_softmax(logits_TV)
    top_logprob_TN, top_token_TN = jax.lax.top_k(logprob_TV, alternatives)
    logprob_T1 = jnp.take_along_axis(logprob_TV, following_T[:, None], axis=1)
    return Scored(following_T, logprob_T1[:, 0], top_token_TN, top_logprob_TN)
