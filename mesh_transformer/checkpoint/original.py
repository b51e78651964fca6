"""The original's checkpoints, `step_N/shard_i/{0..15}.npz` and `meta.json`, both ways.

They name nothing: what stands where is written down here; `original_files` reads and writes the
files.  A full one holds the counts of Adam and of the schedule, both moments, the parameters and
the step; a slim one the parameters and the step.
"""

import enum
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike
from tqdm import tqdm

from mesh_transformer.checkpoint import original_files
from mesh_transformer.checkpoint.atomic_folder import whole_folder
from mesh_transformer.checkpoint.host_arrays import FLOATS, LazyLeaf, cast, in_memory
from mesh_transformer.checkpoint.original_files import Shard
from mesh_transformer.checkpoint.state_tree import check_state
from mesh_transformer.config import Config
from mesh_transformer.mesh.declaration import Declaration
from mesh_transformer.model import gptj
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


_MOMENTS = ("mu", "nu")
_REMEDY = "use the config that it was trained with"
Tree = dict[str, dict[str, dict[str, Any]]]  # leaves are arrays or `LazyLeaf`s


class _Source(NamedTuple):
    """An opened checkpoint; `first` is where each group of leaves begins."""

    layers: int
    shards: list[Shard]
    entries: list[Entry]
    first: dict[str, int]


def read(
    folder: str,
    config: Config,
    *,
    dtype: DTypeLike | None = None,
    optimizer: bool = True,
    lazy: bool = False,
) -> dict[str, Any]:
    """The state in `folder` (a model's, newest step, or one step_N): nested numpy arrays.

    Any number of shards that divides the model is merged, whatever `config.cores_per_replica`.

    Args:
      dtype: parameters are cast to it; None: they keep their own.  Moments keep theirs.
      optimizer: take Adam's moments where there are any.
      lazy: leaves are `LazyLeaf`s, read (and found to be damaged) when they are asked for.

    Returns:
      {"params", "step"} and perhaps {"opt_state": {"count", "mu", "nu"}}.  The step is the
      schedule's count where there is one: the original's fine-tuning begins that anew, not its
      other two counts.

    Raises:
      InputError: for files that are damaged, missing or do not fit `config`.
    """
    path = original_files.step_folder(folder)
    source = _open(path, config)
    full = "mu" in source.first
    groups = ("params", *_MOMENTS) if full and optimizer else ("params",)
    target = None if dtype is None else np.dtype(dtype)
    trees = {g: _group(source, g, target if g == "params" else None) for g in groups}
    params = trees.pop("params")
    state: dict[str, Any] = {
        "params": params,
        "step": _read_count(source, "schedule" if full else "step"),
    }
    if trees:
        state["opt_state"] = {"count": _read_count(source, "adam"), **trees}
    return state if lazy else in_memory(state)


def write(
    folder: str,
    state: dict[str, Any],
    config: Config,
    *,
    shards: int | None = None,
    dtype: DTypeLike | None = None,
) -> str:
    """Writes a state into the model folder `folder`, as the original does; returns its step_N.

    It appears there whole or not at all.  One layer's part of a leaf is in memory beside the state.
    Norm layernorm-nobias gets zeros for the offset that the original stores unread.

    Args:
      state: as `read` returns it; without "opt_state" the checkpoint is slim.
      shards: default `config.cores_per_replica`.
      dtype: parameters are cast to it; None: they keep their own.  Moments become f32.

    Raises:
      InputError: where the shards do not divide the model, a leaf does not fit `config`, the
        step is there already, or the storage refuses.
    """
    count = config.cores_per_replica if shards is None else shards
    declared = gptj.declarations(config)
    found = entries(config, declared)
    check_shards(config, found, count, folder, "choose another number of shards")
    check_state(state, declared)
    leaves = _leaves(state, found, None if dtype is None else np.dtype(dtype), count)
    step = int(state["step"])
    path = os.path.join(folder, f"step_{step}")
    if not os.path.lexists(folder):
        with whole_folder(folder) as new:
            _write_shards(os.path.join(new, f"step_{step}"), leaves, count)
            original_files.write_index(os.path.join(new, "meta.json"), {}, step)
        return path
    index = original_files.read_index(folder)
    with whole_folder(path) as new:
        _write_shards(new, leaves, count)
        original_files.write_index(os.path.join(new, "meta.json"), index, step)
    os.replace(os.path.join(path, "meta.json"), os.path.join(folder, "meta.json"))
    return path


def _open(path: str, config: Config) -> _Source:
    """All shards of a step; they must agree in what they hold, and with `config`."""
    numbers = original_files.numbered(path, "shard")
    missing = sorted(set(range(numbers[-1] + 1)) - set(numbers))
    if missing:
        raise InputError(
            f"{path}: shard_{missing[0]} is missing, though shard_{numbers[-1]} is there; "
            "copy it as well"
        )
    found = entries(config, gptj.declarations(config))
    remedy = f"copy all of its shards, or {_REMEDY}"
    check_shards(config, found, len(numbers), path, remedy)
    shards = [Shard(os.path.join(path, f"shard_{i}"), len(numbers)) for i in numbers]
    for shard in shards:
        if len(shard) != len(shards[0]):
            raise InputError(
                f"{shard.folder}: found {len(shard)} leaves, expected the {len(shards[0])} of "
                f"{shards[0].folder}; copy both anew"
            )
    size, held = len(found), len(shards[0])
    full = {"adam": 0, "mu": 1, "nu": 1 + size, "schedule": 1 + 2 * size, "params": 2 + 2 * size}
    if held not in (3 * size + 3, size + 1):
        raise InputError(
            f"{shards[0].folder}: found {held} leaves{_layers_in(held, found, config)}, expected "
            f"{3 * size + 3} (full) or {size + 1} (slim) for the {config.layers} layers, norm and "
            f"pe of the config; {_REMEDY}"
        )
    first = full if held > size + 1 else {"params": 0}
    return _Source(config.layers, shards, found, first | {"step": held - 1})


def _layers_in(held: int, found: list[Entry], config: Config) -> str:
    """How many layers so many leaves are, in words; nothing where no number fits."""
    others = sum(entry.layer is None for entry in found)
    each = (len(found) - others) // config.layers
    for kind, size in (("full", held / 3 - 1), ("slim", held - 1)):
        layers = (size - others) / each
        if layers >= 1 and layers.is_integer():
            return f" ({layers:.0f} layers, {kind})"
    return ""


def _read_count(source: _Source, name: str) -> np.ndarray:
    shard, index = source.shards[0], source.first[name]
    value = shard.read(index, name, ())
    if value.dtype.kind not in "iu":
        raise InputError(f"{shard.where(index, name)} is {value.dtype}, expected int32; {_REMEDY}")
    return value.astype(np.int32)


def _group(source: _Source, group: str, dtype: np.dtype | None) -> Tree:
    """The parameters, or one of the two moments, in our structure."""
    numbers: dict[tuple[str, str, str], list[int]] = {}
    for number, entry in enumerate(source.entries):
        if entry.rule is not Rule.UNUSED:
            numbers.setdefault((entry.part, entry.module, entry.leaf), []).append(number)
    tree: Tree = {}
    for (part, module, leaf), found in numbers.items():
        found.sort(key=lambda number: source.entries[number].layer or 0)  # layer_10 before layer_2
        tree.setdefault(part, {}).setdefault(module, {})[leaf] = _lazy(source, group, found, dtype)
    return tree


def _lazy(source: _Source, group: str, numbers: list[int], dtype: np.dtype | None) -> LazyLeaf:
    """One of our leaves from its entries, one a layer; all are of the first one's dtype."""
    entry, first = source.entries[numbers[0]], source.shards[0]
    index, name = source.first[group] + numbers[0], f"{group}: {entry.name}"
    own = first.dtype(index, name, entry.shard_shape(len(source.shards)))
    there = first.where(index, name)
    if own not in FLOATS.values():
        floats = ", ".join(map(str, FLOATS.values()))
        raise InputError(f"{there} is {own}, expected one of {floats}; {_REMEDY}")

    def read(layer: int | None) -> np.ndarray:
        values = np.empty(entry.shape, dtype or own)
        for where, block, value in _blocks(source, group, numbers[layer or 0], own, there):
            values[block] = cast(value, values.dtype, where)
        return values

    layers = entry.layer is not None
    shape = (len(numbers), *entry.shape) if layers else entry.shape
    return LazyLeaf(shape, dtype or own, read, layers=layers)


def _blocks(
    source: _Source, group: str, number: int, own: np.dtype, there: str
) -> Iterator[tuple[str, Any, np.ndarray]]:
    """An entry in parts: what error lines call it, where the part stands, its values.

    They must be of the dtype `own`, as what is `there` is.
    """
    entry, shards = source.entries[number], source.shards
    index, name = source.first[group] + number, f"{group}: {entry.name}"
    shape = entry.shard_shape(len(shards))

    def part(shard: Shard) -> np.ndarray:
        value = shard.read(index, name, shape)
        if value.dtype != own:
            raise InputError(
                f"{shard.where(index, name)} is {value.dtype}, expected {own} as in {there}; "
                "copy both anew"
            )
        return value

    if entry.rule in (Rule.SPLIT, Rule.STACKED):
        for number, shard in enumerate(shards):
            yield shard.where(index, name), entry.block(number, len(shards)), part(shard)
    elif entry.rule is Rule.FIRST:
        yield shards[0].where(index, name), ..., part(shards[0])
    else:
        shared = entry.rule is Rule.SUMMED and group == "params"
        yield shards[0].where(index, name), ..., _joined([part(shard) for shard in shards], shared)


def _joined(parts: list[np.ndarray], shared: bool) -> np.ndarray:
    """The sum of the shards' parts, in f32, where they are shares of one; else their mean.

    Parts that agree, as the original's do, are not added up, which would round more often.
    """
    if all(np.array_equal(part, parts[0], equal_nan=True) for part in parts):
        return parts[0].astype(np.float32) * np.float32(len(parts)) if shared else parts[0]
    total = np.sum([part.astype(np.float32) for part in parts], axis=0)
    return total if shared else total / np.float32(len(parts))


def _leaves(
    state: dict[str, Any], found: list[Entry], dtype: np.dtype | None, shards: int
) -> list[Callable[[], Iterable[np.ndarray]]]:
    """What gives each leaf's parts, one a shard, in the original's order."""

    def group(tree: Tree, dtype: np.dtype | None, moment: bool) -> list[Callable[..., Any]]:
        return [partial(_parts, tree, entry, dtype, moment, shards) for entry in found]

    def count(value: Any) -> Callable[[], Iterable[np.ndarray]]:
        return lambda: [np.asarray(value, np.int32)] * shards

    leaves = [*group(state["params"], dtype, False), count(state["step"])]
    if "opt_state" not in state:
        return leaves
    moments = [
        leaf
        for name in _MOMENTS
        for leaf in group(state["opt_state"][name], np.dtype(np.float32), True)
    ]
    return [count(state["opt_state"]["count"]), *moments, count(state["step"]), *leaves]


def _parts(
    tree: Tree, entry: Entry, dtype: np.dtype | None, moment: bool, shards: int
) -> Iterator[np.ndarray]:
    """What each of so many shards holds of one entry."""
    leaves = tree[entry.part][entry.module]
    if entry.rule is Rule.UNUSED:
        yield from [np.zeros(entry.shape, dtype or leaves["scale"].dtype)] * shards
        return
    leaf = leaves[entry.leaf]
    kept: np.dtype = dtype or leaf.dtype
    value = np.asarray(leaf if entry.layer is None else leaf[entry.layer])
    if entry.rule is Rule.SUMMED and not moment:
        value = value.astype(np.float32) / np.float32(shards)
    for number in range(shards):
        part = value
        if entry.rule in (Rule.SPLIT, Rule.STACKED):
            part = value[entry.block(number, shards)]
        elif entry.rule is Rule.FIRST and number > 0:
            initial = 1 if entry.leaf == "scale" and not moment else 0
            part = np.full(entry.shape, initial, kept)
        yield cast(part, kept, entry.name)


def _write_shards(
    folder: str, leaves: list[Callable[[], Iterable[np.ndarray]]], shards: int
) -> None:
    """All shards of a step, with a progress bar."""
    folders = [os.path.join(folder, f"shard_{number}") for number in range(shards)]
    title = f"writing {shards} shards"
    with tqdm(total=len(leaves), desc=title, unit="leaf", disable=None) as bar:
        original_files.write(folders, [partial(_counted, leaf, bar) for leaf in leaves])


def _counted(leaf: Callable[[], Iterable[np.ndarray]], bar: tqdm) -> Iterable[np.ndarray]:
    bar.update()
    return leaf()
