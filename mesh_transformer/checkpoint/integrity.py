"""Whether a checkpoint step is what was saved: checksums of its leaves, digests of its JSON.

    step_<N>/checksums.json   {"leaves": {"params.proj.w": [uint32 per layer]},
                               "files": {"aux/metadata": SHA-256},
                               "digest": SHA-256 of the other two}

It is written before the step is committed.  Steps of earlier versions have none.

Checksums are the same on every mesh, on devices and in numpy: each entry's bits are hashed with the
entry's index, and the hashes are added modulo 2^32.  A sum does not depend on the order of its
terms, so no layout changes it; the hash of one entry is a bijection of its bits, so a change to a
single entry always changes the sum.
"""

import functools
import hashlib
import json
import logging
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

from mesh_transformer.util import InputError

_INDEX = 0x9E3779B1
_ROUNDS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))  # MurmurHash3's last steps
_CHUNK = 1 << 16  # entries that numpy hashes at once: they stay in the processor's cache
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}  # by bytes per entry


def checksum(values: Array, *, layers: bool = False) -> Array:
    """The checksum of an array, uint32 [], or of each of its layers (its first axis), [L].

    Indices count from the beginning of the whole array, so that the layers' sums add up to its own.
    """
    if values.dtype == jnp.bool:
        values = values.astype(jnp.uint8)
    unsigned = _UNSIGNED[values.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(values, unsigned).astype(jnp.uint32)
    index = jnp.zeros(values.shape, jnp.uint32)
    for axis, size in enumerate(values.shape):
        index = index * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, values.shape, axis)
    mixed = bits ^ (index * np.uint32(_INDEX))
    for shift, factor in _ROUNDS:
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    mixed ^= mixed >> np.uint32(16)
    return jnp.sum(mixed, axis=tuple(range(layers, values.ndim)), dtype=jnp.uint32)


def host_checksum(values: np.ndarray, first: int = 0, dtype: DTypeLike | None = None) -> int:
    """As `checksum`, of a part of an array that begins at its entry `first`.

    Args:
      dtype: entries are cast to it first (default: their own).
    """
    flat, total = values.reshape(-1), 0
    steps = np.arange(_CHUNK, dtype=np.uint32) * np.uint32(_INDEX)
    mixed, shifted = np.empty(_CHUNK, np.uint32), np.empty(_CHUNK, np.uint32)
    for begin in range(0, flat.size, _CHUNK):
        part = np.ascontiguousarray(flat[begin : begin + _CHUNK])
        part = part if dtype is None else part.astype(dtype)
        mix, shift_ = mixed[: part.size], shifted[: part.size]
        np.add(steps[: part.size], np.uint32((first + begin) * _INDEX % 2**32), out=mix)
        mix ^= part.view(f"u{part.itemsize}")
        for shift, factor in _ROUNDS:
            np.right_shift(mix, np.uint32(shift), out=shift_)
            mix ^= shift_
            mix *= np.uint32(factor)
        np.right_shift(mix, np.uint32(16), out=shift_)
        mix ^= shift_
        total += int(mix.sum(dtype=np.uint64))
    return total % 2**32


def is_stacked(path: tuple[str, ...]) -> bool:
    """Whether the leaf of a state at that path has layers along its first axis."""
    return "layers" in path


def tree_checksums(leaves: dict[tuple[str, ...], Array]) -> dict[tuple[str, ...], list[int]]:
    """The checksums of each leaf's layers, or of the whole leaf where it has none; waits for them.

    Every process of a mesh that the leaves span has to call it, and gets all sums.
    """
    meshes = {getattr(leaf.sharding, "mesh", None) for leaf in leaves.values()}
    layout = None
    if len(meshes) == 1 and (mesh := meshes.pop()) is not None:
        layout = NamedSharding(mesh, P())
    # In one program: XLA's CPU devices abort where many small ones with collectives are under way.
    return {path: np.asarray(sums).tolist() for path, sums in _compiled(layout)(leaves).items()}


@functools.cache
def _compiled(layout: NamedSharding | None) -> Any:
    def sums(leaves: dict[tuple[str, ...], Array]) -> dict[tuple[str, ...], Array]:
        return {
            path: checksum(leaf, layers=is_stacked(path)).reshape(-1)
            for path, leaf in leaves.items()
        }

    return jax.jit(sums, out_shardings=layout)


NAME = "checksums.json"
# JSON that says where arrays are and what they look like; the arrays' own files are not hashed.
_FILES = ("aux/metadata", "state/_METADATA", "state/_sharding")
_PER_PROCESS = "state/array_metadatas"

Path = tuple[str, ...]

_log = logging.getLogger(__name__)


class Integrity(NamedTuple):
    """What was saved: checksums of each leaf's layers (one where it has none), files' digests."""

    leaves: dict[str, list[int]]  # by their keys joined with dots, as Orbax names them
    files: dict[str, str]


def write(step: epath.Path, sums: Mapping[str, Sequence[int]]) -> None:
    """Writes the record of a step whose other files are complete.

    Args:
      sums: of each leaf's layers, by the leaf's name.
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
    """The record of a step; None, after a warning, where an earlier version saved it.

    Raises:
      InputError: where the record itself is damaged.
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
        raise damaged(step, f"its file {NAME}") from None
    if digest != _digest(record):
        raise damaged(step, f"its file {NAME}")
    return Integrity(leaves, files)


@functools.cache
def _warn(step: str) -> None:
    """Warns once per step and process."""
    _log.warning(
        "checkpoint %s has no checksums, as an earlier version saved it: damage cannot be noticed",
        step,
    )


def check_file(step: epath.Path, record: Integrity | None, name: str, content: bytes) -> None:
    """Raises InputError where a file's content is not what was saved."""
    if record is not None and record.files.get(name, _sha256(content)) != _sha256(content):
        raise damaged(step, f"its file {name}")


def damaged_file(step: epath.Path, record: Integrity | None) -> str | None:
    """The first JSON file of a step that is missing or not what was saved."""
    for name, digest in record.files.items() if record else ():
        path = step / name
        if not path.exists() or _sha256(path.read_bytes()) != digest:
            return name
    return None


def check_leaves(step: epath.Path, record: Integrity | None, leaves: dict[Path, Any]) -> None:
    """Raises InputError naming the first of these arrays on a mesh that is not what was saved.

    Every process of the mesh has to call it.
    """
    if record is None:
        return
    for path, sums in tree_checksums(leaves).items():
        check_sums(step, record, path, 0, sums)


def check_sums(
    step: epath.Path, record: Integrity, path: Path, first: int, sums: Sequence[int]
) -> None:
    """Raises InputError where the sums of a leaf's layers, from `first` on, are not those saved."""
    saved = record.leaves.get(".".join(path))
    if saved is None:
        return  # not a leaf of that step: shapes are checked elsewhere
    for layer, found in enumerate(sums, first):
        if found != saved[layer]:
            part = f" (layer {layer})" if len(saved) > 1 else ""
            raise damaged(step, f"its leaf {'/'.join(path)}{part}")


def damaged(step: epath.Path, what: str) -> InputError:
    """The error for a step that is not what was saved."""
    return InputError(
        f"checkpoint {step}: {what} is damaged, it is not what was saved; restore another step or "
        "copy this one anew"
    )


def _digest(record: Mapping[str, Any]) -> str:
    return _sha256(json.dumps(record, sort_keys=True).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
