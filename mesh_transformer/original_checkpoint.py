"""The original's checkpoints, `step_N/shard_i/{0..15}.npz` and `meta.json`, both ways.

They name nothing: `original_names` has what stands where, `original_files` the files.  A full one
holds the counts of Adam and of the schedule, both moments, the parameters and the step; a slim one
the parameters and the step.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike
from tqdm import tqdm

from mesh_transformer import model, original_files
from mesh_transformer.casts import FLOATS, cast
from mesh_transformer.config import Config
from mesh_transformer.original_files import Shard
from mesh_transformer.original_names import Entry, Rule, check_shards, entries
from mesh_transformer.state_tree import check_state
from mesh_transformer.util import InputError
from mesh_transformer.whole_folder import whole_folder

_MOMENTS = ("mu", "nu")
_REMEDY = "use the config that it was trained with"
Tree = dict[str, dict[str, dict[str, np.ndarray]]]


class _Source(NamedTuple):
    """An opened checkpoint; `first` is where each group of leaves begins."""

    layers: int
    shards: list[Shard]
    entries: list[Entry]
    first: dict[str, int]


def read(
    folder: str, config: Config, *, dtype: DTypeLike | None = None, optimizer: bool = True
) -> dict[str, Any]:
    """The state in `folder` (a model's, newest step, or one step_N): nested numpy arrays.

    Any number of shards that divides the model is merged, whatever `config.cores_per_replica`.
    One shard's part of one leaf is in memory beside the result.

    Args:
      dtype: parameters are cast to it; None: they keep their own.  Moments keep theirs.
      optimizer: take Adam's moments where there are any.

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
    total = len(groups) * len(source.entries)
    with tqdm(total=total, desc=f"reading {path}", unit="leaf", disable=None) as bar:
        trees = {
            group: _read_group(source, group, target if group == "params" else None, bar)
            for group in groups
        }
    params = trees.pop("params")
    state = {"params": params, "step": _read_count(source, "schedule" if full else "step")}
    return state | ({"opt_state": {"count": _read_count(source, "adam"), **trees}} if trees else {})


def write(
    folder: str,
    state: dict[str, Any],
    config: Config,
    *,
    shards: int | None = None,
    dtype: DTypeLike | None = None,
) -> str:
    """Writes a state into the model folder `folder`, as the original does; returns its step_N.

    It appears there whole or not at all.  One shard's part of one leaf is in memory beside the
    state.  Norm layernorm-nobias gets zeros for the offset that the original stores unread.

    Args:
      state: as `read` returns it; without "opt_state" the checkpoint is slim.
      shards: default `config.cores_per_replica`.
      dtype: parameters are cast to it; None: they keep their own.  Moments become f32.

    Raises:
      InputError: where the shards do not divide the model, a leaf does not fit `config`, the
        step is there already, or the storage refuses.
    """
    count = config.cores_per_replica if shards is None else shards
    declared = model.declarations(config)
    found = entries(config, declared)
    check_shards(config, found, count, folder, "choose another number of shards")
    check_state(state, declared)
    leaves = _leaves(state, found, None if dtype is None else np.dtype(dtype))
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
    found = entries(config, model.declarations(config))
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


def _read_group(source: _Source, group: str, dtype: np.dtype | None, bar: tqdm) -> Tree:
    """The parameters, or one of the two moments, in our structure."""
    tree: Tree = {}
    firsts: dict[tuple[str, str], tuple[np.dtype, str]] = {}
    for place, entry in enumerate(source.entries):
        bar.update()
        leaves = tree.setdefault(entry.part, {}).setdefault(entry.module, {})
        for where, block, value in _blocks(source, group, place, firsts):
            if entry.leaf not in leaves:
                shape = entry.shape if entry.layer is None else (source.layers, *entry.shape)
                own, _ = firsts[entry.module, entry.leaf]
                leaves[entry.leaf] = np.empty(shape, dtype or own)
            target = leaves[entry.leaf]
            one = target if entry.layer is None else target[entry.layer, ...]
            one[block] = cast(value, target.dtype, where)
    return tree


def _blocks(
    source: _Source, group: str, place: int, firsts: dict[tuple[str, str], tuple[np.dtype, str]]
) -> Iterator[tuple[str, Any, np.ndarray]]:
    """A leaf in parts: what error lines call it, where the part stands, its values.

    `firsts` has the dtype of each leaf, which its layers and shards share, and where it was found.
    """
    entry, shards = source.entries[place], source.shards
    index, name = source.first[group] + place, f"{group}: {entry.name}"
    shape = entry.shard_shape(len(shards))

    def part(shard: Shard) -> np.ndarray:
        where, value = shard.where(index, name), shard.read(index, name, shape)
        first, there = firsts.setdefault((entry.module, entry.leaf), (value.dtype, where))
        if value.dtype not in FLOATS.values():
            floats = ", ".join(map(str, FLOATS.values()))
            raise InputError(f"{where} is {value.dtype}, expected one of {floats}; {_REMEDY}")
        if value.dtype != first:
            raise InputError(
                f"{where} is {value.dtype}, expected {first} as in {there}; copy both anew"
            )
        return value

    if entry.rule in (Rule.SPLIT, Rule.STACKED):
        for number, shard in enumerate(shards):
            yield shard.where(index, name), entry.block(number, len(shards)), part(shard)
    elif entry.rule is Rule.FIRST:
        yield shards[0].where(index, name), ..., part(shards[0])
    elif entry.rule is not Rule.UNUSED:
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
    state: dict[str, Any], found: list[Entry], dtype: np.dtype | None
) -> list[Callable[[int, int], np.ndarray]]:
    """What makes each leaf of a shard, in the original's order, from (its number, of how many)."""

    def group(tree: Tree, dtype: np.dtype | None, moment: bool) -> list[Callable[..., np.ndarray]]:
        return [partial(_part, tree, entry, dtype, moment) for entry in found]

    def count(value: Any) -> Callable[[int, int], np.ndarray]:
        return lambda number, shards: np.asarray(value, np.int32)

    leaves = [*group(state["params"], dtype, False), count(state["step"])]
    if "opt_state" not in state:
        return leaves
    moments = [
        leaf
        for name in _MOMENTS
        for leaf in group(state["opt_state"][name], np.dtype(np.float32), True)
    ]
    return [count(state["opt_state"]["count"]), *moments, count(state["step"]), *leaves]


def _part(
    tree: Tree, entry: Entry, dtype: np.dtype | None, moment: bool, number: int, shards: int
) -> np.ndarray:
    """What shard `number` of so many holds of one leaf."""
    leaves = tree[entry.part][entry.module]
    if entry.rule is Rule.UNUSED:
        return np.zeros(entry.shape, dtype or leaves["scale"].dtype)
    value = leaves[entry.leaf]
    value = value if entry.layer is None else value[entry.layer, ...]
    dtype = dtype or value.dtype
    if entry.rule in (Rule.SPLIT, Rule.STACKED):
        value = value[entry.block(number, shards)]
    elif entry.rule is Rule.FIRST and number > 0:
        initial = 1 if entry.leaf == "scale" and not moment else 0
        value = np.full(entry.shape, initial, dtype)
    elif entry.rule is Rule.SUMMED and not moment:
        value = value.astype(np.float32) / np.float32(shards)
    return cast(value, dtype, entry.name)


def _write_shards(folder: str, leaves: list[Callable[[int, int], np.ndarray]], shards: int) -> None:
    total = shards * len(leaves)
    with tqdm(total=total, desc=f"writing {shards} shards", unit="leaf", disable=None) as bar:
        for number in range(shards):
            made = [partial(_counted, leaf, number, shards, bar) for leaf in leaves]
            original_files.write(os.path.join(folder, f"shard_{number}"), made)


def _counted(
    leaf: Callable[[int, int], np.ndarray], number: int, shards: int, bar: tqdm
) -> np.ndarray:
    bar.update()
    return leaf(number, shards)
