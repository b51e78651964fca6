"""Opens what files contain: decompresses them, and reads the members of archives."""

import gzip
import io
import lzma
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from tarfile import EOFHeaderError, HeaderError, ReadError  # type: ignore[attr-defined]
from typing import IO, Any, NamedTuple

from mesh_transformer.data.file_types import (
    FILE_TYPES,
    WHOLE_TABLES,
    FileType,
    format_types,
    is_hidden,
)
from mesh_transformer.data.inputs import BadInputError, BadInputHandler, DamagedError

# Compressed bytes per read.  The value is small because even so few bytes can decompress to 500 MB.
COMPRESSED_BYTES = 1 << 14
BUFFER = 1 << 17
LARGEST_WINDOW = 1 << 31  # bytes that `zstd --long=31` looks back; zstandard allows 128 MiB


class Content(NamedTuple):
    """A text or a table: a file, or a member of an archive.

    Attributes:
      where: the file and the member, for error messages.
      kind: .txt, or one of `TABLE_TYPES`.
      stream: the content, decompressed.
    """

    where: str
    kind: str
    stream: IO[bytes]


def contents(raw: IO[bytes], path: str, bad: BadInputHandler) -> Iterator[Content]:
    """Yield the texts and tables in a file.

    Each must be read before the next one is requested.  Reading raises one of
    `inputs.DAMAGE_ERRORS` if compressed data or an archive is damaged or cut short.

    Args:
      raw: the open file.
      path: the path of the file, whose type is known (see `FileType.of`).
      bad: called for each member of an archive whose type is unknown.
    """
    file_type = FileType.of(path)
    assert file_type is not None, path
    yield from _contents(raw, path, file_type, bad)


def _contents(
    raw: IO[bytes], where: str, file_type: FileType, bad: BadInputHandler
) -> Iterator[Content]:
    kind, stream = file_type.kind, _decompressed(raw, file_type.compression)
    if kind == ".xz":
        is_archive = stream.peek(tarfile.BLOCKSIZE)[257:262] == b"ustar"  # type: ignore[attr-defined]
        kind = ".tar" if is_archive else ".txt"
    if kind == ".tar":
        yield from _members(stream, where, bad)
    else:
        yield Content(where, kind, stream)


def _decompressed(raw: IO[bytes], compression: str) -> IO[bytes]:
    if compression == ".zst":
        return io.BufferedReader(ZstandardReader(raw), BUFFER)
    if compression == ".xz":
        return io.BufferedReader(lzma.LZMAFile(raw), BUFFER)  # type: ignore[arg-type]
    if compression == ".gz":
        if not raw.peek(1):  # type: ignore[attr-defined]
            raise EOFError("the file is empty")
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    return raw


class _Header(tarfile.TarInfo):
    """The header of a member; unlike tarfile's own, a damaged one does not end the archive."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> "_Header":
        try:
            return super().fromtarfile(tarfile)
        except EOFHeaderError:
            raise
        except HeaderError as error:
            raise ReadError(f"{error} at byte {tarfile.offset} of the archive") from error


class _Member(io.RawIOBase):
    """A member of an archive; unlike tarfile's own object, it says that it cannot be sought in."""

    def __init__(self, file: Any):
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _members(stream: IO[bytes], where: str, bad: BadInputHandler) -> Iterator[Content]:
    """Yield the contents of an archive's members, except of hidden ones."""
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as archive:
        for member in archive:
            if not member.isreg() or is_hidden(member.name):
                continue
            file = io.BufferedReader(_Member(archive.extractfile(member)), BUFFER)
            place, file_type = f"{where}: {member.name}", FileType.of(member.name)
            if file_type is None:
                expected = f"expected names ending in {format_types(FILE_TYPES)}"
                message = f"{place} is of an unknown type, {expected}; leave it out of the archive"
                bad(BadInputError("unknown type", message))
            elif file_type.kind in WHOLE_TABLES:
                with tempfile.TemporaryFile() as copy:
                    shutil.copyfileobj(file, copy)
                    copy.seek(0)
                    yield Content(place, file_type.kind, copy)
            else:
                yield from _contents(file, place, file_type, bad)
    # Read to the end of the stream, because only there does the decompressor verify its checksums.
    while stream.read(tarfile.RECORDSIZE):
        pass


class ZstandardReader(io.RawIOBase):
    """A stream of the decompressed contents of zstandard frames.

    Reading raises DamagedError for damaged frames, if the last frame is incomplete, and if the
    input has no frames.
    """

    def __init__(self, raw: IO[bytes]):
        import zstandard  # imported late, as an installation may lack it

        self._zstandard = zstandard
        self._raw = raw
        self._frame: Any = None  # the decompressor of a frame that is only partly read
        self._compressed, self._contents = b"", memoryview(b"")
        self._is_empty = True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._contents:
            self._compressed = self._compressed or self._raw.read(COMPRESSED_BYTES)
            if not self._compressed:
                if self._frame is not None or self._is_empty:
                    raise DamagedError("the last frame is incomplete or missing")
                return 0
            self._is_empty = False
            self._frame = (
                self._frame
                or self._zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj()
            )
            try:
                self._contents = memoryview(self._frame.decompress(self._compressed))
            except self._zstandard.ZstdError as error:
                raise DamagedError(str(error)) from error
            self._compressed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._contents))
        buffer[:count] = self._contents[:count]
        self._contents = self._contents[count:]
        return count
