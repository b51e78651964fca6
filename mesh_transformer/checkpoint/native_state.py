"""Native checkpoints from and to numpy arrays, without a mesh; see `checkpoint` for the rest."""

import os
import sys
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from tqdm import tqdm

from mesh_transformer.checkpoint.atomic_folder import whole_folder
from mesh_transformer.checkpoint.host_arrays import in_memory
from mesh_transformer.checkpoint.native import Checkpoints, find
from mesh_transformer.checkpoint.saved_step import SavedStep
from mesh_transformer.checkpoint.state_tree import (
    Path,
    check_match,
    check_same_model,
    expected,
    leaves,
    nested,
)
from mesh_transformer.config import Config
from mesh_transformer.model import gptj
from mesh_transformer.util import InputError


def read(
    path: str | SavedStep,
    *,
    config: Config | None = None,
    dtype: DTypeLike | None = None,
    optimizer: bool = True,
    lazy: bool = False,
) -> tuple[Config, dict[str, Any]]:
    """The state at `path` (a model folder, newest step, or one step_N) and its config.

    With `lora_rank` in the config the parameters are the adapters alone.

    Args:
      config: takes the place of the saved one, whose model it must be.
      dtype: parameters are cast to it; None: they keep their own.  Moments keep theirs.
      optimizer: take Adam's moments where there are any.
      lazy: leaves are `LazyLeaf`s, read (and found to be damaged) when they are asked for.

    Returns:
      The config, and {"params", "step"} and perhaps {"opt_state"}, of numpy arrays.

    Raises:
      InputError: where there is no checkpoint, it is damaged, or it does not fit the config.
    """
    step = path if isinstance(path, SavedStep) else find(path)
    where = str(step)
    if config is None:
        config = Config.from_dict(step.config, f"{where}: saved config")
    check_same_model(config, step.config, where)
    full = optimizer and ("opt_state", "count") in step.leaves
    wanted = expected(gptj.trained(config), optimizer=full)
    check_match(where, step.leaves, wanted)
    flat: dict[Path, Any] = {}
    for key in wanted:
        leaf = step.open_leaf(key)
        if dtype is not None and key[0] == "params":
            leaf = leaf.astype(np.dtype(dtype), f"checkpoint {where}: leaf {'/'.join(key)}")
        flat[key] = leaf if leaf.ndim else np.asarray(leaf)
    state = nested(flat)
    return config, state if lazy else in_memory(state)


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
