"""Functions to read, copy and move files, both local files and files in a bucket."""

import contextlib
import errno
import io
import os
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from etils import epath
from tqdm import tqdm

from mesh_transformer.storage.access import (
    GCS,
    check_bucket,
    convert_storage_errors,
    delete_tree,
    entries,
    is_missing,
    is_uri,
)
from mesh_transformer.storage.remote_file import IN_FLIGHT, READ_AHEAD, RemoteFile

# Of the files in a bucket that are read next, the number that are opened before they are needed,
# and the bytes that are requested of them.
OPEN_FILES, OPEN_BYTES = 16, 2 * IN_FLIGHT


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


def open_file(path: str, *, in_order: bool = False) -> io.BufferedReader:
    """Open a file for reading bytes at any position.

    Args:
      in_order: whether all of the file will be read, from its start to its end.  The first bytes of
        a file in a bucket are then requested at once.

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
    file = RemoteFile(path, remote.length, remote.mtime, in_order=in_order)
    return io.BufferedReader(file, READ_AHEAD[0])


class OpenAhead:
    """Context manager that opens files to be read one after the other.

    Files in a bucket are opened, and their first bytes requested, before they are needed.

    Args:
      paths, sizes: the files in the order of reading, and their sizes in bytes.
      is_cut: whether the first file will not be read from its start.
    """

    def __init__(self, paths: Sequence[str], sizes: Sequence[int], *, is_cut: bool = False):
        self._files = list(zip(paths, sizes, strict=True))
        self._begun, self._is_cut = 0, is_cut  # the number of files that were or are being opened
        self._ahead: deque[tuple[int, Future[io.BufferedReader]]] = deque()
        self._pool = ThreadPoolExecutor(OPEN_FILES)  # it starts threads as it needs them

    def __enter__(self) -> "OpenAhead":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def next(self) -> io.BufferedReader:
        """Open the next file; for the errors, see `open_file`."""
        self._open_ahead()
        if not self._ahead:
            self._begun += 1
            return open_file(self._files[self._begun - 1][0])
        _, opened = self._ahead.popleft()
        self._open_ahead()
        return opened.result()

    def _open_ahead(self) -> None:
        """Begin to open files as long as they are in a bucket and not too many."""
        while self._begun < len(self._files) and len(self._ahead) < OPEN_FILES:
            path, size = self._files[self._begun]
            requested = min(size, IN_FLIGHT)
            others = sum(own for own, _ in self._ahead)
            if not is_uri(path) or (others and others + requested > OPEN_BYTES):
                return
            in_order = not (self._is_cut and self._begun == 0)
            opened = self._pool.submit(open_file, path, in_order=in_order)
            self._ahead.append((requested, opened))
            self._begun += 1


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


def sizes_in(folder: str) -> dict[str, int]:
    """Return the size of each file in a folder of a `gs://` bucket, by its path.

    A request lists 1,000 files, whereas `size` sends one for each file.
    """
    check_bucket(folder)
    from gcsfs.core import GCSFileSystem  # gcsfs's own would ask for the kind of the bucket

    bucket, _, name = folder.removeprefix(GCS).partition("/")
    sizes: dict[str, int] = {}
    # The file system's own listings hold all that is known of each file, 4 KB of memory.
    query = {"prefix": f"{name}/" if name else "", "delimiter": "/"}
    query["fields"] = "items(name,size),nextPageToken"
    with convert_storage_errors(folder):
        storage: Any = GCSFileSystem(use_listings_cache=False, skip_instance_cache=True)
        while True:
            page = storage.call("GET", "b/{}/o", bucket, json_out=True, **query)
            for one in page.get("items", ()):
                sizes[f"{GCS}{bucket}/{one['name']}"] = int(one["size"])
            if "nextPageToken" not in page:
                return sizes
            query["pageToken"] = page["nextPageToken"]


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
