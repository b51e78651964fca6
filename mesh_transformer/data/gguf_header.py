"""The header of a GGUF file, llama.cpp's format: metadata, and which tensors the file holds.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.  The package
gguf reads local files only, and takes seconds for the strings of a vocabulary.
"""

import functools
import io
import math
import struct
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.storage import files
from mesh_transformer.util import InputError

SUFFIX = ".gguf"
COPY_ADVICE = "copy the file again"
# The types of metadata: of numbers, by their codes, and the other ones.
_NUMBERS = dict(enumerate(("u1", "i1", "u2", "i2", "u4", "i4", "f4", "?")))
_NUMBERS |= {10: "u8", 11: "i8", 12: "f8"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4  # of a tensor, ggml's limit
_LONGEST = 1 << 28  # bytes of a string or an array of numbers, more than any vocabulary has


class GgufTensor(NamedTuple):
    """One tensor of a file: its shape, the number of its type in ggml, and its position."""

    shape: tuple[int, ...]
    kind: int
    start: int


class GgufHeader(NamedTuple):
    """The header of a GGUF file.

    Attributes:
      metadata: {key: value}.
      tensors: {name: tensor}.
      size: the file's size in bytes.
    """

    path: str
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    size: int

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a value of the metadata.

        Raises:
          InputError: if it is not of the type `kind`, or is missing and there is no default.
        """
        value = self.metadata.get(key, default)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            names = " or ".join(
                {int: "a whole number", float: "a number", str: "a text"}.get(one, one.__name__)
                for one in (kind if isinstance(kind, tuple) else (kind,))
            )
            problem = "is missing" if value is None else f"is {str(value)[:80]!r}"
            raise InputError(
                f"{self.path}: {key} {problem}, expected {names}; convert the model again"
            )
        return value


def is_gguf(path: str) -> bool:
    """Return whether a path is that of a GGUF file, by its name; it need not exist."""
    return path.endswith(SUFFIX)


def read_header(path: str) -> GgufHeader:
    """Return the header of a GGUF file.

    Raises:
      InputError: if the file is missing, damaged or of another format.
    """
    try:
        return _read_header(path, files.status(path))
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{path} cannot be read ({reason}); give a GGUF file") from None


@functools.lru_cache(2)  # a model's file is opened for its config, weights and tokenizer
def _read_header(path: str, status: tuple[int, int]) -> GgufHeader:
    size, _ = status
    with files.open_file(path) as file:
        if file.read(4) != b"GGUF":
            raise InputError(f"{path} is not a GGUF file; give one, or {COPY_ADVICE}")
        try:
            version = _number(file, "<u4")
            if version not in (2, 3):
                raise InputError(
                    f"{path} is in version {version} of GGUF, expected 2 or 3 (and little-endian); "
                    "convert the model again with a current llama.cpp"
                )
            count, keys = _number(file, "<u8"), _number(file, "<u8")
            metadata: dict[str, Any] = {}
            for _ in range(keys):
                key = _new_name(file, "key", metadata)
                metadata[key] = _value(file, _number(file, "<u4"))
            tensors: dict[str, GgufTensor] = {}
            for _ in range(count):
                name = _new_name(file, "tensor", tensors)
                tensors[name] = _tensor(file, name)
        except (ValueError, MemoryError, OverflowError) as error:
            raise InputError(f"{path}: its header is damaged ({error}); {COPY_ADVICE}") from None
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise InputError(f"{path}: general.alignment is {alignment!r}; {COPY_ADVICE}")
        start = file.tell() + -file.tell() % alignment
    for name, tensor in tensors.items():
        tensors[name] = tensor._replace(start=start + tensor.start)
    return GgufHeader(path, metadata, tensors, size)


def _bytes(file: io.BufferedReader, count: int) -> bytes:
    content = file.read(min(count, _LONGEST))
    if len(content) != count:
        raise ValueError(f"found {len(content):,} bytes, expected {count:,}")
    return content


def _number(file: io.BufferedReader, kind: str) -> Any:
    return _numbers(file, kind, 1)[0]


def _numbers(file: io.BufferedReader, kind: str, count: int) -> list[Any]:
    dtype = np.dtype(kind).newbyteorder("<")
    values = np.frombuffer(_bytes(file, count * dtype.itemsize), dtype)
    if dtype == np.float32:  # the number that was rounded to f32, such as 1e-5
        return [float(str(value)) for value in values]
    return values.tolist()


def _string(file: io.BufferedReader) -> str:
    (length,) = struct.unpack("<Q", _bytes(file, 8))
    return _bytes(file, length).decode("utf-8", "replace")


def _new_name(file: io.BufferedReader, what: str, names: Collection[str]) -> str:
    name = _string(file)
    if name in names:
        raise ValueError(f"{what} {name[:80]!r} is listed twice")
    return name


def _value(file: io.BufferedReader, kind: int) -> Any:
    if kind in _NUMBERS:
        return _number(file, _NUMBERS[kind])
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        raise ValueError(f"a value has the unknown type {kind}")
    kind, count = _number(file, "<u4"), _number(file, "<u8")
    if kind in _NUMBERS:
        return _numbers(file, _NUMBERS[kind], count)
    if kind != _STRING:
        raise ValueError(f"an array has the unknown type {kind}")
    return [_string(file) for _ in range(count)]


def _tensor(file: io.BufferedReader, name: str) -> GgufTensor:
    rank = _number(file, "<u4")
    if rank > _MOST_DIMENSIONS:
        raise ValueError(
            f"tensor {name[:80]!r} has {rank:,} dimensions, expected at most {_MOST_DIMENSIONS}"
        )
    shape = tuple(reversed(_numbers(file, "<u8", rank)))
    if math.prod(shape) >= 2**63:
        raise ValueError(f"tensor {name[:80]!r} has shape {shape}")
    return GgufTensor(shape, _number(file, "<u4"), _number(file, "<u8"))
