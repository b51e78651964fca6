"""Arrays on the host: checked casts, and leaves that stay on disk until they are read."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from tqdm import tqdm

from mesh_transformer.util import InputError

FLOATS: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}


def cast(value: np.ndarray, dtype: np.dtype, where: str) -> np.ndarray:
    """`value` in `dtype`: itself where that is its own, else a copy.

    Infinities stay.  Raises InputError, which begins with `where`, for a number too large for
    `dtype`.
    """
    if value.dtype == dtype:
        return value
    found = np.empty(value.shape, dtype)
    # One layer at a time: what the comparison makes of a stacked leaf would take as much again.
    for target, source in zip(found, value, strict=True) if value.ndim > 2 else [(found, value)]:
        with np.errstate(over="ignore"):
            target[...] = source
        lost = np.isinf(target) & np.isfinite(source)
        if lost.any():
            largest = float(np.abs(source[lost]).max())
            fitting = " or ".join(str(t) for t in FLOATS.values() if _end(t) > largest)
            raise InputError(
                f"{where} holds {largest:g}, but {dtype} ends at {_end(dtype):g}; choose {fitting}"
            )
    return found


def _end(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).max)


class LazyLeaf:
    """An array that is read when asked for: `leaf[layer]`, or `np.asarray(leaf)` for all of it.

    Whatever takes a state takes these in place of numpy arrays, but reads them once.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        read: Callable[[int | None], np.ndarray],
        *,
        layers: bool,
    ) -> None:
        """`read(layer)` gives an array of this dtype; `read(None)` a leaf that has no `layers`."""
        self.shape, self.dtype = shape, dtype
        self._read, self._layers = read, layers

    def __repr__(self) -> str:
        return f"LazyLeaf({self.shape}, {self.dtype})"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def astype(self, dtype: np.dtype, where: str) -> "LazyLeaf":
        """It in another dtype; an error line about a number too large for that begins so."""
        if dtype == self.dtype:
            return self
        return LazyLeaf(
            self.shape,
            dtype,
            lambda layer: cast(self._read(layer), dtype, where),
            layers=self._layers,
        )

    def __getitem__(self, index: Any) -> np.ndarray:
        if self._layers and isinstance(index, int):
            return self._read(range(self.shape[0])[index])
        return np.asarray(self)[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"{self} is on the disk: it cannot become an array without a copy")
        if self._layers:
            values = np.empty(self.shape, self.dtype)
            for layer in range(len(values)):
                values[layer, ...] = self._read(layer)
        else:
            values = self._read(None)
        return values if dtype is None else values.astype(dtype, copy=False)


def in_memory(tree: Any) -> Any:
    """Nested dicts with every leaf that is lazy read, with a progress bar."""
    total = sum(_lazy_bytes(tree))
    if not total:
        return tree
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading", disable=None) as bar:
        return _read(tree, bar)


def _lazy_bytes(tree: Any) -> Iterator[int]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _lazy_bytes(value)
    elif isinstance(tree, LazyLeaf):
        yield tree.nbytes


def _read(tree: Any, bar: tqdm) -> Any:
    if isinstance(tree, dict):
        return {key: _read(value, bar) for key, value in tree.items()}
    if not isinstance(tree, LazyLeaf):
        return tree
    values = np.asarray(tree)
    bar.update(tree.nbytes)
    return values
