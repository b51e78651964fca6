"""Files in a bucket, whose bytes are requested before they are needed."""

import functools
import io
import os
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mesh_transformer.storage.access import reason
from mesh_transformer.util import InputError

if TYPE_CHECKING:
    import tensorstore

# The initial and the maximum number of bytes of a request.  The number doubles with each request as
# long as the file is read in order.
READ_AHEAD = (1 << 16, 1 << 23)
# The maximum number of bytes that are requested before they are needed, and not more than have been
# read in order.  With answers that begin after 50 ms, this limits the speed to 640 MB/s.
IN_FLIGHT = 1 << 25
PART = 1 << 24  # longer reads are split into parts of this size, requested at the same time
REQUESTS = 256  # the maximum number of requests that a bucket answers at the same time


class RemoteFile(io.RawIOBase):
    """A file in a bucket, opened for reading; each request fetches a range of the file's bytes.

    Args:
      size: the file's size in bytes.
      version: a value that changes when the file changes, such as its modification time.
      in_order: whether all of the file will be read from its start, so that its first `IN_FLIGHT`
        bytes are requested at once.
    """

    def __init__(self, path: str, size: int, version: Any, *, in_order: bool = False):
        self._path, self._size, self._version = path, size, version
        self._position = 0
        self._buffer, self._start = b"", 0  # bytes read ahead, and the position of the first
        # The requested ranges that follow each other and are not in the buffer yet.
        self._requested: deque[Range] = deque()
        # The bytes of a request, and those that have been read in order after a first request.
        self._ahead, self._in_order = READ_AHEAD[0], 0
        # Formats such as .npz have their table of contents at the end, which is read at each open.
        self._tail = size if in_order else max(0, size - READ_AHEAD[0])
        if in_order:
            self._ahead, self._in_order = READ_AHEAD[1], IN_FLIGHT
            self._request(0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if origin + offset < 0:
            raise ValueError(f"{self._path}: negative position {origin + offset}")
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read bytes until `buffer` is full or the file ends; return the number of bytes read."""
        target = memoryview(buffer).cast("B")
        target = target[: max(0, self._size - self._position)]
        done = 0
        while done < len(target):
            held = self._held()
            if not held:
                left = len(target) - done
                if left >= self._ahead and not self._is_requested():
                    Range(self._path, self._position, self._position + left).read(target[done:])
                    self._position += left
                    return len(target)
                self._read_ahead()
                continue
            count = min(len(held), len(target) - done)
            target[done : done + count] = held[:count]
            self._position += count
            done += count
        return done

    def _held(self) -> memoryview:
        """Return the buffered bytes from the current position on; empty if there are none."""
        offset = self._position - self._start
        return memoryview(self._buffer)[offset:] if offset >= 0 else memoryview(b"")

    def _is_requested(self) -> bool:
        return bool(self._requested) and self._requested[0].start == self._position

    def _read_ahead(self) -> None:
        if self._position >= self._tail:
            self._buffer = _read_tail(self._path, self._tail, self._size, self._version)
            self._start = self._tail
            return
        follows = bool(self._buffer) and self._position == self._start + len(self._buffer)
        if follows:
            self._ahead = min(2 * self._ahead, READ_AHEAD[1])
        elif not self._is_requested():
            self._ahead, self._in_order = READ_AHEAD[0], 0
        if not self._is_requested():
            self._requested.clear()
            self._request(self._position)
        arrived = self._requested.popleft()
        self._start, self._buffer = arrived.start, arrived.content()
        self._in_order += len(self._buffer) * follows
        self._request(self._requested[-1].end if self._requested else arrived.end, least=0)

    def _request(self, start: int, least: int = 1) -> None:
        """Request further ranges from `start` on, at least `least` of them."""
        flying = sum(one.end - one.start for one in self._requested)
        most = min(self._in_order, IN_FLIGHT)
        while start < self._tail and (len(self._requested) < least or flying + self._ahead <= most):
            end = min(start + self._ahead, self._tail)
            self._requested.append(Range(self._path, start, end))
            flying += end - start
            start = end


@functools.lru_cache(maxsize=1024)
def _read_tail(path: str, start: int, end: int, version: Any) -> bytes:
    """Return the last bytes of a file in a bucket, from a cache if they were read before.

    Args:
      version: a value that changes when the file changes, so that a changed file is read again.
    """
    return Range(path, start, end).content()


class Range:
    """Bytes of a file in a bucket, which are requested at construction.

    Args:
      start, end: the first byte, and the one after the last.
    """

    def __init__(self, path: str, start: int, end: int):
        self.path, self.start, self.end = path, start, end
        folder, name = os.path.split(path)
        self._spans = [(at, min(at + PART, end)) for at in range(start, end, PART)]
        self._parts = [_store(folder).read(name, byte_range=slice(*span)) for span in self._spans]

    def content(self) -> bytes:
        """Return the bytes when they have arrived; for the errors, see `read`."""
        return b"".join(self._arrived())

    def read(self, target: memoryview) -> None:
        """Copy the bytes into `target` when they have arrived.

        Raises:
          InputError: if the bytes cannot be read, or the file is too short.
        """
        for (first, last), value in zip(self._spans, self._arrived(), strict=True):
            target[first - self.start : last - self.start] = value

    def _arrived(self) -> Iterator[bytes]:
        try:
            for (first, last), part in zip(self._spans, self._parts, strict=True):
                value = part.result().value
                if len(value) != last - first:
                    raise ValueError("the file was replaced or truncated while it was read")
                yield value
        except (ValueError, OSError, RuntimeError, NotImplementedError) as error:
            raise InputError(
                f"{self.path}: bytes {self.start} to {self.end} cannot be read: {reason(error)}; "
                "check your credentials and the network"
            ) from error


@functools.cache
def _store(folder: str) -> "tensorstore.KvStore":
    import tensorstore

    return tensorstore.KvStore.open(f"{folder}/", context=_context()).result()


@functools.cache
def _context() -> "tensorstore.Context":
    """Return what all folders share; TensorStore itself sends 32 requests at the same time."""
    import tensorstore

    return tensorstore.Context({"gcs_request_concurrency": {"limit": REQUESTS}})
