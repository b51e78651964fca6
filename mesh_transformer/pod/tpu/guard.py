"""What a process takes on with a TPU: to end by unwinding, and to be the only one that uses it."""

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
    """While held, the process has taken `signals`, and is the only one that uses the TPU.

    `alone` keeps this user's other processes from holding a TPU of that name too.
    """

    def __init__(self, spec: TpuSpec, signals: Signals, *, alone: bool):
        self._spec, self._signals, self._alone = spec, signals, alone
        self._lock: IO[str] | None = None

    def hold(self) -> None:
        """Raises InputError where another process holds it."""
        if self._alone:
            self._lock = _locked(self._spec)
        self._signals.take()

    def release(self) -> None:
        """Gives back what `hold` took, as often as it is called."""
        self._signals.give_back()
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _locked(spec: TpuSpec) -> IO[str]:
    """A file by the TPU's name, locked until it is closed; it tells who has locked it."""
    path = _file_of(spec, "lock")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror}; give HOME a folder of yours, since it "
            "holds what keeps two runs from using one TPU"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        number = file.read().strip()
        file.close()
        raise InputError(
            f"TPU {spec.name!r} is in use by process {number} of yours; take another name, or end "
            "that first"
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def kept_mark(spec: TpuSpec) -> str:
    """What this user of this machine marks TPUs of that name with, from run to run.

    The caller holds a `Guard` alone.
    """
    path = _file_of(spec, "owner")
    if not path.exists() or not path.read_text():
        path.write_text(secrets.token_hex(8))
    return path.read_text()


def _file_of(spec: TpuSpec, kind: str) -> Path:
    return Path.home() / FOLDER / f"{spec.project}.{spec.zone}.{spec.name}.{kind}"
