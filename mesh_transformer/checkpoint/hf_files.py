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
import pickletools
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Container, Sequence
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
DTYPES["F64"] = np.dtype(np.float64)  # read only
_LARGEST_HEADER = 100_000_000  # the format's own limit
# What precedes each file in a zip archive: a mark, ..., the lengths of the name and of a comment.
_ZIP_HEADER = struct.Struct("<4s22xHH")
# The opcodes in pickles of torch.save, of all protocols.
_OPCODES = re.compile(
    "PROTO|FRAME|MEMOIZE|(STACK_)?GLOBAL|(SHORT_)?BINUNICODE8?|(LONG_)?BIN(PUT|GET)|MARK"
    "|(EMPTY_)?TUPLE|TUPLE[123]|EMPTY_(DICT|LIST)|APPENDS?|SETITEMS?|BININT[12]?|LONG1|BINFLOAT"
    "|NEWTRUE|NEWFALSE|NONE|REDUCE|BUILD|BINPERSID|STOP"
)
_MOST_TUPLES = 16  # between two calls of functions; torch.save writes 4
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


def find(folder: str, optional: Container[str] = ()) -> dict[str, StoredTensor]:
    """Return all tensors in the weight files of a folder, by name.

    The files are model.safetensors, or the shards that model.safetensors.index.json lists.  If the
    folder has neither, the files are pytorch_model.bin or its shards.

    Args:
      optional: names of tensors that an index may list although no shard has them.

    Raises:
      InputError: if a file or tensor is missing or damaged.
    """
    for single, opener in (("model.safetensors", _safetensors), ("pytorch_model.bin", _pickled)):
        path = os.path.join(folder, single)
        if files.is_file(path):
            return opener(path)
        if files.is_file(f"{path}.index.json"):
            return _sharded(folder, f"{path}.index.json", opener, optional)
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
    folder: str,
    index: str,
    opener: Callable[[str], dict[str, StoredTensor]],
    optional: Container[str],
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
        if name not in stored and name not in optional:
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
    archive = (
        f"{path} is truncated or not a zip archive of torch.save (a plain pickle is refused as "
        "unsafe); copy it again or use the safetensors files"
    )
    try:
        with files.open_file(path) as file, zipfile.ZipFile(file) as directory:
            records = _records(directory)
            if "data.pkl" not in records:
                raise InputError(archive)
            if "byteorder" in records and _read(path, file, records["byteorder"]) != b"little":
                raise InputError(f"{path} is in big-endian byte order; use the safetensors files")
            content = bytes(_read(path, file, records["data.pkl"]))
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read ({reason(error)}); {_COPY_ADVICE}") from None
    except MemoryError:
        raise
    except Exception:  # zipfile raises errors of many types for damaged archives
        raise InputError(archive) from None
    try:
        _check_opcodes(content)
        tensors = _Unpickler(io.BytesIO(content), records).load()
    except _RefusedError as error:
        raise InputError(
            f"{path}: refused as unsafe: its pickle holds more than tensors ({error}); use the "
            "safetensors files"
        ) from None
    except MemoryError:
        raise
    except Exception:  # a damaged pickle can raise errors of many types
        raise InputError(f"{path}: its list of tensors is damaged; {_COPY_ADVICE}") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, _TorchTensor)
        for name, tensor in dict.items(tensors)
    ):
        raise InputError(f"{path}: found no mapping of names to tensors; {_COPY_ADVICE}")
    tensors = dict(dict.items(tensors))  # without the attributes that a pickle may set
    uses = collections.Counter(tensor.record for tensor in tensors.values())

    def read_record(record: _Record) -> memoryview:
        try:
            with files.open_file(path) as file:
                return _read(path, file, record)
        except OSError as error:
            raise InputError(f"{path} cannot be read ({reason(error)}); {_COPY_ADVICE}") from None

    # Tensors that are views of one record usually follow each other.
    read_shared = functools.lru_cache(maxsize=1)(read_record)

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        content = (read_shared if uses[tensor.record] > 1 else read_record)(tensor.record)
        dtype = DTYPES[tensor.dtype]
        strides = tuple(stride * dtype.itemsize for stride in tensor.strides)
        try:
            return np.ndarray(tensor.shape, dtype, content, tensor.offset * dtype.itemsize, strides)
        except (ValueError, TypeError, OverflowError):
            raise InputError(
                f"{path}: tensor {name} is larger than its data; {_COPY_ADVICE}"
            ) from None

    return {
        name: StoredTensor(path, tensor.dtype, tensor.shape, functools.partial(read, name))
        for name, tensor in tensors.items()
    }


class _Record(NamedTuple):
    """One file in an archive of torch.save.

    Attributes:
      name: the file's name in the archive.
      start: the position in the archive of what precedes the content.
      end: the position at which the next file, or the archive's directory, starts.
      size: the number of bytes.
      checksum: the CRC-32 of the bytes; 0 if there is none.
      compressed: whether the bytes are compressed, which torch.save never does.
    """

    name: str
    start: int
    end: int
    size: int
    checksum: int
    compressed: bool


def _records(archive: zipfile.ZipFile) -> dict[str, _Record]:
    """Return the files in an archive of torch.save, by their names in its only folder."""
    entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    ends = [entry.header_offset for entry in entries[1:]] + [archive.start_dir]
    return {
        entry.filename.partition("/")[2]: _Record(
            entry.filename,
            entry.header_offset,
            end,
            entry.file_size,
            entry.CRC,
            entry.compress_type != zipfile.ZIP_STORED,
        )
        for entry, end in zip(entries, ends, strict=True)
    }


def _read(path: str, file: io.BufferedReader, record: _Record) -> memoryview:
    """Return the bytes of one file in an archive of torch.save, and verify their checksum.

    zipfile could not be used, because it takes a missing checksum, which torch allows, for damage.

    Args:
      path: the path of the archive.
      file: the opened archive.
    """
    damaged = InputError(f"{path}: the part {record.name!r} is damaged; {_COPY_ADVICE}")
    if record.compressed:
        raise InputError(f"{path} is compressed; save it again with torch.save")
    file.seek(record.start)
    content = memoryview(file.read(max(0, record.end - record.start)))
    if len(content) < max(_ZIP_HEADER.size, record.end - record.start):
        raise damaged
    mark, *lengths = _ZIP_HEADER.unpack_from(content)
    start = _ZIP_HEADER.size + sum(lengths)
    data = content[start : start + record.size]
    wrong = record.checksum and zlib.crc32(data) != record.checksum  # 0: there is no checksum
    if mark != b"PK\3\4" or len(data) != record.size or wrong:
        raise damaged
    return data


class _RefusedError(Exception):
    """Raised for a pickle that holds something that is not a tensor."""


def _check_opcodes(content: bytes) -> None:
    """Check that a pickle has only opcodes that torch.save writes, and no deep nesting.

    Otherwise a small file could take all memory or crash the process.
    """
    tuples = 0  # since the last call of a function
    for opcode, argument, _ in pickletools.genops(content):
        if not _OPCODES.fullmatch(opcode.name):
            raise _RefusedError(f"opcode {opcode.name}")
        if opcode.name == "LONG_BINPUT" and int(argument or 0) > len(content):
            raise ValueError("memo index")
        tuples = 0 if opcode.name == "REDUCE" else tuples + opcode.name.startswith("TUPLE")
        if tuples > _MOST_TUPLES:
            raise _RefusedError("nested tuples")


class _TorchTensor(NamedTuple):
    """A tensor in a .bin file: a view of a record, with its offset and strides in elements.

    `dtype` is the dtype's name in safetensors; for dtypes without one, it is torch's name.
    """

    dtype: str
    record: _Record
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Unpickler(pickle.Unpickler):
    """Unpickles what torch.save writes for a mapping of tensors, and refuses all else.

    Only the functions in `find_class` can be called, and they run no code of the file.
    """

    def __init__(self, file: io.BytesIO, records: dict[str, _Record]):
        """Prepare to read `file`, whose tensors are stored in `records` (see `_records`)."""
        super().__init__(file)
        self._stored = records

    def find_class(self, module: str, name: str) -> Any:
        """Return what replaces a global name of the pickle."""
        known = {
            "collections.OrderedDict": collections.OrderedDict,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor_of_dtype,
            "torch._utils._rebuild_parameter": self._parameter,
            "torch._utils._rebuild_parameter_with_state": self._parameter,
            "torch.storage.UntypedStorage": "U8",
        }
        full = f"{module}.{name}"
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if re.fullmatch(r"torch\.(u?int|b?float|complex)\d+\w*", full):
            return full  # a dtype
        if full not in known:
            raise _RefusedError(repr(full[:100]))
        return known[full]

    def persistent_load(self, pid: Any) -> tuple[str, _Record]:
        """Return the dtype and the record for a tuple ("storage", dtype, key, device, size)."""
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, str) or not isinstance(key, str):
            raise _RefusedError("a reference to something else")
        return dtype, self._stored[f"data/{key}"]

    @staticmethod
    def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *others: Any) -> _TorchTensor:
        """Return a tensor; `others` are requires_grad, hooks and flags such as a conjugation."""
        dtype, record = storage
        numbers = (offset, *shape, *strides)
        if not isinstance(record, _Record) or len(shape) != len(strides):
            raise ValueError("storage")
        if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
            raise ValueError("layout")
        if any(others[2:]):
            raise _RefusedError("a conjugated or negated view")
        return _TorchTensor(dtype, record, offset, tuple(shape), tuple(strides))

    @staticmethod
    def _tensor_of_dtype(
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        grad: Any,
        hooks: Any,
        dtype: Any,
        *_: Any,
    ) -> _TorchTensor:
        if not isinstance(dtype, str):
            raise ValueError("dtype")
        return _Unpickler._tensor((dtype, storage[1]), offset, shape, strides, grad, hooks, *_)

    @staticmethod
    def _parameter(tensor: Any, *_: Any) -> _TorchTensor:
        if not isinstance(tensor, _TorchTensor):
            raise ValueError("parameter")
        return tensor


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
