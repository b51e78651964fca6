"""Reading and writing native checkpoints as numpy arrays, without a mesh; see also `native`."""

import contextlib
import os
import sys
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from tqdm import tqdm

from mesh_transformer.checkpoint.atomic_folder import atomic_folder
from mesh_transformer.checkpoint.native import Checkpoints, find
from mesh_transformer.checkpoint.saved_step import SavedStep
from mesh_transformer.checkpoint.state_tree import (
    Path,
    check_match,
    check_same_model,
    declared_leaves,
    differing_leaf,
    in_memory,
    leaves,
    nested,
    optimizer_of,
)
from mesh_transformer.checkpoint.step_folders import damage_error
from mesh_transformer.config import Config
from mesh_transformer.model import transformer
from mesh_transformer.storage.access import is_uri
from mesh_transformer.training.optimizer import Optimizer
from mesh_transformer.util import InputError, is_named


def read(
    path: str | SavedStep,
    *,
    config: Config | None = None,
    dtype: DTypeLike | None = None,
    optimizer: bool = True,
    lazy: bool = False,
) -> tuple[Config, dict[str, Any]]:
    """Return the config and the state of a native checkpoint, in host memory.

    If the config sets `lora_rank`, "params" holds only the adapters.

    Args:
      path: a model folder (its newest step) or a step_N.
      config, dtype, optimizer, lazy: as for `conversion.read`; moments are not cast.

    Raises:
      InputError: if there is no checkpoint, or it is damaged or does not fit the config.
    """
    step = path if isinstance(path, SavedStep) else find(path)
    where = str(step)
    saved = Config.from_dict(step.config, f"{where}: saved config")
    # A function of the user's may have changed since.
    is_own = config is None and not (is_named(saved.norm) or is_named(saved.optimizer))
    config = config or saved
    check_same_model(config, step.config, where)
    declared, moments = transformer.trained(config), None
    has_moments = ("opt_state", "count") in step.leaves
    if optimizer and has_moments and optimizer_of(saved) == optimizer_of(config):
        moments = Optimizer(config, declared).moments()
    expected_leaves = declared_leaves(declared, moments)
    own = {path: leaf for path, leaf in step.leaves.items() if path in expected_leaves}
    if is_own and (difference := differing_leaf(own, expected_leaves)):
        raise damage_error(step.path, f": its {difference}")
    check_match(where, step.leaves, expected_leaves)
    flat: dict[Path, Any] = {}
    for key in expected_leaves:
        leaf = step.open_leaf(key)
        if dtype is not None and key[0] == "params":
            leaf = leaf.astype(np.dtype(dtype), f"checkpoint {where}: leaf {'/'.join(key)}")
        flat[key] = leaf if leaf.ndim else np.asarray(leaf)
    state = nested(flat)
    return config, state if lazy else in_memory(state)


def write(folder: str, state: dict[str, Any], config: Config) -> None:
    """Write a state, as `read` returns it, to `folder`/step_N, where N is the state's step.

    The step appears complete or not at all.  If `folder` is local and does not exist yet, it is
    created only when the step is complete.

    Raises:
      InputError: if the step already exists or storage fails.
    """
    if is_uri(folder) or os.path.isdir(folder):
        _save(folder, state, config)
    else:
        with atomic_folder(folder) as new:
            try:
                _save(new, state, config)
            except InputError as error:
                raise InputError(str(error).replace(new, folder)) from error


def _save(folder: str, state: dict[str, Any], config: Config) -> None:
    """Save a state to a model folder, with a progress bar."""
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
    """Return how many bytes the save of a step has written so far; 0 if `folder` is not local."""
    total = 0
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        if name.partition(".")[0] != f"step_{step}":
            continue
        for root, _, files in os.walk(os.path.join(folder, name)):
            for file in files:
                with contextlib.suppress(OSError):  # renamed in the meantime
                    total += os.path.getsize(os.path.join(root, file))
    return total
