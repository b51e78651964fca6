"""Functions to read, copy and move files, both local files and files in a bucket."""

import contextlib
import errno
import functools
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etils import epath
from tqdm import tqdm

from mesh_transformer.storage.access import (
    check_bucket,
    convert_storage_errors,
    delete_tree,
    entries,
    is_missing,
    is_uri,
    reason,
)
from mesh_transformer.util import InputError

if TYPE_CHECKING:
    import tensorstore

# The initial and the maximum number of bytes to read ahead from a file in a bucket.  The number
# doubles with each request as long as the file is read sequentially.
READ_AHEAD = (1 << 16, 1 << 23)
PART = 1 << 24  # longer reads are split into parts of this size, requested at the same time


def is_folder(path: str) -> bool:
    if not is_uri(path):
        return os.path.isdir(path)
    with convert_storage_errors(path):
        # First `exists`: if the bucket may not be read, it raises, but `is_dir` returns False.
        return _remote(path).exists() and _remote(path).is_dir()


def is_file(path: str) -> bool:
    if not is_uri(path):
        return os.path.isfile(path)
    with convert_storage_errors(path):
        return _remote(path).is_file()


def names(folder: str) -> list[str]:
    """Return the names of a folder's entries; an empty list if the folder does not exist."""
    return [path.name for path in entries(_remote(folder))]


def open_file(path: str) -> io.BufferedReader:
    """Open a file for reading bytes at any position.

    Raises:
      FileNotFoundError: if there is no such file.
      InputError: if a file in a bucket cannot be read.  Later reads may raise this error, too.
    """
    if not is_uri(path):
        return open(path, "rb")
    with convert_storage_errors(path):
        try:
            remote = _remote(path).stat()
        except Exception as error:
            if not is_missing(error):
                raise
            remote = None
    if remote is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return io.BufferedReader(_RemoteFile(path, remote.length, remote.mtime), READ_AHEAD[0])


def size(path: str) -> int:
    """Return a file's size in bytes."""
    return status(path)[0]


def status(path: str) -> tuple[int, int]:
    """Return a file's size in bytes, and the time of its last change in nanoseconds."""
    if not is_uri(path):
        local = os.stat(path)
        return local.st_size, local.st_mtime_ns
    with convert_storage_errors(path):
        remote = _remote(path).stat()
    return remote.length, int(remote.mtime * 10**9)


def _is_last(path: str) -> bool:
    """Return whether readers recognise a checkpoint or a record set by this file.

    Examples are config.json and the index of a record set.  `upload` copies such files last and
    deletes them first, so that readers never take an incomplete set of files for a complete one.
    """
    return os.path.basename(path) in ("meta.json", "config.json") or path.endswith(".index")


def upload(folder: str, target: str, *, replace: bool = False) -> None:
    """Copy the files of a local folder, and of its subfolders, into a folder of a bucket.

    The files that identify a model or a record set, such as config.json, are copied last, so that
    an incomplete upload is never mistaken for a complete model or record set.

    Args:
      target: the URI of the folder in the bucket.
      replace: whether to replace files that exist in the bucket.  If true, existing files that
        identify a model or a record set are deleted first, so that readers never see a mixture of
        old and new files.  If false, a failed upload deletes the files that it has copied so far.

    Raises:
      InputError: if a file cannot be read or written.
    """
    paths = [os.path.join(root, name) for root, _, found in os.walk(folder) for name in found]
    paths.sort(key=lambda path: (_is_last(path), path))
    total, copied = sum(map(os.path.getsize, paths)), []
    with tqdm(total=total, unit="B", unit_scale=True, desc="uploading", disable=None) as bar:
        try:
            for path in filter(_is_last, paths if replace else ()):
                remote = epath.Path(target) / os.path.relpath(path, folder)
                with convert_storage_errors(f"{remote} cannot be replaced"):
                    remote.unlink(missing_ok=True)
            for path in paths:
                remote = epath.Path(target) / os.path.relpath(path, folder)
                with convert_storage_errors(f"{remote} cannot be written"):
                    copied.append(remote)
                    epath.Path(path).copy(remote, overwrite=replace)
                bar.update(os.path.getsize(path))
        except BaseException:
            for remote in [] if replace else copied:
                with contextlib.suppress(Exception):
                    remote.unlink(missing_ok=True)
            raise


def replace(path: str, target: str) -> None:
    """Move a file to `target`, replacing any file there.

    In a bucket, the file is copied and then deleted, so the move is not atomic.
    """
    if not is_uri(path):
        os.replace(path, target)
        return
    with convert_storage_errors(f"{target} cannot be written"):
        epath.Path(path).copy(target, overwrite=True)
        epath.Path(path).unlink()


def delete(path: str) -> None:
    """Delete a file, or a folder with its contents, if it exists."""
    with convert_storage_errors(f"{path} cannot be deleted"):
        if is_folder(path):
            delete_tree(_remote(path))
        else:
            _remote(path).unlink(missing_ok=True)


@contextlib.contextmanager
def output_folder(folder: str) -> Iterator[Path]:
    """Return a context manager that yields a local folder to write into, in place of `folder`.

    If `folder` is local, `folder` itself is created and yielded.  If `folder` is in a bucket, a
    temporary folder is yielded.  When the `with` block ends without an error, the files in the
    temporary folder are uploaded to `folder`, and replace files of the same names.
    """
    if not is_uri(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        yield Path(folder)
        return
    check_bucket(folder)
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)
        upload(temporary, folder, replace=True)


def write_text(path: str, text: str) -> None:
    """Write a UTF-8 text file, which appears at `path` only when it is complete.

    An existing file at `path` is replaced.

    Raises:
      OSError: if a local file cannot be written.
      InputError: if a file in a bucket cannot be written.
    """
    if is_uri(path):
        with convert_storage_errors(f"{path} cannot be written"):
            _remote(path).write_text(text)
        return
    draft = Path(path).with_name(f".{os.path.basename(path)}.partial")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _remote(path: str) -> epath.Path:
    check_bucket(path)
    return epath.Path(path)


class _RemoteFile(io.RawIOBase):
    """A file in a bucket, opened for reading; each request fetches a range of the file's bytes.

    Args:
      size: the file's size in bytes.
      version: a value that changes when the file changes, such as its modification time.
    """

    def __init__(self, path: str, size: int, version: Any):
        self._path, self._size, self._version = path, size, version
        self._position = 0
        self._buffer, self._start = b"", 0  # bytes read ahead, and the position of the first
        self._ahead = READ_AHEAD[0]

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
                if len(target) - done >= self._ahead:
                    _read_range(self._path, self._position, target[done:])
                    self._position += len(target) - done
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

    def _read_ahead(self) -> None:
        # Formats such as .npz have their table of contents at the end, which is read at each open.
        tail = max(0, self._size - READ_AHEAD[0])
        if self._position >= tail:
            self._buffer = _read_tail(self._path, tail, self._size, self._version)
            self._start = tail
            return
        in_order = self._buffer and self._position == self._start + len(self._buffer)
        self._ahead = min(2 * self._ahead, READ_AHEAD[1]) if in_order else READ_AHEAD[0]
        self._start = self._position
        content = bytearray(min(self._ahead, self._size - self._start))
        _read_range(self._path, self._start, memoryview(content))
        self._buffer = bytes(content)


@functools.lru_cache(maxsize=1024)
def _read_tail(path: str, start: int, end: int, version: Any) -> bytes:
    """Return the last bytes of a file in a bucket, from a cache if they were read before.

    Args:
      version: a value that changes when the file changes, so that a changed file is read again.
    """
    content = bytearray(end - start)
    _read_range(path, start, memoryview(content))
    return bytes(content)


def _read_range(path: str, start: int, target: memoryview) -> None:
    """Fill `target` with the bytes of a file in a bucket, starting at byte `start`.

    Raises:
      InputError: if the bytes cannot be read, or the file is too short.
    """
    folder, name = os.path.split(path)
    end = start + len(target)
    spans = [(at, min(at + PART, end)) for at in range(start, end, PART)]
    try:
        parts = [_store(folder).read(name, byte_range=slice(*span)) for span in spans]
        for (first, last), part in zip(spans, parts, strict=True):
            value = part.result().value
            if len(value) != last - first:
                raise ValueError("the file was replaced or truncated while it was read")
            target[first - start : last - start] = value
    except (ValueError, OSError, RuntimeError, NotImplementedError) as error:
        raise InputError(
            f"{path}: bytes {start} to {end} cannot be read: {reason(error)}; check your "
            "credentials and the network"
        ) from error


@functools.cache
def _store(folder: str) -> "tensorstore.KvStore":
    import tensorstore

    return tensorstore.KvStore.open(f"{folder}/").result()
