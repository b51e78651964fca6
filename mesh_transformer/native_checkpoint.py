"""Native checkpoints from and to numpy arrays, without a mesh; see `checkpoint` for the rest."""

import math
import os
import sys
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from tqdm import tqdm

from mesh_transformer import model
from mesh_transformer.casts import cast
from mesh_transformer.checkpoint import Checkpoints, find
from mesh_transformer.config import Config
from mesh_transformer.state_tree import Path, check_match, expected, leaves
from mesh_transformer.util import InputError
from mesh_transformer.whole_folder import whole_folder


def read(
    path: str,
    *,
    config: Config | None = None,
    dtype: DTypeLike | None = None,
    optimizer: bool = True,
) -> tuple[Config, dict[str, Any]]:
    """The state at `path` (a model folder, newest step, or one step_N) and its config.

    Args:
      config: takes the place of the saved one, whose model it must be.
      dtype: parameters are cast to it; None: they keep their own.  Moments keep theirs.
      optimizer: take Adam's moments where there are any.

    Returns:
      The config, and {"params", "step"} and perhaps {"opt_state"}, of numpy arrays.

    Raises:
      InputError: where there is no checkpoint, it is damaged, or it does not fit the config.
    """
    folder, step = find(path)
    where = f"{folder}/step_{step}"
    with Checkpoints(folder, read_only=True) as checkpoints:
        values = saved_config(checkpoints.aux(step), where)
        if config is None:
            config = Config.from_dict(values, f"{where}: saved config")
        config.check_same_model(values, where)
        saved = checkpoints.leaves(step)
        full = optimizer and ("opt_state", "count") in saved
        wanted = expected(model.declarations(config), optimizer=full)
        check_match(where, saved, wanted)
        state: dict[str, Any] = {}
        total = sum(math.prod(leaf.shape) for leaf in wanted.values())
        unit = " numbers"
        with tqdm(total=total, unit=unit, unit_scale=True, desc="reading", disable=None) as bar:
            for key, leaf in wanted.items():
                own = np.dtype(saved[key].dtype)
                target = own if dtype is None or key[0] != "params" else np.dtype(dtype)
                _put(state, key, _read_leaf(checkpoints, step, key, own, target))
                bar.update(math.prod(leaf.shape))
    return config, state


def saved_config(aux: Any, where: str) -> dict[str, Any]:
    """The config's values in the `aux` of the step at `where`; InputError where it has none."""
    values = aux.get("config") if isinstance(aux, dict) else None
    if not isinstance(values, dict):
        raise InputError(
            f"{where}: its aux is {str(aux)[:80]}, expected a mapping whose `config` is one too; "
            "restore another step or copy this one anew"
        )
    return values


def write(folder: str, state: dict[str, Any], config: Config) -> None:
    """Writes a state as `read` returns it to `folder`/step_N, which appears whole or not at all.

    Raises InputError where the step is there already, and for what the storage refuses.
    """
    if "://" in folder or os.path.isdir(folder):
        _save(folder, state, config)
    else:
        with whole_folder(folder) as new:
            try:
                _save(new, state, config)
            except InputError as error:
                raise InputError(str(error).replace(new, folder)) from error


def _save(folder: str, state: dict[str, Any], config: Config) -> None:
    step = int(state["step"])
    total = sum(leaf.nbytes for leaf in leaves(state).values())
    with (
        Checkpoints(folder, keep_n=sys.maxsize, host=True) as checkpoints,
        tqdm(total=total, unit="B", unit_scale=True, desc="writing", disable=None) as bar,
    ):
        checkpoints.save(step, state, {"config": config.as_dict()})
        while checkpoints.is_saving(0.2):
            bar.update(min(_bytes_in(folder, step), total) - bar.n)
        bar.update(total - bar.n)


def _read_leaf(
    checkpoints: Checkpoints, step: int, key: Path, own: np.dtype, dtype: np.dtype
) -> np.ndarray:
    """One leaf, saved in its `own` dtype, in `dtype`; InputError where that is too small for it.

    Orbax casts chunk by chunk, so that a narrow leaf needs no wide one beside it, but makes large
    numbers infinite.  Only where there are infinities the leaf is read again, to tell whether they
    were saved.
    """
    value = checkpoints.read_leaf(step, key, dtype)
    if dtype == own or not any(np.isinf(row).any() for row in np.atleast_1d(value)):
        return value
    del value
    where = f"checkpoint {checkpoints.folder}/step_{step}: leaf {'/'.join(key)}"
    return cast(checkpoints.read_leaf(step, key, own), dtype, where)


def _put(tree: dict[str, Any], path: Path, value: np.ndarray) -> None:
    *outer, last = path
    for key in outer:
        tree = tree.setdefault(key, {})
    tree[last] = value


def _bytes_in(folder: str, step: int) -> int:
    """What has been written of a save under way; 0 where that cannot be seen."""
    found = 0
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        if name.partition(".")[0] != f"step_{step}":
            continue
        for where, _, files in os.walk(os.path.join(folder, name)):
            for file in files:
                try:
                    found += os.path.getsize(os.path.join(where, file))
                except OSError:  # renamed meanwhile
                    continue
    return found
