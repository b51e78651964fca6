"""Operations on states, which are nested dicts of arrays, and checks that they fit a config."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr
from tqdm import tqdm

from mesh_transformer.checkpoint.host_arrays import FLOATS, LazyLeaf
from mesh_transformer.config import Config
from mesh_transformer.config_model import Architecture
from mesh_transformer.mesh.declaration import map_declared
from mesh_transformer.util import InputError


def check_same_model(config: Config, saved: dict[str, Any], where: str) -> None:
    """Raise InputError if saved weights belong to a model that differs from the one in `config`.

    The configs are compared, because the shapes of the weights do not show the number of heads, the
    norm or the rotary dimensions.

    Args:
      config: the config of the model that is to use the weights.
      saved: the config, as a dict, that the weights were saved with.
    """
    saved_config = Config.from_dict(saved, f"{where}: saved config")
    free = {"layers", "n_vocab", "seq", "hf_type"}  # the shapes show the first two
    if config.pe != "rotary":
        free |= {"pe_rotary_dims", "rotary_pairs"}
    if all(c.window == c.seq for c in (config, saved_config)):
        free.add("attention_window")  # by default all of seq, which may change from run to run
    if config.rotary_scaling is not None:
        free.add("rotary_scaling")  # of a longer window than that of the saved weights
    keys = differing_keys(saved_config, config, free)
    # If only the new config has adapters, the saved weights become their base model.  If only the
    # saved one has them, they are merged into their base model.
    if saved_config.lora_rank and config.lora_rank:
        adapter = ("lora_rank", "lora_alpha", "lora_targets")
        keys += [key for key in adapter if getattr(saved_config, key) != getattr(config, key)]
    for key in keys:
        raise InputError(
            f"{where}: its model has {key} {getattr(saved_config, key)!r}, but the config has "
            f"{getattr(config, key)!r}; use the config that the model was trained with"
        )


def differing_keys(one: Config, other: Config, but: set[str]) -> list[str]:
    """Return the keys of `Architecture`, except those in `but`, that differ in two configs."""
    keys = (field.name for field in fields(Architecture) if field.name not in but)
    return [key for key in keys if getattr(one, key) != getattr(other, key)]


def check_same_run(config: Config, saved: dict[str, Any], where: str) -> None:
    """Raise InputError if a run with `config` cannot resume from a saved state.

    Args:
      saved: the config, as a dict, that the state was saved with.
    """
    check_same_model(config, saved, where)
    saved_config = Config.from_dict(saved, f"{where}: saved config")
    advice = "choose another model folder, and give this checkpoint as --tune-model-path"
    if saved_config.rotary_scaling != config.rotary_scaling:
        raise InputError(
            f"{where} was saved by a run with rotary_scaling {saved_config.rotary_scaling}, but "
            f"the config has {config.rotary_scaling}; change it back, or {advice}"
        )
    if config.lora_rank and config.frozen_bits != saved_config.frozen_bits:
        raise InputError(
            f"{where} was saved by a run with frozen_bits {saved_config.frozen_bits}, but the "
            f"config has {config.frozen_bits}; change it back, or {advice}"
        )
    if bool(saved_config.lora_rank) != bool(config.lora_rank):
        kinds = ("a whole model", "adapters")
        raise InputError(
            f"{where} was saved by a run that trains {kinds[saved_config.lora_rank > 0]} "
            f"(lora_rank {saved_config.lora_rank}), but the config has lora_rank "
            f"{config.lora_rank}; {advice}"
        )
    if (other := optimizer_of(saved_config)) != optimizer_of(config):
        raise InputError(
            f"{where} was saved by a run with optimizer {other}, but the config has "
            f"{optimizer_of(config)}; change it back, or {advice} with --fresh-opt"
        )
    if config.schedule_in_tokens and not saved_config.schedule_in_tokens:
        raise InputError(
            f"{where}: its run did not count tokens, but the config has warmup_tokens or "
            f"anneal_tokens; give the lengths in updates (warmup_steps, anneal_steps), or {advice}"
        )


def optimizer_of(config: Config) -> str:
    """Return the name of the optimizer whose moments a run's state has."""
    is_plain = config.optimizer == "sgd" and not config.momentum
    return "sgd without momentum" if is_plain else config.optimizer


def check_optimizer(config: Config, saved: str, where: str) -> None:
    """Raise InputError if a run with `config` cannot use moments of the optimizer `saved`.

    Args:
      where: the checkpoint with the moments, for error messages.
    """
    if optimizer_of(config) != saved:
        raise InputError(
            f"{where}: its optimizer state is that of {saved}, but the config has optimizer "
            f"{optimizer_of(config)}; add --fresh-opt to start with a fresh one"
        )


Path = tuple[str, ...]  # a leaf's keys, outermost first


def leaves(tree: Any) -> dict[Path, Any]:
    """Return {path: leaf} for all leaves of nested dicts, which may have quantized matrices."""
    flat, _ = jax.tree.flatten_with_path(tree)
    return {tuple(keystr((key,), simple=True) for key in path): leaf for path, leaf in flat}


def map_leaves(function: Callable[[Path, Any], Any], tree: Any) -> Any:
    """Return nested dicts in which each leaf is replaced by `function(path, leaf)`."""

    def replace(path: tuple[Any, ...], leaf: Any) -> Any:
        return function(tuple(key.key for key in path), leaf)

    return jax.tree.map_with_path(replace, tree)


def nested(flat: dict[Path, Any]) -> dict[str, Any]:
    """Return nested dicts that hold the leaves of `flat`; the inverse of `leaves`."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        subtree = tree
        for key in path[:-1]:
            subtree = subtree.setdefault(key, {})
        subtree[path[-1]] = leaf
    return tree


def in_memory(tree: Any) -> Any:
    """Return the nested dicts `tree` with each `LazyLeaf` replaced by a numpy array.

    A progress bar is shown while the values are read from disk.
    """
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if isinstance(leaf, LazyLeaf))
    if not total:
        return tree

    def read(leaf: Any) -> Any:
        if not isinstance(leaf, LazyLeaf):
            return leaf
        values = np.asarray(leaf)
        bar.update(leaf.nbytes)
        return values

    with tqdm(total=total, unit="B", unit_scale=True, desc="reading", disable=None) as bar:
        return jax.tree.map(read, tree)


def cast_groups(
    saved: dict[Path, Any], expected: dict[Path, Any], max_bytes: int, *, every: bool = False
) -> list[list[Path]]:
    """Divide a checkpoint's leaves into groups, to be restored and cast one group at a time.

    While a group is cast, its leaves are in memory in both dtypes, so small groups save memory.
    The first group has all leaves that keep their dtype.  The other leaves follow, largest first,
    in groups of at most `max_bytes` bytes (in the saved dtypes); a leaf that is larger than this is
    a group of its own.

    Args:
      saved: {path: leaf or its metadata}, with the saved shapes and dtypes.
      expected: {path: leaf or template}, with the dtypes to cast to.
      every: whether all leaves are converted, even those that keep their dtype.
    """
    sizes = {
        path: math.prod(saved[path].shape) * saved[path].dtype.itemsize
        for path in expected
        if every or saved[path].dtype != expected[path].dtype
    }
    groups = [[path for path in expected if path not in sizes]]
    room = 0
    for path in sorted(sizes, key=lambda path: sizes[path], reverse=True):
        if sizes[path] > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(path)
        room -= sizes[path]
    return [group for group in groups if group]


# Converts a leaf, given its path, when it has been read.
Convert = Callable[[Path, jax.Array], Any]


def put_on_devices(
    host: Any, template: Any, convert: Convert | None = None, path: Path = ()
) -> Any:
    """Copy a state from host memory to the devices, with the template's shardings and dtypes.

    Leaves are copied one by one and removed from `host`, to save host memory.

    Args:
      host: nested dicts of numpy arrays or `LazyLeaf`s.
      template: nested dicts of `ShapeDtypeStruct`s with shardings.
    """
    if isinstance(template, dict):
        return {
            key: put_on_devices(host.pop(key), leaf, convert, (*path, key))
            for key, leaf in template.items()
        }
    values = np.asarray(host).astype(template.dtype, copy=False)
    leaf = jax.make_array_from_callback(template.shape, template.sharding, values.__getitem__)
    return leaf if convert is None else convert(path, leaf)


def declared_leaves(declared: Any, moments: dict[str, Any] | None = None) -> dict[Path, Any]:
    """Return the leaves that a state is expected to have, as {path: array of zeros}.

    The arrays only show the expected shapes and dtypes.  Floating leaves are f32 here, but a state
    may hold them in another floating dtype.

    Args:
      declared: the `Declaration` of each parameter, as nested dicts.
      moments: the moments of the optimizer, from `Optimizer.moments` (default: the state has no
        entry "opt_state").
    """

    def zeros(leaf: Any) -> np.ndarray:
        return np.broadcast_to(np.float32(0), leaf.shape)

    count = np.zeros((), np.int32)
    state: dict[str, Any] = {"params": map_declared(zeros, declared), "step": count}
    if moments is not None:
        state["opt_state"] = {"count": count} | jax.tree.map(zeros, moments)
    return leaves(state)


def check_names(state: Any) -> None:
    """Raise ValueError if two leaves get the same name in Orbax, which joins keys with dots."""
    names = [".".join(path) for path in leaves(state)]
    if len(set(names)) != len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two leaves of the state are both called {duplicate}; rename a key")


def check_match(path: object, saved: dict[Path, Any], expected: dict[Path, Any]) -> None:
    """Raise InputError if a checkpoint's leaves do not match the expected ones.

    Names, shapes and integer dtypes must be equal.  The checkpoint may have additional top-level
    keys.

    Args:
      saved: {leaf path: leaf or metadata} of the checkpoint.
      expected: {leaf path: leaf or template}.
    """
    tops = {key[0] for key in expected}
    if missing := tops - {key[0] for key in saved}:
        raise InputError(
            f"checkpoint {path} has no {min(missing)}: a run can start from its weights "
            "(--tune-model-path, with another model folder), but not resume from it"
        )
    _check_leaves(f"checkpoint {path}", {k: v for k, v in saved.items() if k[0] in tops}, expected)


def check_state(state: dict[str, Any], declared: Any) -> None:
    """Raise InputError if a state's leaves do not match the declared parameters.

    Names, shapes and integer dtypes must be equal.  The moments, if there are any, must be Adam's.
    """
    moments = {"mu": declared, "nu": declared} if "opt_state" in state else None
    _check_leaves("the state", leaves(state), declared_leaves(declared, moments))


def _check_leaves(where: str, actual: dict[Path, Any], expected: dict[Path, Any]) -> None:
    """Raise InputError if `actual` differs from `expected`; name the first leaf that differs."""
    if difference := differing_leaf(actual, expected):
        raise InputError(f"{where}: {difference}; use the config that the model was trained with")


def differing_leaf(actual: dict[Path, Any], expected: dict[Path, Any]) -> str | None:
    """Name the first leaf that differs from the expected one, and how; None if none does."""
    for key in sorted(expected.keys() | actual.keys()):
        if difference := _difference(actual.get(key), expected.get(key)):
            return f"leaf {'/'.join(key)} {difference}"
    return None


def _difference(actual: Any, expected: Any) -> str | None:
    """Return how a leaf differs from the expected one, for an error message; None if it matches.

    Two floating dtypes always match, because floating leaves are cast.

    Args:
      actual: the leaf; None if it is missing.
      expected: the expected leaf; None if the leaf should not exist.
    """
    if actual is None:
        return f"is missing; the config expects shape {_shape(expected)}"
    if expected is None:
        return f"of shape {_shape(actual)} is not part of the config's model"
    if _shape(actual) != _shape(expected):
        return f"has shape {_shape(actual)}, but the config expects {_shape(expected)}"
    floating = all(leaf.dtype in FLOATS.values() for leaf in (actual, expected))
    if not floating and actual.dtype != expected.dtype:
        return f"has dtype {actual.dtype}, but the config expects {expected.dtype}"
    return None


def _shape(leaf: Any) -> str:
    return str(tuple(leaf.shape))
