"""What stops two processes from using the same TPU, and identifies the TPUs of one user.

Both are files in the user's home folder, one of each kind for each TPU name, zone and project.
"""

import fcntl
import os
import secrets
from pathlib import Path
from typing import IO

from mesh_transformer.pod.tpu.install import FOLDER
from mesh_transformer.pod.tpu.signals import Signals
from mesh_transformer.pod.tpu.spec import TpuSpec
from mesh_transformer.util import InputError


class Guard:
    """Signal handlers and a lock for the time in which this process uses a TPU.

    `hold` installs the handlers and takes the lock; `release` undoes both.  The handlers turn
    SIGINT, SIGTERM and SIGHUP into exceptions, so that `with` blocks can delete the TPU.

    Args:
      exclusive: whether to take the lock.  While the lock is held, no other process of this user on
        this machine can take the lock for a TPU of the same name, zone and project.
    """

    def __init__(self, spec: TpuSpec, signals: Signals, *, exclusive: bool):
        self._spec, self._signals, self._exclusive = spec, signals, exclusive
        self._lock: IO[str] | None = None

    def hold(self) -> None:
        """Install the signal handlers and, if `exclusive`, take the lock.

        Raises:
          InputError: if another process holds the lock.
        """
        if self._exclusive:
            self._lock = _locked_file(self._spec)
        self._signals.install()

    def release(self) -> None:
        """Restore the previous signal handlers and release the lock; further calls do nothing."""
        self._signals.uninstall()
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _locked_file(spec: TpuSpec) -> IO[str]:
    """Open and lock the lock file for the TPU's name, and return the open file.

    Closing the file releases the lock.  The file contains the id of the process that holds the
    lock.

    Raises:
      InputError: if another process holds the lock, or if the file cannot be written.
    """
    path = _file_of(spec, "lock")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror}; this file is the lock that stops two "
            "runs from using the same TPU; set HOME to a folder that you can write to"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        number = file.read().strip()
        file.close()
        raise InputError(
            f"TPU {spec.name!r} is in use by your process {number} on this machine; choose another "
            "name, or end that process first"
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def ownership_label(spec: TpuSpec) -> str:
    """Return the ownership label for TPUs with the spec's name, project and zone.

    The label is stored in a file, so it is the same in all runs of this user on this machine.
    Before the call, the caller must hold a `Guard` for this spec with `exclusive=True`.
    """
    path = _file_of(spec, "owner")
    if not path.exists() or not path.read_text():
        path.write_text(secrets.token_hex(8))
    return path.read_text()


def _file_of(spec: TpuSpec, kind: str) -> Path:
    return Path.home() / FOLDER / f"{spec.project}.{spec.zone}.{spec.name}.{kind}"
