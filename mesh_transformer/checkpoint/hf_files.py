"""The tensor files of Hugging Face folders, read and written one tensor at a time.

`.safetensors` files are handled here instead of by the safetensors library, for three reasons.  The
library memory-maps whole files, and the pages that it reads count as this process's memory.  It
does not support bfloat16 in numpy.  It can write a file only if all of the file's arrays are in
memory.  The format is described at https://github.com/huggingface/safetensors
"""

import collections
import contextlib
import functools
import io
import json
import math
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from mesh_transformer.checkpoint.host_arrays import FLOATS
from mesh_transformer.data.prefetch import Prefetch
from mesh_transformer.storage import files
from mesh_transformer.storage.access import reason
from mesh_transformer.util import InputError

DTYPES = {name.upper(): dtype for name, dtype in FLOATS.items()}  # safetensors' code -> dtype
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_LARGEST_HEADER = 100_000_000  # the format's own limit
_ZIP_HEADER = struct.Struct("<26xHH")  # before each file of a zip archive: lengths of name, extra
# torch's classes of storages -> the code of their dtype in safetensors
_STORAGES = {
    "BFloat16Storage": "BF16",
    "BoolStorage": "BOOL",
    "ByteStorage": "U8",
    "CharStorage": "I8",
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "IntStorage": "I32",
    "LongStorage": "I64",
    "ShortStorage": "I16",
}
# The key of the checksums in the metadata of files that we write.
_CHECKSUMS = "mesh_transformer.crc32"
_COPY_ADVICE = "copy the folder again"


class StoredTensor(NamedTuple):
    """One tensor in a file, which has not been read yet.

    Attributes:
      path: the file.
      dtype: the dtype's name in safetensors, such as "BF16".
      shape: the tensor's shape.
      read: a function that returns the tensor's values.  They may be a view of a larger array, so
        the caller must copy them and drop the view.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


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


def find(folder: str) -> dict[str, StoredTensor]:
    """Return all tensors in the weight files of a folder, by name.

    The files are model.safetensors, or the shards that model.safetensors.index.json lists.  If the
    folder has neither, the files are pytorch_model.bin or its shards.

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
    """Return the tensors of one PyTorch .bin file, by name.  torch is not needed.

    Raises:
      InputError: if the file is damaged, or if its pickle contains anything but tensors.
    """
    try:
        with files.open_file(path) as file, zipfile.ZipFile(file) as archive:
            records = _records(path, archive)
            _check_byte_order(path, records)
            content = io.BytesIO(records["data.pkl"]().data)
    except InputError:
        raise
    except PermissionError as error:
        raise InputError(f"{path} cannot be read ({reason(error)}); {_COPY_ADVICE}") from None
    except Exception:  # zipfile raises errors of many types for damaged archives
        raise InputError(
            f"{path} is truncated or not a zip archive of torch.save (a plain pickle is refused as "
            "unsafe); copy it again or use the safetensors files"
        ) from None
    try:
        tensors = _Unpickler(content, records).load()
    except InputError:
        raise
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path}: refused as unsafe: its pickle holds more than tensors ({error}); use the "
            "safetensors files"
        ) from None
    except Exception:  # a damaged pickle can raise errors of many types
        raise InputError(f"{path}: its list of tensors is damaged; {_COPY_ADVICE}") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(tensor, _TorchTensor) for tensor in tensors.values()
    ):
        raise InputError(f"{path}: found no mapping of names to tensors; {_COPY_ADVICE}")
    return {
        name: StoredTensor(
            path, tensor.storage.dtype, tensor.shape, functools.partial(tensor.values, path, name)
        )
        for name, tensor in tensors.items()
    }


def _records(path: str, archive: zipfile.ZipFile) -> dict[str, Callable[[], np.ndarray]]:
    """Return {name: function that reads the file's bytes} for the files in a torch.save archive.

    Such an archive has one top-level folder, and the names are relative to this folder.
    """
    entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    ends = [entry.header_offset for entry in entries[1:]] + [archive.start_dir]
    return {
        entry.filename.partition("/")[2]: functools.partial(_read_record, path, entry, end)
        for entry, end in zip(entries, ends, strict=True)
    }


def _read_record(path: str, entry: zipfile.ZipInfo, end: int) -> np.ndarray:
    """Return the bytes (uint8) of one file in a torch.save archive, and verify its checksum.

    `zipfile` is not used for this, because it reports a file without a checksum as damaged, and
    torch may write files without checksums.

    Args:
      path: the archive.
      entry: zipfile's description of the file.
      end: the position in the archive at which the next file or the archive's directory starts.
    """
    damaged = InputError(f"{path}: {entry.filename!r} in it is damaged; {_COPY_ADVICE}")
    content = np.empty(max(0, end - entry.header_offset), np.uint8)
    if len(content) < _ZIP_HEADER.size or entry.compress_type != zipfile.ZIP_STORED:
        raise damaged
    with files.open_file(path) as file:
        file.seek(entry.header_offset)
        if file.readinto(content.data) < len(content):
            raise damaged
    start = _ZIP_HEADER.size + sum(_ZIP_HEADER.unpack_from(content.data))
    data = content[start : start + entry.file_size]
    if len(data) != entry.file_size or (entry.CRC and zlib.crc32(data.data) != entry.CRC):
        raise damaged
    return data


def _check_byte_order(path: str, records: dict[str, Callable[[], np.ndarray]]) -> None:
    """Raise InputError if a .bin file was written on a big-endian machine."""
    if "byteorder" in records and records["byteorder"]().tobytes() != b"little":
        raise InputError(f"{path} is not in little-endian byte order; use the safetensors files")


class _Storage(NamedTuple):
    """A torch storage in a .bin file: the data of one or more tensors.

    Attributes:
      dtype: the dtype's name in safetensors, such as "BF16".
      read: a function that returns the bytes (uint8).
    """

    dtype: str
    read: Callable[[], np.ndarray]


class _TorchTensor(NamedTuple):
    """A tensor in a .bin file: a view of a storage, with offset and strides counted in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def values(self, path: str, name: str) -> np.ndarray:
        """Return the tensor's values; `path` (the file) and `name` are for error messages."""
        dtype = DTYPES[self.storage.dtype]
        data, offset = self.storage.read(), self.offset * dtype.itemsize
        strides = tuple(stride * dtype.itemsize for stride in self.strides)
        try:
            return np.ndarray(self.shape, dtype, data, offset, strides)
        except (ValueError, TypeError):
            raise InputError(
                f"{path}: tensor {name} is larger than its data; {_COPY_ADVICE}"
            ) from None


class _Unpickler(pickle.Unpickler):
    """Unpickler for files of torch.save that hold a mapping of names to tensors, and nothing else.

    It raises UnpicklingError for all other contents, so no code in the file can run.
    """

    def __init__(self, file: io.BytesIO, records: dict[str, Callable[[], np.ndarray]]):
        """Prepare to read `file`, whose tensors are stored in `records` (see `_records`)."""
        super().__init__(file)
        self._records = records

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement for a class or function that the pickle refers to by name."""
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        known = {
            "collections.OrderedDict": collections.OrderedDict,
            "torch._utils._rebuild_tensor_v2": lambda *args: _TorchTensor(*args[:4]),
            "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
        }
        if (function := known.get(f"{module}.{name}")) is None:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return function

    def persistent_load(self, pid: Any) -> _Storage:
        """Return the storage for `pid`, a tuple ("storage", dtype, key, device, size)."""
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, str):
            raise pickle.UnpicklingError(f"{kind} of {dtype}")
        return _Storage(dtype, self._records[f"data/{key}"])


def write(folder: str, tensors: Sequence[Tensor], shard_bytes: int, bar: tqdm) -> None:
    """Write model.safetensors or, if it would exceed `shard_bytes`, several shards and an index.

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
