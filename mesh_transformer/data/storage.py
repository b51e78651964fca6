"""Paths, folders, locks and one-line error messages for local and cloud storage."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from mesh_transformer.util import InputError

LOCK = ".lock"  # name of the file in a model folder while a process writes to it
AnyPath = str | os.PathLike[str]
_STEP_NAME = re.compile(r"step_(0|[1-9]\d*)")

# By name, as their packages are only imported where they are used.
_STORAGE_ERRORS = {
    "tensorflow.python.framework.errors_impl.OpError",
    "gcsfs.retry.HttpError",
    "google.auth.exceptions.GoogleAuthError",
    "aiohttp.client_exceptions.ClientError",
}

# tensorstore writes "...: No space left on device [os_error_code='28']".
_OS_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")

# Messages of tensorstore and Orbax for operations that end after a save or restore has failed.
_LATE = ("Event loop is closed", "Encountered error while reading array index")

_log = logging.getLogger(__name__)


def is_uri(path: str) -> bool:
    """Return whether `path` is a URI, such as `gs://bucket/model`, rather than a local path."""
    return "://" in path


def local_path(path: AnyPath) -> str:
    """Make a local path absolute and expand its `~`; strip the trailing slashes of a URI."""
    path = os.fspath(path)
    return path.rstrip("/") if is_uri(path) else os.path.abspath(os.path.expanduser(path))


def step_number(path: str) -> int | None:
    """Return the N of a path that ends in `step_N`, as all formats name steps; None for others."""
    match = _STEP_NAME.fullmatch(os.path.basename(path))
    return None if match is None else int(match[1])


def check_free(path: str) -> None:
    """Raise InputError if a local `path` already exists; does nothing for URIs."""
    if not is_uri(path) and os.path.lexists(path):
        raise InputError(f"{path}: already exists; choose another name or move it away")


def delete_tree(path: epath.Path) -> None:
    """Delete a file, or a folder with its contents; symbolic links are deleted, not followed."""
    if is_uri(os.fspath(path)):
        path.rmtree()
    elif os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
    else:
        shutil.rmtree(path)  # does not follow links inside the folder


class FolderLock:
    """A lock that keeps other processes from writing to a model folder.

    It is held until it is released or the process ends.  Only local folders are locked, not URIs.
    The lock is the operating system's, on a file `.lock` that names its owner; a killed process
    leaves the file behind, but not the lock.

    Raises:
      InputError: at construction, if another process holds the lock (the message says which, and
        since when), or if the folder cannot be created or written.
    """

    def __init__(self, folder: AnyPath):
        self._folder = local_path(folder)
        self._path = os.path.join(self._folder, LOCK)
        self._file: int | None = None
        if is_uri(self._folder):
            return
        with failures_as(lambda error: unwritable(self._folder, error)):
            os.makedirs(self._folder, exist_ok=True)
            while self._file is None:
                self._file = self._try_lock()

    def _try_lock(self) -> int | None:
        """Lock the file and return its descriptor; None if its last owner has just deleted it."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._in_use_error(os.pread(file, 4096, 0)) from None
            except OSError as error:  # a file system without locks
                _log.warning("%s cannot be locked (%s)", self._folder, reason(error))
            if not os.path.exists(self._path) or not os.path.samestat(
                os.fstat(file), os.stat(self._path)
            ):
                os.close(file)
                return None
            os.truncate(file, 0)
            with contextlib.suppress(OSError):  # e.g. a full disk; the lock holds anyway
                os.pwrite(file, json.dumps(_owner()).encode(), 0)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(file)
            raise
        return file

    def _in_use_error(self, content: bytes) -> InputError:
        """Return the error for a lock held by the owner that the file's `content` names."""
        try:
            owner = json.loads(content)
            holder = (
                f"process {owner['process']} on {owner['host']} since {owner['since']} "
                f"({owner['command']})"
            )
        except (ValueError, KeyError, TypeError):
            holder = "another process"
        return InputError(
            f"model folder {self._folder} is in use by {holder}; wait for it or stop it, or choose "
            "another folder"
        )

    def release(self) -> None:
        """Release the lock; does nothing if it is already released."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            os.close(file)

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _owner() -> dict[str, Any]:
    return {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "command": " ".join(map(os.path.basename, sys.argv[:1])) or "python",
    }


def reason(error: BaseException) -> str:
    """Return the root cause of a storage error as one line of at most 200 characters."""
    cause: BaseException | None = error
    root = error
    while cause is not None:
        root = cause
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        if match := _OS_ERROR.search(str(cause)):
            return os.strerror(int(match[1]))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    text = " ".join(str(root).split()) or type(root).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


@contextlib.contextmanager
def reported(what: str) -> Iterator[None]:
    """Turn storage errors raised inside the block into a one-line InputError.

    Args:
      what: the start of the message: what was being read or written.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if not is_storage_error(error):
            raise
        raise InputError(
            f"{what}: {reason(error)}; check the name, your credentials and the network"
        ) from error


def is_storage_error(error: BaseException) -> bool:
    """Return whether an error comes from a file system: Python's, TensorFlow's or gcsfs's."""
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    return isinstance(error, OSError) or bool(names & _STORAGE_ERRORS)


def is_failure(error: Exception) -> bool:
    """Return whether Orbax, tensorstore or a file system raises this error when storage fails.

    RuntimeErrors count: JAX's errors are of that class.
    """
    return isinstance(error, ValueError | KeyError | RuntimeError) or is_storage_error(error)


@contextlib.contextmanager
def failures_as(line: Callable[[Exception], InputError]) -> Iterator[None]:
    """Replace storage failures (see `is_failure`) raised inside the block.

    Args:
      line: returns the InputError to raise for a failure.  It is also called with InputErrors and
        may return them unchanged.
    """
    try:
        yield
    except Exception as error:
        if not is_failure(error) or (replacement := line(error)) is error:
            raise
        raise replacement from error


def unwritable(folder: AnyPath, error: Exception) -> InputError:
    """Return the error to raise for a model folder that cannot be written.

    An `error` that is an InputError is returned unchanged.
    """
    if isinstance(error, InputError):
        return error
    return InputError(
        f"model folder {os.fspath(folder)} cannot be written: {reason(error)}; "
        "choose another folder or fix its permissions"
    )


def nothing_in(folder: epath.Path) -> InputError:
    """Return the error to raise if a folder has no checkpoint or does not exist."""
    problem = "holds no finished checkpoint" if folder.is_dir() else "does not exist"
    return InputError(
        f"checkpoint folder {folder} {problem}; expected a model folder, a step_<N> inside one, or "
        "a Hugging Face folder"
    )


def entries(folder: epath.Path) -> list[epath.Path]:
    """Return the entries of a folder; an empty list if it does not exist.

    Raises:
      InputError: if storage fails.
    """
    with reported(f"folder {folder}"):
        try:
            return list(folder.iterdir())
        except NotADirectoryError:
            return []
        except Exception as error:
            if _is_missing(error):
                return []
            raise


def _is_missing(error: BaseException) -> bool:
    """Return whether an error of Python or TensorFlow says that a path does not exist."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, FileNotFoundError) or "NotFoundError" in names


def is_full(error: BaseException) -> bool:
    """Return whether a storage error says that the disk, or the user's quota, is full."""
    return reason(error) in (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


def free_space(folder: str) -> str:
    """Return ", N bytes free" to append to a message about a full disk; "" if unknown."""
    try:
        return f", {shutil.disk_usage(folder).free:,} bytes free"
    except OSError:  # a bucket, or a folder that no longer exists
        return ""


def hush_failures(is_new: Callable[[logging.LogRecord], bool]) -> None:
    """Keep Orbax from printing a failed save or restore, which is raised as one line anyway.

    Orbax's threads log each error with a traceback, asyncio logs the errors after the first, and
    errors of operations that end after that reach `sys.unraisablehook`.  The filter stays in
    place for the rest of the process, as some messages only appear when the failed save is
    garbage-collected.

    Args:
      is_new: a filter for the log records of absl and asyncio; returns False for those to drop.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_new)
    warnings.filterwarnings("ignore", r"coroutine '.*' was never awaited", RuntimeWarning)
    previous = sys.unraisablehook
    if getattr(previous, "__name__", "") == "_without_late_failures":
        return

    def _without_late_failures(unraisable: Any) -> None:
        if not str(unraisable.exc_value).startswith(_LATE):
            previous(unraisable)

    sys.unraisablehook = _without_late_failures
