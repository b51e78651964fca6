"""A Ray head that lives as long as its driver, and takes every process of it along when it ends.

`python -m mesh_transformer.ray_head BYTES` prints `address: HOST:PORT` and ends once its standard
input is closed, which even a SIGKILL of the driver does.  `RayHead` starts it in a session of its
own: Ctrl-C in the terminal reaches the driver alone, and `ray.init` in the driver itself would
take the driver out of the terminal's process group.
"""

import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from mesh_transformer.util import StoppedError

OBJECT_STORE = 256 << 20  # bytes; a few batches of token ids are all that is ever in it
SECONDS_TO_START = 120.0
SECONDS_TO_END = 20.0


class RayHead:
    """A running Ray head, and this process connected to it; a context manager.

    Whoever joins needs the token, which is made here unless RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH
    gives one; Ray's own way would leave it in a file that others can read.

    Raises:
      StoppedError: where Ray cannot start.
    """

    def __init__(self, object_store: int = OBJECT_STORE):
        _require_token()
        command = [sys.executable, "-m", "mesh_transformer.ray_head", str(object_store)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"},
        )
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
        self._log.seek(0)
        said = self._log.read().strip().splitlines() or [f"nothing in {SECONDS_TO_START:.0f} s"]
        raise StoppedError(f"Ray cannot start on this machine: {said[-1]}")

    def __enter__(self) -> "RayHead":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends Ray and every process that it started."""
        import ray

        ray.shutdown()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
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
    """Runs the head until standard input ends, then kills its whole session."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the driver decides when it is over
    import ray

    context: Any = ray.init(
        num_cpus=0,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=int(sys.argv[1]),
    )
    try:
        print(f"address: {context.address_info['gcs_address']}", flush=True)
        sys.stdin.read()
    finally:  # of a driver that has not even waited for the address, too
        _end_session()


def _end_session() -> None:
    """Kills every process of this session, this one last.

    Ray's own way to shut down leaves agents for up to a minute, and workers that are stopped.
    """
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        with contextlib.suppress(ProcessLookupError):
            if pid != os.getpid() and os.getsid(pid) == os.getsid(0):
                os.kill(pid, signal.SIGKILL)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
