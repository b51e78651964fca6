"""Cross entropy over a vocabulary that mp splits, of logits that need never be held all at once.

Array names end in their shape: B batch, T position, C positions of one chunk, V vocabulary this
program sees, G norm groups, D model.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mesh_transformer.config import Config
from mesh_transformer.mesh.parallel import Parallel
from mesh_transformer.model.gptj import (
    Params,
    declarations,
    residual_stream,
    segment_runs,
    transforms,
)
from mesh_transformer.util import to_f32


class Losses(NamedTuple):
    """What one forward pass says of every position, in nats.

    Attributes:
      loss_BT: -log p of the target.
      log_sum_BT: log of the sum of exp(logit - largest logit); the original squares it (z-loss).
      correct_BT: whether the first largest logit is the target's.
    """

    loss_BT: Array
    log_sum_BT: Array
    correct_BT: Array


class _Part(NamedTuple):
    """What the logits of this program's vocabulary say of every position, by themselves."""

    max_BT: Array
    sum_BT: Array  # of exp(logit - max)
    target_BT: Array  # the target's logit, 0 where another program has it
    best_BT: Array  # the first token with the largest logit


def _part(logits_BTV: Array, targets_BT: Array, first: Array | int) -> _Part:
    """`first` is the token of the first of these logits."""
    max_BT = jax.lax.stop_gradient(logits_BTV.max(axis=-1))
    sum_BT = jnp.sum(jnp.exp(logits_BTV - max_BT[..., None]), axis=-1)
    ids_V = first + jnp.arange(logits_BTV.shape[-1])
    is_target_BTV = ids_V == targets_BT[..., None].astype(jnp.int32)
    target_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0.0), axis=-1)
    best_BT = first + jnp.argmax(jax.lax.stop_gradient(logits_BTV), axis=-1)
    return _Part(max_BT, sum_BT, target_BT, best_BT)


def _joined(part: _Part, targets_BT: Array, par: Parallel) -> Losses:
    """The parts that mp holds, as one."""
    max_BT = par.max(part.max_BT)
    log_sum_BT = jnp.log(par.sum(part.sum_BT * jnp.exp(part.max_BT - max_BT)))
    loss_BT = log_sum_BT - (par.sum(part.target_BT) - max_BT)
    # The first part with the largest logit answers: max of the negated ids, others out of range.
    is_best_BT = part.max_BT == max_BT
    candidate_BT = jnp.where(is_best_BT, -part.best_BT, jnp.iinfo(jnp.int32).min)
    correct_BT = -par.max(candidate_BT) == targets_BT.astype(jnp.int32)
    return Losses(loss_BT, log_sum_BT, correct_BT)


def cross_entropy(logits_BTV: Array, targets_BT: Array, par: Parallel) -> Losses:
    """Of the logits, f32, of the vocabulary that this program holds."""
    first = par.rank() * logits_BTV.shape[-1]
    return _joined(_part(logits_BTV, targets_BT, first), targets_BT, par)


def chunked_cross_entropy(
    head: Callable[[Array], Array], x_GBTD: Array, targets_BT: Array, par: Parallel, chunk: int
) -> Losses:
    """As `cross_entropy(head(x), targets, par)`, with the logits of `chunk` positions at a time.

    The backward pass makes them again.  Nothing is said between devices inside the loop.
    """
    length = x_GBTD.shape[2]
    if length <= chunk:
        return cross_entropy(head(x_GBTD), targets_BT, par)
    chunks = -(-length // chunk)

    def cut(x: Array, axis: int) -> Array:
        """The chunks of an array along an axis, the last one filled with zeros, on a new axis 0."""
        widths = [(0, chunks * chunk - length if at == axis else 0) for at in range(x.ndim)]
        shape = (*x.shape[:axis], chunks, chunk, *x.shape[axis + 1 :])
        return jnp.moveaxis(jnp.pad(x, widths).reshape(shape), axis, 0)

    @jax.checkpoint
    def one(x_GBCD: Array, targets_BC: Array) -> _Part:
        logits_BCV = head(x_GBCD)
        return _part(logits_BCV, targets_BC, par.rank() * logits_BCV.shape[-1])

    parts = jax.lax.map(lambda at: one(*at), (cut(x_GBTD, 2), cut(targets_BT, 1)))

    def whole(found: Array) -> Array:
        found_BT = jnp.moveaxis(found, 0, 1).reshape(targets_BT.shape[0], -1)
        return found_BT[:, :length]

    return _joined(jax.tree.map(whole, parts), targets_BT, par)


def losses(
    params: Params,
    tokens_BT: Array,
    targets_BT: Array,
    config: Config,
    par: Parallel,
    segments_BT: Array | None = None,
) -> Losses:
    """Cross entropy at every position, in nats; for `segments` see `logits`."""
    x_BTD = residual_stream(params, tokens_BT, config, par, segments_BT)
    whole = par.collect(params["proj"], declarations(config)["proj"], config.dtype)
    projection = transforms(config, par)["proj"].apply
    weights = to_f32(whole)  # so that the gradients of the chunks are summed in f32

    def head(x_GBTD: Array) -> Array:
        own = jax.tree.map(lambda w: w.astype(config.dtype), weights)
        return projection(own, x_GBTD, norm=False)

    x_GBTD = projection(whole, x_BTD, head=False)
    return chunked_cross_entropy(head, x_GBTD, targets_BT, par, config.loss_chunk)


class LossWeights(NamedTuple):
    """How much each position counts in the loss and in `last_loss`; means over a batch are 1."""

    every_BT: Array
    last_BT: Array


def loss_weights(mask: Array, par: Parallel, segments: Array | None = None) -> LossWeights:
    """Weights [..., T] under which means over all of a batch are means where `mask` is 1.

    The last position of a sequence, or of each of its `segments`, is its last one with 1; where no
    position has 1 all weights are 0.
    """
    every, length = mask.astype(jnp.float32), mask.shape[-1]
    runs = jnp.zeros_like(mask, jnp.int32) if segments is None else segment_runs(segments)[0]
    # Behind all others stands a position with 1 of a run of its own.
    index = jnp.where(mask != 0, jnp.arange(length), length)
    onward = jax.lax.cummin(index, axis=mask.ndim - 1, reverse=True)
    following = jnp.concatenate((onward[..., 1:], jnp.full_like(onward[..., :1], length)), -1)
    others = jnp.concatenate((runs, jnp.full_like(runs[..., :1], -1)), -1)
    last = every * (jnp.take_along_axis(others, following, axis=-1) != runs)
    shares = par.mean_scalar(jnp.stack((every.mean(), last.mean())))
    scales = 1 / jnp.maximum(shares, jnp.finfo(jnp.float32).tiny)
    return LossWeights(every * scales[0], last * scales[1])


def train_loss(
    params: Params,
    tokens_BT: Array,
    targets_BT: Array,
    config: Config,
    par: Parallel,
    weights: LossWeights | None = None,
    segments_BT: Array | None = None,
) -> tuple[Array, Array]:
    """The mean loss that training minimises, z-loss included, and that of the last position."""
    found = losses(params, tokens_BT, targets_BT, config, par, segments_BT)
    if weights is None:
        z_loss = config.z_loss * jnp.mean(jnp.square(found.log_sum_BT))
        return found.loss_BT.mean() + z_loss, found.loss_BT[:, -1].mean() + z_loss
    z_loss = config.z_loss * jnp.mean(weights.every_BT * jnp.square(found.log_sum_BT))
    every = jnp.mean(weights.every_BT * found.loss_BT)
    return every + z_loss, jnp.mean(weights.last_BT * found.loss_BT) + z_loss
