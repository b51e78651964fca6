"""What Orbax calls to save a state: arrays of the host layer by layer, of a mesh by all hosts."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint import future as futures

from mesh_transformer.checkpoint.host_arrays import LazyLeaf
from mesh_transformer.checkpoint.integrity import host_checksum, is_stacked
from mesh_transformer.checkpoint.joint_save import JointSave
from mesh_transformer.data.prefetch import Prefetch

handlers = ocp.type_handlers

SAVE_SECONDS = 20 * 60  # for all of a save


class HostArrayHandler(handlers.NumpyHandler):
    """Saves numpy arrays, which are not copied first, and `LazyLeaf`s, which are not held whole.

    In one process, and not into OCDBT, whose buffers hold all that is under way.

    Args:
      sums: takes the checksums of each leaf's layers by its name, as it is written.
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
        saving = _save(values, infos, args or [ocp.SaveArgs()] * len(values), self._sums)
        # Runs it in a thread of its own, once the folders are there.
        return [futures.CommitFutureAwaitingContractedSignals(saving, name="host-arrays")]


async def _save(
    values: Sequence[np.ndarray | LazyLeaf],
    infos: Sequence[Any],
    args: Sequence[ocp.SaveArgs],
    sums: dict[str, list[int]],
) -> None:
    # The next part is read while one is written.
    with contextlib.closing(Prefetch(_parts(values, infos, sums), 1)) as parts:
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
    for value, info in zip(values, infos, strict=True):
        own = sums[info.name] = []
        stacked = is_stacked(tuple(info.name.split(".")))
        for layer in _layers(value):
            part = np.asarray(value if layer is None else value[layer])
            layers = part if layer is None and stacked else [part]
            first = (layer or 0) * part.size
            for number, values_ in enumerate(layers):
                own.append(host_checksum(values_, first + number * values_.size))
            yield part
        if not stacked:
            own[:] = [sum(own) % 2**32]


def _layers(value: np.ndarray | LazyLeaf) -> Sequence[int | None]:
    """The parts that a leaf is saved in: layers, where each is chunks of its own; None: whole."""
    return range(value.shape[0]) if value.ndim > 2 else (None,)


class StateHandler(ocp.PyTreeCheckpointHandler):
    """Writes arrays once the first process has made the folders for them."""

    def __init__(self, joint: JointSave, **options: Any):
        super().__init__(**options)
        self._joint = joint

    async def async_save(self, *args: Any, **kwargs: Any) -> Any:
        self._joint.barrier("folders", SAVE_SECONDS * 1000)
        return await super().async_save(*args, **kwargs)


# Orbax finds a handler by the arguments' class.
@ocp.args.register_with_handler(StateHandler, for_save=True)
@dataclasses.dataclass
class StateSave(ocp.args.PyTreeSave):
    pass


# Nothing is restored by it (see `SavedStep`), but Orbax does not know a handler without one.
@ocp.args.register_with_handler(StateHandler, for_restore=True)
@dataclasses.dataclass
class StateRestore(ocp.args.PyTreeRestore):
    pass
