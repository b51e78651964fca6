"""GPT-J as pure functions of its parameters; `par` decides what a program holds of them.

The parameters are {"embed", "layers", "proj"} and with pe=t5 {"relative"}, each {module: {name:
array}}; those of the layers are stacked on a leading L.

Array names end in their shape: B batch, T query, S key, D model, H heads, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax import Array

from mesh_transformer.config import Config
from mesh_transformer.mesh.declaration import (
    Declaration,
    map_declared,
    partition,
    record_declarations,
)
from mesh_transformer.mesh.parallel import GATHERED, Auto, Parallel
from mesh_transformer.model import flash_attention
from mesh_transformer.model.attention import MASKED, causal_bias
from mesh_transformer.model.layers import (
    Context,
    Embedding,
    Projection,
    RelativePosition,
    TransformerLayer,
)
from mesh_transformer.model.loss import Losses, chunked_cross_entropy
from mesh_transformer.util import to_f32

Params = dict[str, Any]


def transforms(config: Config, par: Parallel) -> dict[str, hk.Transformed]:
    """The parts of the model as pure init and apply functions."""
    parts: dict[str, Callable[..., Any]] = {
        "embed": lambda tokens, positions: Embedding(config, par)(tokens, positions),
        "layers": lambda x, context, cache: TransformerLayer(config, par)(x, context, cache),
        "proj": lambda x, **parts: Projection(config, par)(x, **parts),
    }
    if config.pe == "t5":
        parts["relative"] = lambda query, key: RelativePosition(config, par)(query, key)
    return {name: hk.without_apply_rng(hk.transform(part)) for name, part in parts.items()}


def init(config: Config, key: Array) -> Params:
    """Fresh parameters in f32, all of them global: jit it with the layout you want."""
    parts = transforms(config, Auto())
    keys = dict(zip(sorted(parts), jax.random.split(key, len(parts)), strict=True))
    tokens = jnp.zeros((1, 1), jnp.int32)
    x_BTD = jnp.zeros((1, 1, config.d_model), jnp.float32)
    context = Context(tokens, jnp.zeros((1, 1, 1, 1)))

    params = {
        "embed": parts["embed"].init(keys["embed"], tokens, tokens),
        "layers": jax.vmap(lambda k: parts["layers"].init(k, x_BTD, context, None))(
            jax.random.split(keys["layers"], config.layers)
        ),
        "proj": parts["proj"].init(keys["proj"], x_BTD),
    }
    if config.pe == "t5":
        params["relative"] = parts["relative"].init(keys["relative"], tokens, tokens)
    return {name: {m: dict(leaves) for m, leaves in part.items()} for name, part in params.items()}


@functools.cache
def declarations(config: Config) -> Params:
    """What every parameter declares (`Declaration`), in the parameters' structure.

    Those of the layers are stacked, with a leading L.
    """
    with record_declarations() as found:
        shapes = jax.eval_shape(functools.partial(init, config), jax.random.key(0))

    def declaration(part: str, one: Declaration) -> Declaration:
        one = dataclasses.replace(one, frozen=config.lora_rank > 0 and not one.adapter)
        return one.stack(config.layers) if part == "layers" else one

    return {
        part: {
            module: {name: declaration(part, found[module][name]) for name in leaves}
            for module, leaves in modules.items()
        }
        for part, modules in shapes.items()
    }


@functools.cache
def trained(config: Config) -> Params:
    """What every trained parameter declares: with lora_rank those of the adapters alone."""
    declared = declarations(config)
    return partition(declared, declared)[0]


def _remat(run: Callable[..., Any], kept: str) -> Callable[..., Any]:
    """`run`, of whose intermediate results the backward pass finds some and computes the rest.

    Even with "none" it computes what lies between two matmuls again: to write all of that and to
    read it back takes longer.  No matmul runs twice, and no word between devices.
    """
    policies = jax.checkpoint_policies
    policy = {
        "full": policies.nothing_saveable,
        "dots": policies.dots_with_no_batch_dims_saveable,
        "none": policies.save_from_both_policies(
            policies.dots_saveable,
            policies.save_only_these_names(GATHERED, flash_attention.ATTENDED),
        ),
    }[kept]
    # Inside a scan the compiler cannot merge the recomputation with the forward pass.
    return jax.checkpoint(run, policy=policy, prevent_cse=False)


def _runs(segments: Array) -> tuple[Array, Array]:
    """The number of the run of equal numbers that each position [..., T] is in, its place there."""
    index_T = jnp.arange(segments.shape[-1])
    begins = jnp.diff(segments, axis=-1, prepend=segments[..., :1]) != 0
    starts = jax.lax.cummax(jnp.where(begins, index_T, 0), axis=segments.ndim - 1)
    return jnp.cumsum(begins, axis=-1), index_T - starts


def _forward(
    params: Params, tokens_BT: Array, config: Config, par: Parallel, segments_BT: Array | None
) -> Array:
    """The residual stream x_BTD before the last norm; segments do not see each other."""
    parts, declared = transforms(config, par), declarations(config)
    positions_BT, run_BT = jnp.arange(tokens_BT.shape[-1])[None], None
    if segments_BT is not None:
        run_BT, positions_BT = _runs(segments_BT)

    def apply(part: str, *args: Array) -> Any:
        whole = par.collect(params[part], declared[part], config.dtype)
        return parts[part].apply(whole, *args)

    attend, bias_BHTS = flash_attention.attend(config, par, tokens_BT.shape[-1], run_BT), None
    if attend is None:
        bias_BHTS = causal_bias(positions_BT, positions_BT, config.window)
        if config.pe == "t5":
            bias_BHTS += apply("relative", positions_BT, positions_BT)
        if run_BT is not None:
            apart_BHTS = (run_BT[:, :, None] != run_BT[:, None, :])[:, None]
            bias_BHTS = jnp.where(apart_BHTS, MASKED, bias_BHTS)
    context = Context(positions_BT, bias_BHTS, attend=attend)
    one_layer = map_declared(lambda d: d.unstack(), declared["layers"])

    def run(layer_params: Params, x_BTD: Array) -> Array:
        whole = par.collect(layer_params, one_layer, config.dtype)
        return parts["layers"].apply(whole, x_BTD, context, None)[0]

    def body(x_BTD: Array, layer_params: Params) -> tuple[Array, None]:
        return x_BTD + _remat(run, config.remat)(layer_params, x_BTD), None

    return jax.lax.scan(body, apply("embed", tokens_BT, positions_BT), params["layers"])[0]


def logits(
    params: Params,
    tokens_BT: Array,
    config: Config,
    par: Parallel,
    segments_BT: Array | None = None,
) -> Array:
    """Next-token logits_BTV in f32, of the vocabulary that this program holds.

    Where several texts share a sequence, each is a run of one number in `segments`, and reads and
    stands as it would alone.
    """
    x_BTD = _forward(params, tokens_BT, config, par, segments_BT)
    whole = par.collect(params["proj"], declarations(config)["proj"], config.dtype)
    return transforms(config, par)["proj"].apply(whole, x_BTD)


def losses(
    params: Params,
    tokens_BT: Array,
    targets_BT: Array,
    config: Config,
    par: Parallel,
    segments_BT: Array | None = None,
) -> Losses:
    """Cross entropy at every position, in nats; for `segments` see `logits`."""
    x_BTD = _forward(params, tokens_BT, config, par, segments_BT)
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
    runs = jnp.zeros_like(mask, jnp.int32) if segments is None else _runs(segments)[0]
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
