"""Objectives: losses that are functions of the log-probabilities of texts or of tokens.

An objective is a function of `Texts` or, on rollouts, of `Tokens`.  `OBJECTIVES` and
`TOKEN_OBJECTIVES` have those of the config key `objective`; `fit` also takes a function of the
user's.

Array names end in their shape: A accumulation, B records, T position, N groups of a record, K the
chosen and the rejected text of a group.  A record packs its texts: `segment_ids` 3 n + 1 is the
chosen text of group n, 3 n + 2 the rejected one, and 3 n + 3 a text whose answer belongs to another
prompt, from which KTO estimates a KL divergence.  A group may lack some of them.
"""

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mesh_transformer.config import Config
from mesh_transformer.data.batches import GROUP
from mesh_transformer.mesh.parallel import Parallel
from mesh_transformer.model.loss import losses
from mesh_transformer.model.transformer import Params, segment_runs
from mesh_transformer.util import InputError, brief, is_named, load_named

Values = dict[str, Array | None]  # the arrays of a batch in `VALUE_KEYS`
PREFIX = "objective/"  # of an objective's metrics among those of a step
# The names of the metrics of a step, which a function may not use.
TAKEN = {"loss", "last_loss", "grad_norm", "learning_rate", "skipped", "sequences", "tokens"}
TAKEN |= {"tokens_per_sec", "mfu"}


class Texts(NamedTuple):
    """The log-probabilities of the texts in a microbatch, in groups of a chosen and a rejected one.

    Only positions whose loss mask is 1 count.  A text that a group lacks has the sum -1, the count
    1 and the reference -1, so that functions of them are finite; its loss does not count.

    Attributes:
      sum_BNK: the sum of log p over a text's positions that count, in nats.
      count_BNK: the number of these positions.
      reference_BNK: `sum_BNK` under the reference; 0 if the batch has no reference.
      kl: the mean of `sum_BNK` less `reference_BNK` over the microbatch's texts with the answer of
        another prompt, at least 0, without a gradient; 0 if there are none.
    """

    sum_BNK: Array
    count_BNK: Array
    reference_BNK: Array
    kl: Array


class Tokens(NamedTuple):
    """The log-probabilities of the targets in a microbatch of rollouts, in nats.

    Only `logprob_BT` has a gradient.  Where the loss mask is 0, and where the batch lacks them, the
    last three are `logprob_BT` without its gradient.

    Attributes:
      logprob_BT: under the parameters that are trained.
      mask_BT: 1 at the tokens of answers, else 0; only these count.
      advantage_BT: how much better the answer is than others to its prompt.
      sampled_BT: when the answer was sampled, as the sampler computed it.
      old_BT: the same, as training computes it.
      reference_BT: under the reference.
    """

    logprob_BT: Array
    mask_BT: Array
    advantage_BT: Array
    sampled_BT: Array
    old_BT: Array
    reference_BT: Array


# Returns a loss per group [B, N], or per text [B, N, K].  It may also return a dict of metrics: per
# group [B, N], per text [B, N, K], which gives two metrics, name/chosen and name/rejected, or [].
# Of tokens, it returns a loss per token [B, T], and metrics per token or [].
Objective = Callable[[Any], Any]
Metrics = dict[str, Array]


def _margin(values_BNK: Array) -> Array:
    return values_BNK[..., 0] - values_BNK[..., 1]


def _metrics(rewards_BNK: Array, **others: Array) -> Metrics:
    margin_BN = _margin(rewards_BNK)
    accuracy_BN = (margin_BN > 0).astype(jnp.float32)
    pairs = {"rewards/margin": margin_BN, "rewards/accuracy": accuracy_BN}
    return {"rewards": rewards_BNK, **pairs, **others}


def _dpo(texts: Texts, beta: float, _: Config) -> tuple[Array, Metrics]:
    """Direct preference optimization (Rafailov et al. 2023, equation 7)."""
    ratio_BNK = texts.sum_BNK - texts.reference_BNK
    rewards_BNK = beta * ratio_BNK
    loss_BN = -jax.nn.log_sigmoid(_margin(rewards_BNK))
    return loss_BN, _metrics(rewards_BNK, kl=ratio_BNK.mean(axis=-1))


def _ipo(texts: Texts, beta: float, _: Config) -> tuple[Array, Metrics]:
    """Identity preference optimization (Azar et al. 2023, equation 17).

    As in TRL, log ratios are means over positions, so that `beta` does not depend on their number.
    """
    ratio_BNK = texts.sum_BNK - texts.reference_BNK
    loss_BN = jnp.square(_margin(ratio_BNK / texts.count_BNK) - 0.5 / beta)
    return loss_BN, _metrics(beta * ratio_BNK, kl=ratio_BNK.mean(axis=-1))


def _orpo(texts: Texts, beta: float, _: Config) -> tuple[Array, Metrics]:
    """Odds ratio preference optimization (Hong et al. 2024, equations 6 and 7); beta is lambda."""
    mean_BNK = texts.sum_BNK / texts.count_BNK
    bounded_BNK = jnp.minimum(mean_BNK, -1e-6)  # log(1 - p) is finite
    odds_BNK = bounded_BNK - jnp.where(
        bounded_BNK > -math.log(2.0),
        jnp.log(-jnp.expm1(bounded_BNK)),
        jnp.log1p(-jnp.exp(bounded_BNK)),
    )
    loss_BN = -mean_BNK[..., 0] - beta * jax.nn.log_sigmoid(_margin(odds_BNK))
    return loss_BN, _metrics(beta * mean_BNK)


def _simpo(texts: Texts, beta: float, config: Config) -> tuple[Array, Metrics]:
    """Simple preference optimization (Meng et al. 2024, equation 6); `margin` is gamma."""
    rewards_BNK = beta * texts.sum_BNK / texts.count_BNK
    return -jax.nn.log_sigmoid(_margin(rewards_BNK) - config.margin), _metrics(rewards_BNK)


def _kto(texts: Texts, beta: float, config: Config) -> tuple[Array, Metrics]:
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, equation 8), a loss per text."""
    ratio_BNK = texts.sum_BNK - texts.reference_BNK
    signs = np.array([1.0, -1.0], np.float32)
    weights = np.array([config.desirable_weight, config.undesirable_weight], np.float32)
    value_BNK = jax.nn.sigmoid(beta * signs * (ratio_BNK - texts.kl))
    return (1 - value_BNK) * weights, {"rewards": beta * ratio_BNK, "kl": texts.kl}


OBJECTIVES: dict[str, Callable[[Texts, float, Config], tuple[Array, Metrics]]] = {
    "dpo": _dpo,
    "ipo": _ipo,
    "orpo": _orpo,
    "simpo": _simpo,
    "kto": _kto,
}


def _grpo(tokens: Tokens, beta: float, config: Config) -> tuple[Array, Metrics]:
    """Group relative policy optimization (Shao et al. 2024, equation 3), without their 1 / length.

    The upper bound of the ratio is that of DAPO (Yu et al. 2025, equation 10).  What the sampler
    and training compute differently is corrected by a truncated importance weight (Yao et al.
    2025).
    """
    ratio_BT = jnp.exp(tokens.logprob_BT - tokens.old_BT)
    gain_BT = ratio_BT * tokens.advantage_BT
    bounded_BT = jnp.clip(ratio_BT, 1 - config.clip_low, 1 + config.clip_high)
    least_BT = jnp.minimum(gain_BT, bounded_BT * tokens.advantage_BT)
    weight_BT = jnp.exp(tokens.old_BT - tokens.sampled_BT)
    loss_BT = -jnp.minimum(weight_BT, config.importance_cap) * least_BT
    metrics = {
        "ratio": ratio_BT,
        "ratio_error": jnp.abs(ratio_BT - 1),
        "sampler_error": jnp.abs(weight_BT - 1),
        "clipped": (least_BT < gain_BT).astype(jnp.float32),
        "entropy": -tokens.logprob_BT,
    }
    if beta:
        gap_BT = tokens.reference_BT - tokens.logprob_BT
        metrics["kl"] = jnp.expm1(gap_BT) - gap_BT  # at least 0, and unbiased
        loss_BT += beta * metrics["kl"]
    return loss_BT, metrics


TOKEN_OBJECTIVES = {"grpo": _grpo}


class Head(NamedTuple):
    """An objective, and what follows from the shapes that it returns.

    Attributes:
      function: returns the loss and the metrics, also if the objective returns no metrics.
      by_text: whether the loss is per text.
      needs_reference: whether they depend on the reference.
      names: the names of the metrics of a step.
      by_token: whether the loss is per token; the function is then one of `Tokens`.
      divisor: the number per row by which the sum over tokens is divided; None for the number of
        tokens that count.
    """

    function: Callable[[Any], tuple[Array, Metrics]]
    by_text: bool
    needs_reference: bool
    names: tuple[str, ...]
    by_token: bool = False
    divisor: int | None = None


def head_of(config: Config, objective: Objective | None = None) -> Head | None:
    """Return the head of an objective, by default the config's; None for cross entropy.

    Raises:
      InputError: if the objective does not return what it should.
    """
    if objective is None and config.objective is None:
        return None

    def function(texts: Any) -> tuple[Array, Metrics]:
        if objective is None:
            assert config.objective is not None
            assert config.beta is not None
            every: dict[str, Any] = OBJECTIVES | TOKEN_OBJECTIVES
            return every[config.objective](texts, config.beta, config)
        result = objective(texts)
        return result if isinstance(result, tuple) else (result, {})

    by_token = config.has_rollouts
    text: Any = jax.ShapeDtypeStruct((2, 3) if by_token else (2, 3, 2), jnp.float32)
    kl: Any = jax.ShapeDtypeStruct((), jnp.float32)
    texts = Tokens(*[text] * 6) if by_token else Texts(text, text, text, kl)
    loss, metrics = jax.eval_shape(function, texts)
    allowed = [text.shape] if by_token else [text.shape[:-1], text.shape]
    for name, array in {"loss": loss, **metrics}.items():
        shapes = allowed if name == "loss" else [(), *allowed]
        if getattr(array, "shape", None) not in shapes:
            raise InputError(
                f"objective: for sums of shape {text.shape}, its {name} has shape "
                f"{getattr(array, 'shape', None)}, expected {' or '.join(map(str, shapes))}"
            )
    both = {name: ("chosen", "rejected") for name, array in metrics.items() if array.ndim == 3}
    names = tuple(
        f"{PREFIX}{name}{end and '/'}{end}"
        for name in sorted(metrics)
        for end in both.get(name, ("",))
    )
    closed = jax.make_jaxpr(function)(texts).jaxpr
    used = {id(x) for eqn in closed.eqns for x in eqn.invars} | set(map(id, closed.outvars))
    needs_reference = not used.isdisjoint(map(id, closed.invars[5 if by_token else 2 :]))
    divisor = config.answer_tokens if config.divide_by == "answer_tokens" else None
    return Head(function, loss.ndim == 3, needs_reference, names, by_token, divisor)


def text_sums(values_BT: Array, mask_BT: Array, segments_BT: Array) -> Array:
    """Return the sum of the values of each text's positions with `mask_BT` 1, [B, N, 3].

    Positions with the same segment number must follow each other.
    """
    length = values_BT.shape[-1]
    slots = length // GROUP * GROUP

    def add(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        return right[0] + jnp.where(left[1] == right[1], left[0], 0.0), right[1]

    # Not `segment_sum`: the order of its additions is not defined on GPUs.
    own_BT = jnp.where(mask_BT != 0, values_BT, 0.0), segment_runs(segments_BT)[0]
    sums_BT, _ = jax.lax.associative_scan(add, own_BT, axis=1)  # up to each position of a text
    number_T = jnp.arange(length)
    last_BS = jax.vmap(lambda text_T: jnp.full(slots + 1, -1).at[text_T].max(number_T))(segments_BT)
    sums_BS = jnp.take_along_axis(sums_BT, jnp.maximum(last_BS[:, 1:], 0), axis=1)
    return jnp.where(last_BS[:, 1:] < 0, 0.0, sums_BS).reshape(-1, slots // GROUP, GROUP)


def counted(counts_BN3: Array, *, by_text: bool) -> Array:
    """Return which texts [..., N, K] have positions that count, or which groups [..., N] have two.

    The result is 0 or 1, in f32.
    """
    is_there_BNK = counts_BN3[..., :2] > 0
    return (is_there_BNK if by_text else is_there_BNK.all(axis=-1)).astype(jnp.float32)


def objective_weights(mask: Array, segments: Array | None, par: Parallel, head: Head) -> Array:
    """Return the weight of each loss of an update, [A, B, N], [A, B, N, K] or [A, B, T].

    The weights have mean 1 over the global batch, or are 0 everywhere if nothing counts.  With a
    `divisor`, their sum over a row is instead T times its number of tokens, over the divisor.
    """
    if head.by_token:
        weights = mask.astype(jnp.float32)
        if head.divisor is not None:
            return weights * (mask.shape[-1] / head.divisor)
    else:
        assert segments is not None
        counts = jax.lax.map(lambda x: text_sums(jnp.ones(x[0].shape), *x), (mask, segments))
        weights = counted(counts, by_text=head.by_text)
    share = par.mean_over_dp(weights.mean())
    return weights / jnp.maximum(share, jnp.finfo(jnp.float32).tiny)


def texts_of(
    sums_BN3: Array, counts_BN3: Array, references_BN3: Array, par: Parallel | None = None
) -> Texts:
    """Return the `Texts` of a microbatch from the sums over all three texts of each group.

    Args:
      par: averages the estimate of the KL divergence over dp; None if the arrays are whole.
    """
    is_there_BNK = counts_BN3[..., :2] > 0
    ratio_BN = jax.lax.stop_gradient(sums_BN3 - references_BN3)[..., 2]
    has_ratio_BN = counts_BN3[..., 2] > 0
    kl = jnp.stack((jnp.where(has_ratio_BN, ratio_BN, 0.0).mean(), has_ratio_BN.mean()))
    kl = kl if par is None else par.mean_over_dp(kl)
    return Texts(
        jnp.where(is_there_BNK, sums_BN3[..., :2], -1.0),
        jnp.where(is_there_BNK, counts_BN3[..., :2], 1.0),
        jnp.where(is_there_BNK, references_BN3[..., :2], -1.0),
        jnp.maximum(kl[0] / jnp.maximum(kl[1], jnp.finfo(jnp.float32).tiny), 0.0),
    )


def tokens_of(logprob_BT: Array, mask_BT: Array, values: Values) -> Tokens:
    """Return the `Tokens` of a microbatch."""
    own_BT = jax.lax.stop_gradient(logprob_BT)

    def value(name: str) -> Array:
        value_BT = values.get(name)
        return own_BT if value_BT is None else jnp.where(mask_BT != 0, value_BT, own_BT)

    advantage_BT = values["advantage"]
    assert advantage_BT is not None
    others = map(value, ("sampled", "old", "reference"))
    return Tokens(logprob_BT, mask_BT.astype(jnp.float32), advantage_BT, *others)


def metric_sums(metrics: Metrics, counts: Array) -> tuple[Array, Array]:
    """Return the mean over all entries of each metric that counts, and the share that counts.

    The metrics are the quotients.  Both arrays are in the order of `Head.names`.

    Args:
      counts: the number of positions of each text that count, [B, N, 3], or of tokens the mask.
    """
    values, shares = [], []
    for _, metric in sorted(metrics.items()):
        weights = jnp.ones(())
        if metric.ndim:
            weights = counts
            if counts.ndim == 3:
                weights = counted(counts, by_text=metric.ndim == 3)
        axes = tuple(range(min(metric.ndim, 2)))
        weighted = jnp.where(weights > 0, jax.lax.stop_gradient(metric), 0.0)
        values.append(weighted.mean(axis=axes).reshape(-1))
        shares.append(weights.mean(axis=axes).reshape(-1))
    none = [jnp.zeros(0)]
    return jnp.concatenate(none + values), jnp.concatenate(none + shares)


def objective_loss(
    params: Params,
    tokens_BT: Array,
    targets_BT: Array,
    weights: Array,
    segments_BT: Array | None,
    key_B: Array | None,
    mask_BT: Array,
    values: Values,
    *,
    config: Config,
    par: Parallel,
    head: Head,
) -> tuple[Array, Array]:
    """Return the mean loss of a microbatch, and its metrics: means, then shares, see `metric_sums`.

    Unlike cross entropy, it has no z-loss.

    Args:
      weights: of the microbatch's losses; see `objective_weights`.
      key_B: see `loss.losses`.
      values: of texts, the first 3 N entries of a row of `reference` are the sums of the row's
        texts under the reference, in the order of their segment numbers.  For tokens, see `Tokens`.
    """
    result = losses(params, tokens_BT, targets_BT, config, par, segments_BT, key_B)
    reference_BT = values["reference"]
    if reference_BT is None and head.needs_reference:
        remedy = "" if head.by_token else "; add it with `training.references.with_reference`"
        raise InputError(f"train: the batch has no 'reference', which the objective needs{remedy}")
    inputs: Tokens | Texts
    if head.by_token:
        inputs = tokens_of(-result.loss_BT, mask_BT, values)
        counts = inputs.mask_BT
    else:
        assert segments_BT is not None
        sums_BN3 = text_sums(-result.loss_BT, mask_BT, segments_BT)
        counts = text_sums(jnp.ones(mask_BT.shape), mask_BT, segments_BT)
        references_BN3 = jnp.zeros(sums_BN3.shape)
        if reference_BT is not None:
            used = sums_BN3[0].size
            references_BN3 = reference_BT[:, :used].reshape(sums_BN3.shape)
        inputs = texts_of(sums_BN3, counts, references_BN3, par)
    loss, metrics = head.function(inputs)
    measured = metric_sums(metrics, counts)
    return jnp.mean(weights * loss), jnp.concatenate(measured)


def check_functions(config: Config) -> None:
    """Raise InputError if a function of the user's that training steps call cannot be loaded."""
    names = [(name, "metrics") for name in config.metrics]
    names += [(config.token_loss, "token_loss")] if config.token_loss else []
    names += [(config.schedule, "schedule")] if is_named(config.schedule) else []
    for name, key in names:
        if not callable(value := load_named(name, key)):
            raise InputError(f"{key}: {name} is {brief(repr(value))}, expected a function")


def own_metrics(name: str, grads: Any, params: Any, others: Collection[str]) -> dict[str, Array]:
    """Return the metrics of a function that the config key `metrics` names.

    Args:
      others: the names of the other metrics.

    Raises:
      InputError: if the function does not return numbers by name, or uses another metric's name.
    """
    values = load_named(name, "metrics")(grads, params)
    if not isinstance(values, dict):
        raise InputError(f"metrics: {name} returned {type(values).__name__}, expected a dict")
    metrics = {}
    for key, value in values.items():
        if key in TAKEN or f"{PREFIX}{key}" in others:
            raise InputError(f"metrics: {name} returned {key!r}, the name of another metric")
        if jnp.shape(value):
            shape = jnp.shape(value)
            raise InputError(f"metrics: {name} returned {key!r} of shape {shape}, expected numbers")
        metrics[f"{PREFIX}{key}"] = jnp.float32(value)
    return metrics
