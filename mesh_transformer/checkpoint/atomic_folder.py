"""Folders that appear whole or not at all."""

import contextlib
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from mesh_transformer.data.storage import (
    check_free,
    free_space,
    is_full,
    is_uri,
    local_path,
    reason,
)
from mesh_transformer.util import InputError

_PAUSE = 0.5  # seconds between looks for what to flush


@contextlib.contextmanager
def whole_folder(path: str) -> Iterator[str]:
    """A folder to fill under a temporary name beside `path`; it takes that name at the end.

    Its files are flushed to the disk before.  Where anything fails, Ctrl-C included, nothing is
    left; what a killed process of this host has left for `path` is cleared away first.  Raises
    InputError where `path` is there already, and for what the storage refuses.
    """
    if is_uri(path):
        raise InputError(f"{path}: is an address; give a local folder")
    path = local_path(path)
    check_free(path)
    parent, name = os.path.split(path)
    temporary = os.path.join(parent, f".{name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        _clear_remains(parent, name)
        os.makedirs(temporary)
        with _flushed_meanwhile(temporary):
            yield temporary
        _flush(temporary)
        os.rename(temporary, path)
        _sync(parent)
    except OSError as error:
        room, remedy = "", "choose another place"
        if is_full(error):
            room, remedy = free_space(parent), "make room or choose another place"
        raise InputError(
            f"{path}: cannot be written: {reason(error)}{room}; nothing is left there; {remedy}"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _clear_remains(parent: str, name: str) -> None:
    """Deletes what processes that run no more began to write as `name`.

    Of this host alone: of another's, which may share the disk, it is not known whether they run.
    """
    host = re.escape(socket.gethostname())
    pattern = re.compile(rf"\.{re.escape(name)}\.{host}\.(\d+)\.tmp")
    for entry in os.listdir(parent) if os.path.isdir(parent) else []:
        match = pattern.fullmatch(entry)
        if match and not _runs(int(match[1])):
            shutil.rmtree(os.path.join(parent, entry))


def _runs(process: int) -> bool:
    """Whether a process of this number, other than this one, runs."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return process != os.getpid()


@contextlib.contextmanager
def _flushed_meanwhile(folder: str) -> Iterator[None]:
    """Flushes what is written in a folder while it is: at the end little is left to wait for.

    What fails then raises at the end: the system tells of a failed write only once.
    """
    done, seen = threading.Event(), dict[str, int]()  # when each file was changed last

    def flush() -> None:
        while not done.wait(_PAUSE):
            for where, _, files in os.walk(folder):
                for path in (os.path.join(where, name) for name in files):
                    with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                        changed = os.stat(path).st_mtime_ns
                        if changed != seen.get(path):
                            _sync(path)
                            seen[path] = changed

    with ThreadPoolExecutor(1, thread_name_prefix="flush") as pool:
        flushing = pool.submit(flush)
        try:
            yield
        finally:
            done.set()
    flushing.result()


def _flush(folder: str) -> None:
    for where, _, files in os.walk(folder):
        for name in files:
            _sync(os.path.join(where, name))
        _sync(where)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
