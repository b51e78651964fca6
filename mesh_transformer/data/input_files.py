"""Files of text as their readers get them: found, opened, decompressed, in lines; what is bad.

Beside create_finetune_tfrecords.py and create_completion_tfrecords.py, its users.
"""

import collections
import contextlib
import gzip
import io
import json
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

import zstandard
from tqdm import tqdm

from mesh_transformer.util import InputError

DAMAGE = (
    EOFError,
    gzip.BadGzipFile,
    lzma.LZMAError,
    tarfile.TarError,
    zlib.error,
    zstandard.ZstdError,
)
COMPRESSED_BYTES = 1 << 14  # read at once: a frame of nothing but zeros becomes 500 MB of them
LONGEST_LINE = 1 << 27  # bytes; so much of a file without line ends is held, not all of it
SHOWN = 20  # what was left out is told so many times, then only counted


class BadInputError(InputError):
    """A document, a line or the rest of a file cannot be used; the others can.

    Attributes:
      reason: few words, under which such things are counted.
    """

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class Bad:
    """What becomes of bad input: an error, or, where it is to be skipped, a count by reason."""

    def __init__(self, skip: bool):
        self.skip = skip
        self.counts: collections.Counter[str] = collections.Counter()

    def __call__(self, error: BadInputError) -> None:
        if not self.skip:
            raise InputError(f"{error}; mend it, or leave out what is bad with --skip-bad")
        if self.count < SHOWN:
            tqdm.write(f"left out: {error}")
        self.counts[error.reason] += 1

    @property
    def count(self) -> int:
        return self.counts.total()


def told(counts: dict[str, int]) -> str:
    """Counts by reason in words, the most first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {reason}" for reason, count in ordered)


def find_files(path: str, types: tuple[str, ...]) -> list[str]:
    """The file itself, or a folder's files of the known types in order of name (not deeper)."""
    if os.path.isfile(path):
        names = [path]
    elif os.path.isdir(path):
        names = sorted(str(entry) for entry in Path(path).iterdir() if entry.is_file())
    else:
        raise InputError(f"{path}: no such file or folder")
    found = [name for name in names if name.endswith(types)]
    if not found:
        raise InputError(f"{path}: no text found, expected files ending in {', '.join(types)}")
    return found


@contextlib.contextmanager
def opened(path: str, bad: Bad) -> Iterator[BinaryIO]:
    """The file's bytes; where they prove damaged, the block ends there and `bad` is told."""
    try:
        with open(path, "rb") as raw:
            yield raw
    except DAMAGE as error:
        bad(BadInputError("damaged", f"{path}: damaged or cut short: {error}"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}") from error


class ZstandardReader(io.RawIOBase):
    """The contents of zstandard frames; unlike the package's own, it sees that the last is cut."""

    def __init__(self, raw: IO[bytes]):
        self._raw = raw
        self._frame: Any = None  # the one begun, of which more must come
        self._compressed, self._contents = b"", memoryview(b"")
        self._is_empty = True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._contents:
            self._compressed = self._compressed or self._raw.read(COMPRESSED_BYTES)
            if not self._compressed:
                if self._frame is not None or self._is_empty:
                    raise zstandard.ZstdError("it ends before its last frame does")
                return 0
            self._is_empty = False
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._contents = memoryview(self._frame.decompress(self._compressed))
            self._compressed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._contents))
        buffer[:count] = self._contents[:count]
        self._contents = self._contents[count:]
        return count


def json_lines(raw: BinaryIO, path: str, bad: Bad) -> Iterator[tuple[str, Any]]:
    """What each line of a .jsonl or .jsonl.zst says, blank ones left out, and the line's name."""
    stream: IO[bytes] = raw
    if path.endswith(".zst"):
        stream = io.BufferedReader(ZstandardReader(raw), 1 << 17)
    number = 0
    while line := stream.readline(LONGEST_LINE):
        number += 1
        where = f"{path}: line {number}"
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = stream.readline(LONGEST_LINE)
            bad(BadInputError("over-long", f"{where} has {LONGEST_LINE} bytes or more"))
        elif line.strip():
            try:
                yield where, json_value(line, where)
            except BadInputError as error:
                bad(error)


def json_value(line: bytes, where: str) -> Any:
    """What a line of JSON says; BadInputError naming it where it is none."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise not_utf8(where, error.object[error.start : error.end]) from error
    except RecursionError as error:
        raise BadInputError("not JSON", f"{where} is not JSON (nested too deep)") from error
    except ValueError as error:  # a number of too many digits is one, too
        message = f"{where} is not JSON ({str(error).partition(':')[0]}); is the file cut short?"
        raise BadInputError("not JSON", message) from error


def not_utf8(where: str, found: bytes) -> BadInputError:
    return BadInputError("not UTF-8", f"{where} holds the bytes {found!r}, expected UTF-8 text")


def whole_characters(text: str) -> str:
    """The text with `?` for halves of surrogate pairs: JSON has them, no encoding does."""
    return text.encode(errors="replace").decode()
