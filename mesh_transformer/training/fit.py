"""`fit`: trains a network on data in memory, with one call."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from mesh_transformer.config import Config
from mesh_transformer.data.loader import in_memory, open_train_set
from mesh_transformer.network import TrainableNetwork, TrainSet
from mesh_transformer.storage.access import AnyPath
from mesh_transformer.training import loop
from mesh_transformer.training.hooks import call_hook
from mesh_transformer.training.objectives import Objective, head_of
from mesh_transformer.util import InputError, brief, check_number

Hook = Callable[[dict[str, Any]], None]  # called with the metrics row of each step


def fit(
    network: TrainableNetwork,
    data: Any,
    folder: AnyPath | None = None,
    *,
    steps: int | None = None,
    val: Any = None,
    hooks: Sequence[Hook] = (),
    objective: Objective | None = None,
) -> list[dict[str, Any]]:
    """Train a network on data in memory or on a record set, and return its metrics.

    Training starts from the network's own weights, shows a progress bar, and ends at the step
    `steps` or at Ctrl-C.  The keys of the network's config, such as `lr`, apply, except
    `train_set`, `val_set` and `model_dir`.

    Args:
      data: token ids in one of these forms: a 1-D array, such as a `numpy.memmap` of a nanoGPT
        `.bin` file; a torch dataset, a list or an array of sequences; any other iterable of
        sequences; or the path of a record set, or a function as in the config key `train_set`.  See
        `InMemoryTrainSet` for sequences.  If the config's objective is grpo, prompts: a list of
        dicts with `prompt` or `messages`, or a path.
      folder: the model folder for checkpoints and metrics.  If it has a checkpoint, training
        resumes from it, with the batches that follow.  None writes nothing.
      steps: the global step to train to (default: the config's `total_steps`).
      val: validation data in the same forms, but no iterator; read in their order every `val_every`
        steps.  The loss is the metric `val/loss_val`.  For `keep_best` and `early_stop`, set
        `val_set` to {"val": "in memory"} in the config.
      hooks: functions that are called with the metrics row of each step, such as `print`, before it
        is written; they may add to it.
      objective: a function to minimise in place of the config's `objective`, for data in groups of
        texts; see `TrainableNetwork.set_objective`.

    Returns:
      The metrics rows of the steps of this call, such as {"step": 1, "train/loss": 4.2, ...}.  If
      the data are an iterable, training may end earlier, with the data.

    Raises:
      InputError: if an argument cannot be used, or the config lacks `total_steps`.
      StoppedError: see `loop.train`.
    """
    config = network.config
    data, val = (os.fspath(x) if isinstance(x, os.PathLike) else x for x in (data, val))
    if config.total_steps is None:
        raise InputError(
            "config: total_steps is not set, on which the learning rate depends; set it"
        )
    if steps is not None:
        check_number("steps", steps, 1)
    if not isinstance(hooks, Sequence) or not all(map(callable, hooks)):
        raise InputError(f"hooks is {brief(repr(hooks))}, expected a list of functions")
    if config.reference != "base" and (objective or config.objective):  # it would be loaded
        raise InputError(
            f"config: reference is {config.reference!r}, but fit compares with the network's own "
            "weights; set reference to base"
        )
    if getattr(network, "state", None) is None:
        raise InputError(
            "the network has no weights to train; call its init or load, and not only_generate"
        )
    watched = config.watched_set
    if watched is not None and (watched != "val" or val is None):
        raise InputError(
            f"keep_best and early_stop need the losses of {watched!r}, but fit has those of val "
            'alone; give val, and set val_set to {"val": "in memory"} in the config'
        )
    rows: list[dict[str, Any]] = []

    def on_row(row: dict[str, Any]) -> None:
        rows.append(row)
        for hook in hooks:
            call_hook(hook, row)

    with contextlib.ExitStack() as stack:
        if objective is not None:
            network.set_objective(objective)
            stack.callback(network.set_objective, None)
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="unsaved-model-"))
            fitted: Any = _Unsaved(network, data)
        else:
            fitted = _Fitted(network, data)
        val_sets = {} if val is None else {"val": val}
        loop.train(
            fitted,
            folder,
            max_steps=steps,
            prompts=data,
            val_sets=val_sets,
            on_row=on_row,
            temporary=isinstance(fitted, _Unsaved),
        )
    return rows


class _Fitted:
    """A network that is trained on given data, from the weights that it has."""

    def __init__(self, network: TrainableNetwork, data: Any):
        self._network, self._data = network, data
        # Training requires this key, and would load the weights that the other one names.
        changes: dict[str, Any] = {"train_set": _name(data), "tune_model_path": None}
        self.config: Config = network.config.replace(**changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def init(self) -> None:
        """Do nothing; the network has weights."""

    def restore(self, folder: str, base: str | None = None) -> dict[str, Any] | None:
        aux = self._network.restore(folder, base)
        if aux is None or isinstance(self._data, str):
            return aux
        return {"loader": None} | aux  # data in memory need no position, only the step's number

    def open_train_set(self) -> TrainSet:
        config, rows = self.config, self._network.batch_size
        if isinstance(self._data, str):
            own = self._network.objective
            head = None if own is None else head_of(config, own)
            return open_train_set(config, rows, reference=head and head.needs_reference)
        return in_memory(config, self._data, rows)


class _Unsaved(_Fitted):
    """A network that is trained on given data, and never saved."""

    save_failed = False

    def claim(self, folder: str, *, room: bool = False) -> None:
        """Do nothing."""

    def restore(self, folder: str, base: str | None = None) -> None:
        """Do nothing; there is no checkpoint."""

    def save(self, folder: str, aux: dict[str, Any] | None = None) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing; a folder that the network has claimed stays claimed."""


def _name(data: Any) -> str:
    return data if isinstance(data, str) else "data in memory"
