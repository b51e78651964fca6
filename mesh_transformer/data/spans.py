"""Spans of large text files, which are read apart from each other."""

import io
import re
from collections.abc import Iterator
from typing import IO, Any

from mesh_transformer.data.file_types import TEXT_TYPES, FileType

BLOCK = 1 << 16  # bytes per read in search of the end of a span
LINE_TYPES = (".jsonl", ".ndjson")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Span:
    """A range of a file's bytes, and counts of what was read of it.

    Args:
      start, end: the positions of the first byte, and after the last one.

    Attributes:
      documents: the number of documents that have ended, unusable ones included.
      lines: the number of line ends.
    """

    def __init__(self, start: int, end: int):
        self.start, self.size = start, end - start
        self.documents = self.lines = 0

    def reader(self, file: IO[bytes]) -> IO[bytes]:
        """Return a stream of the span's bytes, in which positions count from its start."""
        file.seek(self.start)
        return io.BufferedReader(_Window(file, self), BLOCK)

    def numbered(self, path: str) -> int:
        """Return how far the span advances the numbers in messages about the file at `path`."""
        return self.lines if path.lower().endswith(LINE_TYPES) else self.documents


class _Window(io.RawIOBase):
    def __init__(self, file: IO[bytes], span: Span):
        self._file, self._span, self._position = file, span, 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(min(len(buffer), self._span.size - self._position))
        buffer[: len(data)] = data
        self._position += len(data)
        self._span.lines += data.count(b"\n")
        return len(data)


def ends_of_spans(file: IO[bytes], path: str, separator: str, size: int) -> Iterator[int]:
    """Yield the ends of a file's spans, in order; the last one is the end of the file.

    No document extends beyond a span.  Files of some kinds are a single span.

    Args:
      separator: the text that separates documents.
      size: the number of bytes after which a span ends as soon as possible.
    """
    total = file.seek(0, io.SEEK_END)
    pattern, position = _pattern(path, separator), 0
    while pattern and position + size < total:
        position = _first_end(file, *pattern, position + size, total)
        yield position
    if position < total or not total:
        yield total


def _pattern(path: str, separator: str) -> tuple[re.Pattern[bytes], int] | None:
    """Return (pattern, maximum bytes of a match and of what it looks at) for the ends of spans.

    Returns None if they are unknown: if the file is compressed, or its rows are not lines; and if
    two separators may overlap, or the line ends in a separator may be written in several ways.
    """
    file_type = FileType.of(path)
    if file_type is None or file_type.compression:
        return None
    if file_type.kind in LINE_TYPES:
        return re.compile(b"\n"), 1
    overlaps = any(separator.endswith(separator[:end]) for end in range(1, len(separator)))
    if file_type.kind not in TEXT_TYPES or overlaps or set(separator) & set("\r\n"):
        return None
    mark = separator.encode()
    # A byte order mark is text, except at the beginning of a file, and so not of a span.
    pattern = re.compile(re.escape(mark) + b"(?!" + _BYTE_ORDER_MARK + b")")
    return pattern, len(mark) + len(_BYTE_ORDER_MARK)


def _first_end(
    file: IO[bytes], pattern: re.Pattern[bytes], width: int, start: int, total: int
) -> int:
    """Return the position after the first match at or after `start`, or the file's end."""
    file.seek(start)
    data = b""
    while block := file.read(BLOCK):
        data += block
        match = pattern.search(data)
        if match and (match.start() + width <= len(data)):
            return start + match.end()
        kept = data[-width:]  # what follows may decide whether it has a match
        start, data = start + len(data) - len(kept), kept
    return total
