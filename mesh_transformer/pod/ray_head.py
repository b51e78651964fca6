"""A Ray head process that exits when its driver exits, and then kills all of Ray's processes.

`python -m mesh_transformer.pod.ray_head BYTES ADDRESS...` starts a head with an object store of
BYTES bytes, and for each loopback address a Ray node that stands for another machine, and prints
`address: HOST:PORT`.  The head ends when its standard input is closed, or when one of
Ray's own servers dies.  The head's standard input is a pipe from the driver.  This pipe is closed
whenever the driver ends, even if SIGKILL kills the driver.

`RayHead` starts the head in a new session, so that Ctrl-C in the terminal reaches only the driver.
The driver does not start the head with `ray.init`, because `ray.init` would remove the driver from
the terminal's process group.
"""

import contextlib
import logging
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mesh_transformer.util import InputError, StoppedError, last_line

OBJECT_STORE = 256 << 20  # default size in bytes; it holds only a few batches of token ids
SECONDS_TO_START = 120.0  # for the head to print its address
SECONDS_TO_END = 20.0  # for the head to exit after its standard input is closed
FOLDER_VARIABLE = "RAY_TMPDIR"
LONGEST_FOLDER = 34  # bytes; Ray adds up to 73, such as /ray/session_<time>_<pid>/sockets/raylet.1
RESOURCE = "tpu"  # the Ray resource that scripts/init_ray.sh declares on each host
SERVERS = ("gcs_server", "raylet")  # Ray's processes without which the cluster cannot run
HEAD_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    # With these, Ray detects a vanished machine within 5 s, and a hanging machine within 20 s.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
}
SECONDS_TO_CONNECT = 10.0
DRIVER_ENVIRONMENT = {
    # If the driver cannot reach the head for this long, Ray ends the driver without a message.
    # The time must exceed two heartbeats of `TPUCluster`, after which the driver itself reports the
    # failure.  With a long heartbeat, one minute would be too short.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
    # Suppress Ray's long logs about a full disk or a dead process.  The driver reports both in one
    # line.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
}


class RayHead:
    """Context manager that starts a Ray head and connects this process to the head.

    Other machines need a token to join the Ray cluster.  The environment variable RAY_AUTH_TOKEN or
    RAY_AUTH_TOKEN_PATH can provide the token.  Otherwise `RayHead` creates a token and sets
    RAY_AUTH_TOKEN.

    Args:
      object_store: size of Ray's object store on this machine, in bytes.
      machines: loopback addresses of nodes that stand for other machines.

    Attributes:
      address: "HOST:PORT" of the head.

    Raises:
      StoppedError: if Ray cannot start.
    """

    def __init__(self, object_store: int = OBJECT_STORE, machines: Sequence[str] = ()):
        _require_token()
        self._arguments = [str(object_store), *machines]
        with contextlib.ExitStack() as stack:
            stack.enter_context(_short_folder())
            self._start()
            self._stack = stack.pop_all()

    def _start(self) -> None:
        try:
            self._start_once()
        except StoppedError:  # on a busy machine, a start may exceed Ray's limit of 30 s
            self._start_once()

    def _start_once(self) -> None:
        command = [sys.executable, "-m", "mesh_transformer.pod.ray_head", *self._arguments]
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
        set_driver_environment()
        try:
            import ray

            self.address = self._read_address()
            ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR)
        except BaseException:
            self.close()
            raise

    def _read_address(self) -> str:
        """Wait until the head prints its address, and return the address."""
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
        self._stack.close()

    def revive(self) -> None:
        """Start a new head if the head process has died; `address` then changes."""
        if self._process.poll() is None:
            return
        cause = self._last_log_line() or f"exit status {self._process.returncode}"
        print(f"Ray's head has died ({cause}); starting a new one", file=sys.stderr, flush=True)
        self.close()
        self._start()

    def close(self) -> None:
        """Shut down Ray and kill all of its processes; further calls do nothing."""
        if self._log.closed:
            return
        import ray

        ray.shutdown()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_END)
        _kill_session(self._process.pid)  # processes that the head has left running
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


def set_driver_environment() -> None:
    """Set the environment variables of a driver, which Ray reads when it is imported."""
    for name, value in DRIVER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Return a context manager that connects this process to a Ray cluster.

    Args:
      address: "HOST:PORT" of the head, or "auto" for RAY_ADDRESS or a cluster on this machine.

    Raises:
      InputError: if no cluster answers.
    """
    set_driver_environment()
    import ray
    from ray.exceptions import RayError

    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdecimal():  # as Ray would try for minutes
            socket.create_connection((host, int(port)), SECONDS_TO_CONNECT).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise InputError(
            f"--ray {address}: no Ray cluster can be reached ({last_line(error)}); start one "
            "with `ray start --head`, or correct the address"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def is_connected() -> bool:
    """Return whether this process is connected to a Ray cluster."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def local_address(number: int) -> str:
    """Return the loopback address of the Ray node with this number, from 0."""
    return f"127.0.0.{2 + number}"  # Ray assumes that 127.0.0.1 is the driver's machine


@contextlib.contextmanager
def _short_folder() -> Iterator[None]:
    """Give Ray a folder of its own, until the end of the context, if `TMPDIR` is too long.

    The paths of its sockets are in this folder, and have at most 107 bytes.  A folder that
    `RAY_TMPDIR` names is kept.
    """
    if os.environ.get(FOLDER_VARIABLE) or len(os.fsencode(_usual_folder())) <= LONGEST_FOLDER:
        yield
        return
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ[FOLDER_VARIABLE] = folder
        try:
            yield
        finally:
            os.environ.pop(FOLDER_VARIABLE)


def _usual_folder() -> str:
    """Return the folder in which Ray puts its logs, its sockets and the objects that it spills."""
    return os.environ.get(FOLDER_VARIABLE) or os.environ.get("TMPDIR") or "/tmp"


def _require_token() -> None:
    """Enable Ray's token authentication, with a new token unless the environment provides one.

    Raises:
      RuntimeError: if Ray was imported before RAY_AUTH_MODE was set, because Ray reads this
        variable at import.
    """
    if "RAY_AUTH_MODE" not in os.environ:
        if "ray" in sys.modules:
            raise RuntimeError("ray is already imported; create RayHead before importing ray")
        os.environ["RAY_AUTH_MODE"] = "token"
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def spill_disk_is_full() -> bool:
    """Return whether the disk to which Ray spills objects is over 95 % full.

    Above this limit, Ray refuses to spill.
    """
    try:
        usage = shutil.disk_usage(_usual_folder())
    except OSError:  # the folder does not exist
        return False
    return usage.free < 0.05 * usage.total


def main() -> None:
    """Run the head until standard input closes or a Ray server dies, then kill Ray's processes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the driver decides when to end
    # Start what `ray.init` starts, except for two servers that are not needed here.  The log
    # monitor scans all processes' logs ten times per second for drivers that print them.  The
    # autoscaler creates machines in a cloud.
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    size, *machines = sys.argv[1:]
    common: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0, "object_store_memory": int(size)}
    common["include_log_monitor"] = False
    parameters = RayParams(**common, include_dashboard=False, no_monitor=True)
    node = Node(parameters, head=True, shutdown_at_exit=False, ray_init_cluster=True)
    servers = _servers()
    for address in machines:
        parameters = RayParams(
            **common,
            gcs_address=node.gcs_address,
            node_ip_address=address,
            resources={RESOURCE: 1},
        )
        Node(parameters, head=False, shutdown_at_exit=False)
    try:
        print(f"address: {node.gcs_address}", flush=True)
        _watch(servers)
    finally:  # also if printing failed because the driver has ended
        _kill_session(os.getsid(0))


def _servers() -> dict[int, str]:
    """Return {process id: name} of Ray's servers (`SERVERS`) in this process's session."""
    return {pid: name for pid, name in _members(os.getsid(0)).items() if name in SERVERS}


def _watch(servers: dict[int, str]) -> None:
    """Wait until standard input is closed or a server dies; print the name of a dead server."""
    watched = {os.pidfd_open(pid): name for pid, name in servers.items()}
    ready, _, _ = select.select([sys.stdin.fileno(), *watched], [], [])
    if ready[0] in watched:
        print(f"{watched[ready[0]]} died", file=sys.stderr, flush=True)


def _members(session: int) -> dict[int, str]:
    """Return {process id: name} of the processes in a session of `os.getsid` (Linux only).

    Processes that end during the scan are left out.
    """
    names = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if os.getsid(int(path.name)) == session:
                names[int(path.name)] = (path / "comm").read_text(errors="replace").strip()
    return names


def _kill_session(session: int) -> None:
    """Kill every process of an operating system session (this process last, if it is a member).

    Ray's own shutdown is not enough: it leaves some processes running for up to a minute, and never
    ends suspended workers (SIGSTOP).
    """
    members = sorted(_members(session), key=lambda pid: pid == os.getpid())
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
