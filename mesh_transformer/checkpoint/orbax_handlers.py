"""Orbax handlers, one to save host arrays layer by layer, one to coordinate several processes.

Also a function that suppresses the messages of Orbax's threads about failures.
"""

import contextlib
import dataclasses
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint import future as futures
from orbax.checkpoint import type_handlers as handlers

from mesh_transformer.checkpoint.host_arrays import LazyLeaf
from mesh_transformer.checkpoint.integrity import host_checksum, is_stacked
from mesh_transformer.checkpoint.joint_save import JointSave
from mesh_transformer.checkpoint.step_folders import TEMPORARY
from mesh_transformer.data.prefetch import Prefetch

SAVE_SECONDS = 20 * 60  # time limit of a save


class HostArrayHandler(handlers.NumpyHandler):
    """Orbax handler that saves numpy arrays without copies, and `LazyLeaf`s layer by layer.

    Works only in a single process.  Does not use the OCDBT format, which would buffer everything
    being written.

    Args:
      sums: a dict to which the handler adds {leaf name: checksums} for each leaf that it writes.
    """

    def __init__(self, sums: dict[str, list[int]]):
        super().__init__()
        self._sums = sums

    async def serialize(
        self,
        values: Sequence[np.ndarray | LazyLeaf],
        infos: Sequence[Any],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> list[futures.Future]:
        saving = self._save(values, infos, args or [ocp.SaveArgs()] * len(values))
        # Orbax runs this coroutine in a thread of its own, once the folders exist.
        return [futures.CommitFutureAwaitingContractedSignals(saving, name="host-arrays")]

    async def _save(
        self,
        values: Sequence[np.ndarray | LazyLeaf],
        infos: Sequence[Any],
        args: Sequence[ocp.SaveArgs],
    ) -> None:
        """Write leaves to their tensorstore arrays, one part (see `_layers`) at a time."""
        # While one part is written, the next one is read.
        with contextlib.closing(Prefetch(_parts(values, infos, self._sums), 1)) as parts:
            for value, info, arg in zip(values, infos, args, strict=True):
                await info.await_path_creation()
                spec = handlers.get_json_tspec_write(
                    info,
                    use_ocdbt=False,
                    global_shape=value.shape,
                    local_shape=value.shape,
                    dtype=value.dtype,
                    arg=arg,
                )
                opened = tensorstore.open(spec, create=True, open=True, context=info.ts_context)
                stored = opened.result()
                for layer in _layers(value):
                    target = stored if layer is None else stored[layer]
                    target.write(next(parts), can_reference_source_data_indefinitely=True).result()


def _parts(
    values: Sequence[np.ndarray | LazyLeaf], infos: Sequence[Any], sums: dict[str, list[int]]
) -> Iterator[np.ndarray]:
    """Yield the parts (see `_layers`) of all leaves in order; add their checksums to `sums`."""
    for value, info in zip(values, infos, strict=True):
        leaf_sums = sums[info.name] = []
        stacked = is_stacked(tuple(info.name.split(".")))
        for layer in _layers(value):
            part = np.asarray(value if layer is None else value[layer])
            layers = part if layer is None and stacked else [part]
            first = (layer or 0) * part.size
            for number, layer_values in enumerate(layers):
                leaf_sums.append(host_checksum(layer_values, first + number * layer_values.size))
            yield part
        if not stacked:
            leaf_sums[:] = [sum(leaf_sums) % 2**32]


def _layers(value: np.ndarray | LazyLeaf) -> Sequence[int | None]:
    """Return the indices of the layers to write one by one, or (None,) to write the leaf whole.

    Leaves with more than two axes are written layer by layer.
    """
    return range(value.shape[0]) if value.ndim > 2 else (None,)


class StateHandler(ocp.PyTreeCheckpointHandler):
    """Orbax handler that writes a step only after process 0 has created the step's folders."""

    def __init__(self, joint: JointSave, **options: Any):
        super().__init__(**options)
        self._joint = joint

    async def async_save(self, *args: Any, **kwargs: Any) -> Any:
        self._joint.barrier("folders", SAVE_SECONDS * 1000)
        return await super().async_save(*args, **kwargs)


# Orbax finds the handler by the class of the arguments.
@ocp.args.register_with_handler(StateHandler, for_save=True)
@dataclasses.dataclass
class StateSave(ocp.args.PyTreeSave):
    pass


# Unused, because `SavedStep` restores without this handler, but Orbax requires that every handler
# has a class of restore arguments.
@ocp.args.register_with_handler(StateHandler, for_restore=True)
@dataclasses.dataclass
class StateRestore(ocp.args.PyTreeRestore):
    pass


# The beginnings of the messages of tensorstore and Orbax about operations that end after their save
# or restore has failed.
_LATE = ("Event loop is closed", "Encountered error while reading array index")


def _should_log(record: logging.LogRecord) -> bool:
    """Return whether to show a log record of absl or asyncio.

    Returns False for failures that are also raised as exceptions, and for one of Orbax's warnings
    that is expected when host arrays are saved.
    """
    if record.name == "asyncio" and "was never retrieved" in record.getMessage():
        return False  # a read or write that failed after another one had
    if record.levelno < logging.ERROR:
        return "Skipping merge of OCDBT" not in record.getMessage()  # expected for host arrays
    return "/orbax/checkpoint/" not in record.pathname and TEMPORARY not in record.getMessage()


def silence_failure_messages() -> None:
    """Suppress the messages that Orbax and asyncio print when a save or restore fails.

    The messages are not needed, because the failure is also raised as an InputError of one line.
    Without this function, Orbax's threads would log each error with a traceback, asyncio would log
    all errors after the first, and `sys.unraisablehook` would print errors of operations that end
    later.

    The messages are suppressed until the process ends, because some of them appear only when the
    failed save is garbage-collected.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_should_log)
    warnings.filterwarnings("ignore", r"coroutine '.*' was never awaited", RuntimeWarning)
    previous = sys.unraisablehook
    if getattr(previous, "__name__", "") == "_without_late_failures":
        return

    def _without_late_failures(unraisable: Any) -> None:
        if not str(unraisable.exc_value).startswith(_LATE):
            previous(unraisable)

    sys.unraisablehook = _without_late_failures
