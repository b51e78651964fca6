"""Reads and writes TFRecord files, local or on gs://, and the indexes that list them.

TensorFlow, whose import takes seconds, is used only for URIs.  The record framing (length and
checksums) is parsed here, so that a reader can start at any record and report the byte at which a
file is damaged.
"""

import contextlib
import functools
import io
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from mesh_transformer.storage import files
from mesh_transformer.storage.access import (
    AnyPath,
    check_bucket,
    is_missing,
    is_storage_error,
    is_uri,
    reason,
    replace_errors,
    tensorflow,
)
from mesh_transformer.storage.remote_file import Range
from mesh_transformer.util import InputError

HEADER_BYTES = 12  # the payload's length (uint64) and the checksum of the length
FOOTER_BYTES = 4  # the checksum of the payload
RECORD_TYPES = (".tfrecords", ".tfrecord")  # endings of the record files in a folder
LONGEST_PATH = 4096  # characters
CHUNK_BYTES = 1 << 20  # read from compressed files at once
UNCHECKED_BYTES = 1 << 24  # for shorter records, the file's size is not queried before reading


class RecordFiles(NamedTuple):
    """The record files that an index lists, or those in a folder without an index.

    Attributes:
      source: "index" or "folder", followed by its path; for error messages.
      entries: the lines of the index, or the names of the files in the folder.
      paths: the path of each file.
    """

    source: str
    entries: list[str]
    paths: list[str]

    @classmethod
    def of(cls, path: str) -> "RecordFiles":
        """Return the record files that `path`, a value of `train_set` or `val_set`, stands for.

        Raises:
          InputError: see `find_index` and `read_index`.
        """
        path = find_index(path)
        if (names := _names(path, RECORD_TYPES)) is not None:
            return cls(f"folder {path}", names, [os.path.join(path, name) for name in names])
        entries = read_index(path)
        return cls(f"index {path}", entries, [_resolve(entry, path) for entry in entries])


def find_index(path: str) -> str:
    """Return the path of the index or folder of records that a config means by `path`.

    If only data/`path` exists, that is meant.  This supports configs of the original
    mesh-transformer-jax, whose paths are relative to `data/`.  A folder with an index means that
    index.

    Raises:
      InputError: if the path is a folder with several indexes, or with neither an index nor record
        files.
    """
    in_data = os.path.join("data", path)
    missing = "://" not in path and not os.path.exists(path)
    path = in_data if missing and os.path.exists(in_data) else path
    indexes = _names(path, (".index",))
    if indexes is None:
        return path
    if len(indexes) > 1:
        raise InputError(
            f"folder {path} has the indexes {', '.join(indexes)}; name one of them, such as "
            f"{os.path.join(path, indexes[0])}"
        )
    if not indexes and not _names(path, RECORD_TYPES):
        raise InputError(
            f"folder {path} has neither an index nor {' or '.join(RECORD_TYPES)} files; name a "
            "folder or index that `mesh-transformer records` has written"
        )
    return os.path.join(path, indexes[0]) if indexes else path


def _names(path: str, types: tuple[str, ...]) -> list[str] | None:
    """Return the names in a folder that end in one of `types`, sorted, without hidden ones.

    Returns None if `path` is not a folder.
    """
    check_bucket(path)
    with _convert_errors(lambda error: f"folder {path}: {reason(error)}"):
        if is_uri(path):
            gfile = tensorflow().io.gfile
            names = gfile.listdir(path) if gfile.isdir(path) else None
        else:
            names = os.listdir(path) if os.path.isdir(path) else None
    if names is None:
        return None
    return [name for name in sorted(names) if name.endswith(types) and name[0] != "."]


def _convert_errors(
    line: Callable[[Exception], str],
) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that replaces storage errors by InputErrors of one `line`."""
    return replace_errors(
        lambda error: InputError(line(error)) if is_storage_error(error) else error
    )


def read_index(index_path: str) -> list[str]:
    """Return the entries of an index: the lines that name record files, without blank lines.

    Raises:
      InputError: if the index or its bucket is missing or cannot be reached, or if the index is
        empty or not a list of files.
    """
    check_bucket(index_path)

    def line(error: Exception) -> str:
        if not is_missing(error):
            return f"index {index_path}: {reason(error)}"
        return (
            f"index {index_path}: no such file; set train_set or val_set to an index that "
            "`mesh-transformer records` has written (the indexes of the shipped configs are in the "
            "repository's data/)"
        )

    with _convert_errors(line), files.open_file(index_path) as file:
        content = file.read()
    try:
        if b"\0" in content:
            raise ValueError("a file with null bytes is not text")
        lines = content.decode("utf-8-sig").splitlines()
    except ValueError as error:  # or not UTF-8
        raise InputError(
            f"index {index_path}: not text; an index lists .tfrecords files, one per line, such as "
            "NAME.index of `mesh-transformer records`"
        ) from error
    entries = [line.strip() for line in lines if line.strip()]
    longest = max(map(len, entries), default=0)
    if longest > LONGEST_PATH:
        raise InputError(
            f"index {index_path} has a line of {longest} characters; list .tfrecords files, one "
            "per line"
        )
    if not entries:
        raise InputError(f"index {index_path} is empty; list .tfrecords files, one per line")
    return entries


def check_set_name(name: str) -> None:
    """Raise InputError if an index could not list record files of this name, one per line."""
    last = os.path.basename(name)
    if last.splitlines() != [last] or last != last.strip():
        raise InputError(
            f"the name of the record set is {name!r}, expected one line that neither begins nor "
            "ends with a space; give another NAME"
        )


def _resolve(entry: str, index_path: str) -> str:
    """Return the path of the record file that an entry (line) of an index names.

    A relative path is resolved against the folder of the index, beside which `records` writes,
    or, if the file exists only there, against the working directory.
    """
    if "://" in entry or os.path.isabs(entry):
        return entry
    beside = os.path.join(os.path.dirname(index_path), entry)
    is_beside = "/" not in entry if is_uri(index_path) else os.path.exists(beside)
    return entry if os.path.exists(entry) and not is_beside else beside


def size(source: str, path: str) -> int:
    """Return the size in bytes of a record file.

    Args:
      source: the index or folder of the file, as in `RecordFiles`; for error messages.

    Raises:
      InputError: if the file is missing, empty or a folder.
    """
    check_bucket(path)

    def line(error: Exception) -> str:
        problem = "no such file" if is_missing(error) else reason(error)
        return f"{path}: {problem}; {source} lists this file"

    with _convert_errors(line):
        length = _length(path)
    if not length:
        problem = "empty" if length == 0 else "a folder"
        raise InputError(
            f"{path} is {problem}, expected records; recreate it, or remove it from {source}"
        )
    return length


def _length(path: str) -> int | None:
    """Return a file's length in bytes; None for a folder."""
    if is_uri(path):
        status = tensorflow().io.gfile.stat(path)
        return None if status.is_directory else status.length
    return None if os.path.isdir(path) else os.path.getsize(path)


def frames(
    path: str, offset: int, opening: Callable[[], IO[bytes]] | None = None
) -> Iterator[tuple[bytes, int]]:
    """Yield (payload, offset of the record's end) for each record of a TFRecord file.

    The file may be compressed (ZLIB or GZIP); offsets then count decompressed bytes.

    Args:
      offset: the byte at which to start; a record must start there.
      opening: opens the file; by default, only its path is needed.

    Raises:
      InputError: if a record is truncated or corrupt; the message says at which byte it starts.
    """
    with (
        _convert_errors(lambda error: f"{path}: {reason(error)} (record at byte {offset})"),
        opening() if opening else files.open_file(path) as opened,
    ):
        file, is_whole = opened, True
        if _is_compressed(opened.read(HEADER_BYTES)):
            opened.seek(0)
            file, is_whole = io.BufferedReader(_Decompressed(opened, path)), False
            _skip(file, offset, path)
        else:
            file.seek(offset)
        while header := file.read(HEADER_BYTES):
            length = _unframe(header, 8, path, offset)
            (count,) = struct.unpack("<Q", length)
            # `read` allocates all `count` bytes first; TensorFlow crashes if memory is too small.
            checked = is_whole and count >= UNCHECKED_BYTES
            has_room = not checked or offset + count < (_length(path) or 0)
            framed = file.read(count + FOOTER_BYTES) if has_room else b""
            payload = _unframe(framed, count, path, offset)
            offset += HEADER_BYTES + count + FOOTER_BYTES
            yield payload, offset


class Frame:
    """A record that is read when its payload is asked for.

    Args:
      path: the record file, which is not compressed.
      offset, length: the first byte of the record's framing, and its bytes.
      table: the path of the file that names this place, for error messages.
    """

    def __init__(self, path: str, offset: int, length: int, table: str):
        self._path, self._offset, self._length, self._table = path, offset, length, table
        self._range: Range | None = None

    def request(self) -> None:
        """Begin to read a record that is in a bucket."""
        if is_uri(self._path) and self._range is None:
            check_bucket(self._path)
            self._range = Range(self._path, self._offset, self._offset + self._length)

    def payload(self) -> bytes:
        """Return the payload when it has arrived.

        Raises:
          InputError: if it cannot be read, or there is no such record.
        """
        self.request()
        if self._range is not None:
            framed = self._range.content()
        else:
            with (
                _convert_errors(lambda error: f"{self._path}: {reason(error)}"),
                open(self._path, "rb", buffering=0) as file,
            ):
                framed = os.pread(file.fileno(), self._length, self._offset)
        count = self._length - HEADER_BYTES - FOOTER_BYTES
        header = struct.pack("<Q", count)
        if framed[:HEADER_BYTES] != header + struct.pack("<I", _masked_checksum(header)):
            raise InputError(
                f"{self._path}: no record of {count} bytes at byte {self._offset}, as the table "
                f"{self._table} says; delete the table or, if a new one is no better, recreate the "
                "records"
            )
        return _unframe(framed[HEADER_BYTES:], count, self._path, self._offset)


def is_compressed(path: str) -> bool:
    """Return whether a TFRecord file is compressed, judging by its content, not by its name."""
    with files.open_file(path) as file:
        return _is_compressed(file.read(HEADER_BYTES))


def _is_compressed(header: bytes) -> bool:
    """Return whether the first bytes of a file are those of a zlib (RFC 1950) or gzip stream."""
    is_zlib = len(header) > 1 and header[0] == 0x78 and int.from_bytes(header[:2], "big") % 31 == 0
    if not is_zlib and header[:2] != b"\x1f\x8b":
        return False
    # An uncompressed file begins with the length of its first record.  The length could have the
    # same bytes by chance, but then it is followed by its checksum.
    checksum = int.from_bytes(header[8:], "little")
    return len(header) < HEADER_BYTES or checksum != _masked_checksum(header[:8])


class _Decompressed(io.RawIOBase):
    """The decompressed content of an open zlib or gzip file, readable from start to end."""

    def __init__(self, file: Any, path: str):
        self._file, self._path = file, path
        self._stream = _decompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            rest = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail
            compressed = rest or self._file.read(CHUNK_BYTES)
            if self._stream.eof:
                if not compressed:
                    return 0
                self._stream = _decompressor()  # another stream follows
            try:
                data = self._stream.decompress(compressed, len(buffer))
            except zlib.error:
                raise InputError(
                    f"{self._path}: corrupt compressed data; copy the file again or recreate it"
                ) from None
            if not compressed and not data:
                raise InputError(
                    f"{self._path}: truncated compressed data; copy the file again or recreate it"
                )
        buffer[: len(data)] = data
        return len(data)


def _decompressor() -> Any:
    return zlib.decompressobj(zlib.MAX_WBITS | 32)  # zlib or gzip, from the header


def _skip(file: IO[bytes], count: int, path: str) -> None:
    """Read and discard the next `count` bytes of a file."""
    while count:
        skipped = len(file.read(min(count, CHUNK_BYTES)))
        if not skipped:
            raise InputError(
                f"{path} ends {count} bytes before the checkpoint's data position; restore the "
                "file's earlier content"
            )
        count -= skipped


def _unframe(framed: bytes, count: int, path: str, offset: int) -> bytes:
    """Verify the checksum that follows the first `count` bytes of `framed`, and return these bytes.

    Raises:
      InputError: if bytes are missing or the checksum is wrong.
    """
    if len(framed) < count + FOOTER_BYTES:
        raise InputError(
            f"{path}: truncated in the record at byte {offset}; copy the file again or recreate it"
        )
    data = framed[:count]
    if struct.unpack("<I", framed[count:])[0] != _masked_checksum(data):
        raise InputError(
            f"{path}: corrupt record at byte {offset} (wrong checksum); copy the file again or "
            "recreate it"
        )
    return data


def _masked_checksum(data: bytes) -> int:
    """Compute TFRecord's checksum: CRC-32C, rotated right by 15 bits, plus a constant."""
    import google_crc32c

    checksum = google_crc32c.value(data)
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def features(payload: bytes, where: str) -> dict[str, np.ndarray | None]:
    """Parse a serialised tf.train.Example and return its features by name.

    Each value is an int64 or float32 array [n], or None if the feature has another type.

    Raises:
      InputError: if the payload is not an Example; the message starts with the location `where`.
    """
    from google.protobuf.message import DecodeError

    try:
        parsed = _example().FromString(payload).features.feature
    except DecodeError as error:
        raise InputError(f"{where} is not a tf.train.Example; recreate the records") from error
    result: dict[str, np.ndarray | None] = {}
    for name, feature in parsed.items():
        kind = feature.WhichOneof("kind")
        dtype = _DTYPES.get(kind)
        result[name] = None if dtype is None else np.array(getattr(feature, kind).value, dtype)
    return result


_DTYPES = {"int64_list": np.int64, "float_list": np.float32}


# TensorFlow's `tf.train.Example`, as a description of a file of protobuf's.
_EXAMPLE = """
name: "example" package: "mesh_transformer" syntax: "proto3"
message_type {name: "bytes" field {name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES}}
message_type {name: "float" field {name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT}}
message_type {name: "int64" field {name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64}}
message_type {
  name: "Feature"
  oneof_decl {name: "kind"}
  field {name: "bytes_list" number: 1 type_name: "bytes" oneof_index: 0}
  field {name: "float_list" number: 2 type_name: "float" oneof_index: 0}
  field {name: "int64_list" number: 3 type_name: "int64" oneof_index: 0}
}
message_type {
  name: "Features"
  field {name: "feature" number: 1 label: LABEL_REPEATED type_name: "FeatureEntry"}
  nested_type {
    name: "FeatureEntry"
    options {map_entry: true}
    field {name: "key" number: 1 type: TYPE_STRING}
    field {name: "value" number: 2 type_name: "Feature"}
  }
}
message_type {name: "Example" field {name: "features" number: 1 type_name: "Features"}}
"""


@functools.cache
def message_class(description: str, name: str) -> Any:
    """Return the protobuf class of a message.

    Args:
      description: the text of the FileDescriptorProto that describes it.
      name: its full name.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(description, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def _example() -> Any:
    """Return the protobuf class of `tf.train.Example`, without TensorFlow."""
    return message_class(_EXAMPLE, "mesh_transformer.Example")


def write_records(path: str, records: Iterable[np.ndarray | Mapping[str, np.ndarray]]) -> int:
    """Write features to a TFRecord file, which appears at `path` only when it is complete.

    Args:
      path: a local path.
      records: one item per record.  An item is a mapping from feature names to arrays, or a single
        array, which is written as the feature `text`.

    Returns:
      The number of records.

    Raises:
      InputError: if the file cannot be written.
    """
    partial, count = f"{path}.partial", 0

    def line(error: Exception) -> str:
        return f"{path} cannot be written ({reason(error)}); check the disk and its permissions"

    try:
        with _convert_errors(line):
            with open(partial, "wb") as file:
                for count, record in enumerate(records, 1):  # noqa: B007
                    file.write(framed(_payload(record)))
            os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)
    return count


def write_set(
    folder: AnyPath,
    name: str,
    records: Iterable[np.ndarray | Mapping[str, np.ndarray]],
    write_table: Callable[[str, list[str]], None] | None = None,
) -> tuple[str, str, int]:
    """Write a record set: NAME_<number of records>.tfrecords, and NAME.index, which lists it.

    Both files appear only when they are complete.  The folder is created if it does not exist.

    Args:
      name: NAME, which may begin with a subfolder.
      records: see `write_records`.
      write_table: writes a file that belongs to the set, from the local path of the index, which is
        not written yet, and the names that it will list; such as `record_offsets.write_offsets`.

    Returns:
      The path of the record file, the path of the index (for the config key `train_set` or
      `val_set`), and the number of records.

    Raises:
      InputError: if the name has line ends, or a file cannot be written.
    """
    check_set_name(name)
    folder, index = os.fspath(folder), f"{name}.index"
    try:
        with files.output_folder(folder) as local:
            (local / name).parent.mkdir(parents=True, exist_ok=True)
            draft = (local / name).with_name(f".{os.path.basename(name)}.tfrecords")
            count = write_records(str(draft), records)
            written = f"{name}_{count}.tfrecords"
            os.replace(draft, local / written)
            if write_table is not None:
                write_table(str(local / index), [os.path.basename(written)])
            files.write_text(str(local / index), f"{os.path.basename(written)}\n")
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written ({error.strerror or error}); check the disk "
            "and its permissions"
        ) from error
    return os.path.join(folder, written), os.path.join(folder, index), count


def _payload(record: np.ndarray | Mapping[str, np.ndarray]) -> bytes:
    """Serialise a record (see `write_records`) as a tf.train.Example."""
    example = _example()()
    for name, values in (record if isinstance(record, Mapping) else {"text": record}).items():
        feature, array = example.features.feature[name], np.asarray(values)
        numbers = feature.float_list if array.dtype.kind == "f" else feature.int64_list
        numbers.SetInParent()
        numbers.value.extend(array.tolist())
    return example.SerializeToString(deterministic=True)


def framed(payload: bytes) -> bytes:
    """Return a payload as TFRecord files store it: length, its checksum, payload, its checksum."""
    length = struct.pack("<Q", len(payload))
    parts = (length, payload)
    return b"".join(part + struct.pack("<I", _masked_checksum(part)) for part in parts)
