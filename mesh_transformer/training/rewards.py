"""Rewards: calls a user's function in processes of its own, with a time limit."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from typing import Any

from mesh_transformer.training import reward_worker
from mesh_transformer.util import InputError

START_SECONDS = 300.0  # limit for loading the function's file, which may import much


class Rewards:
    """Calls a reward function for many answers at a time.

    A process that exceeds the time limit or ends is replaced.

    Args:
      place: the function, as FILE.py:FUNCTION.  It is called with the prompt, the answer and the
        prompt's row, and returns a finite number.
      seconds: time limit of a call.
      workers: number of processes.

    Raises:
      InputError: at construction, if the function cannot be loaded.
    """

    def __init__(self, place: str, seconds: float, workers: int):
        path, separator, name = place.rpartition(":")
        if not separator or not os.path.isfile(path):
            raise InputError(f"reward is {place!r}, expected FILE.py:FUNCTION of an existing file")
        self._command = [sys.executable, reward_worker.__file__, os.path.abspath(path), name]
        self._place, self._seconds = place, seconds
        self._threads = ThreadPoolExecutor(workers, "reward")
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._workers: set[subprocess.Popen[bytes]] = set()
        try:
            for _ in range(workers):
                self._idle.put(self._start())
        except BaseException:
            self.close()
            raise

    def __call__(self, calls: Iterable[tuple[str, str, Any]]) -> list[float | str]:
        """Return the reward of each (prompt, answer, row), or what went wrong, in their order."""
        return list(self._threads.map(self._call, calls))

    def close(self) -> None:
        """End all processes, also those that are in a call."""
        for worker in list(self._workers):
            self._end(worker)
        self._threads.shutdown(cancel_futures=True)

    def _start(self) -> "subprocess.Popen[bytes]":
        pipe = subprocess.PIPE
        worker = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, start_new_session=True)
        self._workers.add(worker)
        if (loaded := self._reply(worker, START_SECONDS)) is None or "error" in loaded:
            problem = (
                f"not loaded after {START_SECONDS:.0f} s" if loaded is None else loaded["error"]
            )
            raise InputError(f"reward {self._place}: {problem}")
        return worker

    def _call(self, arguments: tuple[str, str, Any]) -> float | str:
        worker = self._idle.get()
        try:
            if worker.poll() is not None:
                self._end(worker)
                worker = self._start()
            assert worker.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.write(json.dumps(arguments).encode() + b"\n")
                worker.stdin.flush()
            reply = self._reply(worker, self._seconds)
            if reply is None:
                self._end(worker)
                return f"no result after {self._seconds:g} s"
            return reply.get("value", reply.get("error", ""))
        finally:
            self._idle.put(worker)

    def _reply(self, worker: "subprocess.Popen[bytes]", seconds: float) -> dict[str, Any] | None:
        """Return the next object that a process writes; None if there is none in time."""
        assert worker.stdout is not None
        if not wait([worker.stdout], seconds):  # type: ignore[list-item]
            return None
        line = worker.stdout.readline()
        if not line:
            return {"error": f"the process ended with status {worker.wait()}"}
        return json.loads(line)

    def _end(self, worker: "subprocess.Popen[bytes]") -> None:
        self._workers.discard(worker)
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)  # also what the function has started
        with contextlib.suppress(OSError), worker:  # closes the pipes, and waits
            pass
