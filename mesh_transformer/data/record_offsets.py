"""Where each record of a set begins, so that records can be read in any order.

The table is a file beside the index, NAME.offsets, which is mapped into memory.  It takes 2 bytes
per record, or 4 if one has 64 KiB or more, and 8 bytes per 64 records and per file.  All numbers
are little-endian:

* the header of 64 bytes: `MAGIC`, a digest of the names and sizes of the record files (32 bytes),
  the number of files and of records (8 bytes each), the bytes per length, and the CRC-32C of all
  that follows (4 bytes each);
* for each file, and for the end, the number of records before it, 8 bytes each;
* for each 64th record, its first byte in the concatenation of all files, 8 bytes each;
* the length of each record with its framing, 2 or 4 bytes each.
"""

import contextlib
import hashlib
import os
import shutil
import struct
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from tqdm import tqdm

from mesh_transformer.data.tfrecords import RecordFiles, find_index, frames, size
from mesh_transformer.storage import files
from mesh_transformer.storage.access import is_uri
from mesh_transformer.util import InputError, cache_folder

MAGIC = b"offsets1"
HEADER = struct.Struct("<8s32sQQII")
BLOCK = 64  # records; the first byte of one of them is stored
DTYPES = {2: "<u2", 4: "<u4"}  # of lengths
CHUNK_BYTES = 1 << 20  # read at once to verify the checksum


class Place(NamedTuple):
    """Where a record is.

    Attributes:
      file: the index of its file.
      number: its number in the file, from 0.
      offset: the first byte of its framing in the file.
      length: bytes with the framing.
    """

    file: int
    number: int
    offset: int
    length: int


class RecordOffsets:
    """The places of all records of a set, by their number in the index's order.

    Args:
      path: the path of the table, for error messages.
      sizes: the bytes of each record file.
      before: the number of records before each file, and of all records, int64 [files + 1].
      anchors: the first byte of each 64th record in the concatenation of all files, int64.
      lengths: the bytes of each record with its framing, uint16 or uint32.
    """

    def __init__(
        self,
        path: str,
        sizes: list[int],
        before: np.ndarray,
        anchors: np.ndarray,
        lengths: np.ndarray,
    ):
        self.path, self._before, self._anchors, self._lengths = path, before, anchors, lengths
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def record_bytes(self) -> float:
        """The mean number of bytes of a record."""
        return int(self._starts[-1]) / len(self)

    def places(self, numbers: np.ndarray) -> list[Place]:
        """Return the places of some records, given by their numbers in the set, int64."""
        file = np.searchsorted(self._before, numbers, side="right") - 1
        block, past = np.divmod(numbers, BLOCK)
        span = np.arange(BLOCK)
        at = np.minimum(block[:, None] * BLOCK + span, len(self) - 1)
        skipped = np.where(span < past[:, None], self._lengths[at], 0).sum(1, dtype=np.int64)
        offsets = self._anchors[block] + skipped - self._starts[file]
        columns = (file, numbers - self._before[file], offsets, self._lengths[numbers])
        return list(map(Place, *(column.tolist() for column in columns)))

    @classmethod
    def of(cls, records: RecordFiles, index_path: str, sizes: list[int]) -> "RecordOffsets":
        """Return the table of a record set; it is made if there is none that fits the files.

        It is then kept beside the index or, where that cannot be written, in the user's cache.  A
        table in a bucket is copied into the cache.

        Args:
          index_path: the value of `train_set` that means the set.
          sizes: the bytes of each record file.

        Raises:
          InputError: if the table has to be made, and a record file is damaged or compressed.
        """
        digest, beside = _digest(records, sizes), _file_of(index_path)
        key = hashlib.sha256(os.path.abspath(beside).encode() + digest).hexdigest()
        cached = str(cache_folder() / "offsets" / f"{key}.offsets")

        def kept() -> RecordOffsets | None:
            paths = [cached] if is_uri(beside) else [beside, cached]
            tables = (_load(path, digest, sizes) for path in paths)
            return next((table for table in tables if table is not None), None)

        if (table := kept()) is not None:
            return table
        is_remote = is_uri(beside) and files.is_file(beside)
        if is_remote and (table := _copy(beside, cached, digest, sizes)) is not None:
            return table
        table = _made(records, beside, sizes)
        for path in [beside, cached]:
            with contextlib.suppress(OSError, InputError):
                table.save(path, digest)
                if not is_uri(path):
                    break
        return kept() or table  # the mapped file takes less memory

    def save(self, path: str, digest: bytes) -> None:
        """Write the table to a file, which appears when it is complete.

        Raises:
          OSError, InputError: if the file, which may be in a bucket, cannot be written.
        """
        body = [array.tobytes() for array in (self._before, self._anchors, self._lengths)]
        sizes = (len(self._before) - 1, len(self), self._lengths.itemsize)
        header = HEADER.pack(MAGIC, digest, *sizes, _checksum(body))
        folder, name = os.path.split(path)
        with files.output_folder(folder or ".") as local, _draft(local / name) as file:
            file.writelines([header, *body])


def write_offsets(index_path: str, entries: list[str]) -> None:
    """Write the table of a new record set beside its index, which may not exist yet.

    Args:
      index_path: the local path of the index.
      entries: the names of the record files, which are in the folder of the index.
    """
    folder = os.path.dirname(index_path)
    paths = [os.path.join(folder, name) for name in entries]
    records = RecordFiles(f"index {index_path}", entries, paths)
    sizes = [size(records.source, path) for path in paths]
    path = _file_of(index_path)
    _made(records, path, sizes).save(path, _digest(records, sizes))


def _file_of(index_path: str) -> str:
    """Return the path of the table of a record set."""
    return f"{find_index(index_path).rstrip('/').removesuffix('.index')}.offsets"


def _digest(records: RecordFiles, sizes: list[int]) -> bytes:
    """Return a digest of the names and sizes of the record files, 32 bytes."""
    return hashlib.sha256(repr((records.entries, sizes)).encode()).digest()


def _made(records: RecordFiles, path: str, sizes: list[int]) -> RecordOffsets:
    """Return the table of record files, which are read completely.

    Args:
      path: the path of the table, for its error messages.
    """
    lengths, before = array("I"), [0]
    name = os.path.basename(path).removesuffix(".offsets")
    with (
        tqdm(
            desc=f"finding records of {name}",
            total=sum(sizes),
            unit="B",
            unit_scale=True,
            leave=False,
        ) as bar,
        files.OpenAhead(records.paths, sizes) as ahead,
    ):
        for file, length in zip(records.paths, sizes, strict=True):
            start = 0
            for _, end in frames(file, 0, ahead.next):
                lengths.append(end - start)
                bar.update(end - start)
                start = end
            if start != length:
                raise InputError(
                    f"{file} is compressed, so its records cannot be read in the order of "
                    "shuffle_buffer all; decompress it, or set shuffle_buffer to a number"
                )
            before.append(len(lengths))
    all_lengths = np.frombuffer(lengths, np.uint32)
    if all_lengths.max() < 1 << 16:
        all_lengths = all_lengths.astype(np.uint16)
    blocks = np.add.reduceat(all_lengths, np.arange(0, len(lengths), BLOCK), dtype=np.int64)
    anchors = np.cumsum(blocks) - blocks
    return RecordOffsets(path, sizes, np.array(before, np.int64), anchors, all_lengths)


def _load(path: str, digest: bytes, sizes: list[int]) -> RecordOffsets | None:
    """Return the table in a local file; None if there is none that fits."""
    try:
        content = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError):  # ValueError: empty
        return None
    return _parsed(content, path, digest, sizes)


def _copy(path: str, cached: str, digest: bytes, sizes: list[int]) -> RecordOffsets | None:
    """Return a table in a bucket, which is copied into the cache if it can be written."""
    with files.open_file(path, in_order=True) as source:
        try:
            with _draft(Path(cached)) as file:
                shutil.copyfileobj(source, file, CHUNK_BYTES)
        except OSError:
            source.seek(0)
            return _parsed(np.frombuffer(source.read(), np.uint8), path, digest, sizes)
    return _load(cached, digest, sizes)


def _parsed(
    content: np.ndarray, path: str, digest: bytes, sizes: list[int]
) -> RecordOffsets | None:
    """Return the table in the bytes of a file; None if they are damaged or another set's."""
    if len(content) < HEADER.size:
        return None
    magic, saved, count, records, width, checksum = HEADER.unpack(content[: HEADER.size].tobytes())
    if (magic, saved, count) != (MAGIC, digest, len(sizes)) or width not in DTYPES:
        return None
    body, anchors = content[HEADER.size :], -(-records // BLOCK)
    ends = (8 * (count + 1), 8 * (count + 1 + anchors))
    chunks = (body[at : at + CHUNK_BYTES].tobytes() for at in range(0, len(body), CHUNK_BYTES))
    if len(body) != ends[1] + width * records or _checksum(chunks) != checksum:
        return None
    before, first, lengths = np.split(body, ends)
    return RecordOffsets(
        path, sizes, before.view("<i8"), first.view("<i8"), lengths.view(DTYPES[width])
    )


def _checksum(parts: Iterable[bytes]) -> int:
    import google_crc32c

    checksum = 0
    for part in parts:
        checksum = google_crc32c.extend(checksum, part)
    return checksum


@contextlib.contextmanager
def _draft(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to write, which appears at `path` at the end of the block.

    Several processes may write the same file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            yield file
        os.chmod(draft, 0o644)  # the default lets no other user read it
        os.replace(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)
