"""Rewards: calls a user's function in processes of its own, with a time limit."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mesh_transformer.evaluation import reward_worker
from mesh_transformer.util import InputError

Worker = subprocess.Popen[bytes]
SLACK_SECONDS = 5.0  # after the time limit, until a process is killed that has not ended itself


class Rewards:
    """Calls a reward function for many answers at a time.

    Args:
      place: the function, as FILE.py:FUNCTION.  It is called with the prompt, the answer and the
        prompt's row, and returns a finite number.
      seconds: time limit of a call; a process that exceeds it, or ends, is replaced.
      workers: number of processes.
      name: the key or the flag that names the function, for error messages.

    Raises:
      InputError: at construction, if the function cannot be loaded.
    """

    def __init__(self, place: str, seconds: float, workers: int, name: str = "reward"):
        path, separator, function = place.rpartition(":")
        self._shown = f"{name} {place}"
        if not separator or not os.path.isfile(path):
            raise InputError(f"{self._shown}: expected FILE.py:FUNCTION of an existing file")
        own = [os.path.abspath(path), function, str(seconds)]
        self._command = [sys.executable, reward_worker.__file__, *own]
        self._seconds, self._workers = seconds, list[Worker]()
        try:
            self._workers.extend(self._start() for _ in range(workers))
            for worker in self._workers:
                self._await_start(worker)
        except BaseException:
            self.close()
            raise

    def __call__(
        self, calls: Sequence[tuple[str, str, Any]], stopped: Callable[[], bool] = lambda: False
    ) -> list[float | str]:
        """Return the reward of each (prompt, answer, row), or what went wrong, in their order.

        Args:
          stopped: asked before each call; once it returns True, no function is called any more.
        """
        results: list[float | str] = [""] * len(calls)
        count = len(self._workers)

        def call(number: int) -> None:
            for at in range(number, len(calls), count):
                results[at] = "" if stopped() else self._call(number, calls[at])

        with ThreadPoolExecutor(count, "reward") as threads:
            list(threads.map(call, range(count)))
        return results

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            _end(worker)

    def _start(self) -> Worker:
        pipe = subprocess.PIPE
        return subprocess.Popen(self._command, stdin=pipe, stdout=pipe, start_new_session=True)

    def _await_start(self, worker: Worker) -> None:
        problem = _reply(worker, reward_worker.START_SECONDS, time.monotonic())
        if isinstance(problem, str):
            _end(worker)
            raise InputError(f"{self._shown}: {problem}")

    def _call(self, number: int, arguments: tuple[str, str, Any]) -> Any:
        if self._workers[number].returncode is not None:
            self._workers[number] = self._start()
            self._await_start(self._workers[number])
        worker = self._workers[number]
        assert worker.stdin is not None
        began = time.monotonic()  # before the process can begin
        with contextlib.suppress(BrokenPipeError):  # it has ended
            worker.stdin.write(json.dumps(arguments, default=str).encode() + b"\n")
            worker.stdin.flush()
        return _reply(worker, self._seconds, began)


def _reply(worker: Worker, seconds: float, began: float) -> Any:
    """Return the value that a process writes, or what went wrong.

    Args:
      seconds: its time limit.
      began: the time when it was asked, or before.
    """
    assert worker.stdout is not None
    poll = select.poll()
    poll.register(worker.stdout, select.POLLIN)
    # The process ends itself in time, unless the function prevents it.
    if not poll.poll(1000 * (seconds + SLACK_SECONDS)):
        _end(worker)
        return f"no result after {seconds:g} s"
    if line := worker.stdout.readline():
        reply = json.loads(line)
        return reply.get("error", reply.get("value"))
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # `_end` needs its number
    is_late = time.monotonic() - began >= seconds
    status = _end(worker)
    return f"no result after {seconds:g} s" if is_late else f"it ended with status {status}"


def _end(worker: Worker) -> int:
    """End a process and what it has started, and return its exit status."""
    if worker.returncode is None:  # its number is not in use again
        os.killpg(worker.pid, signal.SIGKILL)
    with contextlib.suppress(OSError), worker:  # closes the pipes, and waits
        pass
    return worker.wait()
