"""Integrity of checkpoint steps: checksums of the leaves, digests of the JSON files.

    step_<N>/checksums.json   {"leaves": {"params.proj.w": [uint32 per layer]},
                               "files": {"aux/metadata": SHA-256},
                               "digest": SHA-256 of the other two}

checksums.json is written before the step is committed.  Steps saved by earlier versions of this
library do not have this file.

The checksum of an array is the same on every mesh, and in numpy.  The bits of each array entry are
hashed together with the entry's index, and the hashes are added modulo 2^32.  The order of the
additions, and therefore the sharding, does not matter.  The hash of an entry is a bijection of its
bits, so a change to a single entry always changes the checksum.
"""

import functools
import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import DTypeLike

from mesh_transformer.checkpoint import step_folders
from mesh_transformer.mesh.host_memory import is_in_host, on_device
from mesh_transformer.util import DamagedError

_INDEX = 0x9E3779B1
_ROUNDS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))  # (shift, factor) of MurmurHash3's last steps
_CHUNK = 1 << 16  # entries that numpy hashes at once, few enough for the processor's cache
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}  # bytes per entry -> integer type


def checksum(values: Array, *, layers: bool = False, first: Array | int = 0) -> Array:
    """Return the checksum of an array, or with `layers`, one checksum per layer.

    The result is uint32, of shape [] or [L]; the L layers are stacked along the array's first axis.
    Entries are indexed from the start of the whole array, so the checksums of all layers add up to
    the array's checksum, modulo 2^32.

    Args:
      first: the index of the first entry, if `values` are a part of an array.
    """
    if values.dtype in (jnp.bool, jnp.int4):
        values = values.astype(jnp.int8)
    unsigned = _UNSIGNED[values.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(values, unsigned).astype(jnp.uint32)
    index = jnp.zeros(values.shape, jnp.uint32)
    for axis, size in enumerate(values.shape):
        index = index * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, values.shape, axis)
    index += jnp.asarray(first, jnp.uint32)
    mixed = bits ^ (index * np.uint32(_INDEX))
    for shift, factor in _ROUNDS:
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    mixed ^= mixed >> np.uint32(16)
    return jnp.sum(mixed, axis=tuple(range(layers, values.ndim)), dtype=jnp.uint32)


def host_checksum(values: np.ndarray, first: int = 0, dtype: DTypeLike | None = None) -> int:
    """Return the checksum of a contiguous part of an array, computed in numpy.

    The checksums of all parts of an array add up to the array's `checksum`, modulo 2^32.

    Args:
      first: the index of the part's first entry in the whole array after flattening.
      dtype: the dtype to cast the entries to before hashing (default: their own).
    """
    flat, total = values.reshape(-1), 0
    offsets = np.arange(_CHUNK, dtype=np.uint32) * np.uint32(_INDEX)
    mixed, shifted = np.empty(_CHUNK, np.uint32), np.empty(_CHUNK, np.uint32)
    for begin in range(0, flat.size, _CHUNK):
        part = np.ascontiguousarray(flat[begin : begin + _CHUNK])
        part = part if dtype is None else part.astype(dtype)
        mix, scratch = mixed[: part.size], shifted[: part.size]
        np.add(offsets[: part.size], np.uint32((first + begin) * _INDEX % 2**32), out=mix)
        mix ^= part.view(f"u{part.itemsize}")
        for shift, factor in _ROUNDS:
            np.right_shift(mix, np.uint32(shift), out=scratch)
            mix ^= scratch
            mix *= np.uint32(factor)
        np.right_shift(mix, np.uint32(16), out=scratch)
        mix ^= scratch
        total += int(mix.sum(dtype=np.uint64))
    return total % 2**32


def is_stacked(path: tuple[str, ...]) -> bool:
    """Return whether a state's leaf at this path is stacked over layers along its first axis."""
    return "layers" in path


def tree_checksums(leaves: dict[tuple[str, ...], Array]) -> dict[tuple[str, ...], list[int]]:
    """Return each leaf's checksums: one per layer, or a single one if the leaf has no layers.

    This function blocks until the result is available.  If the leaves are on a mesh of several
    processes, every process must call this function, and each gets the checksums of all leaves.
    """
    meshes = {getattr(leaf.sharding, "mesh", None) for leaf in leaves.values()}
    layout = None
    if len(meshes) == 1 and (mesh := meshes.pop()) is not None:
        layout = NamedSharding(mesh, P())
    offloaded = frozenset(path for path, leaf in leaves.items() if is_in_host(leaf))
    # One program for all leaves: on CPU devices, XLA aborts if many small programs with collectives
    # run at once.
    results = _compiled(layout, offloaded)(leaves)
    return {path: np.asarray(sums).tolist() for path, sums in results.items()}


@functools.cache
def _compiled(layout: NamedSharding | None, offloaded: frozenset[tuple[str, ...]]) -> Any:
    """Return the jitted computation of `tree_checksums`.

    Args:
      offloaded: the paths of the leaves in host memory.
    """

    def one(path: tuple[str, ...], leaf: Array) -> Array:
        stacked = is_stacked(path)
        if path not in offloaded:
            return checksum(leaf, layers=stacked)
        if not stacked:
            return checksum(on_device(leaf))
        size = np.uint32(math.prod(leaf.shape[1:]) % 2**32)
        numbers = jnp.arange(len(leaf), dtype=jnp.uint32)
        return jax.lax.map(lambda x: checksum(on_device(x[1]), first=x[0] * size), (numbers, leaf))

    def sums(leaves: dict[tuple[str, ...], Array]) -> dict[tuple[str, ...], Array]:
        return {path: one(path, leaf).reshape(-1) for path, leaf in leaves.items()}

    return jax.jit(sums, out_shardings=layout)


NAME = "checksums.json"
# JSON files that describe the arrays; the files of the arrays themselves are not hashed.
_FILES = ("aux/metadata", "state/_METADATA", "state/_sharding")
_PER_PROCESS = "state/array_metadatas"

Path = tuple[str, ...]

_log = logging.getLogger(__name__)


class Integrity(NamedTuple):
    """The integrity record of a checkpoint step: checksums and digests from when it was saved.

    Attributes:
      leaves: {leaf name: its checksums, one per layer, or a single one if it has no layers}.  A
        leaf's name is its keys joined with dots, as in Orbax.
      files: {path in the step's folder: SHA-256} of the JSON files.
    """

    leaves: dict[str, list[int]]
    files: dict[str, str]


def write(step: epath.Path, sums: Mapping[str, Sequence[int]]) -> None:
    """Write the integrity record of a checkpoint step whose other files are complete.

    Args:
      sums: {leaf name: its checksums}, as in `Integrity.leaves`.
    """
    names = [name for name in _FILES if (step / name).exists()]
    if (step / _PER_PROCESS).is_dir():
        names += sorted(f"{_PER_PROCESS}/{path.name}" for path in (step / _PER_PROCESS).iterdir())
    record: dict[str, Any] = {
        "leaves": dict(sums),
        "files": {name: _sha256((step / name).read_bytes()) for name in names},
    }
    (step / NAME).write_text(json.dumps(record | {"digest": _digest(record)}))


def read(step: epath.Path) -> Integrity | None:
    """Return the integrity record of a checkpoint step; log a warning and return None if missing.

    Raises:
      DamagedError: if the record itself is damaged.
    """
    path = step / NAME
    if not path.exists():
        _warn(str(step))
        return None
    try:
        record = json.loads(path.read_text())
        digest = record.pop("digest")
        leaves = {name: list(sums) for name, sums in record["leaves"].items()}
        files = dict(record["files"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise damage_error(step, f"its file {NAME}") from None
    if digest != _digest(record):
        raise damage_error(step, f"its file {NAME}")
    return Integrity(leaves, files)


@functools.cache
def _warn(step: str) -> None:
    """Warn that a step has no checksums, at most once per step in this process."""
    _log.warning(
        "checkpoint %s has no checksums (an earlier version saved it, or its file %s is missing); "
        "damage cannot be detected",
        step,
        NAME,
    )


def check_file(step: epath.Path, record: Integrity | None, name: str, content: bytes) -> None:
    """Raise DamagedError if the content of a step's file is not what was saved.

    Nothing is checked if `record` is None or does not list the file.

    Args:
      name: the path of the file in the step's folder.
    """
    if record is not None and record.files.get(name, _sha256(content)) != _sha256(content):
        raise damage_error(step, f"its file {name}")


def damaged_file(step: epath.Path, record: Integrity | None) -> str | None:
    """Return the name of the first JSON file of a step that is missing or not what was saved.

    Returns None if all files are intact, or if `record` is None.
    """
    for name, digest in record.files.items() if record else ():
        path = step / name
        if not path.exists() or _sha256(path.read_bytes()) != digest:
            return name
    return None


def check_leaves(step: epath.Path, record: Integrity | None, leaves: dict[Path, Any]) -> None:
    """Raise DamagedError if the values of a restored leaf are not what was saved.

    If the leaves are on a mesh of several processes, every process must call this function.
    If `record` is None, nothing is checked.
    """
    if record is None:
        return
    for path, sums in tree_checksums(leaves).items():
        check_sums(step, record, path, 0, sums)


def check_sums(
    step: epath.Path, record: Integrity, path: Path, first: int, sums: Sequence[int]
) -> None:
    """Raise DamagedError if the checksums of a leaf's layers differ from those in the record.

    Args:
      first: the index of the layer that `sums` starts with.
      sums: the checksums of consecutive layers, computed from the values that were read.
    """
    saved = record.leaves.get(".".join(path))
    if saved is None:
        return  # the step has no such leaf; `check_match` reports that
    for layer, actual in enumerate(sums, first):
        if actual != saved[layer]:
            part = f" (layer {layer})" if len(saved) > 1 else ""
            raise damage_error(step, f"its leaf {'/'.join(path)}{part}")


def damage_error(step: epath.Path, what: str) -> DamagedError:
    """Return the error to raise if a file or leaf of a step is not what was saved.

    Args:
      what: the file or leaf, for the error message, such as "its file aux/metadata".
    """
    return step_folders.damage_error(step, f": {what} is damaged: it is not what was saved")


def _digest(record: Mapping[str, Any]) -> str:
    return _sha256(json.dumps(record, sort_keys=True).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
