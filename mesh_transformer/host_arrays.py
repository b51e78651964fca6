"""How Orbax saves the host's arrays: one after another, those of layers a layer at a time."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint import future as futures

from mesh_transformer.lazy_leaf import LazyLeaf
from mesh_transformer.prefetch import Prefetch

handlers = ocp.type_handlers


class HostArrayHandler(handlers.NumpyHandler):
    """Saves numpy arrays, which are not copied first, and `LazyLeaf`s, which are not held whole.

    In one process, and not into OCDBT, whose buffers hold all that is under way.
    """

    async def serialize(
        self,
        values: Sequence[np.ndarray | LazyLeaf],
        infos: Sequence[Any],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> list[futures.Future]:
        saving = _save(values, infos, args or [ocp.SaveArgs()] * len(values))
        # Runs it in a thread of its own, once the folders are there.
        return [futures.CommitFutureAwaitingContractedSignals(saving, name="host-arrays")]


async def _save(
    values: Sequence[np.ndarray | LazyLeaf], infos: Sequence[Any], args: Sequence[ocp.SaveArgs]
) -> None:
    # The next part is read while one is written.
    with contextlib.closing(Prefetch(_parts(values), 1)) as parts:
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


def _parts(values: Sequence[np.ndarray | LazyLeaf]) -> Iterator[np.ndarray]:
    for value in values:
        for layer in _layers(value):
            yield np.asarray(value if layer is None else value[layer])


def _layers(value: np.ndarray | LazyLeaf) -> Sequence[int | None]:
    """The parts that a leaf is saved in: layers, where each is chunks of its own; None: whole."""
    return range(value.shape[0]) if value.ndim > 2 else (None,)
