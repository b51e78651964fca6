"""Barriers for a save by several processes, which a failure of any of them breaks.

Orbax's own barriers know nothing of failures: where one process cannot write its part, the others
would wait for it for 20 minutes.  These are made of keys in JAX's coordination service.
"""

import contextlib
import itertools
import time
from typing import Any

import jax
from jax._src import distributed  # which has no public name; Orbax takes it from here too

from mesh_transformer.data.storage import reason

POLL_SECONDS = (0.005, 0.5)  # between looks: at first, and after a while

_numbers = itertools.count()  # every process makes the same saves in the same order


class JointSave:
    """One save after another by all processes; `begin` each, then meet at barriers.

    Attributes:
      alone: whether there is one process only, for which nothing here does anything.
    """

    def __init__(self) -> None:
        self.alone = jax.process_count() == 1
        self._rank, self._count = jax.process_index(), jax.process_count()
        self._prefix = ""
        self._old: list[str] = []

    @property
    def _client(self) -> Any:
        return distributed.global_state.client

    def begin(self) -> None:
        """Starts a save, for which no barrier is broken yet."""
        if self.alone:
            return
        if self._prefix:
            self._old.append(self._prefix)
        self._prefix = f"mesh_transformer/save/{next(_numbers)}"
        # Two saves back no process waits at a barrier any more.
        if self._rank == 0 and len(self._old) > 1:
            self._client.key_value_delete(f"{self._old.pop(0)}/")

    def barrier(self, key: str, timeout_ms: int) -> None:
        """Waits for all processes.

        Raises:
          BrokenSaveError: where one has failed in this save; why, and which.
          TimeoutError: after `timeout_ms`.
        """
        if self.alone:
            return
        self._meet(key, timeout_ms / 1000, broken=True)

    def fail(self, error: Exception, seconds: float) -> None:
        """Breaks this save's barriers, now and later, and waits until all have given it up.

        The others give up once they have finished writing; this process waits for them for
        `seconds` at most.
        """
        if self.alone:
            return
        if not isinstance(error, BrokenSaveError):
            self._client.key_value_set(f"{self._prefix}/failed/{self._rank}", reason(error))
        with contextlib.suppress(TimeoutError):
            self._meet("given up", seconds, broken=False)

    def _meet(self, key: str, seconds: float, *, broken: bool) -> None:
        place = f"{self._prefix}/at/{key.replace('/', ':')}"
        self._client.key_value_set(f"{place}/{self._rank}", "")
        deadline, pause = time.monotonic() + seconds, POLL_SECONDS[0]
        while True:
            there = dict(self._client.key_value_dir_get(f"{self._prefix}/"))
            failed = {k: v for k, v in there.items() if k.startswith(f"{self._prefix}/failed/")}
            if broken and failed:
                rank, why = min((int(k.rpartition("/")[2]), v) for k, v in failed.items())
                raise BrokenSaveError(f"{why} (host {rank})")
            if sum(k.startswith(f"{place}/") for k in there) == self._count:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all hosts came to {key!r} within {seconds:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS[1])


class BrokenSaveError(OSError):
    """Another process has failed in this save, and broken its barriers."""
