"""Reading PyTorch's .bin files without torch, and without running code that they may contain.

`torch.save` writes a zip archive.  Before PyTorch 1.6 it wrote five pickles (a magic number, a
version, properties of the machine, the tensors and the keys of their data), followed by the data.
"""

import collections
import contextlib
import functools
import io
import pickle
import pickletools
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.checkpoint.stored_tensors import (
    COPY_ADVICE,
    DTYPES,
    StoredTensor,
    refuse_pointer,
)
from mesh_transformer.storage import files
from mesh_transformer.storage.access import reason
from mesh_transformer.util import InputError

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
_ITEM_BYTES = {code: int(re.sub(r"\D", "", code) or 8) // 8 for code in _STORAGES.values()}
# The first two values in a file before PyTorch 1.6: its mark and its version.
_LEGACY = (0x1950A86A20F9469CFC6C, 1001)


def find(path: str) -> dict[str, StoredTensor]:
    """Return the tensors of one PyTorch .bin file, by name.

    Raises:
      InputError: if the file is damaged, or if its pickle contains anything but tensors.
    """
    try:
        with files.open_file(path) as file:
            start = file.read(64)
            refuse_pointer(path, start)
            file.seek(0)
            tensors, records = (_archived if start[:2] == b"PK" else _legacy)(path, file)
    except _RefusedError as error:
        raise InputError(
            f"{path}: refused as unsafe: its pickle holds more than tensors ({error}); use the "
            "safetensors files"
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({reason(error)}); {COPY_ADVICE}") from None
    uses = collections.Counter(tensor.key for tensor in tensors.values())

    def read_record(key: str) -> memoryview:
        try:
            with files.open_file(path) as file:
                return _read(path, file, records[key])
        except OSError as error:
            raise InputError(f"{path} cannot be read ({reason(error)}); {COPY_ADVICE}") from None

    # Tensors that are views of one record usually follow each other.
    read_shared = functools.lru_cache(maxsize=1)(read_record)

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        content = (read_shared if uses[tensor.key] > 1 else read_record)(tensor.key)
        dtype = DTYPES[tensor.dtype]
        strides = tuple(stride * dtype.itemsize for stride in tensor.strides)
        try:
            return np.ndarray(tensor.shape, dtype, content, tensor.offset * dtype.itemsize, strides)
        except (ValueError, TypeError, OverflowError):
            raise InputError(
                f"{path}: tensor {name} is larger than its data; {COPY_ADVICE}"
            ) from None

    return {
        name: StoredTensor(path, tensor.dtype, tensor.shape, functools.partial(read, name), tensor)
        for name, tensor in tensors.items()
    }


_Found = tuple[dict[str, "_TorchTensor"], dict[str, "_Record"]]  # tensors by name, data by key


def _archived(path: str, file: io.BufferedReader) -> _Found:
    """Return the tensors in a zip archive of torch.save."""
    with _damage(path, f"is truncated or not a zip archive of torch.save; {COPY_ADVICE}"):
        with zipfile.ZipFile(file) as directory:
            records = _records(directory)
        if "data.pkl" not in records:
            raise ValueError("no data.pkl")
        if "byteorder" in records and _read(path, file, records["byteorder"]) != b"little":
            raise InputError(f"{path} is in big-endian byte order; use the safetensors files")
        content = bytes(_read(path, file, records["data.pkl"]))
    tensors, _ = _load(path, content)
    with _damage(path):
        return tensors, {tensor.key: records[f"data/{tensor.key}"] for tensor in tensors.values()}


def _legacy(path: str, file: io.BufferedReader) -> _Found:
    """Return the tensors in a file of torch.save before PyTorch 1.6."""
    with _damage(
        path,
        "is truncated or not a file of torch.save (any other pickle is refused as unsafe); copy it "
        "again or use the safetensors files",
    ):
        if tuple(_unpickle(_next_pickle(file))[0] for _ in _LEGACY) != _LEGACY:
            raise ValueError("another format")
        machine, _ = _unpickle(_next_pickle(file))
        if machine["little_endian"] is not True:
            raise InputError(f"{path} is in big-endian byte order; use the safetensors files")
        content, keys = _next_pickle(file), _next_pickle(file)
    tensors, sizes = _load(path, content)
    with _damage(path):
        start, records = file.tell(), {}
        for key in _unpickle(keys)[0]:
            start += 8  # after the number of elements
            records[key] = _Record(key, start, start + sizes[key], sizes[key], 0, False, False)
            start += sizes[key]
        if start > files.size(path) or records.keys() != sizes.keys():
            raise ValueError("data")
    return tensors, records


def _next_pickle(file: io.BufferedReader) -> bytes:
    """Return the bytes of the pickle at a file's position, and move to its end."""
    start = file.tell()
    collections.deque(pickletools.genops(file), maxlen=0)
    size = file.tell() - start
    file.seek(start)
    return file.read(size)


def _unpickle(content: bytes) -> tuple[Any, dict[str, int]]:
    """Return the value of a pickle, and the bytes of each part of the data that it refers to."""
    _check_opcodes(content)
    unpickler = _Unpickler(io.BytesIO(content))
    return unpickler.load(), unpickler.sizes


def _load(path: str, content: bytes) -> tuple[dict[str, "_TorchTensor"], dict[str, int]]:
    """Return the tensors in a pickle by name, and the bytes of each part of their data by key."""
    with _damage(path):
        tensors, sizes = _unpickle(content)
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, _TorchTensor)
        for name, tensor in dict.items(tensors)
    ):
        raise InputError(f"{path}: found no mapping of names to tensors; {COPY_ADVICE}")
    return dict(dict.items(tensors)), sizes  # without the attributes that a pickle may set


@contextlib.contextmanager
def _damage(path: str, problem: str | None = None) -> Iterator[None]:
    """Turn the errors that damage causes in zipfile and pickle, of many types, into InputError.

    Args:
      problem: what to say after the path (default: that the list of tensors is damaged).
    """
    try:
        yield
    except (InputError, OSError, MemoryError, _RefusedError):
        raise
    except Exception:
        line = f"{path}: its list of tensors is damaged; {COPY_ADVICE}"
        raise InputError(f"{path} {problem}" if problem else line) from None


class _Record(NamedTuple):
    """The data of tensors in a file of torch.save: one file in its archive.

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
    in_archive: bool = True  # false in files before PyTorch 1.6


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
    """
    damaged = InputError(f"{path}: the part {record.name!r} is damaged; {COPY_ADVICE}")
    if record.compressed:
        raise InputError(f"{path} is compressed; save it again with torch.save")
    file.seek(record.start)
    content = memoryview(file.read(max(0, record.end - record.start)))
    if not record.in_archive and len(content) == record.size:
        return content
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
    """A tensor in a .bin file: a view of the data `key`, with offset and strides in elements.

    `dtype` is the dtype's name in safetensors; for dtypes without one, it is torch's name.
    """

    dtype: str
    key: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Unpickler(pickle.Unpickler):
    """Unpickles what torch.save writes for a mapping of tensors, and refuses all else.

    Only the functions in `find_class` can be called, and they run no code of the file.
    """

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.sizes: dict[str, int] = {}  # the bytes of each part of the data, by key

    def find_class(self, module: str, name: str) -> Any:
        """Return what replaces a global name of the pickle."""
        known = {
            "collections.OrderedDict": collections.OrderedDict,
            "torch._utils._rebuild_tensor": self._tensor,
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

    def persistent_load(self, pid: Any) -> tuple[str, str]:
        """Return dtype and key of a tuple ("storage", dtype, key, device, size, view)."""
        kind, dtype, key, _, size, *view = pid
        if kind != "storage" or dtype not in _ITEM_BYTES or not isinstance(key, str) or any(view):
            raise _RefusedError("a reference to something else")
        if type(size) is not int or not 0 <= size < 1 << 62:
            raise ValueError("size")
        self.sizes[key] = size * _ITEM_BYTES[dtype]
        return dtype, key

    @staticmethod
    def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *others: Any) -> _TorchTensor:
        """Return a tensor; `others` are requires_grad, hooks and flags such as a conjugation."""
        dtype, key = storage
        numbers = (offset, *shape, *strides)
        if not isinstance(key, str) or len(shape) != len(strides):
            raise ValueError("storage")
        if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
            raise ValueError("layout")
        if any(others[2:]):
            raise _RefusedError("a conjugated or negated view")
        return _TorchTensor(dtype, key, offset, tuple(shape), tuple(strides))

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
