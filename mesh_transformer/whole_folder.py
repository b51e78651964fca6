"""Folders that appear whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator

from mesh_transformer.storage import check_free, free_space, is_uri, local_path, reason
from mesh_transformer.util import InputError


@contextlib.contextmanager
def whole_folder(path: str) -> Iterator[str]:
    """A folder to fill under a temporary name beside `path`; it takes that name at the end.

    Its files are flushed to the disk before.  Where anything fails, Ctrl-C included, nothing is
    left.  Raises InputError where `path` is there already, and for what the storage refuses.
    """
    if is_uri(path):
        raise InputError(f"{path}: is an address; give a local folder")
    path = local_path(path)
    check_free(path)
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
