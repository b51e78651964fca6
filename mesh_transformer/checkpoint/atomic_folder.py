"""Atomic creation of folders and files: they appear complete or not at all."""

import contextlib
import os
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from mesh_transformer.storage import files
from mesh_transformer.storage.access import (
    check_absent,
    free_space,
    is_full,
    is_uri,
    local_path,
    reason,
)
from mesh_transformer.util import InputError, is_running

_PAUSE = 0.5  # seconds between two scans for files to flush


def atomic_folder(path: str) -> contextlib.AbstractContextManager[str]:
    """Return a context manager that yields a temporary folder, which becomes `path` at the end.

    The caller writes its files to the temporary folder, which is beside `path`.  When the `with`
    block ends, the files are flushed to disk, and the folder is renamed to `path`.  On any failure,
    Ctrl-C included, the temporary folder is deleted.  Temporary folders for the same `path` that
    killed processes on this host have left are deleted at the start.

    If `path` is in a bucket, the temporary folder is in the system's folder for temporary files,
    and its files are uploaded when the block ends (see `files.upload`).

    Raises:
      InputError: if `path` already exists, or if storage fails.
    """
    return _atomic(path)


@contextlib.contextmanager
def atomic_file(path: str) -> Iterator[str]:
    """Return a context manager that yields the path of a temporary file, which becomes `path`.

    This is like `atomic_folder`; the temporary file is in a temporary folder.
    """
    name = os.path.basename(path)
    with _atomic(path, name) as temporary:
        yield os.path.join(temporary, name)


@contextlib.contextmanager
def _atomic(path: str, inside: str = "") -> Iterator[str]:
    """Yield a temporary folder that becomes `path` at the end, or only its file `inside` does."""
    path = local_path(path)
    check_absent(path)
    if is_uri(path):
        with tempfile.TemporaryDirectory() as temporary:
            yield temporary
            files.upload(temporary, os.path.dirname(path) if inside else path)
        return
    parent, name = os.path.split(path)
    temporary = os.path.join(parent, f".{name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        _delete_abandoned(parent, name)
        os.makedirs(temporary)
        with _flush_in_background(temporary):
            yield temporary
        _flush(temporary)
        os.rename(os.path.join(temporary, inside) if inside else temporary, path)
        _sync(parent)
    except OSError as error:
        free, remedy = "", "choose another path"
        if is_full(error):
            free, remedy = free_space(parent), "make room or choose another path"
        kind = "file" if inside else "folder"
        raise InputError(
            f"{path} cannot be written: {reason(error)}{free}; no partial {kind} is left; {remedy}"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _delete_abandoned(parent: str, name: str) -> None:
    """Delete temporary folders that `atomic_folder` left for `parent`/`name` in killed processes.

    Only the folders of this host's processes are deleted.  Other hosts may share the disk, and this
    host cannot check whether their processes are still running.
    """
    host = re.escape(socket.gethostname())
    pattern = re.compile(rf"\.{re.escape(name)}\.{host}\.(\d+)\.tmp")
    for entry in os.listdir(parent) if os.path.isdir(parent) else []:
        match = pattern.fullmatch(entry)
        # The id of this process may have been that of an earlier one.
        if match and (int(match[1]) == os.getpid() or not is_running(int(match[1]))):
            shutil.rmtree(os.path.join(parent, entry))


@contextlib.contextmanager
def _flush_in_background(folder: str) -> Iterator[None]:
    """Flush a folder's files to disk in a background thread while the `with` block writes them.

    Little is then left to flush after the block.  If a flush fails, its error is raised when the
    block ends, because the operating system reports a failed write only once.
    """
    done, flushed = threading.Event(), dict[str, int]()  # flushed: each file's modification time

    def flush() -> None:
        while not done.wait(_PAUSE):
            for root, _, names in os.walk(folder):
                for path in (os.path.join(root, name) for name in names):
                    # The file may have been renamed or deleted in the meantime.
                    with contextlib.suppress(FileNotFoundError):
                        changed = os.stat(path).st_mtime_ns
                        if changed != flushed.get(path):
                            _sync(path)
                            flushed[path] = changed

    with ThreadPoolExecutor(1, thread_name_prefix="flush") as pool:
        flushing = pool.submit(flush)
        try:
            yield
        finally:
            done.set()
    flushing.result()


def _flush(folder: str) -> None:
    """Flush a folder and everything in it, recursively, to disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            _sync(os.path.join(root, name))
        _sync(root)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
