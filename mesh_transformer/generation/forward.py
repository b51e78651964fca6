"""The model's parts as generation runs them: layer by layer, with a cache, up to the logits.

Array names end in their shape: B rows of the batch, T tokens of a text, S slots or keys, D model, H
heads, V vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mesh_transformer.config import Config
from mesh_transformer.generation.weights import SCALES, Weights
from mesh_transformer.mesh.parallel import Parallel
from mesh_transformer.model import matrices, paged, ring, transformer
from mesh_transformer.model.attention import LONG, attend_function, causal_bias
from mesh_transformer.model.layer_values import layer_values
from mesh_transformer.model.layers import Context
from mesh_transformer.model.ring import Cache, RingCache


def forward(
    weights: Weights,
    tokens_BT: Array,
    context: Context,
    caches: tuple[Cache | None, ...] | None,
    config: Config,
    par: Parallel,
    ring_context: Context | None = None,
) -> tuple[Array, tuple[Cache, ...]]:
    """Run the embedding and all layers, without the final norm.

    If `caches` is None, the tokens attend only to each other.  See `layers.TransformerLayer` for
    the other cases.

    Args:
      ring_context: the context of layers whose cache is a `RingCache`.

    Returns:
      The residual stream x_BTD, and one cache per layer: the updated cache or, if `caches` is not
      updated, the keys and values of `tokens_BT`.
    """
    parts = transformer.transforms(config, par)
    x_BTD = parts["embed"].apply(weights["embed"], tokens_BT, context.positions_BT)
    filled = []
    caches = caches or (None,) * config.layers
    attends: Any = {name: getattr(context, name) for name in ("attend", "sliding_attend")}

    # Jitted, so that layers of one kind are traced once.  The compiler inlines each call.
    @functools.partial(jax.jit, static_argnames="is_sliding")
    def run(
        layer: Any, x_BTD: Array, context: Context, cache: Cache | None, is_sliding: bool
    ) -> tuple[Array, Cache]:
        assert context.values is not None
        values = context.values._replace(is_sliding=np.bool_(is_sliding))
        whole = context._replace(values=values, **attends)
        return parts["layers"].apply(layer, x_BTD, whole, cache)

    for layer, values, cache in zip(weights["layers"], layer_values(config), caches, strict=True):
        layer = matrices.after(x_BTD, layer)
        own = ring_context if isinstance(cache, RingCache) else context
        assert own is not None
        own = own._replace(values=values, attend=None, sliding_attend=None)
        y_BTD, cache = run(layer, x_BTD, own, cache, is_sliding=bool(values.is_sliding))
        x_BTD = par.by_rows(jnp.add)(x_BTD, y_BTD)
        filled.append(cache)
    return x_BTD, tuple(filled)


def context_of(
    weights: Weights,
    positions_BT: Array,
    key_positions_BS: Array | None,
    slots: Array | None,
    config: Config,
    par: Parallel,
    adapter_B: Array,
    rows: Array | None = None,
    table: paged.Table | None = None,
) -> Context:
    """Return the `Context` that all layers share: positions, attention bias and cache slots.

    The bias contains the causal mask and any relative position bias.

    Args:
      key_positions_BS: None if the tokens attend only to each other, and are at 0, 1, ...: then
        attention to more than `LONG` of them never holds all scores.
      adapter_B: the number of each row's adapter, or one for all, [1]; 0 for none.
    """
    window = min(config.sliding_window or config.window, config.window)
    attend = sliding_attend = None
    if key_positions_BS is None:
        length, key_positions_BS = positions_BT.shape[1], positions_BT
        if length > LONG and config.pe != "t5" and par.exact is None:
            whole = par.without_cp()
            attend = attend_function(config, whole, length, None)
            sliding_attend = attend_function(config, whole, length, None, window)
    bias_BHTS, sliding_BHTS = causal_bias(positions_BT, key_positions_BS, config.window), None
    if config.sliding_window is not None:
        sliding_BHTS = causal_bias(positions_BT, key_positions_BS, window)
    if config.pe == "t5":
        relative = transformer.transforms(config, par)["relative"]
        bias_BHTS += relative.apply(weights["relative"], positions_BT, key_positions_BS)
    scale = weights[SCALES][adapter_B][:, None] if SCALES in weights else None
    return Context(
        positions_BT,
        bias_BHTS,
        slots,
        rows,
        table,
        lora_scale=scale,
        sliding_bias_BHTS=sliding_BHTS,
        attend=attend,
        sliding_attend=sliding_attend,
    )


def in_ring(
    context: Context,
    key_positions_BS: Array,
    slots: Array | None,
    config: Config,
    part: ring.Part | None = None,
) -> Context:
    """Return the context of layers whose cache is a `RingCache`, which has other slots.

    Args:
      context: that of the other layers.
    """
    assert config.sliding_window is not None
    window = min(config.sliding_window, config.window)
    bias_BHTS = causal_bias(context.positions_BT, key_positions_BS, window)
    return context._replace(sliding_bias_BHTS=bias_BHTS, slots=slots, part=part)


def own_logits(weights: Weights, x_BTD: Array, config: Config, par: Parallel) -> Array:
    """Return the logits for this device's shard of the vocabulary."""
    projection = matrices.after(x_BTD, transformer.projection_params(weights))
    return transformer.transforms(config, par)["proj"].apply(projection, x_BTD)


def full_logits(logits_BTV: Array, config: Config, par: Parallel) -> Array:
    """Return the result of `own_logits` as [B T, V]: all positions of a row, then the next row.

    Every device gets the logits of the full vocabulary.
    """
    logits_BTV = par.gather(logits_BTV)[..., : config.n_vocab]
    return par.shard(logits_BTV.reshape(-1, config.n_vocab), "dp", None)
