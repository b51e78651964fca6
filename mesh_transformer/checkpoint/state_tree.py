"""The leaves of a state by their path, which a model has, and whether those found are these."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mesh_transformer.checkpoint.host_arrays import FLOATS
from mesh_transformer.config import Config
from mesh_transformer.mesh.declaration import map_declared
from mesh_transformer.util import InputError


def check_same_model(config: Config, saved: dict[str, Any], where: str) -> None:
    """Raises InputError where weights saved under another config would compute otherwise.

    Their shapes may still agree: heads, norm or rotary dims leave no trace in them.
    """
    there = Config.from_dict(saved, f"{where}: saved config")
    keys = ["block", "norm", "pe", "n_heads", "head_size", "pe_rotary_dims"]
    if there.lora_rank and config.lora_rank:  # else one is the other's base, or merged
        keys += ["lora_rank", "lora_alpha", "lora_targets"]
    for key in keys:
        if getattr(there, key) != getattr(config, key):
            raise InputError(
                f"{where}: its model has {key} {getattr(there, key)!r}, the config "
                f"{getattr(config, key)!r}; use the config that it was trained with"
            )
    # At its default a window is all of seq, which may change from run to run.
    chosen = there.window != there.seq or config.window != config.seq
    if chosen and there.window != config.window:
        raise InputError(
            f"{where}: its model has attention_window {there.window}, the config "
            f"{config.window}; use the config that it was trained with"
        )


def check_same_run(config: Config, saved: dict[str, Any], where: str) -> None:
    """Raises InputError where a run cannot go on from the state of one under a saved config."""
    check_same_model(config, saved, where)
    there = Config.from_dict(saved, f"{where}: saved config")
    if bool(there.lora_rank) != bool(config.lora_rank):
        kinds = ("all of a model", "adapters")
        raise InputError(
            f"{where}: is of a run that trains {kinds[there.lora_rank > 0]} (lora_rank "
            f"{there.lora_rank}), the config has lora_rank {config.lora_rank}; choose another "
            "model folder, and begin from this one with --tune-model-path"
        )


Path = tuple[str, ...]  # a leaf's keys, outermost first


def leaves(tree: Any) -> dict[Path, Any]:
    """Path to leaf of nested dicts; the leaves have a shape and a dtype."""
    flat, _ = jax.tree.flatten_with_path(tree)
    return {tuple(key.key for key in path): leaf for path, leaf in flat}


def map_leaves(function: Callable[[Path, Any], Any], tree: Any) -> Any:
    """Nested dicts with `function(path, leaf)` in place of each leaf."""

    def at(path: tuple[Any, ...], leaf: Any) -> Any:
        return function(tuple(key.key for key in path), leaf)

    return jax.tree.map_with_path(at, tree)


def nested(flat: dict[Path, Any]) -> dict[str, Any]:
    """Nested dicts of the leaves at these paths."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        at = tree
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = leaf
    return tree


def cast_groups(saved: dict[Path, Any], wanted: dict[Path, Any], most: int) -> list[list[Path]]:
    """The leaves to restore together: those that keep their dtype, then the others by size.

    A group of leaves to be cast holds at most `most` bytes, or a single leaf; the largest leaves
    come first.
    """
    sizes = {
        path: math.prod(saved[path].shape) * saved[path].dtype.itemsize
        for path in wanted
        if saved[path].dtype != wanted[path].dtype
    }
    groups = [[path for path in wanted if path not in sizes]]
    room = 0
    for path in sorted(sizes, key=lambda path: sizes[path], reverse=True):
        if sizes[path] > room:
            groups.append([])
            room = most
        groups[-1].append(path)
        room -= sizes[path]
    return [group for group in groups if group]


def placed(host: Any, template: Any) -> Any:
    """A host tree's leaves in the template's layouts and dtypes; the host tree is emptied.

    Of its `LazyLeaf`s one at a time is in memory.
    """
    if isinstance(template, dict):
        return {key: placed(host.pop(key), leaf) for key, leaf in template.items()}
    values = np.asarray(host).astype(template.dtype, copy=False)
    return jax.make_array_from_callback(template.shape, template.sharding, values.__getitem__)


def expected(declared: Any, *, optimizer: bool) -> dict[Path, Any]:
    """Every leaf that a state with these declared parameters has, with its shape and a dtype."""
    params = map_declared(lambda d: np.broadcast_to(np.float32(0), d.shape), declared)
    count = np.zeros((), np.int32)
    state: dict[str, Any] = {"params": params, "step": count}
    if optimizer:
        state["opt_state"] = {"count": count, "mu": params, "nu": params}
    return leaves(state)


def check_names(state: Any) -> None:
    """Orbax stores a leaf under its keys joined by dots: two leaves may not share that."""
    names = [".".join(path) for path in leaves(state)]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two leaves of the state are both called {twice}")


def check_match(path: object, saved: dict[Path, Any], wanted: dict[Path, Any]) -> None:
    """InputError naming the first leaf in which the checkpoint at `path` and the wanted differ."""
    tops = {key[0] for key in wanted}
    if missing := tops - {key[0] for key in saved}:
        raise InputError(
            f"checkpoint {path}: has no {min(missing)}, weights alone: a run can begin with it "
            "(--tune-model-path, another model folder), but not go on from it"
        )
    _check_leaves(f"checkpoint {path}", {k: v for k, v in saved.items() if k[0] in tops}, wanted)


def check_state(state: dict[str, Any], declared: Any) -> None:
    """InputError naming the first leaf of a state, full or weights, that is not as declared."""
    wanted = expected(declared, optimizer=True)
    wanted = {key: leaf for key, leaf in wanted.items() if key[0] in state}
    _check_leaves("the state", leaves(state), wanted)


def _check_leaves(where: str, found: dict[Path, Any], wanted: dict[Path, Any]) -> None:
    """InputError naming the first leaf in which those found and the wanted differ."""
    for key in sorted(wanted.keys() | found.keys()):
        if difference := _difference(found.get(key), wanted.get(key)):
            raise InputError(
                f"{where}: leaf {'/'.join(key)} {difference}: "
                "use the config that it was trained with"
            )


def _difference(found: Any, expected: Any) -> str | None:
    """What keeps the leaf found from being taken as the one expected; floats become one another."""
    if found is None:
        return f"is missing; the config expects shape {_shape(expected)}"
    if expected is None:
        return f"of shape {_shape(found)} has no place in this config"
    if _shape(found) != _shape(expected):
        return f"has shape {_shape(found)}, the config expects {_shape(expected)}"
    floating = all(leaf.dtype in FLOATS.values() for leaf in (found, expected))
    if not floating and found.dtype != expected.dtype:
        return f"has dtype {found.dtype}, the config expects {expected.dtype}"
    return None


def _shape(leaf: Any) -> str:
    return str(tuple(leaf.shape))
