"""The file status.json in a model folder: whether the run is running, or how it ended."""

import contextlib
import json
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from mesh_transformer import log_lines
from mesh_transformer.storage import files
from mesh_transformer.util import InputError, error_line, exit_status, first_line

if TYPE_CHECKING:  # `plot` imports this module, and loads no JAX
    from mesh_transformer.network import TrainableNetwork

NAME = "status.json"
SIGNAL = "a signal"  # the reason why a run is stopped, if it is no other


class RunStatus(contextlib.AbstractContextManager["RunStatus"]):
    """Keeps the file of a run's status while the context lasts.

    The file changes from `begin` on, so that a start that is refused changes nothing.  A file that
    cannot be written, as on a full disk, does not end the run.

    Args:
      folder: the model folder, which the network has claimed.
      total: the step to train to.
    """

    def __init__(self, network: "TrainableNetwork", folder: str, total: int):
        self._network, self._path = network, f"{folder}/{NAME}"
        self._facts = {"total_steps": total, "host": socket.gethostname(), "process": os.getpid()}
        self._has_begun, self._step = False, 0

    def begin(self) -> None:
        """Call this when the run has its weights."""
        self._has_begun = True
        self.finished(self._network.step)
        self._write(state="running")

    def finished(self, step: int) -> None:
        """Record the last step that is finished, which JSON lines say from now on, too."""
        self._step = step
        log_lines.about(step=step)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        network, total = self._network, self._facts["total_steps"]
        whole = network.config.total_steps or total
        if isinstance(error, Exception):
            reason = error_line(error) or f"{type(error).__name__}: {first_line(error)}"
            self._write(state="failed", status=exit_status(error), reason=reason)
        elif error is not None or (network.signals and network.step < total):
            self._write(state="stopped", reason=SIGNAL)
        elif network.step == total < whole:
            self._write(state="stopped", reason=f"--max-steps, of {whole} steps")
        else:
            self._write(state="complete")

    def _write(self, **facts: Any) -> None:
        if not self._has_begun:
            return
        when = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        content = facts | {"step": self._step, "time": when} | self._facts
        with contextlib.suppress(OSError, InputError):
            files.write_text(self._path, json.dumps(content) + "\n")


def read(folder: str) -> dict[str, Any]:
    """Return the status of the run in a model folder; {} if it is unknown.

    The entry `state` is running, complete, stopped (`reason` says by what: `SIGNAL` or
    --max-steps), failed (with `status`, the exit status, and `reason`) or killed: the process has
    ended without writing a status.  `step` is the last step that was finished at that time.
    """
    from mesh_transformer.storage.locks import is_locked  # takes long; `plot` needs no locks

    try:
        with files.open_file(f"{folder}/{NAME}") as file:
            status = json.loads(file.read())
    except (OSError, InputError, ValueError):
        return {}
    if not isinstance(status, dict):
        return {}
    with contextlib.suppress(OSError, InputError):  # else whether it was killed is unknown
        if status.get("state") == "running" and not is_locked(folder):
            status["state"] = "killed"
    return status
