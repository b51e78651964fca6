"""A Ray head process that ends with its driver, together with every process that it started.

`python -m mesh_transformer.pod.ray_head BYTES`, with the size of the object store, prints
`address: HOST:PORT`.  It ends once its standard input is closed, which happens even if the driver
is killed with SIGKILL, or once one of Ray's own servers has died.  `RayHead` starts it in a session
of its own, so that Ctrl-C in the terminal reaches only the driver.  Starting the head with
`ray.init` in the driver would remove the driver from the terminal's process group.
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

OBJECT_STORE = 256 << 20  # bytes; it only ever holds a few batches of token ids
SECONDS_TO_START = 120.0  # for the head to print its address
SECONDS_TO_END = 20.0  # for the head to exit after its standard input is closed
SERVERS = ("gcs_server", "raylet")  # Ray's processes that the cluster cannot run without
HEAD_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    # Detects a machine that has vanished within 5 s, and one that hangs within 20 s.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
}
DRIVER_ENVIRONMENT = {
    # Ray ends the driver itself, without a message, once it has lost the head for this long.  A
    # minute would be shorter than two long heartbeats.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
    # Suppress Ray's own pages of logs for a full disk or a dead process: one line reports each.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
}


class RayHead:
    """A running Ray head, with this process connected to it; a context manager.

    Joining requires a token, which is created here unless RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH
    provides one.  Ray itself would leave the token in a file that others can read.

    Raises:
      StoppedError: if Ray cannot start.
    """

    def __init__(self, object_store: int = OBJECT_STORE):
        _require_token()
        self._object_store = object_store
        self._start()

    def _start(self) -> None:
        try:
            self._start_once()
        except StoppedError:  # a busy machine may exceed Ray's own limit of 30 s
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
        """Return the head's address once the head has printed it."""
        timer = threading.Timer(SECONDS_TO_START, self._process.kill)
        timer.start()
        try:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if line.startswith("address: "):
                    return line.removeprefix("address: ").strip()
        finally:
            timer.cancel()
        cause = self._last_log_line() or f"no address after {SECONDS_TO_START:.0f} s"
        raise StoppedError(f"Ray cannot start on this machine: {cause}")

    def _last_log_line(self) -> str:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else ""

    def __enter__(self) -> "RayHead":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def revive(self) -> None:
        """Start a new head, with a new `address`, if this one has died."""
        if self._process.poll() is None:
            return
        cause = self._last_log_line() or f"exit status {self._process.returncode}"
        print(f"Ray's head has died ({cause}); starting a new one", file=sys.stderr, flush=True)
        self.close()
        self._start()

    def close(self) -> None:
        """End Ray and every process that it started; a second call does nothing."""
        if self._log.closed:
            return
        import ray

        ray.shutdown()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_END)
        _kill_session(self._process.pid)  # whatever the head has left running
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


def _require_token() -> None:
    """Make this process and its children require a token.

    Raises RuntimeError if Ray is already imported, since it reads the mode at import.
    """
    if "RAY_AUTH_MODE" not in os.environ:
        if "ray" in sys.modules:
            raise RuntimeError("ray was imported before RayHead was created; create RayHead first")
        os.environ["RAY_AUTH_MODE"] = "token"
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def main() -> None:
    """Run the head until standard input ends or a server dies, then kill its whole session."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the driver decides when to end
    # As `ray.init`, but without two servers that it cannot leave out: the log monitor scans all
    # processes' logs ten times a second, for drivers that print them, and the autoscaler creates
    # machines in a cloud.
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
    finally:  # also if the driver ended before it read the address
        _kill_session(os.getsid(0))


def _servers() -> dict[int, str]:
    """Return Ray's servers in this session, by process id."""
    return {pid: name for pid, name in _members(os.getsid(0)).items() if name in SERVERS}


def _watch(servers: dict[int, str]) -> None:
    """Wait for standard input to end or for a server to die; print which server died."""
    watched = {os.pidfd_open(pid): name for pid, name in servers.items()}
    ready, _, _ = select.select([sys.stdin.fileno(), *watched], [], [])
    if ready[0] in watched:
        print(f"{watched[ready[0]]} died", file=sys.stderr, flush=True)


def _members(session: int) -> dict[int, str]:
    """Return the names of a session's processes by id (Linux), without any that end meanwhile."""
    names = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if os.getsid(int(path.name)) == session:
                names[int(path.name)] = (path / "comm").read_text(errors="replace").strip()
    return names


def _kill_session(session: int) -> None:
    """Kill every process of a session, this process last.

    Ray's own shutdown leaves agents running for up to a minute, and never ends stopped workers.
    """
    members = sorted(_members(session), key=lambda pid: pid == os.getpid())
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
