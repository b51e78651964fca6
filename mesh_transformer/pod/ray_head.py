"""A Ray head that lives as long as its driver, and takes every process of it along when it ends.

`python -m mesh_transformer.pod.ray_head BYTES` prints `address: HOST:PORT`.  It ends once its
standard input is closed, which even a SIGKILL of the driver does, or once one of Ray's own servers
has died.  `RayHead` starts it in a session of its own: Ctrl-C in the terminal reaches the driver
alone, and `ray.init` in the driver itself would take the driver out of the terminal's process
group.
"""

import contextlib
import logging
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from mesh_transformer.util import StoppedError

OBJECT_STORE = 256 << 20  # bytes; a few batches of token ids are all that is ever in it
SECONDS_TO_START = 120.0
SECONDS_TO_END = 20.0
SERVERS = ("gcs_server", "raylet")  # those of Ray's processes that nothing goes on without
HEAD_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    # A machine that has vanished is known to within 5 s, one that hangs within 20.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
}
DRIVER_ENVIRONMENT = {
    # Ray ends the driver itself, without a word, when it has lost the head for so long: a minute
    # would be less than two long heartbeats.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
    # Pages of Ray's own logs, where a disk is full or a process dies: each failure is one line.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
}


class RayHead:
    """A running Ray head, and this process connected to it; a context manager.

    Whoever joins needs the token, which is made here unless RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH
    gives one; Ray's own way would leave it in a file that others can read.

    Raises:
      StoppedError: where Ray cannot start.
    """

    def __init__(self, object_store: int = OBJECT_STORE):
        _require_token()
        self._object_store = object_store
        self._start()

    def _start(self) -> None:
        try:
            self._start_once()
        except StoppedError:  # a busy machine may take more than the 30 s that Ray gives itself
            self._start_once()

    def _start_once(self) -> None:
        command = [sys.executable, "-m", "mesh_transformer.pod.ray_head", str(self._object_store)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            env=os.environ | HEAD_ENVIRONMENT,
        )
        for name, value in DRIVER_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            import ray

            self.address = self._read_address()
            ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR)
        except BaseException:
            self.close()
            raise

    def _read_address(self) -> str:
        """The head's address, once it has said that it is ready."""
        timer = threading.Timer(SECONDS_TO_START, self._process.kill)
        timer.start()
        try:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if line.startswith("address: "):
                    return line.removeprefix("address: ").strip()
        finally:
            timer.cancel()
        said = self._last_words() or f"nothing in {SECONDS_TO_START:.0f} s"
        raise StoppedError(f"Ray cannot start on this machine: {said}")

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else ""

    def __enter__(self) -> "RayHead":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def revive(self) -> None:
        """Starts a new head, with an `address` of its own, where this one has died."""
        if self._process.poll() is None:
            return
        died = self._last_words() or f"its process ended with {self._process.returncode}"
        print(f"Ray's head has died ({died}); a new one starts", file=sys.stderr, flush=True)
        self.close()
        self._start()

    def close(self) -> None:
        """Ends Ray and every process that it started; a second call does nothing."""
        if self._log.closed:
            return
        import ray

        ray.shutdown()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_END)
        _kill_session(self._process.pid)  # what is left where the head did not do it
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


def _require_token() -> None:
    """Has this process and its children ask for a token; Ray reads the mode when imported."""
    if "RAY_AUTH_MODE" not in os.environ:
        if "ray" in sys.modules:
            raise RuntimeError("ray was imported before the RayHead was made")
        os.environ["RAY_AUTH_MODE"] = "token"
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def main() -> None:
    """Runs the head until standard input ends or a server dies, then kills its whole session."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the driver decides when it is over
    # `ray.init` does the same, but has no way to leave out two servers: one looks at all processes'
    # logs ten times a second, for drivers that print them, one makes machines in a cloud.
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    parameters = RayParams(
        num_cpus=0,
        num_gpus=0,
        include_dashboard=False,
        include_log_monitor=False,  # type: ignore[arg-type]
        no_monitor=True,
        object_store_memory=int(sys.argv[1]),
    )
    node = Node(parameters, head=True, shutdown_at_exit=False, ray_init_cluster=True)
    try:
        print(f"address: {node.gcs_address}", flush=True)
        _watch(_servers())
    finally:  # of a driver that has not even waited for the address, too
        _kill_session(os.getsid(0))


def _servers() -> dict[int, str]:
    """Ray's servers in this session, by process id."""
    return {pid: name for pid, name in _members(os.getsid(0)).items() if name in SERVERS}


def _watch(servers: dict[int, str]) -> None:
    """Waits for the end of standard input, or for a server to die, which it tells of."""
    watched = {os.pidfd_open(pid): name for pid, name in servers.items()}
    ready, _, _ = select.select([sys.stdin.fileno(), *watched], [], [])
    if ready[0] in watched:
        print(f"{watched[ready[0]]} died", file=sys.stderr, flush=True)


def _members(session: int) -> dict[int, str]:
    """Linux: the processes of a session and their names, less what ends meanwhile."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if os.getsid(int(path.name)) == session:
                found[int(path.name)] = (path / "comm").read_text(errors="replace").strip()
    return found


def _kill_session(session: int) -> None:
    """Kills every process of a session, this process last.

    Ray's own way to shut down leaves agents for up to a minute, and workers that are stopped.
    """
    members = sorted(_members(session), key=lambda pid: pid == os.getpid())
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
