"""Where checkpoints are, and what storage says when it fails: in a few words, and said once."""

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

LOCK = ".lock"  # in a model folder while a process writes there
AnyPath = str | os.PathLike[str]
_STEP_NAME = re.compile(r"step_(0|[1-9]\d*)")

# Of packages that are only imported where they are used.
_STORAGE_ERRORS = {
    "tensorflow.python.framework.errors_impl.OpError",
    "gcsfs.retry.HttpError",
    "google.auth.exceptions.GoogleAuthError",
    "aiohttp.client_exceptions.ClientError",
}

# tensorstore writes "...: No space left on device [os_error_code='28']".
_OS_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")

# tensorstore's and Orbax's words for what ends after a save or restore has failed.
_LATE = ("Event loop is closed", "Encountered error while reading array index")

_log = logging.getLogger(__name__)


def is_uri(path: str) -> bool:
    """Whether `path` is an address, such as `gs://bucket/model`, and not on a local disk."""
    return "://" in path


def local_path(path: AnyPath) -> str:
    """A local path absolute and with its `~` expanded; a URI less its closing slashes."""
    path = os.fspath(path)
    return path.rstrip("/") if is_uri(path) else os.path.abspath(os.path.expanduser(path))


def step_number(path: str) -> int | None:
    """The N of a path that ends in `step_N`, as every format writes it; None for others."""
    match = _STEP_NAME.fullmatch(os.path.basename(path))
    return None if match is None else int(match[1])


def check_free(path: str) -> None:
    """InputError where something is at a local `path` already."""
    if not is_uri(path) and os.path.lexists(path):
        raise InputError(f"{path}: is there already; choose another name or move it away")


def delete_tree(path: epath.Path) -> None:
    """Deletes a folder and all in it; of a link the link alone, wherever it stands."""
    if is_uri(os.fspath(path)):
        path.rmtree()
    elif os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
    else:
        shutil.rmtree(path)  # which does not follow the links in it


class FolderLock:
    """Keeps other processes from writing to a model folder, until it is released or we end.

    Local folders only: for a URI nothing is locked.  The lock is the operating system's, on a file
    `.lock` that names its owner; a process that is killed leaves the file, but no lock.

    Raises:
      InputError: at construction, where another holds the lock (who, and since when), or where the
        folder cannot be made or written.
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
                self._file = self._taken()

    def _taken(self) -> int | None:
        """The locked file; None where its last owner has just deleted it."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._held(os.pread(file, 4096, 0)) from None
            except OSError as error:  # a file system without locks
                _log.warning("%s cannot be locked (%s)", self._folder, reason(error))
            if not os.path.exists(self._path) or not os.path.samestat(
                os.fstat(file), os.stat(self._path)
            ):
                os.close(file)
                return None
            os.truncate(file, 0)
            with contextlib.suppress(OSError):  # of a full disk: the lock holds all the same
                os.pwrite(file, json.dumps(_owner()).encode(), 0)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(file)
            raise
        return file

    def _held(self, content: bytes) -> InputError:
        try:
            owner = json.loads(content)
            who = (
                f"process {owner['process']} on {owner['host']} since {owner['since']} "
                f"({owner['command']})"
            )
        except (ValueError, KeyError, TypeError):
            who = "another process"
        return InputError(
            f"model folder {self._folder} is in use by {who}; wait for it or stop it, or choose "
            "another folder"
        )

    def release(self) -> None:
        """Lets others write; does nothing the second time."""
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
    """The cause of a storage error in a few words, on one line."""
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
    """Turns what any storage raises into an InputError that begins with `what`, on one line."""
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
    """Whether it is of the kinds that file systems raise: Python's, TensorFlow's, gcsfs's."""
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    return isinstance(error, OSError) or bool(names & _STORAGE_ERRORS)


def is_failure(error: Exception) -> bool:
    """Whether Orbax, tensorstore or a file system raises it when storage fails.

    jax's errors are RuntimeErrors.
    """
    return isinstance(error, ValueError | KeyError | RuntimeError) or is_storage_error(error)


@contextlib.contextmanager
def failures_as(line: Callable[[Exception], InputError]) -> Iterator[None]:
    """Raises the InputError that `line` makes of a failure (`is_failure`) of what is done here.

    `line` also gets InputErrors, and may return them as they are.
    """
    try:
        yield
    except Exception as error:
        if not is_failure(error) or (told := line(error)) is error:
            raise
        raise told from error


def unwritable(folder: AnyPath, error: Exception) -> InputError:
    """What to raise where nothing can be written to a model folder; an InputError as it is."""
    if isinstance(error, InputError):
        return error
    return InputError(
        f"model folder {os.fspath(folder)} cannot be written: {reason(error)}; "
        "choose another folder or mend its permissions"
    )


def nothing_in(folder: epath.Path) -> InputError:
    """What to raise where a folder has no checkpoint, or does not exist."""
    found = "holds no finished checkpoint" if folder.is_dir() else "does not exist"
    return InputError(
        f"checkpoint folder {folder} {found}; expected a model folder with step_<N> folders "
        "in it, one of these, or a Hugging Face folder"
    )


def entries(folder: epath.Path) -> list[epath.Path]:
    """What is in a folder; empty where there is none.

    Raises:
      InputError: where storage does not say.
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
    """Whether storage says that there is no such thing, in Python's words or TensorFlow's."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, FileNotFoundError) or "NotFoundError" in names


def is_full(error: BaseException) -> bool:
    """Whether a storage error says that the disk, or the user's part of it, is full."""
    return reason(error) in (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


def free_space(folder: str) -> str:
    """What to add to a line about a full disk: ", N bytes free"; nothing where not known."""
    try:
        return f", {shutil.disk_usage(folder).free:,} bytes free"
    except OSError:  # A bucket has no such number, nor has a folder that has gone.
        return ""


def hush_failures(is_new: Callable[[logging.LogRecord], bool]) -> None:
    """Keep Orbax from printing a failed save or restore, which is raised as one line anyway.

    Its threads log each error with a traceback, asyncio logs those that came after the first,
    and what else ends after the first failure comes to `sys.unraisablehook`.  Log lines that are
    not `is_new` are left out from now on: some come up only when the failed save is garbage.
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
