"""The original's checkpoints, `step_N/shard_i/{0..15}.npz`: weights, from any number of shards."""

import os
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer import model
from mesh_transformer.config import Config
from mesh_transformer.declaration import Declaration, map_declared
from mesh_transformer.util import InputError

PIECES = 16

# The original's module below layer_<i>/~ -> our (module, {its name: our name}).
_LAYER = {
    "linear": ("layer/q", {"w": "w"}),
    "linear_1": ("layer/v", {"w": "w"}),
    "linear_2": ("layer/k", {"w": "w"}),
    "linear_3": ("layer", {"w": "o"}),
    "linear_4": ("layer/fc", {"b": "b", "w": "w"}),
    "linear_5": ("layer", {"b": "b", "w": "out"}),
}


class Entry(NamedTuple):
    """One leaf of the original's parameters, and where it stands in ours."""

    name: str
    part: str
    module: str
    leaf: str
    layer: int | None


def _norm_leaves(config: Config) -> tuple[str, tuple[str, ...]]:
    """The norm's module name there, and which leaves it stores (nobias: an unused offset too)."""
    kind = config.norm
    if kind.startswith("layernorm"):
        name = "layer_norm" if kind == "layernorm-desync" else "replicated_layer_norm"
        return name, ("offset", "scale")
    return "rms_norm", ("offset", "scale") if kind.endswith("-bias") else ("scale",)


def entries(config: Config) -> list[Entry]:
    """The parameters in the original's order: sorted by module, then by name.

    Raises:
      InputError: for a block that the original's version 1 has not.
    """
    if config.block != "gptj":
        raise InputError(
            f"config: block is {config.block}, but the original's checkpoints hold gptj alone"
        )
    norm, norm_leaves = _norm_leaves(config)
    root = "causal_transformer_shard/~/"
    found = [
        Entry(f"{root}embedding_shard/~/linear {leaf}", "embed", "embedding", leaf, None)
        for leaf in ("b", "w")
    ]
    if config.pe == "fixed":
        name = f"{root}embedding_shard pos_embs"
        found.append(Entry(name, "embed", "embedding", "pos_embs", None))
    for layer in range(config.layers):
        scope = f"{root}layer_{layer}/~/"
        for theirs, (module, names) in _LAYER.items():
            for leaf, ours in names.items():
                found.append(Entry(f"{scope}{theirs} {leaf}", "layers", module, ours, layer))
        for leaf in norm_leaves:
            found.append(Entry(f"{scope}{norm} {leaf}", "layers", "layer/norm", leaf, layer))
    scope = f"{root}projection_shard/~/"
    for leaf in ("b", "w"):
        found.append(Entry(f"{scope}linear {leaf}", "proj", "projection/head", leaf, None))
    for leaf in norm_leaves:
        found.append(Entry(f"{scope}{norm} {leaf}", "proj", "projection/norm", leaf, None))
    if config.pe == "t5":
        name = f"{root}relative_position_embs rel_embedding"
        found.append(Entry(name, "relative", "relative", "rel_embedding", None))
    return sorted(found, key=lambda entry: tuple(entry.name.split(" ")))


def _shard_leaves(folder: str) -> list[np.ndarray]:
    """All leaves of one shard, in order."""
    leaves = []
    for piece in range(PIECES):
        path = os.path.join(folder, f"{piece}.npz")
        try:
            with np.load(path) as arrays:
                leaves += [arrays[f"arr_{i}"] for i in range(len(arrays.files))]
        except (OSError, ValueError) as error:
            raise InputError(
                f"{path}: cannot be read ({error}); copy the checkpoint anew"
            ) from None
    return leaves


def _merge(parts: list[np.ndarray], declaration: Declaration, config: Config) -> np.ndarray:
    """One layer's global value from the shards', as its declaration says."""
    axes = tuple(declaration.spec)
    if "mp" in axes:
        if config.norm == "layernorm-desync" and parts[0].ndim < len(axes):
            return np.stack(parts)
        return np.concatenate(parts, axis=axes.index("mp"))
    if declaration.summed:
        return parts[0] * len(parts)
    # A LayerNorm lives in shard 0; the other norms' shards are equal (the original means them).
    return parts[0]


def read_params(folder: str, config: Config) -> dict[str, Any]:
    """The parameters in `folder` (a step_N, full or slim), merged, as f32 numpy arrays.

    Raises:
      InputError: for files that do not fit `config`.
    """
    shards = sorted(os.listdir(folder), key=lambda name: int(name.rpartition("_")[2]))
    leaves = [_shard_leaves(os.path.join(folder, shard)) for shard in shards]
    wanted = entries(config)
    # Full: count, mu, nu, count, params, step.  Slim: params, step.
    first = {3 * len(wanted) + 3: 2 * len(wanted) + 2, len(wanted) + 1: 0}.get(len(leaves[0]))
    if first is None:
        raise InputError(
            f"{folder}: found {len(leaves[0])} leaves a shard, expected {3 * len(wanted) + 3} "
            f"(full) or {len(wanted) + 1} (slim) for {config.layers} layers; check the config"
        )
    declared = model.declarations(config)
    params = map_declared(lambda d: np.zeros(d.shape, np.float32), declared)
    for index, (name, part, module, leaf, layer) in enumerate(wanted):
        if leaf not in params[part][module]:
            continue  # layernorm-nobias stores an offset that it never reads
        declaration = declared[part][module][leaf]
        target = params[part][module][leaf]
        if layer is not None:
            declaration = declaration.unstack()
        value = _merge([shard[first + index] for shard in leaves], declaration, config)
        if value.shape != declaration.shape:
            raise InputError(
                f"{folder}: {name} is {value.shape} over {len(shards)} shards, "
                f"expected {declaration.shape}; check the config"
            )
        target[... if layer is None else layer] = value
    return params
