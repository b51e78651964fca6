"""Losses over a vocabulary split over mp, computed in chunks of positions to save memory.

These are the cross entropy, and the KL divergence between a model and its teacher.

Array names end in their shape: B batch, T position, C positions of one chunk, V vocabulary, K
listed tokens, L the same and the target, D model, E the teacher's model.  V is the vocabulary's
size per mp shard (`Manual`) or in all (`Auto`), see `Parallel`.

Which targets count is decided long before: `data.completions` and `data.chat` write each token's
loss mask into the records, `data.record_set` and `data.in_memory` read it, `data.batches` checks it
and `training.step` passes it here.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mesh_transformer.config_model import Model
from mesh_transformer.mesh.parallel import Parallel
from mesh_transformer.model.casts import to_f32
from mesh_transformer.model.dropout import Dropout
from mesh_transformer.model.transformer import (
    Params,
    collect_projection,
    residual_stream,
    segment_runs,
    transforms,
)
from mesh_transformer.util import InputError, first_line, load_named


class Losses(NamedTuple):
    """Losses at every position, in nats.

    Attributes:
      loss_BT: -log p of the target.
      log_sum_BT: log of the sum of exp(logit - largest logit).  As in the original
        mesh-transformer-jax, the z-loss is `config.z_loss` times the mean of the squared values.
      correct_BT: whether the target is the token with the largest logit.  If several tokens share
        the largest logit, the first of them counts.
    """

    loss_BT: Array
    log_sum_BT: Array
    correct_BT: Array


class _Part(NamedTuple):
    """Intermediate values of the loss at every position, for one shard of the vocabulary."""

    max_BT: Array
    sum_BT: Array  # the sum of exp(logit - max)
    target_BT: Array  # the target's logit, or 0 if the target is in another shard
    best_BT: Array  # the first token with the largest logit


def _part(logits_BTV: Array, targets_BT: Array, first: Array | int) -> _Part:
    """Compute the loss's intermediate values from the logits of the tokens from `first` on."""
    max_BT = jax.lax.stop_gradient(logits_BTV.max(axis=-1))
    sum_BT = jnp.sum(jnp.exp(logits_BTV - max_BT[..., None]), axis=-1)
    ids_V = first + jnp.arange(logits_BTV.shape[-1])
    is_target_BTV = ids_V == targets_BT[..., None].astype(jnp.int32)
    target_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0.0), axis=-1)
    best_BT = first + jnp.argmax(jax.lax.stop_gradient(logits_BTV), axis=-1)
    return _Part(max_BT, sum_BT, target_BT, best_BT)


def _own_part(logits_BTV: Array, targets_BT: Array, par: Parallel) -> _Part:
    """Return the result of `_part` for this device's shard."""
    first = par.rank() * logits_BTV.shape[-1]
    return par.by_rows(functools.partial(_part, first=first))(logits_BTV, targets_BT)


def _joined(part: _Part, targets_BT: Array, par: Parallel) -> Losses:
    """Compute the losses from the intermediate values of all mp shards."""
    part = part._replace(max_BT=jax.lax.stop_gradient(part.max_BT))
    max_BT = par.max(part.max_BT)

    def own_sum(part: _Part, max_BT: Array) -> Array:
        return part.sum_BT * jnp.exp(part.max_BT - max_BT)

    def ends(sum_BT: Array, target_BT: Array, max_BT: Array) -> tuple[Array, Array]:
        log_sum_BT = jnp.log(sum_BT)
        return log_sum_BT, log_sum_BT - (target_BT - max_BT)

    sum_BT = par.sum(par.by_rows(own_sum)(part, max_BT))
    log_sum_BT, loss_BT = par.by_rows(ends)(sum_BT, par.sum(part.target_BT), max_BT)
    # The smallest token id with the largest logit is found as the maximum of the negated ids.
    # Shards that do not contain the largest logit contribute the smallest integer.
    is_best_BT = part.max_BT == max_BT
    candidate_BT = jnp.where(is_best_BT, -part.best_BT, jnp.iinfo(jnp.int32).min)
    correct_BT = -par.max(candidate_BT) == targets_BT.astype(jnp.int32)
    return Losses(loss_BT, log_sum_BT, correct_BT)


def cross_entropy(logits_BTV: Array, targets_BT: Array, par: Parallel) -> Losses:
    """Compute the losses from f32 logits that are split over mp along the vocabulary.

    Args:
      targets_BT: the target token ids, numbered over the whole vocabulary.
    """
    return _joined(_own_part(logits_BTV, targets_BT, par), targets_BT, par)


def chunked_cross_entropy(
    head: Callable[[Array], Array], x_BTD: Array, targets_BT: Array, par: Parallel, chunk: int
) -> Losses:
    """Compute `cross_entropy(head(x_BTD), targets_BT, par)` in chunks, to save memory.

    The logits of only `chunk` positions are computed at a time, and the backward pass recomputes
    them.  The collectives over mp run once, after the loop over the chunks.

    Args:
      head: the output head, from x_BTD to f32 logits_BTV.
      chunk: the number of positions per chunk.
    """

    def part(x_BCD: Array, targets_BC: Array) -> _Part:
        return _own_part(head(x_BCD), targets_BC, par)

    return _joined(_by_chunks(part, chunk, x_BTD, targets_BT), targets_BT, par)


def _by_chunks(function: Callable[..., Any], chunk: int, *arrays: Array) -> Any:
    """Return `function(*arrays)`, computed for `chunk` positions at a time.

    The function maps arrays [B, T, ...] to a tree of arrays [B, T, ...], without collectives.  The
    backward pass computes it again, unless there is only one chunk.
    """
    length = arrays[0].shape[1]
    if length <= chunk:
        return function(*arrays)
    chunks = -(-length // chunk)

    def chunked(x: Array) -> Array:
        """Split x [B, T, ...] into chunks on a new axis 0; the last one is padded with zeros."""
        widths = [(0, chunks * chunk - length if axis == 1 else 0) for axis in range(x.ndim)]
        shape = (len(x), chunks, chunk, *x.shape[2:])
        return jnp.moveaxis(jnp.pad(x, widths).reshape(shape), 1, 0)

    def joined(x: Array) -> Array:
        shape = (x.shape[1], chunks * chunk, *x.shape[3:])
        return jnp.moveaxis(x, 0, 1).reshape(shape)[:, :length]

    of_chunk = jax.checkpoint(lambda inputs: function(*inputs))
    return jax.tree.map(joined, jax.lax.map(of_chunk, tuple(map(chunked, arrays))))


class _DivergencePart(NamedTuple):
    """Intermediate values of sum(p log(p / q)) at every position, for one shard of the vocabulary.

    p and q are the softmax of two arrays of logits.
    """

    max_p_BT: Array  # of the logits of p
    max_q_BT: Array
    sum_p_BT: Array  # the sum of exp(logit - max)
    sum_q_BT: Array
    weighted_BT: Array  # the sum of exp(p - max_p) * ((p - max_p) - (q - max_q)), of logits p and q


def _divergence_part(p_BTV: Array, q_BTV: Array) -> _DivergencePart:
    max_p_BT, max_q_BT = (jax.lax.stop_gradient(x.max(axis=-1)) for x in (p_BTV, q_BTV))
    p_BTV, q_BTV = p_BTV - max_p_BT[..., None], q_BTV - max_q_BT[..., None]
    exp_BTV = jnp.exp(p_BTV)
    sum_p_BT, sum_q_BT = exp_BTV.sum(axis=-1), jnp.exp(q_BTV).sum(axis=-1)
    weighted_BT = jnp.sum(exp_BTV * (p_BTV - q_BTV), axis=-1)
    return _DivergencePart(max_p_BT, max_q_BT, sum_p_BT, sum_q_BT, weighted_BT)


def _joined_divergence(part: _DivergencePart, par: Parallel) -> Array:
    """Compute sum(p log(p / q)) at every position, in nats, from the values of all mp shards."""
    max_2BT = jax.lax.stop_gradient(jnp.stack((part.max_p_BT, part.max_q_BT)))
    p_BT, q_BT = max_2BT - par.max(max_2BT)
    weighted_BT = part.weighted_BT + part.sum_p_BT * (p_BT - q_BT)
    own = part.sum_p_BT * jnp.exp(p_BT), part.sum_q_BT * jnp.exp(q_BT), weighted_BT * jnp.exp(p_BT)
    sum_p_BT, sum_q_BT, weighted_BT = par.sum(jnp.stack(own))
    return weighted_BT / sum_p_BT - jnp.log(sum_p_BT) + jnp.log(sum_q_BT)


def losses(
    params: Params,
    tokens_BT: Array,
    targets_BT: Array,
    config: Model,
    par: Parallel,
    segments_BT: Array | None = None,
    key_B: Array | None = None,
) -> Losses:
    """Compute the model's losses at every position.

    Args:
      segments_BT: see `transformer.residual_stream`.
      key_B: the PRNG keys of the sequences, for dropout; None for no dropout.
    """
    head, x_BTD = _head_and_input(params, tokens_BT, config, par, segments_BT, key_B)
    own = chunked_cross_entropy(head, x_BTD, par.cut(targets_BT), par, config.loss_chunk)
    return jax.tree.map(par.whole, own)


def _head_and_input(
    params: Params,
    tokens_BT: Array,
    config: Model,
    par: Parallel,
    segments_BT: Array | None,
    key_B: Array | None,
) -> tuple[Callable[[Array], Array], Array]:
    """Return the output head, from normed x_BTD to f32 logits_BTV, and the normed x_BTD.

    These are of this device's positions (see `Positions.cut`).
    """
    dropout = None if key_B is None else Dropout(key_B)
    x_BTD = residual_stream(params, tokens_BT, config, par, segments_BT, dropout)
    whole = collect_projection(params, config, par)
    projection = transforms(config, par)["proj"].apply
    weights = to_f32(whole)  # so that the chunks' gradients are summed in f32

    def head(x_BTD: Array) -> Array:
        cast = jax.tree.map(lambda w: w.astype(config.dtype), weights)
        return projection(cast, x_BTD, norm=False)

    return head, projection(whole, x_BTD, head=False)


class Teacher(NamedTuple):
    """A model whose probabilities of every token another one learns.

    It has the same vocabulary, and no gradient.
    """

    params: Params
    config: Model
    par: Parallel


def distillation_losses(
    params: Params,
    teacher: Teacher,
    tokens_BT: Array,
    targets_BT: Array,
    config: Model,
    par: Parallel,
    segments_BT: Array | None = None,
    key_B: Array | None = None,
) -> tuple[Losses, Array]:
    """Compute the model's losses, and its KL divergence from the teacher, at every position.

    The divergence, in nats, is that of the two models' probabilities at the temperature
    `config.distill_temperature`: the sum over the vocabulary of p log(p / q), where p is the
    teacher's if `config.distill_kl` is "forward", else the model's.  The vocabulary stays split
    over mp; five numbers per position cross the mesh, besides those of the losses.

    Args:
      segments_BT, key_B: see `losses`.
    """
    head, x_BTD = _head_and_input(params, tokens_BT, config, par, segments_BT, key_B)
    teacher_head, x_BTE = _head_and_input(
        teacher.params, tokens_BT, teacher.config, teacher.par, segments_BT, None
    )

    def part(x_BTD: Array, x_BTE: Array, targets_BT: Array) -> tuple[_Part, _DivergencePart]:
        logits_BTV, teacher_BTV = head(x_BTD), teacher_head(x_BTE)
        pair = teacher_BTV / config.distill_temperature, logits_BTV / config.distill_temperature
        p_BTV, q_BTV = pair if config.distill_kl == "forward" else pair[::-1]
        return _own_part(logits_BTV, targets_BT, par), _divergence_part(p_BTV, q_BTV)

    targets_BT = par.cut(targets_BT)
    parts, divergence = _by_chunks(part, config.loss_chunk, x_BTD, x_BTE, targets_BT)
    own = _joined(parts, targets_BT, par), _joined_divergence(divergence, par)
    return jax.tree.map(par.whole, own)


def _own_listed(logits_BTV: Array, ids_BTK: Array, par: Parallel) -> Array:
    """Return the logit of each token, or 0 if it is in another shard of the vocabulary.

    Each token is compared with all ids: unlike a gather, this needs no collectives where XLA
    inserts them.
    """
    first = par.rank() * logits_BTV.shape[-1]

    def listed(logits_BTV: Array, ids_BTK: Array) -> Array:
        ids_V = first + jnp.arange(logits_BTV.shape[-1])

        def one(ids_BT: Array) -> Array:
            return jnp.where(ids_V == ids_BT[..., None], logits_BTV, 0.0).sum(axis=-1)

        # Unrolled, not a loop: on a virtual mesh, JAX 0.11 does not evaluate one inside another.
        ids_BTK = ids_BTK.astype(jnp.int32)
        return jnp.stack([one(ids_BTK[..., k]) for k in range(ids_BTK.shape[-1])], axis=-1)

    return par.by_rows(listed)(logits_BTV, ids_BTK)


SMALLEST_REST = 1e-6  # lower bound of a probability that is computed as 1 minus a sum


def stored_losses(
    params: Params,
    tokens_BT: Array,
    targets_BT: Array,
    ids_BTK: Array,
    logprobs_BTK: Array,
    config: Model,
    par: Parallel,
    segments_BT: Array | None = None,
    key_B: Array | None = None,
) -> tuple[Losses, Array]:
    """Compute the model's losses, and its KL divergence from a teacher with K known tokens.

    The divergence, in nats, is the sum of p log(p / q) over the K tokens, and over all others
    together, where p is the teacher's probability.  It is at most that over all tokens.  K + 1
    numbers per position cross the mesh, besides those of the losses.

    Args:
      ids_BTK, logprobs_BTK: see `data.teacher.Alternatives`.  The divergence is 0 where nothing is
        known.
      segments_BT, key_B: see `losses`.
    """
    head, x_BTD = _head_and_input(params, tokens_BT, config, par, segments_BT, key_B)
    targets_BT, ids_BTK, logprobs_BTK = map(par.cut, (targets_BT, ids_BTK, logprobs_BTK))
    # The target comes last.
    ids_BTL = jnp.concatenate((ids_BTK, targets_BT[..., None].astype(ids_BTK.dtype)), axis=-1)

    def part(x_BCD: Array, targets_BC: Array, ids_BCL: Array) -> tuple[_Part, Array]:
        logits_BCV = head(x_BCD)
        return _own_part(logits_BCV, targets_BC, par), _own_listed(logits_BCV, ids_BCL, par)

    parts, own_BTL = _by_chunks(part, config.loss_chunk, x_BTD, targets_BT, ids_BTL)
    result, logits_BTL = _joined(parts, targets_BT, par), par.sum(own_BTL)

    def divergence(logits_BTL: Array, loss_BT: Array, logp_BTK: Array) -> Array:
        logq_BTK = logits_BTL[..., :-1] - logits_BTL[..., -1:] - loss_BT[..., None]
        p_BTK = jnp.exp(logp_BTK)
        is_known_BTK = p_BTK > 0
        rest_p_BT = jnp.maximum(1 - p_BTK.sum(axis=-1), 0)
        q_BTK = jnp.where(is_known_BTK, jnp.exp(logq_BTK), 0)
        rest_q_BT = jnp.maximum(1 - q_BTK.sum(axis=-1), SMALLEST_REST)
        finite_BTK = jnp.where(is_known_BTK, logp_BTK, 0)
        listed_BT = jnp.where(is_known_BTK, p_BTK * (finite_BTK - logq_BTK), 0).sum(axis=-1)
        log_rest_BT = jnp.log(jnp.maximum(rest_p_BT, SMALLEST_REST))
        rest_BT = rest_p_BT * (log_rest_BT - jnp.log(rest_q_BT))
        return jnp.where(is_known_BTK.any(axis=-1), listed_BT + rest_BT, 0)

    own = result, par.by_rows(divergence)(logits_BTL, result.loss_BT, logprobs_BTK)
    return jax.tree.map(par.whole, own)


class LossWeights(NamedTuple):
    """Weight of each position in the mean losses of a batch.

    Each array has mean 1 over the global batch, or is 0 everywhere if no position counts in the
    loss.

    Attributes:
      every_BT: weights for the loss, nonzero at all positions that count.
      last_BT: weights for the metric `last_loss`, nonzero only at the last position that counts in
        each text.
    """

    every_BT: Array
    last_BT: Array


def loss_weights(mask: Array, par: Parallel, segments: Array | None = None) -> LossWeights:
    """Return weights [..., T] that restrict the mean loss of a batch to positions with `mask` 1.

    If `mask` is 0 everywhere in the global batch, all weights are 0.

    Args:
      mask: 1 at positions that count in the loss, else 0, [..., T].
      segments: segment numbers, [..., T], for sequences that pack several texts (see
        `transformer.logits`).  By default, each sequence is one text.
    """
    every, length = mask.astype(jnp.float32), mask.shape[-1]
    runs = jnp.zeros_like(mask, jnp.int32) if segments is None else segment_runs(segments)[0]
    # The index `length` is a position added after the end, with mask 1 and run number -1.
    index = jnp.where(mask != 0, jnp.arange(length), length)
    nearest = jax.lax.cummin(index, axis=mask.ndim - 1, reverse=True)
    following = jnp.concatenate((nearest[..., 1:], jnp.full_like(nearest[..., :1], length)), -1)
    padded_runs = jnp.concatenate((runs, jnp.full_like(runs[..., :1], -1)), -1)
    last = every * (jnp.take_along_axis(padded_runs, following, axis=-1) != runs)
    shares = par.mean_over_dp(jnp.stack((every.mean(), last.mean())))
    scales = 1 / jnp.maximum(shares, jnp.finfo(jnp.float32).tiny)
    return LossWeights(every * scales[0], last * scales[1])


def train_loss(
    params: Params,
    tokens_BT: Array,
    targets_BT: Array,
    config: Model,
    par: Parallel,
    weights: LossWeights | None = None,
    segments_BT: Array | None = None,
    key_B: Array | None = None,
) -> tuple[Array, Array]:
    """Return the mean loss that training minimises, and the mean loss at only the last positions.

    The last positions are those where `weights.last_BT` is not 0 or, without `weights`, the last
    position of each sequence.  Both means include the same z-loss.

    Args:
      key_B: see `losses`.
    """
    result = losses(params, tokens_BT, targets_BT, config, par, segments_BT, key_B)
    if config.token_loss is not None:
        result = result._replace(loss_BT=_own_loss(str(config.token_loss), result.loss_BT, par))
    if weights is None:
        z_loss = config.z_loss * jnp.mean(jnp.square(result.log_sum_BT))
        return result.loss_BT.mean() + z_loss, result.loss_BT[:, -1].mean() + z_loss
    z_loss = config.z_loss * jnp.mean(weights.every_BT * jnp.square(result.log_sum_BT))
    every = jnp.mean(weights.every_BT * result.loss_BT)
    return every + z_loss, jnp.mean(weights.last_BT * result.loss_BT) + z_loss


def _own_loss(name: str, loss_BT: Array, par: Parallel) -> Array:
    """Return what the function that `token_loss` names makes of the loss of each target.

    Raises:
      InputError: if the function fails, or returns something else than an array [B, T].
    """
    own = par.by_rows(load_named(name, "token_loss"))
    try:
        result = own(loss_BT)
    except (TypeError, ValueError, IndexError) as error:
        raise InputError(
            f"token_loss {name}: {type(error).__name__}: {first_line(error)}"
        ) from error
    if (shape := jnp.shape(result)) != loss_BT.shape:
        raise InputError(
            f"token_loss {name} returned an array of shape {shape}, expected {loss_BT.shape}: the "
            "loss of each target [B, T]"
        )
    return result
