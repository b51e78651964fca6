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
from jax.sharding import PartitionSpec as P

from mesh_transformer.config import Config
from mesh_transformer.config_model import Model
from mesh_transformer.generation import decode, texts
from mesh_transformer.generation.pool import IN_ROWS, Pool, Storage
from mesh_transformer.generation.sampling_settings import SamplerSettings
from mesh_transformer.generation.weights import WeightLayout, weights_of
from mesh_transformer.mesh.declaration import Declaration, map_declared, resized
from mesh_transformer.mesh.devices import named
from mesh_transformer.mesh.host_memory import device_copies
from mesh_transformer.mesh.program import Layout
from mesh_transformer.model import transformer
from mesh_transformer.model.cache import LayerCache
from mesh_transformer.model.layer_values import layer_values
from mesh_transformer.model.lora import Adapter
from mesh_transformer.model.ring import Cache, RingCache


def decode_specs(
    config: Config, storage: Storage = IN_ROWS, draft: Config | None = None
) -> decode.DecodeState:
    """Return the PartitionSpecs of a `DecodeState`: rows or pages split over dp, heads over mp."""
    rows, cache = P("dp"), P("dp", "mp")
    settings = SamplerSettings(*(rows,) * len(SamplerSettings._fields))

    def caches(own: Config, has_rings: bool) -> tuple[Cache, ...]:
        usual = LayerCache(*(cache,) * (4 if own.int8_cache else 2))
        ring = RingCache(usual, usual if storage.keeps else None)
        is_ring = (has_rings and bool(values.is_sliding) for values in layer_values(own))
        return tuple(ring if each else usual for each in is_ring)

    return decode.DecodeState(
        caches(config, storage.ring_slots > 0),
        rows if storage.in_pages else None,
        *(rows,) * 6,
        settings=settings,
        draft_caches=() if draft is None else caches(draft, False),
    )


def compile_weights(
    source: Layout, layout: WeightLayout, adapters: Sequence[Model] = ()
) -> Callable[[Any, Sequence[Any]], Any]:
    """Return a jitted function that converts parameters to the weights for generation.

    Its arguments are the model's parameters and a list with those of each adapter, which may have
    any sharding.  See `weights_of` for the weights.

    Args:
      source: the layout of the parameters, from which `weight_layout` made `layout`.
      adapters: the configs of the adapters.
    """
    config, mp = source.config.replace(dtype=layout.config.dtype), layout.par.shards
    declared = transformer.stored(config)

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

    return jax.jit(weights, out_shardings=named(layout.mesh, layout.specs))


def compile_empty(
    layout: WeightLayout, storage: Storage, draft: Config | None = None
) -> Callable[..., decode.DecodeState]:
    """Return a jitted function (rows, slots, pool) -> state of a batch without prompts.

    `rows` is the number of rows of all replicas together, and `slots` the number of positions of
    each; `pool` is the size of each replica's pool, or None.
    """
    mesh = layout.mesh.shape

    def empty(rows: int, slots: int, pool: Pool | None) -> decode.DecodeState:
        pages, page, kept = pool[:3] if pool else (0, 1, 0)
        pages, kept = mesh["dp"] * pages, mesh["dp"] * kept if storage.keeps else 0
        sizes = rows, slots, pages, page, kept, storage.ring_slots
        return decode.empty(layout.config, *sizes, mp=layout.par.shards, draft=draft)

    specs = decode_specs(layout.config, storage, draft)
    return jax.jit(empty, static_argnums=(0, 1, 2), out_shardings=named(layout.mesh, specs))


def compile_grow(
    layout: WeightLayout, storage: Storage, draft: Config | None = None
) -> Callable[..., decode.DecodeState]:
    """Return a jitted function (state, slots) -> the same state with a larger KV cache.

    `slots` is the new number of positions in each row's KV cache.  The state must have no pool.
    """
    shardings = named(layout.mesh, decode_specs(layout.config, storage, draft))
    grow = functools.partial(decode.grow, ring_slots=storage.ring_slots)
    return jax.jit(grow, static_argnums=1, out_shardings=shardings)


def before_specs(config: Config) -> texts.Before:
    """Return the PartitionSpecs of a `Before`: heads split over mp."""
    cache = P(None, "mp")
    return texts.Before((LayerCache(cache, cache),) * config.layers, P())


def compile_before(layout: WeightLayout) -> Callable[..., texts.Before]:
    """Return `texts.before`, compiled: (weights, tokens, length, adapter) -> `Before`."""
    specs = (layout.specs, P(), P(), P())
    return layout.compiled(texts.before, specs, before_specs(layout.config))


def compile_score(
    layout: WeightLayout, alternatives: int, after: bool = False
) -> Callable[..., Any]:
    """Return `texts.score`, compiled: (weights, tokens, following, text, adapter) -> `Chosen`.

    Args:
      alternatives: see `texts.score`, also for the function's arguments.
      after: whether the function is called with a `text` that is not None.
    """
    rows = P("dp")
    function = functools.partial(texts.score, alternatives=alternatives)
    text = before_specs(layout.config) if after else None
    return layout.compiled(function, (layout.specs, rows, rows, text, P()), rows)


def compile_embed(layout: WeightLayout, pooling: str) -> Callable[..., Array]:
    """Return `texts.embed`, compiled: (weights, tokens, lengths, adapter) -> vectors."""
    rows = P("dp")
    function = functools.partial(texts.embed, pooling=pooling)
    return layout.compiled(function, (layout.specs, rows, rows, P()), rows)


def compile_prefill(
    layout: WeightLayout,
    alternatives: int | None,
    width: int,
    storage: Storage,
    constrained: bool = False,
    draft: Config | None = None,
) -> Callable[..., Any]:
    """Return `decode.prefill`, compiled as a function (weights, state, prompts) -> (state, chosen).

    The `state` that is passed in is donated.  See `decode.prefill` for `alternatives` and `width`.

    Args:
      constrained: whether `prompts.allowed_PW` is given.
    """
    rows, state = P("dp"), decode_specs(layout.config, storage, draft)
    allowed = rows if constrained else None
    prompts = decode.Prompts(*(rows,) * 8, settings=state.settings, allowed_PW=allowed)
    function = functools.partial(
        decode.prefill, alternatives=alternatives, width=width, draft=draft
    )
    specs = (layout.specs_with(draft), state, prompts)
    return layout.compiled(function, specs, (state, rows), donate_argnums=1)


def compile_decode(
    layout: WeightLayout,
    alternatives: int | None,
    most: int,
    storage: Storage = IN_ROWS,
    guesses: int = 0,
    constrained: bool = False,
    draft: Config | None = None,
) -> Callable[..., Any]:
    """Return `decode.decode`, compiled: (weights, state, left, steps, allowed) -> its results.

    The `state` that is passed in is donated.  See `decode.decode` for all arguments.

    Args:
      constrained: whether `allowed` is given; None must be passed otherwise.
    """
    state = decode_specs(layout.config, storage, draft)
    function = functools.partial(
        decode.decode, alternatives=alternatives, most=most, guesses=guesses, draft=draft
    )
    rows = P("dp")
    specs = (layout.specs_with(draft), state, rows, P(), rows if constrained else None)
    return layout.compiled(function, specs, (state, rows, rows), donate_argnums=1)


@jax.jit
def read_pages(caches: Any, pages: Array) -> Any:
    """Return the contents of pages of all layers' caches, in the order of `pages`."""
    return jax.tree.map(lambda x: x[pages], caches)


@functools.partial(jax.jit, donate_argnums=0)
def write_pages(caches: Any, pages: Array, contents: Any) -> Any:
    """Return the caches with the contents of some pages replaced; negative pages are left out."""

    def write(x: Array, new: Array) -> Array:
        return x.at[jnp.where(pages < 0, len(x), pages)].set(new, mode="drop")

    return jax.tree.map(write, caches, contents)
