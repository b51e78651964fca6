"""The compiled functions of generation, with the layout of their arguments on the mesh.

Functions that take a batch's state have an argument `draft`: the config of the model that guesses
tokens in this batch, or None.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mesh_transformer.config import Config, Model
from mesh_transformer.generation import decode
from mesh_transformer.generation.sampling import SamplerSettings
from mesh_transformer.generation.weights import (
    check_weights,
    joined_config,
    weight_specs,
    weights_of,
)
from mesh_transformer.mesh.declaration import Declaration, map_declared, resized
from mesh_transformer.mesh.devices import named
from mesh_transformer.mesh.host_memory import device_copies
from mesh_transformer.mesh.program import compiled
from mesh_transformer.model import transformer
from mesh_transformer.model.cache import LayerCache
from mesh_transformer.model.lora import Adapter


def decode_specs(
    config: Config, *, pool: bool = False, draft: Config | None = None
) -> decode.DecodeState:
    """Return the PartitionSpecs of a `DecodeState`: rows or blocks split over dp, heads over mp.

    Args:
      pool: whether the batch has a pool of blocks.
    """
    rows, cache = P("dp"), P("dp", "mp")
    settings = SamplerSettings(*(rows,) * len(SamplerSettings._fields))

    def caches(own: Config) -> tuple[LayerCache, ...]:
        return (LayerCache(*(cache,) * (4 if own.int8_cache else 2)),) * own.layers

    return decode.DecodeState(
        caches(config),
        rows if pool else None,
        *(rows,) * 6,
        settings=settings,
        draft_caches=() if draft is None else caches(draft),
    )


def compile_weights(
    config: Config, mesh: Mesh, adapters: Sequence[Model] = ()
) -> Callable[[Any, Sequence[Any]], Any]:
    """Return a jitted function that converts parameters to the weights for generation.

    Its arguments are the model's parameters and a list with those of each adapter, which may have
    any sharding.  See `weights_of` for the weights.

    Args:
      adapters: the configs of the adapters.

    Raises:
      InputError: if the config quantizes weights to 4 bits, and a matrix cannot be (see
        `check_weights`).
    """
    declared, mp = transformer.declarations(config), mesh.shape["mp"]
    check_weights(config, mp)

    def one(d: Declaration, x: Array) -> Array:  # a virtual mesh may have other padding
        return resized(resized(x, d.shape), d.padded(mp))

    def weights(params: Any, factors: Sequence[Any]) -> Any:
        params = device_copies(params, declared, config, jnp.float32)
        if config.virtual_mesh is not None:
            params = map_declared(one, declared, params)
            factors = [
                map_declared(one, transformer.trained(own), x)
                for own, x in zip(adapters, factors, strict=True)
            ]
        return weights_of(params, config, list(map(Adapter, adapters, factors)))

    own = joined_config(config.merged(), adapters)
    return jax.jit(weights, out_shardings=named(mesh, weight_specs(own)))


def compile_empty(
    config: Config, mesh: Mesh, pool: bool, draft: Config | None = None
) -> Callable[..., decode.DecodeState]:
    """Return a jitted function (rows, slots, blocks, block) -> state of a batch without prompts.

    `rows` and `blocks` are the numbers of rows and of the pool's blocks on all replicas together;
    `slots` and `block` are the numbers of positions of each (see `decode.empty`).
    """
    return jax.jit(
        functools.partial(decode.empty, config, mp=mesh.shape["mp"], draft=draft),
        static_argnums=(0, 1, 2, 3),
        out_shardings=named(mesh, decode_specs(config, pool=pool, draft=draft)),
    )


def compile_grow(
    config: Config, mesh: Mesh, draft: Config | None = None
) -> Callable[..., decode.DecodeState]:
    """Return a jitted function (state, slots) -> the same state with a larger KV cache.

    `slots` is the new number of positions in each row's KV cache.  The state must have no pool.
    """
    layout = named(mesh, decode_specs(config, draft=draft))
    return jax.jit(decode.grow, static_argnums=1, out_shardings=layout)


def before_specs(config: Config) -> decode.Before:
    """Return the PartitionSpecs of a `Before`: heads split over mp."""
    cache = P(None, "mp")
    return decode.Before((LayerCache(cache, cache),) * config.layers, P())


def compile_before(config: Config, mesh: Mesh) -> Callable[..., decode.Before]:
    """Return `decode.before`, compiled: (weights, tokens, length, adapter) -> `Before`."""
    specs = (weight_specs(config), P(), P(), P())
    return compiled(decode.before, config, mesh, specs, before_specs(config))


def compile_score(
    config: Config, mesh: Mesh, alternatives: int, after: bool = False
) -> Callable[..., Any]:
    """Return `decode.score`, compiled: (weights, tokens, following, text, adapter) -> `Chosen`.

    Args:
      alternatives: see `decode.score`, also for the function's arguments.
      after: whether the function is called with a `text` that is not None.
    """
    rows = P("dp")
    function = functools.partial(decode.score, alternatives=alternatives)
    text = before_specs(config) if after else None
    specs = (weight_specs(config), rows, rows, text, P())
    return compiled(function, config, mesh, specs, rows)


def compile_embed(config: Config, mesh: Mesh, pooling: str) -> Callable[..., Array]:
    """Return `decode.embed`, compiled: (weights, tokens, lengths, adapter) -> vectors."""
    rows = P("dp")
    function = functools.partial(decode.embed, pooling=pooling)
    return compiled(function, config, mesh, (weight_specs(config), rows, rows, P()), rows)


def compile_prefill(
    config: Config,
    mesh: Mesh,
    alternatives: int | None,
    width: int,
    pool: bool,
    constrained: bool = False,
    draft: Config | None = None,
) -> Callable[..., Any]:
    """Return `decode.prefill`, compiled as a function (weights, state, prompts) -> (state, chosen).

    The `state` that is passed in is donated.  See `decode.prefill` for `alternatives` and `width`.

    Args:
      constrained: whether `prompts.allowed_PW` is given.
    """
    rows, state = P("dp"), decode_specs(config, pool=pool, draft=draft)
    allowed = rows if constrained else None
    prompts = decode.Prompts(*(rows,) * 6, settings=state.settings, allowed_PW=allowed)
    function = functools.partial(
        decode.prefill, alternatives=alternatives, width=width, draft=draft
    )
    specs = (weight_specs(config, draft), state, prompts)
    return compiled(function, config, mesh, specs, (state, rows), donate_argnums=1)


def compile_decode(
    config: Config,
    mesh: Mesh,
    alternatives: int | None,
    most: int,
    pool: bool = False,
    guesses: int = 0,
    constrained: bool = False,
    draft: Config | None = None,
) -> Callable[..., Any]:
    """Return `decode.decode`, compiled: (weights, state, left, steps, allowed) -> its results.

    The `state` that is passed in is donated.  See `decode.decode` for all arguments.

    Args:
      constrained: whether `allowed` is given; None must be passed otherwise.
    """
    state = decode_specs(config, pool=pool, draft=draft)
    function = functools.partial(
        decode.decode, alternatives=alternatives, most=most, guesses=guesses, draft=draft
    )
    rows = P("dp")
    specs = (weight_specs(config, draft), state, rows, P(), rows if constrained else None)
    return compiled(function, config, mesh, specs, (state, rows, rows), donate_argnums=1)
