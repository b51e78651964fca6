"""The tensor files of Hugging Face folders, read and written one tensor at a time.

`.safetensors` files are handled here instead of by the safetensors library, for three reasons.  The
library memory-maps whole files, and the pages that it reads count as this process's memory.  It
does not support bfloat16 in numpy.  It can write a file only if all of the file's arrays are in
memory.  The format is described at https://github.com/huggingface/safetensors
"""

import contextlib
import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from mesh_transformer.checkpoint import torch_files
from mesh_transformer.checkpoint.stored_tensors import (
    COPY_ADVICE,
    DTYPES,
    StoredTensor,
    have_equal_values,
    parse_json,
    read_json,
    refuse_pointer,
)
from mesh_transformer.data.prefetch import Prefetch
from mesh_transformer.storage import files
from mesh_transformer.util import InputError

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_LARGEST_HEADER = 100_000_000  # the format's own limit
# The key of the checksums in the metadata of files that we write.
_CHECKSUMS = "mesh_transformer.crc32"


class Tensor(NamedTuple):
    """One tensor to write to a file.

    Attributes:
      values: a function that returns the tensor's array.  It is called only when the tensor is
        written.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    values: Callable[[], np.ndarray]

    @property
    def n_bytes(self) -> int:
        """The tensor's size in a file, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def has_weights(folder: str) -> bool:
    """Return whether a folder holds a model's weights, complete or not."""
    paths = (os.path.join(folder, name) for name in WEIGHTS)
    return any(files.is_file(path) or files.is_file(f"{path}.index.json") for path in paths)


def find(
    folder: str, optional: Container[str] = (), names: tuple[str, str] = WEIGHTS
) -> dict[str, StoredTensor]:
    """Return all tensors in the weight files of a folder, by name.

    The files are model.safetensors, or the shards that model.safetensors.index.json lists.  If the
    folder has neither, the files are pytorch_model.bin or its shards.

    Args:
      optional: names of tensors that an index may list although no shard has them.
      names: the names of the safetensors file and of the .bin file.

    Raises:
      InputError: if a file or tensor is missing or damaged.
    """
    for single, opener in zip(names, (_safetensors, torch_files.find), strict=True):
        path = os.path.join(folder, single)
        if files.is_file(path):
            return opener(path)
        if files.is_file(f"{path}.index.json"):
            return _sharded(folder, f"{path}.index.json", opener, optional)
    raise InputError(
        f"{folder}: found no weights; expected {' or '.join(names)}, or shards of either with "
        "their .index.json"
    )


def _sharded(
    folder: str,
    index: str,
    opener: Callable[[str], dict[str, StoredTensor]],
    optional: Container[str],
) -> dict[str, StoredTensor]:
    """Return the tensors of all shards that an index lists."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"{index} has no mapping `weight_map`; {COPY_ADVICE}")
    stored: dict[str, StoredTensor] = {}
    for name in sorted({str(name) for name in weight_map.values()}):
        path = os.path.join(folder, name)
        if os.path.basename(name) != name or not files.is_file(path):
            raise InputError(f"{path} is missing, though {index} names it; {COPY_ADVICE}")
        for tensor, values in opener(path).items():
            if not have_equal_values(stored.setdefault(tensor, values), values):
                raise InputError(
                    f"{path}: tensor {tensor} has other values in {stored[tensor].path}, and only "
                    f"one can be right; {COPY_ADVICE}"
                )
    for name, file in weight_map.items():
        if name not in stored and name not in optional:
            raise InputError(
                f"{os.path.join(folder, file)}: tensor {name} is missing; {COPY_ADVICE}"
            )
    return stored


def _safetensors(path: str) -> dict[str, StoredTensor]:
    """Return the tensors of one .safetensors file, in the order of their positions in the file."""
    size = files.size(path)
    with files.open_file(path) as file:
        refuse_pointer(path, file.read(64))
        file.seek(0)
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
        if length > min(size - 8, _LARGEST_HEADER):
            raise InputError(f"{path} is truncated or not a safetensors file; {COPY_ADVICE}")
        try:
            header = parse_json(file.read(length))
            sums = parse_json((header.pop("__metadata__", None) or {}).get(_CHECKSUMS, "{}"))
            spans = {name: tuple(entry["data_offsets"]) for name, entry in header.items()}
            stored = {
                name: _span(path, name, entry, 8 + length, sums.get(name))
                for name, entry in sorted(header.items(), key=lambda item: spans[item[0]])
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: its header is damaged ({error}); {COPY_ADVICE}") from None
    expected = 8 + length + max((end for _, end in spans.values()), default=0)
    if size != expected:
        raise InputError(
            f"{path} is truncated or damaged: found {size:,} bytes, expected {expected:,}; "
            f"{COPY_ADVICE}"
        )
    return stored


def _span(
    path: str, name: str, entry: dict[str, Any], start: int, checksum: str | None
) -> StoredTensor:
    """Return one tensor of a safetensors file.

    Args:
      start: the position in the file at which the data of all tensors start.
      checksum: the checksum of the tensor's bytes, from `_checksum`; None if the file has none.

    Raises:
      ValueError: if the number of bytes does not match the shape and dtype.
    """
    code, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"shape {shape} or offsets {begin}, {end} of {name}")
    dtype, count = DTYPES.get(code), math.prod(shape)
    if dtype is not None and end - begin != count * dtype.itemsize:
        raise ValueError(f"{end - begin} bytes for {shape} {code}")

    def part(first: int, length: int) -> np.ndarray:
        values = np.empty(length, dtype)
        with files.open_file(path) as file:
            file.seek(start + begin + first * values.itemsize)
            read_bytes = file.readinto(values.view(np.uint8).data)
        if read_bytes != values.nbytes:
            raise InputError(f"{path} was truncated while it was read; {COPY_ADVICE}")
        return values

    def read() -> np.ndarray:
        values = part(0, count)
        if checksum is not None and (actual := _checksum(values)) != checksum:
            raise InputError(
                f"{path}: tensor {name} is damaged: its checksum is {actual}, expected {checksum}; "
                f"{COPY_ADVICE}"
            )
        return values.reshape(shape)

    return StoredTensor(path, code, shape, read, begin, part)


def _checksum(values: np.ndarray) -> str:
    """Return the CRC-32 of an array's bytes as 8 hexadecimal digits."""
    return f"{zlib.crc32(values.reshape(-1).view(np.uint8).data):08x}"


def write(
    folder: str, tensors: Sequence[Tensor], shard_bytes: float = math.inf, name: str = WEIGHTS[0]
) -> None:
    """Write the file `name` or, if it would exceed `shard_bytes`, several shards and an index.

    A tensor larger than `shard_bytes` is written to a file of its own.
    """
    shards: list[list[Tensor]] = [[]]
    room = shard_bytes
    for tensor in tensors:
        if shards[-1] and tensor.n_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.n_bytes
    stem = name.removesuffix(".safetensors")
    total, weight_map = sum(tensor.n_bytes for tensor in tensors), {}
    with tqdm(total=total, unit="B", unit_scale=True, desc="writing", disable=None) as bar:
        for number, shard in enumerate(shards, 1):
            if shards[1:]:
                name = f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
            write_file(os.path.join(folder, name), shard, bar)
            weight_map |= {tensor.name: name for tensor in shard}
    if shards[1:]:
        values = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(os.path.join(folder, f"{stem}.safetensors.index.json"), values)


def write_json(path: str, values: dict[str, Any]) -> None:
    """Write a mapping to a JSON file, formatted as Hugging Face's transformers does."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(values, indent=2, sort_keys=True) + "\n")


def write_file(path: str, tensors: Sequence[Tensor], bar: tqdm) -> None:
    """Write one .safetensors file, with a checksum of each tensor in its metadata."""
    sums = {tensor.name: "0" * 8 for tensor in tensors}  # not known yet
    start = _header(tensors, sums)
    # While one tensor is written, the next one is computed.
    arrays = Prefetch((tensor.values() for tensor in tensors), 1)
    with contextlib.closing(arrays), open(path, "wb") as file:
        file.write(start)
        for tensor, values in zip(tensors, arrays, strict=True):
            assert values.shape == tensor.shape, tensor.name
            assert values.dtype == tensor.dtype, tensor.name
            data = np.ascontiguousarray(values).reshape(-1)
            file.write(data.view(np.uint8).data)
            sums[tensor.name] = _checksum(data)
            bar.update(tensor.n_bytes)
        file.seek(0)
        file.write(_header(tensors, sums))


def _header(tensors: Sequence[Tensor], sums: dict[str, str]) -> bytes:
    """Return the bytes that precede the data in a .safetensors file: header length and header.

    Args:
      sums: {tensor name: checksum}, to store in the header's metadata.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", _CHECKSUMS: json.dumps(sums)}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.n_bytes
        code, shape = _CODES[tensor.dtype], list(tensor.shape)
        header[tensor.name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data start at a multiple of 8
    return struct.pack("<Q", len(text)) + text
