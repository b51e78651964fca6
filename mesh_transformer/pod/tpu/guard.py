"""What stops two processes from using the same TPU, and identifies the TPUs of one user.

Both are files in the user's home folder, one of each kind for each TPU name, zone and project.
"""

import fcntl
import os
import secrets
from pathlib import Path
from typing import IO

from mesh_transformer.pod.tpu.install import FOLDER
from mesh_transformer.pod.tpu.spec import TpuSpec
from mesh_transformer.util import InputError


def locked_file(spec: TpuSpec) -> IO[str]:
    """Open and lock the lock file for the TPU's name, and return the open file.

    Until the file is closed, no other process of this user on this machine can take the lock for a
    TPU of the same name, zone and project.  The file contains the id of the process that holds it.

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
    The caller must hold the lock for this spec; see `locked_file`.
    """
    path = _file_of(spec, "owner")
    if not path.exists() or not path.read_text():
        path.write_text(secrets.token_hex(8))
    return path.read_text()


def _file_of(spec: TpuSpec, kind: str) -> Path:
    return Path.home() / FOLDER / f"{spec.project}.{spec.zone}.{spec.name}.{kind}"
