"""Reading and writing checkpoints of the original mesh-transformer-jax.

A checkpoint consists of `step_N/shard_i/{0..15}.npz` and `meta.json`.  The files do not name the
parameters, so this module defines the order and meaning of their arrays; `original_files` reads and
writes the files.  A full checkpoint holds the step counts of Adam and of the learning-rate
schedule, Adam's two moments, the parameters and the step.  A slim one holds only the parameters and
the step.
"""

import enum
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mesh_transformer.checkpoint import original_files
from mesh_transformer.checkpoint.atomic_folder import atomic_folder
from mesh_transformer.checkpoint.host_arrays import FLOATS, LazyLeaf, cast
from mesh_transformer.checkpoint.original_files import Shard
from mesh_transformer.checkpoint.state_tree import (
    Path,
    check_state,
    differing_keys,
    in_memory,
    nested,
)
from mesh_transformer.config import Config
from mesh_transformer.families import NORMS
from mesh_transformer.mesh.declaration import Declaration
from mesh_transformer.model import transformer
from mesh_transformer.storage import files
from mesh_transformer.storage.access import is_uri
from mesh_transformer.util import InputError, is_named

# mesh-transformer-jax's module below layer_<i>/~/ -> (our module, {their leaf: our leaf}).
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
    """How a parameter is divided among the shards of a checkpoint.  The values are descriptions.

    Adam's moments are divided like their parameter, with two exceptions.  If the parameter is the
    sum of the shards' arrays (SUMMED), every shard holds the full moments.  If only shard 0 holds
    the parameter (FIRST), only shard 0 holds the moments, and the other shards hold zeros.
    """

    SPLIT = "each shard holds a block along one axis"
    STACKED = "each shard holds one row of the first axis"
    SUMMED = "each shard holds an equal share, and the parameter is the sum"
    FIRST = "shard 0 holds the parameter, the others keep their initial value"
    EQUAL = "each shard holds the parameter (the original takes the mean)"
    UNUSED = "the original never reads it, and our model does not have it"


class Entry(NamedTuple):
    """One parameter in a mesh-transformer-jax checkpoint, and the leaf that holds it in our tree.

    mesh-transformer-jax stores the parameters of each layer separately, so there is an `Entry` per
    layer.  Our parameter tree stacks the layers in a single leaf.

    Attributes:
      name: mesh-transformer-jax's names of the module and the leaf, separated by a space.
      part, module, leaf: the keys of our leaf, which is `params[part][module][leaf]`.
      layer: the entry's index on our leaf's layer axis; None if the leaf has no layer axis.
      shape: the shape of the unsharded parameter, without the layer axis.
      rule: how the parameter is divided among the shards.
      axis: if the rule is SPLIT, the axis that is split among the shards.
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
        """Return the shape of the parameter's array in each of `shards` shards.

        For SPLIT, `shards` must divide the size of the axis that is split.
        """
        if self.rule is Rule.STACKED:
            return self.shape[1:]
        if self.rule is Rule.SPLIT:
            size = self.shape[self.axis] // shards
            return (*self.shape[: self.axis], size, *self.shape[self.axis + 1 :])
        return self.shape

    def block(self, shard: int, shards: int) -> tuple[Any, ...]:
        """Return the index that selects one shard's part of the unsharded parameter.

        Defined only for SPLIT and STACKED.
        """
        if self.rule is Rule.STACKED:
            return (shard,)
        size = self.shape[self.axis] // shards
        return (*(slice(None),) * self.axis, slice(shard * size, (shard + 1) * size))


def entries(config: Config, declared: Any) -> list[Entry]:
    """Return an entry for each of the model's parameters, in the order of the checkpoint's arrays.

    The entries are sorted by mesh-transformer-jax's module names, then by its leaf names.

    Args:
      declared: the declarations of the config's parameters, from `transformer.declarations`.

    Raises:
      InputError: if checkpoints of mesh-transformer-jax (version 1) cannot represent the model.
    """
    _check_expressible(config)
    norm, linear = config.norm_kind, {"b": "b", "w": "w"}
    # The original's layernorm-nobias has an offset, although the model does not use it.
    norm_leaves = {"offset": "offset"} if norm.centered or norm.offset else {}
    norm_leaves |= {"scale": "scale"}
    placed: list[tuple[str, int | None, str, str, dict[str, str]]] = [
        ("embedding_shard/~/linear", None, "embed", "embedding", linear),
        ("projection_shard/~/linear", None, "proj", "projection/head", linear),
        (f"projection_shard/~/{norm.original}", None, "proj", "projection/norm", norm_leaves),
    ]
    if config.pe == "fixed":
        placed.append(("embedding_shard", None, "embed", "embedding", {"pos_embs": "pos_embs"}))
    if config.pe == "t5":
        leaves = {"rel_embedding": "rel_embedding"}
        placed.append(("relative_position_embs", None, "relative", "relative", leaves))
    in_layer = _LAYER | {f"{norm.original}": ("layer/norm", norm_leaves)}
    placed += [
        (f"layer_{layer}/~/{theirs}", layer, "layers", module, leaves)
        for layer in range(config.layers)
        for theirs, (module, leaves) in in_layer.items()
    ]
    result = [
        _entry(f"{_ROOT}{theirs} {leaf}", part, module, ours, layer, config, declared)
        for theirs, layer, part, module, leaves in placed
        for leaf, ours in leaves.items()
    ]
    return sorted(result, key=lambda entry: entry.name.split(" "))


def check_shards(
    config: Config, parameters: list[Entry], shards: int, where: str, remedy: str
) -> None:
    """Raise InputError if the model cannot be split into `shards` shards.

    Args:
      remedy: the end of the error message, which says what to do.
    """
    if shards < 1:
        raise InputError(f"{where}: the number of shards is {shards}, expected at least 1")
    sizes = {"n_heads": config.n_heads}
    for entry in parameters:
        if entry.rule is Rule.SPLIT:
            sizes[f"axis {entry.axis} of {entry.name}"] = entry.shape[entry.axis]
        if entry.rule is Rule.STACKED and entry.shape[0] != shards:
            raise InputError(
                f"{where}: the number of shards is {shards}, but the config's cores_per_replica is "
                f"{entry.shape[0]}; they must be equal, because norm layernorm-desync has one "
                f"{entry.name} per shard; {remedy}"
            )
    for what, size in sizes.items():
        if size % shards:
            raise InputError(
                f"{where}: {what} is {size}, not divisible by {shards} shards; {remedy}"
            )


def _check_expressible(config: Config) -> None:
    """Raise InputError if mesh-transformer-jax checkpoints cannot represent the config's model."""
    free = {"layers", "d_model", "n_heads", "n_vocab", "seq", "head_size"}
    usual = Config(**{key: getattr(config, key) for key in free}, block="gptj")
    free |= {"norm", "pe", "pe_rotary_dims", "hf_type", "attention_window"}
    for key in differing_keys(config, usual, free):
        raise InputError(
            f"config: {key} is {getattr(config, key)}, but mesh-transformer-jax checkpoints "
            f"support only {getattr(usual, key)}; change the config, or keep a model in native "
            "format"
        )
    if is_named(config.pe):
        raise InputError(
            f"config: pe is {config.pe}, but mesh-transformer-jax checkpoints support only rotary, "
            "fixed and t5; keep this model in native format"
        )
    if config.norm_kind.original is None:
        known = ", ".join(name for name, kind in NORMS.items() if kind.original is not None)
        raise InputError(
            f"config: norm is {config.norm}, but mesh-transformer-jax checkpoints support only "
            f"{known}; keep this model in native format"
        )
    if config.d_head * config.n_heads != config.d_model:
        raise InputError(
            f"config: head_size is {config.d_head}, but mesh-transformer-jax checkpoints support "
            f"only d_model / n_heads ({config.d_model} / {config.n_heads}); keep this model "
            "in native format"
        )


def _entry(
    name: str, part: str, module: str, leaf: str, layer: int | None, config: Config, declared: Any
) -> Entry:
    """Return the `Entry` of one parameter; see `Entry` and `entries` for the arguments."""
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
            rule = Rule.FIRST if config.norm_kind.centered else Rule.EQUAL
    else:
        rule = Rule.SUMMED if declaration.summed else Rule.SPLIT
    axis = axes.index("mp") if rule is Rule.SPLIT else 0
    return Entry(name, part, module, leaf, layer, declaration.shape, rule, axis)


_MOMENTS = ("mu", "nu")
_REMEDY = "use the config that the model was trained with"
Tree = dict[str, dict[str, dict[str, Any]]]  # leaves are arrays or `LazyLeaf`s


class _Source(NamedTuple):
    """An opened checkpoint of mesh-transformer-jax.

    Attributes:
      shards: the checkpoint's shards, in order.
      entries: the model's parameters, as the function `entries` returns them.
      first: {group: index of the group's first leaf in each shard}.  The groups are "params" and
        "step", and in a full checkpoint also "adam", "mu", "nu" and "schedule".
    """

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
    """Read a checkpoint of mesh-transformer-jax into host memory, and merge its shards.

    The number of shards may differ from `config.cores_per_replica`.

    Args:
      folder: a model folder (its newest step) or a step_N.
      dtype: the dtype to cast the parameters to (default: their own); moments are not cast.
      optimizer: whether to read Adam's moments if there are any.
      lazy: whether to return `LazyLeaf`s, which are read from disk (and checked for damage) on use.

    Returns:
      Nested dicts of numpy arrays with the keys "params", "step" and, if there are moments to read,
      "opt_state": {"count", "mu", "nu"}.  For a full checkpoint, "step" is the step count of the
      learning-rate schedule, not the stored step.  The two differ if the model was fine-tuned in
      mesh-transformer-jax: fine-tuning there resets the schedule's count, but not the stored step
      or Adam's count.

    Raises:
      InputError: if files are missing, are damaged or do not fit `config`.
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
    """Write a state to a model folder in mesh-transformer-jax's format; return the step_N's path.

    The step appears complete or not at all.  The state is converted one layer at a time, so little
    memory is needed besides that of the state.  For layernorm-nobias, mesh-transformer-jax stores
    an offset that it never reads; zeros are written for it.

    Args:
      folder: the model folder, which is created if necessary.
      state: a state as `read` returns it.  If it has no "opt_state", the checkpoint is slim.
      shards: the number of shards (default: `config.cores_per_replica`).
      dtype: the dtype to cast the parameters to (default: their own); moments are cast to f32.

    Raises:
      InputError: if the model cannot be split into `shards` shards, a leaf does not fit `config`,
        the step already exists, or storage fails.
    """
    count = config.cores_per_replica if shards is None else shards
    declared = transformer.declarations(config)
    parameters = entries(config, declared)
    check_shards(config, parameters, count, folder, "choose another number of shards")
    if "opt_state" in state and config.optimizer != "adam":
        raise InputError(
            f"{folder}: the optimizer is {config.optimizer}, but mesh-transformer-jax checkpoints "
            "can store only adam's state; leave out opt_state"
        )
    check_state(state, declared)
    leaves = _leaves(state, parameters, None if dtype is None else np.dtype(dtype), count)
    step = int(state["step"])
    path = os.path.join(folder, f"step_{step}")
    if not (files.is_folder(folder) if is_uri(folder) else os.path.lexists(folder)):
        with atomic_folder(folder) as new:
            original_files.write(os.path.join(new, f"step_{step}"), leaves, count)
            original_files.write_index(os.path.join(new, "meta.json"), {}, step)
        return path
    index = original_files.index_before(path)
    with atomic_folder(path) as new:
        original_files.write(new, leaves, count)
        original_files.write_index(os.path.join(new, "meta.json"), index, step)
    original_files.finish(path)
    return path


def _open(path: str, config: Config) -> _Source:
    """Open all shards of a step.

    Raises:
      InputError: if a shard is missing, the shards contradict each other, or they do not fit
        `config`.
    """
    numbers = original_files.entry_numbers(path, "shard")
    missing = sorted(set(range(numbers[-1] + 1)) - set(numbers))
    if missing:
        raise InputError(
            f"{path}: shard_{missing[0]} is missing, though shard_{numbers[-1]} exists; "
            f"copy shard_{missing[0]} as well"
        )
    parameters = entries(config, transformer.declarations(config))
    remedy = f"copy all of its shards, or {_REMEDY}"
    check_shards(config, parameters, len(numbers), path, remedy)
    shards = [Shard(os.path.join(path, f"shard_{i}"), len(numbers)) for i in numbers]
    for shard in shards:
        if len(shard) != len(shards[0]):
            raise InputError(
                f"{shard.folder}: found {len(shard)} leaves, but {shards[0].folder} has "
                f"{len(shards[0])}; copy both folders again"
            )
    size, held = len(parameters), len(shards[0])
    full = {"adam": 0, "mu": 1, "nu": 1 + size, "schedule": 1 + 2 * size, "params": 2 + 2 * size}
    if held not in (3 * size + 3, size + 1):
        raise InputError(
            f"{shards[0].folder}: found {held} leaves{_describe_layers(held, parameters, config)}, "
            f"expected {3 * size + 3} (full) or {size + 1} (slim: without optimizer state) for the "
            f"{config.layers} layers, norm and pe of the config; {_REMEDY}"
        )
    first = full if held > size + 1 else {"params": 0}
    return _Source(shards, parameters, first | {"step": held - 1})


def _describe_layers(held: int, parameters: list[Entry], config: Config) -> str:
    """Guess from the number of leaves how many layers a checkpoint has, for an error message.

    A full checkpoint holds Adam's moments, a slim one does not.

    Returns:
      " (N layers, full)" or " (N layers, slim)"; "" if no number of layers fits.
    """
    others = sum(entry.layer is None for entry in parameters)
    per_layer = (len(parameters) - others) // config.layers
    for kind, size in (("full", held / 3 - 1), ("slim", held - 1)):
        layers = (size - others) / per_layer
        if layers >= 1 and layers.is_integer():
            return f" ({layers:.0f} layers, {kind})"
    return ""


def _read_count(source: _Source, name: str) -> np.ndarray:
    """Return one of a checkpoint's counts as an int32 scalar.

    The count is read from the first shard.  All shards hold the same value.

    Args:
      name: "adam", "schedule" or "step".
    """
    shard, index = source.shards[0], source.first[name]
    value = shard.read(index, name, ())
    if value.dtype.kind not in "iu":
        raise InputError(f"{shard.where(index, name)} is {value.dtype}, expected int32; {_REMEDY}")
    return value.astype(np.int32)


def _group(source: _Source, group: str, dtype: np.dtype | None) -> Tree:
    """Return the parameters or one of Adam's moments as nested dicts of `LazyLeaf`s.

    Args:
      group: "params", "mu" or "nu".
    """
    numbers: dict[Path, list[int]] = {}
    # The entries are sorted by name, so layer_10 comes before layer_2.
    for number, entry in sorted(enumerate(source.entries), key=lambda pair: pair[1].layer or 0):
        if entry.rule is not Rule.UNUSED:
            numbers.setdefault((entry.part, entry.module, entry.leaf), []).append(number)
    return nested({path: _lazy(source, group, own, dtype) for path, own in numbers.items()})


def _lazy(source: _Source, group: str, numbers: list[int], dtype: np.dtype | None) -> LazyLeaf:
    """Return a leaf of our parameters or moments as a `LazyLeaf` that reads one entry per layer.

    The stored arrays of these entries must have the same dtype in all shards.

    Args:
      numbers: the indices of the entries in `source.entries`, in the order of the layers.
    """
    entry, first = source.entries[numbers[0]], source.shards[0]
    index, name = source.first[group] + numbers[0], f"{group}: {entry.name}"
    own = first.dtype(index, name, entry.shard_shape(len(source.shards)))
    first_place = first.where(index, name)
    if own not in FLOATS.values():
        floats = ", ".join(map(str, FLOATS.values()))
        raise InputError(f"{first_place} is {own}, expected one of {floats}; {_REMEDY}")

    def read(layer: int | None) -> np.ndarray:
        values = np.empty(entry.shape, dtype or own)
        for where, block, value in _blocks(source, group, numbers[layer or 0], own, first_place):
            values[block] = cast(value, values.dtype, where)
        return values

    layers = entry.layer is not None
    shape = (len(numbers), *entry.shape) if layers else entry.shape
    return LazyLeaf(shape, dtype or own, read, layers=layers)


def _blocks(
    source: _Source, group: str, number: int, dtype: np.dtype, first_place: str
) -> Iterator[tuple[str, Any, np.ndarray]]:
    """Read an entry from all shards, and yield its values in one or more blocks.

    Args:
      number: the index of the entry in `source.entries`.
      dtype: the dtype that each shard's array must have.
      first_place: a description of the array that `dtype` was read from, for error messages.

    Yields:
      (description of the block for error messages, index that selects the block in the unsharded
      parameter, values of the block).
    """
    entry, shards = source.entries[number], source.shards
    index, name = source.first[group] + number, f"{group}: {entry.name}"
    shape = entry.shard_shape(len(shards))

    def part(shard: Shard) -> np.ndarray:
        value = shard.read(index, name, shape)
        if value.dtype != dtype:
            raise InputError(
                f"{shard.where(index, name)} is {value.dtype}, expected {dtype} as in "
                f"{first_place}; copy the checkpoint again"
            )
        return value

    if entry.rule in (Rule.SPLIT, Rule.STACKED):
        for place, shard in enumerate(shards):
            yield shard.where(index, name), entry.block(place, len(shards)), part(shard)
    elif entry.rule is Rule.FIRST:
        yield shards[0].where(index, name), ..., part(shards[0])
    else:
        summed = entry.rule is Rule.SUMMED and group == "params"
        yield shards[0].where(index, name), ..., _joined([part(shard) for shard in shards], summed)


def _joined(parts: list[np.ndarray], summed: bool) -> np.ndarray:
    """Return the sum of the shards' arrays in f32 if `summed`, otherwise their mean.

    mesh-transformer-jax writes equal arrays to all shards.  To avoid rounding errors, the sum of
    equal arrays is computed as a product, and their mean is the first array, unchanged.
    """
    if all(np.array_equal(part, parts[0], equal_nan=True) for part in parts):
        return parts[0].astype(np.float32) * np.float32(len(parts)) if summed else parts[0]
    total = np.sum([part.astype(np.float32) for part in parts], axis=0)
    return total if summed else total / np.float32(len(parts))


def _leaves(
    state: dict[str, Any], parameters: list[Entry], dtype: np.dtype | None, shards: int
) -> list[Callable[[], Iterable[np.ndarray]]]:
    """Return one function per leaf of the checkpoint to write, in the order of the file format.

    Each function computes and returns the arrays of its leaf, one per shard.

    Args:
      dtype: the dtype to cast the parameters to (None: their own); moments are cast to f32.
    """

    def group(tree: Tree, dtype: np.dtype | None, moment: bool) -> list[Callable[..., Any]]:
        return [partial(_parts, tree, entry, dtype, moment, shards) for entry in parameters]

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
    """Yield the arrays to write for one entry, one per shard.

    Args:
      dtype: the dtype to cast to; None for the leaf's own.
      moment: whether `tree` is one of Adam's moments.
    """
    leaves = tree[entry.part][entry.module]
    if entry.rule is Rule.UNUSED:
        yield from [np.zeros(entry.shape, dtype or leaves["scale"].dtype)] * shards
        return
    leaf = leaves[entry.leaf]
    target: np.dtype = dtype or leaf.dtype
    value = np.asarray(leaf if entry.layer is None else leaf[entry.layer])
    if entry.rule is Rule.SUMMED and not moment:
        value = value.astype(np.float32) / np.float32(shards)
    for number in range(shards):
        part = value
        if entry.rule in (Rule.SPLIT, Rule.STACKED):
            part = value[entry.block(number, shards)]
        elif entry.rule is Rule.FIRST and number > 0:
            initial = 1 if entry.leaf == "scale" and not moment else 0
            part = np.full(entry.shape, initial, target)
        yield cast(part, target, entry.name)
