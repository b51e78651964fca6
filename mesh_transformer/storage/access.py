"""Paths, folders and error messages for local and cloud storage."""

import contextlib
import functools
import gc
import http.client
import logging
import os
import re
import shutil
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from mesh_transformer.util import FULL, InputError, UnreachableError

GCS = "gs://"
BUCKET_SECONDS = 10.0  # longest wait for an answer about a bucket
BUCKET_PAUSES = (1.0, 2.0)  # seconds before another attempt
KERAS_CHOICE = "TF_USE_LEGACY_KERAS"  # an environment variable that TensorFlow reads
AnyPath = str | os.PathLike[str]  # a local path, or a URI such as gs://bucket/model

# Names of exception classes, because their packages are imported only where they are used.
_STORAGE_ERRORS = {
    "tensorflow.python.framework.errors_impl.OpError",
    "gcsfs.retry.HttpError",
    "google.auth.exceptions.GoogleAuthError",
    "aiohttp.client_exceptions.ClientError",
}

# tensorstore writes "...: No space left on device [os_error_code='28']".
_OS_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")

# The beginnings of tensorstore's messages about requests that failed.
_UNANSWERED = re.compile(
    "ABORTED|CANCELLED|DEADLINE_EXCEEDED|INTERNAL|PERMISSION_DENIED|RESOURCE_EXHAUSTED"
    "|UNAUTHENTICATED|UNAVAILABLE|UNKNOWN"
)

# Statuses, also of JAX's runtime, of what may succeed later.
PASSING_STATUSES = "ABORTED|CANCELLED|DEADLINE_EXCEEDED|UNAVAILABLE"
_PASSING_CLASSES = {"AbortedError", "CancelledError", "DeadlineExceededError", "UnavailableError"}

# By default, tensorstore waits for an answer for as long as the operating system keeps the
# connection, about half an hour.  With these variables, which it reads at its first request, a
# request that transfers less than a byte per second for 30 seconds fails, and is then repeated.
_TENSORSTORE_LIMITS = {
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "30",
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "20",
}

_log = logging.getLogger(__name__)


def is_uri(path: str) -> bool:
    """Return whether `path` is a URI, such as `gs://bucket/model`, rather than a local path."""
    return "://" in path


def local_path(path: AnyPath) -> str:
    """Return a local path as an absolute path with `~` expanded, or a URI without final slashes."""
    path = os.fspath(path)
    return path.rstrip("/") if is_uri(path) else os.path.abspath(os.path.expanduser(path))


@functools.cache
def tensorflow() -> Any:
    """Import TensorFlow and return the module.

    TensorFlow's log messages are silenced.  GPUs and TPUs are hidden from TensorFlow, because JAX
    needs their memory.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # oneDNN is not needed, because TensorFlow computes nothing here.  It would print a notice at
    # any log level.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    # If the legacy Keras is selected, TensorFlow does not load the installed Keras.  This halves
    # the time of the import.
    choice = os.environ.get(KERAS_CHOICE)
    os.environ[KERAS_CHOICE] = "1"
    # The import creates hundreds of thousands of objects that stay.  Looking through them again and
    # again for garbage would take a sixth of its time, and some more in everything that follows.
    enabled = gc.isenabled()
    gc.disable()
    try:
        import tensorflow
    finally:
        if enabled:
            gc.enable()
    gc.freeze()
    del os.environ[KERAS_CHOICE]
    if choice is not None:
        os.environ[KERAS_CHOICE] = choice
    for kind in ("GPU", "TPU"):
        tensorflow.config.set_visible_devices([], kind)
    return tensorflow


def check_bucket(path: AnyPath) -> None:
    """Check that the bucket of a `gs://` path exists; do nothing for other paths.

    Call this before a path is first accessed through epath, tensorstore or TensorFlow.  If there is
    no network, these libraries retry for minutes, whereas this function fails sooner.  Each bucket
    is checked once per process.

    For a `gs://` path, this function also limits how long tensorstore waits for an answer, and
    imports TensorFlow with silenced log messages, because epath uses TensorFlow for such paths.

    Raises:
      InputError: after about a minute at most, if the storage cannot be reached, or if it answers
        that there is no such bucket.
    """
    path = os.fspath(path)
    if not path.startswith(GCS):
        return
    name = path.removeprefix(GCS).partition("/")[0]
    if not name:
        raise InputError(f"{path} names no bucket; expected {GCS}<bucket>/<folder>")
    for pause in (*BUCKET_PAUSES, None):
        try:
            if _bucket_exists(name):
                tensorflow()
                for variable, value in _TENSORSTORE_LIMITS.items():
                    os.environ.setdefault(variable, value)
                return
            break
        except (OSError, http.client.HTTPException) as error:
            if pause is None:
                cause = getattr(error, "reason", None)
                cause = cause if isinstance(cause, Exception) else error
                raise InputError(
                    f"{path}: Google Cloud Storage cannot be reached ({reason(cause)}); "
                    "check the network and https_proxy, or use a local folder"
                ) from error
            time.sleep(pause)
    raise InputError(
        f"{path}: there is no bucket {name}; check the name, or create it "
        f"(gcloud storage buckets create {GCS}{name})"
    )


@functools.cache
def _bucket_exists(name: str) -> bool:
    """Return False if Google Cloud Storage answers that a bucket does not exist, otherwise True.

    The request needs no credentials: for a private bucket the answer is an error other than 404.

    Raises:
      OSError: if the storage cannot be reached.
      http.client.HTTPException: if the answer is cut short or not valid HTTP.
    """
    url = f"https://storage.googleapis.com/storage/v1/b/{urllib.parse.quote(name)}?fields=name"
    # TensorFlow and tensorstore also trust the certificates in this file, such as those of a
    # company's proxy.
    trusted = ssl.create_default_context(cafile=os.environ.get("CURL_CA_BUNDLE"))
    try:
        urllib.request.urlopen(url, timeout=BUCKET_SECONDS, context=trusted).close()
    except urllib.error.HTTPError as error:
        error.close()
        return error.code != http.HTTPStatus.NOT_FOUND
    except urllib.error.URLError as error:
        if not isinstance(error.reason, ssl.SSLError):
            raise
    return True  # the clients report untrusted certificates themselves


def check_absent(path: str) -> None:
    """Raise InputError if a file or folder already exists at `path`."""
    if is_uri(path):
        check_bucket(path)
        with convert_storage_errors(path):
            exists = epath.Path(path).exists()
    else:
        exists = os.path.lexists(path)
    if exists:
        raise InputError(f"{path} already exists; choose another name or move it away")


def files_below(folder: epath.Path) -> Iterator[epath.Path]:
    """Yield the files of a folder and of its subfolders."""
    for path in folder.iterdir():
        if path.is_dir():
            yield from files_below(path)
        else:
            yield path


def delete_tree(path: epath.Path) -> None:
    """Delete a file, or a folder with its contents; symbolic links are deleted, not followed.

    In a bucket, what could not be deleted is tried again a few times.
    """
    if is_uri(os.fspath(path)):
        for pause in BUCKET_PAUSES:
            try:
                path.rmtree()
                return
            except FileNotFoundError:
                raise
            except Exception:  # TensorFlow's errors have no other class in common
                time.sleep(pause)
        if path.exists():
            path.rmtree()
    elif os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
    else:
        shutil.rmtree(path)  # does not follow links inside the folder


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of its cause, and so on to the root cause."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def reason(error: BaseException) -> str:
    """Return the root cause of a storage error as one line of at most 200 characters."""
    root = error
    for root in causes(error):
        if isinstance(root, OSError) and root.strerror:
            return root.strerror
        if match := _OS_ERROR.search(str(root)):
            return os.strerror(int(match[1]))
    text = " ".join(str(root).split()) or type(root).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


def convert_storage_errors(what: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that replaces a storage error by an InputError of one line.

    Args:
      what: the start of the error message, such as the path that was being read or written.
    """

    def line(error: Exception) -> InputError:
        advice = "check the name, your credentials and the network"
        kind = UnreachableError if _may_pass(error) else InputError
        return kind(f"{what}: {reason(error)}; {advice}")

    return replace_errors(lambda error: line(error) if is_storage_error(error) else error)


def _may_pass(error: BaseException) -> bool:
    """Return whether a storage error says that the service or the network failed for now."""
    *_, root = causes(error)
    names = {kind.__name__ for kind in type(root).__mro__}
    is_passing = bool(re.match(PASSING_STATUSES, str(root))) or bool(names & _PASSING_CLASSES)
    return is_passing or isinstance(root, ConnectionError | TimeoutError)


def is_storage_error(error: BaseException) -> bool:
    """Return whether an error was raised by access to local or cloud storage.

    These are OSErrors and the exception classes listed in `_STORAGE_ERRORS`.
    """
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    return isinstance(error, OSError) or bool(names & _STORAGE_ERRORS)


def storage_failed(error: BaseException) -> bool:
    """Return whether an error means that storage could not be accessed, such as a lost connection.

    Returns False if a file is missing, or if a file was read but its content is wrong.
    """
    *_, error = causes(error)
    names = {kind.__name__ for kind in type(error).__mro__}
    if is_missing(error) or "DataLossError" in names:
        return False
    if _OS_ERROR.search(str(error)) or _UNANSWERED.match(str(error)):
        return True
    return is_storage_error(error)


def is_failure(error: BaseException) -> bool:
    """Return whether an error is of a class that a failed save or restore raises.

    These are the storage errors (see `is_storage_error`), and ValueError, KeyError and
    RuntimeError, which Orbax, tensorstore and JAX raise.
    """
    return isinstance(error, ValueError | KeyError | RuntimeError) or is_storage_error(error)


@contextlib.contextmanager
def replace_errors(replacement: Callable[[Exception], Exception]) -> Iterator[None]:
    """Return a context manager that replaces errors by other errors.

    Args:
      replacement: a function from an error to the error to raise in its place.  If the function
        returns the same error, that error is raised unchanged.
    """
    try:
        yield
    except Exception as error:
        if (new := replacement(error)) is error:
            raise
        raise new from error


def convert_failures(
    line: Callable[[Exception], Exception],
) -> contextlib.AbstractContextManager[None]:
    """As `replace_errors`, but only errors for which `is_failure` is true are replaced."""
    return replace_errors(lambda error: line(error) if is_failure(error) else error)


def unwritable_error(folder: AnyPath, error: Exception) -> InputError:
    """Return the InputError to raise if `error` prevents writing to a model folder.

    If `error` is already an InputError, it is returned unchanged.
    """
    if isinstance(error, InputError):
        return error
    return InputError(
        f"model folder {os.fspath(folder)} cannot be written: {reason(error)}; "
        "choose another folder or fix its permissions"
    )


def entries(folder: epath.Path) -> list[epath.Path]:
    """Return the entries of a folder; an empty list if there is no such folder.

    Raises:
      InputError: if the folder cannot be read.
    """
    with convert_storage_errors(f"folder {folder}"):
        try:
            return list(folder.iterdir())
        except NotADirectoryError:
            return []
        except Exception as error:
            if not is_missing(error):
                raise
            # TensorFlow also says that a folder is missing if it may not be read; `exists` then
            # raises the right error.
            return list(folder.iterdir()) if folder.exists() else []


def is_missing(error: BaseException) -> bool:
    """Return whether an error of Python or TensorFlow means that a path does not exist."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, FileNotFoundError) or "NotFoundError" in names


def is_full(error: BaseException) -> bool:
    """Return whether a storage error means that the disk is full or a quota is exceeded."""
    return reason(error) in map(os.strerror, FULL)


def free_space(folder: str) -> str:
    """Return ", N bytes free" for the disk of `folder`, or "" if the number is unknown.

    The text is to be appended to a message about a full disk.
    """
    free = free_bytes(folder)
    return "" if free is None else f", {free:,} bytes free"


def free_bytes(folder: str) -> int | None:
    """Return the number of free bytes on the disk of `folder`; None if it is unknown."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:  # a bucket, or a folder that no longer exists
        return None
