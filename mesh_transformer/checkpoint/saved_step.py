"""Reading a committed step of a native checkpoint, `<folder>/step_<N>/`."""

import asyncio
import functools
import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath

from mesh_transformer.checkpoint import integrity
from mesh_transformer.checkpoint.host_arrays import LazyLeaf
from mesh_transformer.checkpoint.integrity import Integrity, host_checksum, is_stacked
from mesh_transformer.checkpoint.state_tree import (
    Convert,
    Path,
    cast_groups,
    check_match,
    leaves,
    map_leaves,
)
from mesh_transformer.checkpoint.step_folders import damage_error, step_number
from mesh_transformer.storage.access import (
    causes,
    convert_failures,
    is_failure,
    reason,
    replace_errors,
    storage_failed,
)
from mesh_transformer.util import InputError

# Maximum total bytes of the leaves that are restored and cast at once.  A leaf that is larger than
# this is cast alone.
_CAST_BYTES = 1 << 30


class SavedStep:
    """A committed step of a native checkpoint.

    Each of its metadata files is read on first use, and only once.

    Attributes:
      path: the step's folder, a local path or a URI.
      number: the N of step_N.
    """

    def __init__(self, path: epath.Path):
        number = step_number(path.name)
        assert number is not None
        self.path, self.number = path, number

    def __str__(self) -> str:
        return os.fspath(self.path)

    @functools.cached_property
    def record(self) -> Integrity | None:
        """The step's saved checksums; None if an earlier version of this library saved none."""
        with convert_failures(lambda error: self._unreadable(error, None)):
            return integrity.read(self.path)

    @functools.cached_property
    def aux(self) -> dict[str, Any]:
        """The JSON dict saved with the arrays; reading it does not initialise JAX's devices."""
        with convert_failures(self._damaged):
            content = (self.path / "aux" / "metadata").read_bytes()
            integrity.check_file(self.path, self.record, "aux/metadata", content)
            return json.loads(content)

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The config that the step was saved with, as a dict.

        Raises:
          InputError: if `aux` has no config.
        """
        values = self.aux.get("config") if isinstance(self.aux, dict) else None
        if not isinstance(values, dict):
            raise damage_error(
                self.path,
                f": its file aux/metadata holds {str(self.aux)[:80]}, expected a JSON object with "
                "an object `config`",
            )
        return values

    @functools.cached_property
    def leaves(self) -> dict[Path, Any]:
        """Orbax's metadata (shape, dtype and so on) of each leaf, by path; no array is read."""
        with replace_errors(self._damaged):  # Orbax has no exception class for damaged metadata
            return leaves(ocp.PyTreeCheckpointHandler().metadata(self.path / "state").tree)

    def open_leaf(self, path: Path) -> LazyLeaf:
        """Return one leaf as a `LazyLeaf`.

        If the step has checksums, each read verifies them: per layer, or for the whole leaf if it
        has no layers.

        Raises:
          InputError: if the leaf cannot be opened.  Reading the `LazyLeaf` raises InputError if its
            data are damaged.
        """
        info = self._info(path)
        spec = ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=self._context[0])

        def attempt(act: Callable[[], Any]) -> Any:
            with convert_failures(self._damaged):
                return act().result()

        def read(layer: int | None) -> np.ndarray:
            values = attempt((stored if layer is None else stored[layer]).read)
            if self.record is not None:
                checksum = host_checksum(values, (layer or 0) * values.size)
                integrity.check_sums(self.path, self.record, path, layer or 0, [checksum])
            return values

        stored = attempt(lambda: tensorstore.open(spec, open=True, context=self._context[1]))
        return LazyLeaf(stored.shape, stored.dtype.numpy_dtype, read, layers=is_stacked(path))

    def restore(
        self, template: Any, *, only: Sequence[str] | None = None, convert: Convert | None = None
    ) -> Any:
        """Restore the saved tree, and read each leaf directly into its sharding.

        Args:
          template: nested dicts of jax.ShapeDtypeStruct with shardings, on any mesh.  The
            template may omit top-level keys of the saved tree; under each key that it has, its
            structure must match the saved tree.  Floating leaves are cast to the template's dtypes.
          only: the template's top-level keys to read (default: all).
          convert: a function of each leaf and its path, whose results are returned.

        Raises:
          InputError: if a leaf is missing or unexpected, or differs from the template in shape or
            integer dtype; this is checked before any array is read.  Also if the values that are
            read do not match the checksums of the step.
        """
        template = template if only is None else {key: template[key] for key in only}
        expected = leaves(template)
        check_match(self.path, self.leaves, expected)
        restored: dict[Path, Any] = {}

        def converted(path: Path, leaf: jax.Array) -> Any:
            dtype = expected[path].dtype
            leaf = leaf if leaf.dtype == dtype else leaf.astype(dtype)
            return leaf if convert is None else convert(path, leaf)

        every = convert is not None
        for group in cast_groups(self.leaves, expected, _CAST_BYTES, every=every):
            # Checksums are computed in the saved dtypes, so the leaves are cast after the check.
            read = self._read({path: expected[path] for path in group})
            integrity.check_leaves(self.path, self.record, read)
            for path in group:
                restored[path] = converted(path, read.pop(path))
        return map_leaves(lambda path, _: restored[path], template)

    def _read(self, expected: dict[Path, Any]) -> dict[Path, jax.Array]:
        """Read leaves in their saved dtypes.

        Args:
          expected: {leaf path: template}; only the templates' shapes and shardings are used.
        """
        arguments = [
            ocp.ArrayRestoreArgs(
                sharding=leaf.sharding,
                global_shape=leaf.shape,
                dtype=np.dtype(self.leaves[path].dtype),
            )
            for path, leaf in expected.items()
        ]
        infos = [self._info(path) for path in expected]
        # Only typed PRNG keys require the other metadata that Orbax stores about arrays.
        handler = ocp.type_handlers.ArrayHandler(array_metadata_store=None)

        async def deserialize() -> Any:
            # Only the first failure is raised; keep asyncio from logging those of the other reads.
            asyncio.get_running_loop().set_exception_handler(lambda *_: None)
            return await handler.deserialize(infos, arguments)

        # In a thread, because a notebook's main thread already runs an event loop.  Orbax has no
        # exception class for a damaged array.
        with replace_errors(self._damaged), ThreadPoolExecutor(1) as executor:
            arrays = executor.submit(lambda: asyncio.run(deserialize())).result()
        return dict(zip(expected, arrays, strict=True))

    def _info(self, path: Path) -> ocp.type_handlers.ParamInfo:
        """Return Orbax's description of where a leaf is stored."""
        name, folder = ".".join(path), self.path / "state"
        ocdbt, context = self._context
        return ocp.type_handlers.ParamInfo(
            name=name,
            path=folder / name,
            parent_dir=folder,
            is_ocdbt_checkpoint=ocdbt,
            ts_context=context,
        )

    @functools.cached_property
    def _context(self) -> tuple[bool, tensorstore.Context]:
        """Whether the arrays are in OCDBT format, and the tensorstore context to read them with."""
        with convert_failures(self._damaged):
            ocdbt = ocp.type_handlers.is_ocdbt_checkpoint(self.path / "state")
        return ocdbt, ocp.type_handlers.get_ts_context(use_ocdbt=ocdbt)

    def _damaged(self, error: Exception) -> Exception:
        """Return the error to raise for a failed read, naming the damaged file if it is known."""
        return self._unreadable(error, self.record)

    def _unreadable(self, error: Exception, record: Integrity | None) -> Exception:
        """Return the error to raise for a failed read of this step.

        This is an InputError if the storage could not be accessed, or a DamagedError if the step's
        files are damaged.  Three kinds of errors are returned unchanged: an InputError, an error of
        JAX's devices and, if no damaged file is known, an error that indicates a bug, such as a
        TypeError.

        Args:
          record: the integrity record; None if there is none or it could not be read.
        """
        *_, cause = causes(error)
        if isinstance(error, InputError) or isinstance(cause, jax.errors.JaxRuntimeError):
            return error
        if not storage_failed(error):
            try:
                if (name := integrity.damaged_file(self.path, record)) is not None:
                    return integrity.damage_error(self.path, f"its file {name}")
            except Exception as later:  # the search for the damaged file
                if not storage_failed(later):
                    raise
                error = cause = later
        if not is_failure(cause):
            return error
        # tensorstore's message names the file last, in quotes.
        quoted = re.findall(rf'"{re.escape(str(self))}/([^"\\]*[^"\\/])"', str(error))
        where = f" (its file {quoted[-1]})" if quoted else ""
        problem = f" cannot be read{where}: {reason(error)}"
        if storage_failed(error):
            return InputError(f"checkpoint {self}{problem}; check the permissions and the network")
        return damage_error(self.path, problem)
