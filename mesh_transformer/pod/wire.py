"""Values as bytes, for messages between processes that may not trust each other's code.

MessagePack carries plain values.  Extension types add arrays, tuples, and objects of the
dataclasses, named tuples and exceptions in `MODULES`, which are rebuilt from their fields.  So
bytes from a stranger can create such objects, but unlike pickles they cannot run other code.
"""

import dataclasses
import importlib
from typing import Any

import jax
import msgpack
import numpy as np

# The modules whose dataclasses, named tuples and exceptions messages may contain.
MODULES = frozenset(
    f"mesh_transformer.{name}"
    for name in (
        "generation.batch",
        "generation.decode",
        "generation.pool",
        "generation.sampling_settings",
        "network",
        "pod.faults",
        "pod.runner",
        "util",
    )
)
ARRAY, TUPLE, OBJECT = 1, 2, 3  # MessagePack's extension types


def encode(value: Any) -> bytes:
    """Return a value as bytes, from which `decode` makes an equal value.

    Raises:
      TypeError: if the value contains an object of another kind.
    """
    content = msgpack.packb(value, default=_extended, strict_types=True)
    assert content is not None
    return content


def decode(content: bytes) -> Any:
    """Return the value that `encode` was called with.

    Raises:
      ValueError: if the content is damaged, or names what no message may contain.
    """
    try:
        return _decoded(content)
    except Exception as error:  # damage, a missing class, too many fields
        raise ValueError(f"not a message ({type(error).__name__}: {error})") from None


def _decoded(content: bytes) -> Any:
    return msgpack.unpackb(content, ext_hook=_plain, strict_map_key=False)


def _extended(value: Any) -> msgpack.ExtType:
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise TypeError("a message cannot contain arrays of Python objects")
        scalar = isinstance(value, np.generic)
        parts = array.dtype.name, array.shape, scalar, array.tobytes()
        return msgpack.ExtType(ARRAY, encode(list(parts)))
    kind = type(value)
    if kind is tuple:
        return msgpack.ExtType(TUPLE, encode(list(value)))
    if kind.__module__ not in MODULES:
        raise TypeError(f"a message cannot contain an object of {kind.__module__}.{kind.__name__}")
    if dataclasses.is_dataclass(kind):
        fields = [getattr(value, field.name) for field in dataclasses.fields(kind)]
    elif isinstance(value, tuple):  # a named tuple
        fields = list(value)
    elif isinstance(value, Exception):
        fields = list(value.args)
    else:
        raise TypeError(f"a message cannot contain an object of {kind.__module__}.{kind.__name__}")
    return msgpack.ExtType(OBJECT, encode([kind.__module__, kind.__name__, fields]))


def _plain(code: int, content: bytes) -> Any:
    parts = _decoded(content)
    if code == TUPLE:
        return tuple(parts)
    if code == ARRAY:
        dtype, shape, scalar, raw = parts
        array = np.frombuffer(raw, jax.numpy.dtype(dtype)).reshape(shape)
        return array[()] if scalar else array.copy()  # which can be written to
    if code != OBJECT:
        raise ValueError(f"extension type {code}")
    module, name, fields = parts
    if module not in MODULES:
        raise ValueError(f"an object of {module}.{name}")
    kind = getattr(importlib.import_module(module), name)
    named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    is_plain = dataclasses.is_dataclass(kind) or named_tuple or issubclass(kind, Exception)
    if kind.__module__ != module or not is_plain:
        raise ValueError(f"an object of {module}.{name}")
    return kind(*fields)
