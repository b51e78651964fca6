"""Arrays on the host: casts that detect overflow, and arrays that stay on disk until used."""

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from mesh_transformer.util import InputError

FLOATS: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}


def cast(value: np.ndarray, dtype: np.dtype, where: str) -> np.ndarray:
    """Cast an array to `dtype`; an array that already has this dtype is returned without a copy.

    Infinite values remain infinite.

    Args:
      where: a description of the array for the error message, such as "checkpoint <path>: leaf
        <name>".

    Raises:
      InputError: if a finite number is too large for `dtype`.
    """
    if value.dtype == dtype:
        return value
    result = np.empty(value.shape, dtype)
    # One layer at a time: checking a whole stacked leaf would need as much memory as the leaf.
    for target, source in zip(result, value, strict=True) if value.ndim > 2 else [(result, value)]:
        with np.errstate(over="ignore"):
            target[...] = source
        overflows = np.isinf(target) & np.isfinite(source)
        if overflows.any():
            largest = float(np.abs(source[overflows]).max())
            fitting = " or ".join(str(t) for t in FLOATS.values() if _max(t) > largest)
            raise InputError(
                f"{where} holds {largest:g}, above {dtype}'s maximum {_max(dtype):g}; "
                f"choose dtype {fitting}"
            )
    return result


def _max(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).max)


class LazyLeaf:
    """An array that stays on disk until it is used.

    `leaf[layer]` reads one layer, and `np.asarray(leaf)` reads the whole array.  A model
    state in host memory may hold `LazyLeaf`s in place of numpy arrays.  Functions that take such a
    state read each of its `LazyLeaf`s only once.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        read: Callable[[int | None], np.ndarray],
        *,
        layers: bool,
    ) -> None:
        """Create a leaf.

        Args:
          shape, dtype: the shape and dtype of the whole array.
          read: a function that reads from disk and returns values of this dtype.  If `layers` is
            True, it is called with the index of a layer and returns this layer.  Otherwise it is
            called with None and returns the whole array.
          layers: whether the array is stacked over layers along its first axis.
        """
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
        """Return a leaf whose values are cast to `dtype` when read; `where` is as for `cast`."""
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
            raise ValueError(f"{self} is on disk; it cannot be converted with copy=False")
        if self._layers:
            values = np.empty(self.shape, self.dtype)
            for layer in range(len(values)):
                values[layer, ...] = self._read(layer)
        else:
            values = self._read(None)
        return values if dtype is None else values.astype(dtype, copy=False)
