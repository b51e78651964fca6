"""Locks that keep other processes from writing to a model folder."""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from typing import Any

import tensorstore
from etils import epath

from mesh_transformer.storage.access import (
    AnyPath,
    check_bucket,
    convert_failures,
    convert_storage_errors,
    is_missing,
    is_uri,
    local_path,
    reason,
    unwritable_error,
)
from mesh_transformer.util import InputError, StoppedError, is_running, start_thread

LOCK = ".lock"  # name of the lock file in a model folder
# A lock in a bucket is renewed after the first number of seconds, and may be taken over if it was
# not renewed for the second.
RENEW_SECONDS = 15.0
LEASE_SECONDS = 60.0
POLL_SECONDS = 2.0
RELEASE_SECONDS = 10.0  # longest wait for the storage at the end

_released: set[str] = set()  # identifiers of locks that this process holds no more
_log = logging.getLogger(__name__)


def lock_folder(folder: AnyPath) -> "LocalLock | BucketLock":
    """Lock a folder, so that no other process can lock it.

    A local folder is created if it does not exist.

    Raises:
      InputError: if another process holds the lock (the message describes that process), or if the
        folder cannot be written.
    """
    return BucketLock(folder) if is_uri(local_path(folder)) else LocalLock(folder)


def is_locked(folder: AnyPath) -> bool:
    """Return whether a folder is locked, as far as this machine can see.

    A lock of a process that has ended on this machine does not count, nor does one in a bucket that
    has not been renewed in time.
    """
    path = epath.Path(local_path(folder)) / LOCK
    with convert_storage_errors(f"{path}"):
        try:
            content, changed = path.read_bytes(), path.stat().mtime
        except Exception as error:
            if not is_missing(error):
                raise
            return False
    if _has_ended(content):
        return False
    return not is_uri(f"{path}") or time.time() < changed + 2 * LEASE_SECONDS


class LocalLock(contextlib.AbstractContextManager["LocalLock"]):
    """A lock on a local folder, which ends when it is released or the process ends.

    It is an operating-system lock on the file `.lock` in the folder, and the content of that file
    describes the owner.  When a process is killed, the file remains, but the operating system
    releases the lock.  For errors, see `lock_folder`.

    Args:
      name: a file in the folder, to lock only this one.
    """

    def __init__(self, folder: AnyPath, name: str | None = None):
        self._folder = local_path(folder)
        self._path = os.path.join(self._folder, f".{name}{LOCK}" if name else LOCK)
        path = os.path.join(self._folder, name or "")
        self._what = f"file {path}" if name else f"model folder {self._folder}"
        self._file: int | None = None
        with convert_failures(lambda error: unwritable_error(self._folder, error)):
            os.makedirs(self._folder, exist_ok=True)
            while self._file is None:
                self._file = self._try_lock()

    def _try_lock(self) -> int | None:
        """Lock the file and return its descriptor.

        Returns None if the previous owner has just deleted the file; the caller must then try
        again.
        """
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _in_use_error(self._what, os.pread(file, 4096, 0)) from None
            except OSError as error:  # a file system that does not support locks
                _log.warning("%s cannot be locked (%s)", self._folder, reason(error))
            try:
                is_same = os.path.samestat(os.fstat(file), os.stat(self._path))
            except FileNotFoundError:
                is_same = False
            if not is_same:
                return None
            os.truncate(file, 0)
            with contextlib.suppress(OSError):  # such as a full disk; the lock is held anyway
                os.pwrite(file, json.dumps(_owner()).encode(), 0)
            stack.pop_all()  # the file stays open
        return file

    def check(self) -> None:
        """Do nothing, because no other process can take over this lock (see `BucketLock.check`)."""

    def release(self) -> None:
        """Release the lock; does nothing if it is already released."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            os.close(file)

    def __exit__(self, *_: object) -> None:
        self.release()


class BucketLock(contextlib.AbstractContextManager["BucketLock"]):
    """A lock on a folder in a bucket, which this process renews until the lock is released.

    The lock is the object `.lock` in the folder.  To take the lock, a process reads the object, and
    then writes it on the condition that it has not changed since.  If several processes try this at
    once, only one succeeds.

    If the process that owns the lock ends without releasing it, another process can take over the
    lock once the object has not changed for 60 seconds (`LEASE_SECONDS`).  A process on the same
    machine can do so at once, because it can see that the owner has ended.  The clocks of different
    machines are never compared.  For errors, see `lock_folder`.
    """

    def __init__(self, folder: AnyPath):
        self._folder = local_path(folder)
        check_bucket(self._folder)
        self._what = f"model folder {self._folder}"
        self._owner = _owner() | {"lock": secrets.token_hex(8)}
        self._taken: StoppedError | None = None  # why the lock was lost
        self._writing = threading.Lock()
        with convert_failures(lambda error: unwritable_error(self._folder, error)):
            self._store = tensorstore.KvStore.open(f"{self._folder}/").result()
            self._generation = self._acquire()
        self._released = threading.Event()
        self._renewing = start_thread(self._keep, name="renew lock")

    def check(self) -> None:
        """Renew the lock.

        Raises:
          StoppedError: if another process has taken over the lock.
          InputError: if the storage fails.
        """
        with self._writing, convert_failures(self._unlocked_error):
            if self._taken is None:
                if written := self._write(self._generation):
                    self._generation = written
                else:
                    owner = self._store.read(LOCK).result().value
                    self._taken = StoppedError(
                        f"this run has lost its lock, because the storage did not answer for "
                        f"{LEASE_SECONDS:.0f} s: {_in_use_error(self._what, owner)}"
                    )
        if self._taken is not None:
            raise self._taken

    def _unlocked_error(self, error: Exception) -> InputError:
        return InputError(
            f"the lock of {self._folder} cannot be renewed: {reason(error)}; check your "
            "credentials and the network"
        )

    def release(self) -> None:
        """Release the lock; does nothing if it is already released or was taken over."""
        self._released.set()
        _released.add(self._owner["lock"])
        self._renewing.join(RELEASE_SECONDS)
        with contextlib.suppress(Exception):  # it can be taken over later
            self._store.write(LOCK, None, if_equal=self._generation).result(RELEASE_SECONDS)

    def __exit__(self, *_: object) -> None:
        self.release()

    def _acquire(self) -> bytes:
        """Write the lock object, and return its generation (the storage's version of an object).

        If another process may hold the lock, this waits for up to LEASE_SECONDS.
        """
        stored = self._store.read(LOCK).result()
        first, waited = stored.stamp.generation, False
        deadline = time.monotonic() + LEASE_SECONDS
        while True:
            is_free = stored.state == "missing" or _has_ended(stored.value)
            if not is_free and stored.stamp.generation != first:
                raise _in_use_error(self._what, stored.value)  # it was renewed or taken over
            if is_free or time.monotonic() >= deadline:
                if written := self._write(stored.stamp.generation):
                    return written
            else:
                if not waited:
                    problem = str(_in_use_error(self._what, stored.value)).partition(";")[0]
                    _log.warning("%s, or was; waiting up to %.0f s", problem, LEASE_SECONDS)
                waited = True
                time.sleep(POLL_SECONDS)
            stored = self._store.read(LOCK).result()

    def _write(self, expected: bytes) -> bytes | None:
        """Write the lock object if its generation is `expected`; return the new one, else None."""
        content = json.dumps(self._owner).encode()
        written = self._store.write(LOCK, content, if_equal=expected).result()
        if written.generation:
            return written.generation
        # An earlier write of this lock may have succeeded, although its answer was lost.
        stored = self._store.read(LOCK).result()
        return stored.stamp.generation if stored.value == content else None

    def _keep(self) -> None:
        while not self._released.wait(RENEW_SECONDS):
            try:
                self.check()
            except Exception as error:  # if the storage fails, the next renewal may succeed
                if self._taken is not None:
                    _log.warning("%s", error)
                    return


def _in_use_error(what: str, content: bytes) -> InputError:
    """Return the error to raise if another process holds a lock.

    Args:
      what: the file or folder that is locked.
      content: the content of the lock file, which describes that process.
    """
    try:
        owner = json.loads(content)
        holder = (
            f"process {owner['process']} on {owner['host']} since {owner['since']} "
            f"({owner['command']})"
        )
    except (ValueError, KeyError, TypeError):
        holder = "another process"
    return InputError(
        f"{what} is in use by {holder}; wait for it or stop it, or choose another one"
    )


def _owner() -> dict[str, Any]:
    """Return a description of this process, to be stored in a lock file or lock object."""
    return {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "command": " ".join(map(os.path.basename, sys.argv[:1])) or "python",
        "processes_of": _process_space(),
    }


def _process_space() -> str | None:
    """Return an identifier of the machine's current boot and of this process's PID namespace.

    Two processes with equal identifiers have different process ids, unless one has ended.  Returns
    None if the identifier is unknown.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _has_ended(content: bytes) -> bool:
    """Return whether a lock in a bucket is known to be unused.

    A lock is unused if its owner has ended, or if this process has released the lock but failed to
    delete the lock object.

    Args:
      content: the content of the lock object, which describes the owner.
    """
    try:
        owner = json.loads(content)
        process, space = int(owner["process"]), owner["processes_of"]
        if owner.get("lock") in _released:
            return True
    except (ValueError, KeyError, TypeError):
        return False
    return space is not None and space == _process_space() and not is_running(process)
