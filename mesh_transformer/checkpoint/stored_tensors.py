"""What the readers of tensor files share: tensors that have not been read yet, JSON, messages."""

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.checkpoint.host_arrays import FLOATS
from mesh_transformer.storage import files
from mesh_transformer.storage.access import reason
from mesh_transformer.util import InputError

# safetensors' names of the dtypes that can be read -> dtype
DTYPES = {name.upper(): dtype for name, dtype in FLOATS.items()} | {"F64": np.dtype(np.float64)}
COPY_ADVICE = "copy the folder again"
COMPARED = 1 << 22  # elements of two tensors that are compared at once
_POINTER = b"version https://git-lfs.github.com/"


class StoredTensor(NamedTuple):
    """One tensor in a file, which has not been read yet.

    Attributes:
      path: the file.
      dtype: the dtype's name in safetensors, such as "BF16".
      shape: the tensor's shape.
      read: a function that returns the tensor's values.  They may be a view of a larger array, so
        the caller must copy them and drop the view.
      place: where in the file the values are.  Tensors of one file at one place share them.
      part: a function that returns the `count` elements from the one at `first` on, in one axis;
        None if only all can be read at once.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    place: Any
    part: Callable[[int, int], np.ndarray] | None = None


def have_equal_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two tensors are equal.  They are read up to the first difference only."""
    if one.shape != other.shape:
        return False
    if (one.path, one.dtype, one.place) == (other.path, other.dtype, other.place):
        return True
    if one.part is None or other.part is None:
        return np.array_equal(one.read(), other.read())
    size = math.prod(one.shape)
    for first in range(0, size, COMPARED):
        count = min(COMPARED, size - first)
        if not np.array_equal(one.part(first, count), other.part(first, count)):
            return False
    return True


def refuse_pointer(path: str, content: bytes) -> None:
    """Raise InputError if a file, which begins with `content`, is a pointer of git-LFS."""
    if content.startswith(_POINTER):
        raise InputError(
            f"{path} is a git-LFS pointer, not the file itself; run `git lfs pull` in its folder"
        )


def parse_json(content: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
      ValueError: if it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: str) -> dict[str, Any]:
    """Return the mapping in a JSON file.

    Raises:
      InputError: if the file is missing, not JSON or not a mapping.
    """
    try:
        with files.open_file(path) as file:
            content = file.read()
        refuse_pointer(path, content)
        values = parse_json(content)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read ({reason(error)}); {COPY_ADVICE}") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); {COPY_ADVICE}") from None
    if not isinstance(values, dict):
        raise InputError(
            f"{path}: found {type(values).__name__}, expected a mapping; {COPY_ADVICE}"
        )
    return values
