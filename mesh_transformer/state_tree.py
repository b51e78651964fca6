"""The leaves of a state by their path, and whether those of a checkpoint are the ones wanted."""

from typing import Any

import jax
import jax.numpy as jnp

from mesh_transformer.util import InputError

Path = tuple[str, ...]  # a leaf's keys, outermost first


def leaves(tree: Any) -> dict[Path, Any]:
    """Path to leaf of nested dicts; the leaves have a shape and a dtype."""
    flat, _ = jax.tree.flatten_with_path(tree)
    return {tuple(key.key for key in path): leaf for path, leaf in flat}


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
    for key in sorted(wanted.keys() | {key for key in saved if key[0] in tops}):
        if difference := _difference(saved.get(key), wanted.get(key)):
            raise InputError(
                f"checkpoint {path}: leaf {'/'.join(key)} {difference}: "
                "use the config that it was trained with"
            )


def _difference(found: Any, expected: Any) -> str | None:
    """What keeps the leaf found in the checkpoint from being read as the one expected."""
    if found is None:
        return f"is missing; the config expects shape {_shape(expected)}"
    if expected is None:
        return f"of shape {_shape(found)} has no place in this config"
    if _shape(found) != _shape(expected):
        return f"has shape {_shape(found)}, the config expects {_shape(expected)}"
    floating = all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in (found, expected))
    if not floating and found.dtype != expected.dtype:
        return f"has dtype {found.dtype}, the config expects {expected.dtype}"
    return None


def _shape(leaf: Any) -> str:
    return str(tuple(leaf.shape))
