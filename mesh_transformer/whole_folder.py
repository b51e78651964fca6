"""Folders that appear whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator

from mesh_transformer.storage import free_space, reason
from mesh_transformer.util import InputError


@contextlib.contextmanager
def whole_folder(path: str) -> Iterator[str]:
    """A folder to fill under a temporary name beside `path`; it takes that name at the end.

    Its files are flushed to the disk before.  Where anything fails, Ctrl-C included, nothing is
    left.  Raises InputError where `path` is there already, and for what the storage refuses.
    """
    if "://" in path:
        raise InputError(f"{path}: is an address; give a local folder")
    path = os.path.abspath(os.path.expanduser(path))
    if os.path.lexists(path):
        raise InputError(f"{path}: is there already; choose another name or move it away")
    parent, name = os.path.split(path)
    temporary = os.path.join(parent, f".{name}.{os.getpid()}.tmp")
    try:
        os.makedirs(temporary)
        yield temporary
        _flush(temporary)
        os.rename(temporary, path)
        _sync(parent)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written: {reason(error)}{free_space(parent)}; nothing is left "
            "there; make room or choose another place"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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
