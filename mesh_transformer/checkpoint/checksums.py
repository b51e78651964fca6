"""Checksums of arrays: the same on every mesh, on devices and in numpy.

Each entry's bits are hashed with the entry's index, and the hashes are added modulo 2^32.  A sum
does not depend on the order of its terms, so that no layout changes it; the hash of one entry is a
bijection of its bits, so that a change to a single entry always changes the sum.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import DTypeLike

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
