"""The types that weights may have, and the casts between them, which make no number infinite."""

import ml_dtypes
import numpy as np

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
