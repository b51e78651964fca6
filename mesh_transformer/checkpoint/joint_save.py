"""Barriers that synchronise the processes of a save, and raise in all of them if one fails.

Orbax's own barriers do not detect failures: if one process cannot write its part of a checkpoint,
the others wait 20 minutes for it.  The barriers in this module are built from keys in JAX's
coordination service.
"""

import contextlib
import itertools
import time
from typing import Any

import jax

from mesh_transformer.mesh.jax_versions import coordination_client
from mesh_transformer.storage.access import reason

POLL_SECONDS = (0.005, 0.5)  # the first and the longest pause between two polls

_numbers = itertools.count()  # numbers of the saves, equal in all processes


class JointSave:
    """Barriers that synchronise all processes while they save checkpoints together.

    Every process calls `begin` once per save.  After that it waits at the same barriers as the
    other processes, or calls `fail`.

    Attributes:
      alone: whether there is only one process; the methods then do nothing.
    """

    def __init__(self) -> None:
        self.alone = jax.process_count() == 1
        self._rank, self._count = jax.process_index(), jax.process_count()
        self._prefix = ""
        self._old: list[str] = []

    @property
    def _client(self) -> Any:
        return coordination_client()

    def begin(self) -> None:
        """Start a new save.  Failures of earlier saves do not affect the new one."""
        if self.alone:
            return
        if self._prefix:
            self._old.append(self._prefix)
        self._prefix = f"mesh_transformer/save/{next(_numbers)}"
        # No process can still be waiting at a barrier of the save before the previous one.
        if self._rank == 0 and len(self._old) > 1:
            self._client.key_value_delete(f"{self._old.pop(0)}/")

    def barrier(self, key: str, timeout_ms: int) -> None:
        """Wait until all processes have reached this barrier.

        Args:
          key: the barrier's name, unique within this save.
          timeout_ms: the longest time to wait, in milliseconds.

        Raises:
          BrokenSaveError: if a process has failed in this save; the message gives its rank and the
            reason.
          TimeoutError: if not all processes reach the barrier within `timeout_ms`.
        """
        if self.alone:
            return
        self._meet(key, timeout_ms / 1000, raise_failures=True)

    def fail(self, error: Exception, seconds: float) -> None:
        """Report to all processes that this save has failed, and wait until all have called `fail`.

        From then on, `barrier` raises BrokenSaveError in the other processes.  Each of them must
        call `fail` too, once it has finished writing.

        Args:
          error: the reason for the failure, which the other processes report.
          seconds: the longest time to wait for the other processes.
        """
        if self.alone:
            return
        if not isinstance(error, BrokenSaveError):
            self._client.key_value_set(f"{self._prefix}/failed/{self._rank}", reason(error))
        with contextlib.suppress(TimeoutError):
            self._meet("given up", seconds, raise_failures=False)

    def _meet(self, key: str, seconds: float, *, raise_failures: bool) -> None:
        """Record that this process has reached a barrier, and wait until all processes have.

        Args:
          seconds: the longest time to wait; TimeoutError is raised after that.
          raise_failures: whether to raise BrokenSaveError if a process has failed in this save.
        """
        barrier = f"{self._prefix}/at/{key.replace('/', ':')}"
        self._client.key_value_set(f"{barrier}/{self._rank}", "")
        deadline, pause = time.monotonic() + seconds, POLL_SECONDS[0]
        while True:
            keys = dict(self._client.key_value_dir_get(f"{self._prefix}/"))
            failed = {k: v for k, v in keys.items() if k.startswith(f"{self._prefix}/failed/")}
            if raise_failures and failed:
                rank, why = min((int(k.rpartition("/")[2]), v) for k, v in failed.items())
                raise BrokenSaveError(f"{why} (host {rank})")
            if sum(k.startswith(f"{barrier}/") for k in keys) == self._count:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all hosts reached barrier {key!r} within {seconds:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS[1])


class BrokenSaveError(OSError):
    """Another process has failed in the current save."""
