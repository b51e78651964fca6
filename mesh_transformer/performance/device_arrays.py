"""What devices hold and a decode step reads: the shapes of weights and caches, and their bytes."""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from mesh_transformer.config import Config
from mesh_transformer.generation import decode, programs
from mesh_transformer.generation.pool import Pool, most_slots, storage
from mesh_transformer.generation.weights import WeightLayout, Weights
from mesh_transformer.mesh.devices import abstract, named
from mesh_transformer.mesh.host_memory import is_in_host
from mesh_transformer.model import transformer
from mesh_transformer.model.casts import packed_bytes
from mesh_transformer.model.ring import Cache, RingCache


def bytes_per_device(tree: Any, *, in_host: bool = False) -> int:
    """Return the bytes that a tree of abstract, sharded arrays takes on each device.

    Arrays in host memory are not counted; with `in_host`, they alone are.
    """
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_in_host(leaf) == in_host]
    return sum(packed_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in leaves)


def weights_read(config: Config, weights: Weights) -> int:
    """Return the bytes of weights that each device reads in a decode step.

    A step reads only one row per token of the embedding table, unless that is the output head, too.
    The quantized head of a model with a tied head is a copy.

    Args:
      weights: the weights of `config`, which may be abstract.
    """
    is_head = config.tie_head and not config.weight_bits
    read = {part: weights[part] for part in weights if part != "embed" or is_head}
    return bytes_per_device(read)


def cache_read(caches: Sequence[Cache], used: float, positions: float) -> int:
    """Return the bytes of keys and values that each device reads in a decode step.

    Args:
      used: the share of slots in use, of layers without rings.
      positions: number of positions that each row has.
    """
    read = 0.0
    for cache in caches:
        if isinstance(cache, RingCache):
            read += bytes_per_device(cache.rows) * min(positions / cache.slots, 1)
        else:
            read += bytes_per_device(cache) * used
    return int(read)


def abstract_weights(layout: WeightLayout) -> Weights:
    """Return the shapes and shardings of the weights that generation reads."""
    params = jax.eval_shape(functools.partial(transformer.init, layout.config), jax.random.key(0))
    shapes = jax.eval_shape(programs.compile_weights(layout, layout), params, [])
    return abstract(shapes, named(layout.mesh, layout.specs))


def abstract_rows(
    layout: WeightLayout,
    rows: int,
    pool: Pool | None = None,
    guesses: int = 0,
    draft: Config | None = None,
) -> decode.DecodeState:
    """Return the shapes and shardings of a decode batch for answers of any length.

    Args:
      rows: batch rows of all replicas together.
      pool: the size of each replica's pool, or None.
      guesses, draft: as for `plan.decode_plan`.
    """
    config, mesh = layout.config, layout.mesh
    slots = most_slots(config.window, guesses, pool)
    stored = storage(config, guesses, pool)
    empty = programs.compile_empty(layout, stored, draft)
    shapes = jax.eval_shape(functools.partial(empty, rows, slots, pool))
    specs = programs.decode_specs(config, stored, draft)
    return abstract(shapes, named(mesh, specs))
