"""What the original's checkpoints call each parameter, in which order, and what a shard holds."""

import enum
from typing import Any, NamedTuple

from mesh_transformer.config import Config
from mesh_transformer.mesh.declaration import Declaration
from mesh_transformer.util import InputError

# The original's module below layer_<i>/~/ -> our (module, {its name: our name}).
_LAYER = {
    "linear": ("layer/q", {"w": "w"}),
    "linear_1": ("layer/v", {"w": "w"}),
    "linear_2": ("layer/k", {"w": "w"}),
    "linear_3": ("layer", {"w": "o"}),
    "linear_4": ("layer/fc", {"b": "b", "w": "w"}),
    "linear_5": ("layer", {"b": "b", "w": "out"}),
}
_ROOT = "causal_transformer_shard/~/"


class Rule(enum.Enum):
    """How the shards' values make the parameter.

    Adam's moments follow the same rule, but that of SUMMED are alike in all shards and no shares,
    and where a shard's parameter keeps its initial value (FIRST) they are zeros.
    """

    SPLIT = "each holds its block along one axis"
    STACKED = "each holds its row of the first axis"
    SUMMED = "each holds its share of a sum, all shares alike"
    FIRST = "shard 0 holds it, the others their initial value"
    EQUAL = "all hold it (the original takes their mean)"
    UNUSED = "the original never reads it, and we have no such parameter"


class Entry(NamedTuple):
    """One parameter of the original, one layer's: its place in our tree and in the shards.

    `shape` is the whole parameter's, without our leading axis of layers; `axis` is the one that
    shards split (SPLIT alone).
    """

    name: str
    part: str
    module: str
    leaf: str
    layer: int | None
    shape: tuple[int, ...]
    rule: Rule
    axis: int = 0

    def shard_shape(self, shards: int) -> tuple[int, ...]:
        """The shape in a shard, where the shards divide the axis that they split."""
        if self.rule is Rule.STACKED:
            return self.shape[1:]
        if self.rule is Rule.SPLIT:
            size = self.shape[self.axis] // shards
            return (*self.shape[: self.axis], size, *self.shape[self.axis + 1 :])
        return self.shape

    def block(self, shard: int, shards: int) -> tuple[Any, ...]:
        """Where a shard's part stands in the whole (SPLIT and STACKED)."""
        if self.rule is Rule.STACKED:
            return (shard,)
        size = self.shape[self.axis] // shards
        return (*(slice(None),) * self.axis, slice(shard * size, (shard + 1) * size))


def entries(config: Config, declared: Any) -> list[Entry]:
    """The parameters in the original's order: sorted by module, then by name.

    Args:
      declared: `model.declarations(config)`.

    Raises:
      InputError: for a model that the original's version 1 cannot express.
    """
    _check_expressible(config)
    placed = [(f"{_ROOT}embedding_shard/~/linear", x, "embed", "embedding", x) for x in ("b", "w")]
    if config.pe == "fixed":
        placed.append((f"{_ROOT}embedding_shard", "pos_embs", "embed", "embedding", "pos_embs"))
    for leaf in ("b", "w"):
        module = f"{_ROOT}projection_shard/~/linear"
        placed.append((module, leaf, "proj", "projection/head", leaf))
    norm, norm_leaves = _norm_leaves(config)
    for leaf in norm_leaves:
        module = f"{_ROOT}projection_shard/~/{norm}"
        placed.append((module, leaf, "proj", "projection/norm", leaf))
    if config.pe == "t5":
        leaf = "rel_embedding"
        placed.append((f"{_ROOT}relative_position_embs", leaf, "relative", "relative", leaf))
    found = [_entry(*place, None, config, declared) for place in placed]
    for layer in range(config.layers):
        scope = f"{_ROOT}layer_{layer}/~/"
        placed = [
            (f"{scope}{theirs}", leaf, "layers", module, ours)
            for theirs, (module, names) in _LAYER.items()
            for leaf, ours in names.items()
        ]
        placed += [(f"{scope}{norm}", x, "layers", "layer/norm", x) for x in norm_leaves]
        found += [_entry(*place, layer, config, declared) for place in placed]
    return sorted(found, key=lambda entry: entry.name.split(" "))


def check_shards(config: Config, found: list[Entry], shards: int, where: str, remedy: str) -> None:
    """Raises InputError where the model cannot be in so many shards."""
    if shards < 1:
        raise InputError(f"{where}: {shards} shards, expected at least 1")
    sizes = {"n_heads": config.n_heads}
    for entry in found:
        if entry.rule is Rule.SPLIT:
            sizes[f"axis {entry.axis} of {entry.name}"] = entry.shape[entry.axis]
        if entry.rule is Rule.STACKED and entry.shape[0] != shards:
            raise InputError(
                f"{where}: {shards} shards, but norm layernorm-desync has a {entry.name} for each "
                f"of the config's cores_per_replica, {entry.shape[0]}; {remedy}"
            )
    for what, size in sizes.items():
        if size % shards:
            raise InputError(f"{where}: {shards} shards do not divide {what}, {size}; {remedy}")


def _check_expressible(config: Config) -> None:
    if config.block != "gptj":
        raise InputError(
            f"config: block is {config.block}, but the original's checkpoints hold gptj alone"
        )
    if config.d_head * config.n_heads != config.d_model:
        raise InputError(
            f"config: head_size is {config.d_head}, but the original's checkpoints have "
            f"d_model / n_heads alone ({config.d_model} / {config.n_heads})"
        )


def _norm_leaves(config: Config) -> tuple[str, tuple[str, ...]]:
    """The norm's module name there, and which leaves it stores (nobias: an unused offset too)."""
    kind = config.norm
    if kind.startswith("layernorm"):
        name = "layer_norm" if kind == "layernorm-desync" else "replicated_layer_norm"
        return name, ("offset", "scale")
    return "rms_norm", ("offset", "scale") if kind.endswith("-bias") else ("scale",)


def _entry(
    theirs: str,
    their_leaf: str,
    part: str,
    module: str,
    leaf: str,
    layer: int | None,
    config: Config,
    declared: Any,
) -> Entry:
    name = f"{theirs} {their_leaf}"
    if leaf not in declared[part][module]:
        return Entry(name, part, module, leaf, layer, (config.d_model,), Rule.UNUSED)
    declaration: Declaration = declared[part][module][leaf]
    if layer is not None:
        declaration = declaration.unstack()
    axes = tuple(declaration.spec)
    if module.endswith("/norm"):
        if "mp" in axes:
            rule = Rule.STACKED
        else:
            rule = Rule.FIRST if config.norm.startswith("layernorm") else Rule.EQUAL
    else:
        rule = Rule.SUMMED if declaration.summed else Rule.SPLIT
    axis = axes.index("mp") if rule is Rule.SPLIT else 0
    return Entry(name, part, module, leaf, layer, declaration.shape, rule, axis)
