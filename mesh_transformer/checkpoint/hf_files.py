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
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from tqdm import tqdm

from mesh_transformer.checkpoint.host_arrays import FLOATS
from mesh_transformer.data import files
from mesh_transformer.data.prefetch import Prefetch
from mesh_transformer.data.storage import is_uri, reason
from mesh_transformer.util import InputError

DTYPES = {name.upper(): dtype for name, dtype in FLOATS.items()}  # safetensors' code -> dtype
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_LARGEST_HEADER = 100_000_000  # the format's own limit
_REMAP_BYTES = 1 << 28  # bytes to read from a .bin file before it is mapped again
# The key of the checksums in the metadata of files that we write.
_CHECKSUMS = "mesh_transformer.crc32"
_COPY_ADVICE = "copy the folder again"


class StoredTensor(NamedTuple):
    """One tensor in a file.

    Attributes:
      path: the file.
      dtype: the dtype's name in safetensors, such as "BF16".  In .bin files, dtypes other than
        F32, F16 and BF16 have their name in torch instead, such as "torch.int64".
      shape: the tensor's shape.
      read: a function that returns the tensor's values.  They may be a view of a memory-mapped
        file, so the caller must copy them and drop the view.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


class Tensor(NamedTuple):
    """One tensor to write.

    `values` returns the tensor's array.  It is called only when the tensor is written.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    values: Callable[[], np.ndarray]

    @property
    def n_bytes(self) -> int:
        """The tensor's size in a file, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def find(folder: str) -> dict[str, StoredTensor]:
    """Return all tensors of a folder by name, in the order in which its files hold them.

    The tensors are read from model.safetensors, or from the shards that its index lists.  If the
    folder has neither, they are read from pytorch_model.bin or its shards, which requires torch.

    Raises:
      InputError: if a file or tensor is missing or damaged.
    """
    for single, opener in (("model.safetensors", _safetensors), ("pytorch_model.bin", _pickled)):
        path = os.path.join(folder, single)
        if files.is_file(path):
            return opener(path)
        if files.is_file(f"{path}.index.json"):
            return _sharded(folder, f"{path}.index.json", opener)
    raise InputError(
        f"{folder}: found no weights; expected model.safetensors or pytorch_model.bin, or "
        "shards of either with their .index.json"
    )


def read_json(path: str) -> dict[str, Any]:
    """Return the mapping in a JSON file.

    Raises:
      InputError: if the file is missing, not JSON or not a mapping.
    """
    try:
        with files.open_file(path) as file:
            values = json.load(file)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read ({reason(error)}); {_COPY_ADVICE}") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); {_COPY_ADVICE}") from None
    if not isinstance(values, dict):
        raise InputError(
            f"{path}: found {type(values).__name__}, expected a mapping; {_COPY_ADVICE}"
        )
    return values


def _sharded(
    folder: str, index: str, opener: Callable[[str], dict[str, StoredTensor]]
) -> dict[str, StoredTensor]:
    """Return the tensors of all shards that an index lists.

    Args:
      index: the path of the .index.json file.
      opener: a function that returns the tensors of one shard, given its path.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"{index} has no mapping `weight_map`; {_COPY_ADVICE}")
    stored: dict[str, StoredTensor] = {}
    for name in sorted({str(name) for name in weight_map.values()}):
        path = os.path.join(folder, name)
        if os.path.basename(name) != name or not files.is_file(path):
            raise InputError(f"{path} is missing, though {index} names it; {_COPY_ADVICE}")
        stored |= opener(path)
    for name, file in weight_map.items():
        if name not in stored:
            raise InputError(
                f"{os.path.join(folder, file)}: tensor {name} is missing; {_COPY_ADVICE}"
            )
    return stored


def _safetensors(path: str) -> dict[str, StoredTensor]:
    """Return the tensors of one .safetensors file, in the order of their positions in the file."""
    size = files.size(path)
    with files.open_file(path) as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
        if length > min(size - 8, _LARGEST_HEADER):
            raise InputError(f"{path} is truncated or not a safetensors file; {_COPY_ADVICE}")
        try:
            header = json.loads(file.read(length))
            sums = json.loads((header.pop("__metadata__", None) or {}).get(_CHECKSUMS, "{}"))
            spans = {name: tuple(entry["data_offsets"]) for name, entry in header.items()}
            stored = {
                name: _span(path, name, entry, 8 + length, sums.get(name))
                for name, entry in sorted(header.items(), key=lambda item: spans[item[0]])
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: its header is damaged ({error}); {_COPY_ADVICE}") from None
    expected = 8 + length + max((end for _, end in spans.values()), default=0)
    if size != expected:
        raise InputError(
            f"{path} is truncated or damaged: found {size:,} bytes, expected {expected:,}; "
            f"{_COPY_ADVICE}"
        )
    return stored


def _span(
    path: str, name: str, entry: dict[str, Any], start: int, checksum: str | None
) -> StoredTensor:
    """Return one tensor of a safetensors file.

    Args:
      entry: the tensor's entry in the file's header.
      start: the position in the file at which the data of all tensors start.
      checksum: the checksum of the tensor's bytes, from `_checksum`; None if the file has none.

    Raises:
      ValueError: if the number of bytes does not match the shape and dtype.
    """
    code, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    dtype, count = DTYPES.get(code), math.prod(shape)
    if dtype is not None and (begin < 0 or end - begin != count * dtype.itemsize):
        raise ValueError(f"{end - begin} bytes for {shape} {code}")

    def read() -> np.ndarray:
        values = np.empty(count, dtype)
        with files.open_file(path) as file:
            file.seek(start + begin)
            read_bytes = file.readinto(values.view(np.uint8).data)
        if read_bytes != values.nbytes:
            raise InputError(f"{path} was truncated while it was read; {_COPY_ADVICE}")
        if checksum is not None and (actual := _checksum(values)) != checksum:
            raise InputError(
                f"{path}: tensor {name} is damaged: its checksum is {actual}, expected {checksum}; "
                f"{_COPY_ADVICE}"
            )
        return values.reshape(shape)

    return StoredTensor(path, code, shape, read)


def _checksum(values: np.ndarray) -> str:
    """Return the CRC-32 of an array's bytes as 8 hexadecimal digits."""
    return f"{zlib.crc32(values.reshape(-1).view(np.uint8).data):08x}"


def _pickled(path: str) -> dict[str, StoredTensor]:
    """Return the tensors of one PyTorch .bin file, by name.

    Raises:
      InputError: if the file is damaged, or if its pickle contains anything but tensors.
    """
    if is_uri(path):
        raise InputError(f"{path}: .bin files are read from local folders only; copy them to one")
    if not zipfile.is_zipfile(path):
        raise InputError(
            f"{path} is truncated or not a zip archive of torch.save (a plain pickle is refused as "
            "unsafe); copy it again or use the safetensors files"
        )
    file = _TorchFile(path)
    return {
        name: StoredTensor(path, code, shape, lambda name=name: file.read(name))
        for name, (code, shape) in file.layout().items()
    }


class _TorchFile:
    """A memory-mapped PyTorch .bin file, which is mapped again after every `_REMAP_BYTES` bytes.

    The pages of a mapping count as the process's memory once they have been read.  Mapping the file
    again frees these pages, so the process's memory stays bounded.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.torch = _import_torch(path)
        self._tensors: dict[str, Any] = {}
        self._left = 0  # bytes to read before the next mapping

    def layout(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return {name: (dtype, shape)} of all tensors, with dtypes named as in `StoredTensor`."""
        torch = self.torch
        codes = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
        return {
            name: (codes.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            for name, tensor in self._load().items()
        }

    def read(self, name: str) -> np.ndarray:
        """Return one tensor's values, as a view of the mapped file."""
        torch = self.torch
        if self._left <= 0:
            self._tensors = {}
            self._tensors, self._left = self._load(), _REMAP_BYTES
        tensor = self._tensors[name]
        self._left -= tensor.nbytes
        if tensor.dtype == torch.bfloat16:  # torch cannot convert it to numpy
            return tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    def _load(self) -> dict[str, Any]:
        torch = self.torch
        try:
            tensors = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError:
            raise InputError(
                f"{self.path}: refused as unsafe: its pickle holds more than tensors and could "
                "run code; use the safetensors files"
            ) from None
        except (RuntimeError, OSError, EOFError) as error:
            reason = str(error).partition("\n")[0]
            raise InputError(f"{self.path} cannot be read ({reason}); {_COPY_ADVICE}") from None
        if not isinstance(tensors, dict) or not all(map(torch.is_tensor, tensors.values())):
            raise InputError(f"{self.path}: found no mapping of names to tensors; {_COPY_ADVICE}")
        return tensors


def _import_torch(path: str) -> Any:
    try:
        import torch
    except ImportError:
        raise InputError(
            f"{path}: reading .bin requires torch; pip install torch, or use the safetensors files"
        ) from None
    return torch


def write(folder: str, tensors: Sequence[Tensor], shard_bytes: int, bar: tqdm) -> None:
    """Write model.safetensors, or, if it would exceed `shard_bytes`, several shards and an index.

    A tensor larger than `shard_bytes` is written to a file of its own.

    Args:
      bar: the progress bar to update, in bytes.
    """
    shards: list[list[Tensor]] = [[]]
    room = shard_bytes
    for tensor in tensors:
        if shards[-1] and tensor.n_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.n_bytes
    if len(shards) == 1:
        _write_file(os.path.join(folder, "model.safetensors"), shards[0], bar)
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_file(os.path.join(folder, name), shard, bar)
        weight_map |= {tensor.name: name for tensor in shard}
    total = sum(tensor.n_bytes for tensor in tensors)
    write_json(
        os.path.join(folder, "model.safetensors.index.json"),
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def write_json(path: str, values: dict[str, Any]) -> None:
    """Write a mapping to a JSON file, formatted as Hugging Face's transformers does."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _write_file(path: str, tensors: Sequence[Tensor], bar: tqdm) -> None:
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
