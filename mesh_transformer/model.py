"""GPT-J as pure functions of its parameters; `par` decides what a program holds of them.

The parameters are {"embed", "layers", "proj"} and with pe=t5 {"relative"}, each {module: {name:
array}}; those of the layers are stacked on a leading L.

Array names end in their shape: B batch, T query, S cache, D model, H heads, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax import Array

from mesh_transformer.config import Config
from mesh_transformer.declaration import map_declared, record_declarations
from mesh_transformer.layers import (
    Context,
    Embedding,
    LayerCache,
    Projection,
    RelativePosition,
    TransformerLayer,
    causal_bias,
    cross_entropy,
)
from mesh_transformer.parallel import Auto, Parallel
from mesh_transformer.sampling import nucleus_sample

Params = dict[str, Any]


class Losses(NamedTuple):
    """What one forward pass says of every position."""

    loss_BT: Array
    log_sum_BT: Array
    correct_BT: Array


class SamplerSettings(NamedTuple):
    """One value a row (or, for a compiled function, their layout); see `nucleus_sample`."""

    top_p_B: Any
    top_k_B: Any
    temp_B: Any
    seed_B: Any


class Cache(NamedTuple):
    """All layers' keys and values in a ring of S slots, and the position each slot holds."""

    layers: LayerCache
    positions_BS: Array  # negative: nothing, or padding


def _transforms(config: Config, par: Parallel) -> dict[str, hk.Transformed]:
    """The parts of the model as pure init and apply functions."""
    parts: dict[str, Callable[..., Any]] = {
        "embed": lambda tokens, positions: Embedding(config, par)(tokens, positions),
        "layers": lambda x, context, cache: TransformerLayer(config, par)(x, context, cache),
        "proj": lambda x: Projection(config, par)(x),
    }
    if config.pe == "t5":
        parts["relative"] = lambda query, key: RelativePosition(config, par)(query, key)
    return {name: hk.without_apply_rng(hk.transform(part)) for name, part in parts.items()}


def init(config: Config, key: Array) -> Params:
    """Fresh parameters in f32, all of them global: jit it with the layout you want."""
    transforms = _transforms(config, Auto())
    keys = dict(zip(sorted(transforms), jax.random.split(key, len(transforms)), strict=True))
    tokens = jnp.zeros((1, 1), jnp.int32)
    x_BTD = jnp.zeros((1, 1, config.d_model), jnp.float32)
    context = Context(tokens, jnp.zeros((1, 1, 1, 1)), 0)

    params = {
        "embed": transforms["embed"].init(keys["embed"], tokens, tokens),
        "layers": jax.vmap(lambda k: transforms["layers"].init(k, x_BTD, context, None))(
            jax.random.split(keys["layers"], config.layers)
        ),
        "proj": transforms["proj"].init(keys["proj"], x_BTD),
    }
    if config.pe == "t5":
        params["relative"] = transforms["relative"].init(keys["relative"], tokens, tokens)
    return {name: {m: dict(leaves) for m, leaves in part.items()} for name, part in params.items()}


@functools.cache
def declarations(config: Config) -> Params:
    """What every parameter declares (`Declaration`), in the parameters' structure.

    Those of the layers are stacked, with a leading L.
    """
    with record_declarations() as found:
        shapes = jax.eval_shape(functools.partial(init, config), jax.random.key(0))

    return {
        part: {
            module: {
                name: found[module][name].stack(config.layers)
                if part == "layers"
                else found[module][name]
                for name in leaves
            }
            for module, leaves in modules.items()
        }
        for part, modules in shapes.items()
    }


def _remat(run: Callable[..., Any], policy: str) -> Callable[..., Any]:
    if policy == "none":
        return run
    saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if policy == "dots" else None
    # Inside a scan the compiler cannot merge the recomputation with the forward pass.
    return jax.checkpoint(run, policy=saved, prevent_cse=False)


def _forward(
    params: Params,
    tokens_BT: Array,
    positions_BT: Array,
    cache: Cache | None,
    slot: Array | int,
    config: Config,
    par: Parallel,
) -> tuple[Array, Cache | None]:
    """The residual stream x_BTD before the last norm, and the cache with these tokens in it."""
    transforms = _transforms(config, par)
    declared = declarations(config)

    def apply(part: str, *args: Array) -> Any:
        whole = par.collect(params[part], declared[part], config.dtype)
        return transforms[part].apply(whole, *args)

    key_positions_BS = positions_BT
    if cache is not None:
        rows = jnp.broadcast_to(positions_BT, tokens_BT.shape)
        key_positions_BS = jax.lax.dynamic_update_slice_in_dim(
            cache.positions_BS, rows, slot, axis=1
        )
    bias_BHTS = causal_bias(positions_BT, key_positions_BS, config.window)
    if config.pe == "t5":
        bias_BHTS += apply("relative", positions_BT, key_positions_BS)
    context = Context(positions_BT, bias_BHTS, slot)
    one_layer = map_declared(lambda d: d.unstack(), declared["layers"])

    def run(layer_params: Params, x_BTD: Array, layer_cache: LayerCache | None) -> Any:
        whole = par.collect(layer_params, one_layer, config.dtype)
        return transforms["layers"].apply(whole, x_BTD, context, layer_cache)

    def body(x_BTD: Array, layer: tuple[Params, LayerCache | None]) -> Any:
        y_BTD, layer_cache = _remat(run, config.remat)(layer[0], x_BTD, layer[1])
        return x_BTD + y_BTD, layer_cache

    x_BTD = apply("embed", tokens_BT, positions_BT)
    layer_caches = None if cache is None else cache.layers
    x_BTD, layer_caches = jax.lax.scan(body, x_BTD, (params["layers"], layer_caches))
    return x_BTD, None if cache is None else Cache(layer_caches, key_positions_BS)


def _project(params: Params, x_BTD: Array, config: Config, par: Parallel) -> Array:
    declared = declarations(config)["proj"]
    whole = par.collect(params["proj"], declared, config.dtype)
    return _transforms(config, par)["proj"].apply(whole, x_BTD)


def logits(params: Params, tokens_BT: Array, config: Config, par: Parallel) -> Array:
    """Next-token logits_BTV in f32, of the vocabulary that this program holds."""
    positions_BT = jnp.arange(tokens_BT.shape[-1])[None]
    x_BTD, _ = _forward(params, tokens_BT, positions_BT, None, 0, config, par)
    return _project(params, x_BTD, config, par)


def losses(
    params: Params, tokens_BT: Array, targets_BT: Array, config: Config, par: Parallel
) -> Losses:
    """Cross entropy at every position, in nats."""
    return Losses(*cross_entropy(logits(params, tokens_BT, config, par), targets_BT, par))


def train_loss(
    params: Params, tokens_BT: Array, targets_BT: Array, config: Config, par: Parallel
) -> tuple[Array, Array]:
    """The mean loss that training minimises, z-loss included, and that of the last position."""
    found = losses(params, tokens_BT, targets_BT, config, par)
    z_loss = config.z_loss * jnp.mean(jnp.square(found.log_sum_BT))
    return found.loss_BT.mean() + z_loss, found.loss_BT[:, -1].mean() + z_loss


def prefill(
    params: Params, tokens_BT: Array, length_B: Array, slots: int, config: Config, par: Parallel
) -> tuple[Array, Cache]:
    """Runs prompts through the model: right-aligned, `length_B` tokens each, padding before them.

    Returns:
      The next token's logits_BV (whole vocabulary) and a cache of `slots` >= T positions.
    """
    batch, width = tokens_BT.shape
    positions_BT = jnp.arange(width)[None] - (width - length_B.astype(jnp.int32))[:, None]
    shape = (config.layers, batch, slots, config.n_heads // par.mp, config.d_head)
    axes = (None, "dp", None, "mp", None)
    cache = Cache(
        LayerCache(par.zeros(shape, config.dtype, *axes), par.zeros(shape, config.dtype, *axes)),
        jnp.broadcast_to(positions_BT[:, :1] * 0 - 1, (batch, slots)),
    )
    return _next_logits(params, tokens_BT, positions_BT, cache, 0, config, par)


def decode(
    params: Params, token_B: Array, cache: Cache, step: Array, config: Config, par: Parallel
) -> tuple[Array, Cache]:
    """One more token a row; `step` counts the tokens before it, padding included.

    The cache is a ring: past its end the oldest position gives way.
    """
    slots = cache.positions_BS.shape[1]
    positions_BT = cache.positions_BS.max(axis=1, keepdims=True) + 1
    return _next_logits(params, token_B[:, None], positions_BT, cache, step % slots, config, par)


def _next_logits(
    params: Params,
    tokens_BT: Array,
    positions_BT: Array,
    cache: Cache,
    slot: Array | int,
    config: Config,
    par: Parallel,
) -> tuple[Array, Cache]:
    x_BTD, filled = _forward(params, tokens_BT, positions_BT, cache, slot, config, par)
    assert filled is not None
    logits_BTV = _project(params, x_BTD[:, -1:], config, par)
    return par.gather(logits_BTV)[:, 0], filled


def generate(
    params: Params,
    tokens_BT: Array,
    length_B: Array,
    settings: SamplerSettings,
    steps: int,
    config: Config,
    par: Parallel,
) -> Array:
    """Continues right-aligned prompts by `steps` tokens.

    A row's tokens depend on its prompt, settings and seed alone, not on the other rows.

    Returns:
      tokens_BT of width `steps`.
    """
    width = tokens_BT.shape[1]
    slots = min(config.window, width + steps)
    logits_BV, cache = prefill(params, tokens_BT, length_B, slots, config, par)

    def body(carry: tuple[Array, Cache], step: Array) -> Any:
        logits_BV, cache = carry
        keys_B = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), step))(
            settings.seed_B
        )
        token_B = nucleus_sample(
            keys_B, logits_BV, top_p=settings.top_p_B, top_k=settings.top_k_B, temp=settings.temp_B
        )
        return decode(params, token_B, cache, width + step, config, par), token_B

    _, tokens_TB = jax.lax.scan(body, (logits_BV, cache), jnp.arange(steps))
    return tokens_TB.T
