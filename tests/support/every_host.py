"""Processes that run `mesh-transformer train --every-host` on this machine, as hosts would.

Run as a program, it is one such process, in which a call of a function can be made to fail:

    python -m tests.support.every_host 'mesh_transformer.evaluation.validation:score:2' FLAGS
"""

import builtins
import contextlib
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mesh_transformer import util
from mesh_transformer.cli import train
from mesh_transformer.training.metrics import NAME
from tests.support.multihost import PROXIES, ROOT, free_port
from tests.support.waiting import SECONDS, wait_until

DEVICES = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")
BAR = re.compile(r"\d+%\|")
# Gloo prints such lines from several threads, piece by piece: pieces of one line may be within
# another, so that a number may be left alone on a line.
GLOO = re.compile(
    r"(\[Gloo\] Rank|is connected to|peer ranks\.?|Expected number of connected|\d|:|is|\s)*"
)


class Processes:
    """Processes of one run, whose outputs are in files.

    Attributes:
      all: the processes, by index.
      folder: the model folder.
    """

    def __init__(self, folder: Path, logs: Path, processes: list[subprocess.Popen]):
        self.folder, self.all, self._logs = folder, processes, logs

    def log(self, index: int) -> str:
        return (self._logs / f"{index}.log").read_text()

    def lines(self, index: int) -> list[str]:
        """Return the lines that a process has printed, without progress bars and Gloo's lines."""
        pieces = [piece.strip() for piece in re.split(r"[\r\n]", self.log(index))]
        return [piece for piece in pieces if not BAR.match(piece) and not GLOO.fullmatch(piece)]

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: self.steps() >= step or self.ended(), f"step {step} in {self._logs}")
        assert self.steps() >= step, self.log(0)[-3000:]

    def steps(self) -> int:
        path = self.folder / NAME
        return path.read_text().count("\n") if path.exists() else 0

    def ended(self) -> bool:
        return any(process.poll() is not None for process in self.all)

    def wait(self, seconds: float = SECONDS) -> list[int]:
        """Wait until all processes have ended; return their exit statuses."""
        return [process.wait(seconds) for process in self.all]


@contextlib.contextmanager
def every_host(
    folder: Path,
    config: str,
    count: int,
    *flags: str,
    places: Sequence[Sequence[str]] | None = None,
    faults: Mapping[int, str] | None = None,
    cwd: Sequence[Path] | None = None,
    environment: Sequence[Mapping[str, str]] | None = None,
) -> Iterator[Processes]:
    """Start a run in `folder`/model; kill its processes at the end.

    Args:
      flags: further flags of all processes.
      places: the flags of each process that say which one it is (default: all three).
      faults: for some indices, the call that fails there, as module:function:number.
      cwd: the current folder of each process (default: the repository).
      environment: more environment variables of each process.
    """
    logs = folder / f"logs{len(list(folder.glob('logs*')))}"
    logs.mkdir(parents=True)
    address = f"127.0.0.1:{free_port()}"
    variables = {k: v for k, v in os.environ.items() if k not in DEVICES}
    # Processes must reach each other without this proxy, which does not answer.
    variables |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    variables |= dict.fromkeys(PROXIES, "http://127.0.0.1:9")
    processes: list[subprocess.Popen] = []
    try:
        for index in range(count):
            place = ("--coordinator", address, "--process-count", str(count))
            place += ("--process-index", str(index))
            words = ["--config", config, "--model-dir", str(folder / "model"), "--every-host"]
            words += [*(place if places is None else places[index]), *flags]
            fault = (faults or {}).get(index, "")
            with (logs / f"{index}.log").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.support.every_host", fault, *words],
                        cwd=ROOT if cwd is None else cwd[index],
                        env=variables | ({} if environment is None else environment[index]),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        yield Processes(folder / "model", logs, processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def break_call(fault: str) -> None:
    """Make one call of a function raise an error; `fault` is module:function:number[:error]."""
    module, name, number, *kind = fault.split(":")
    *owners, name = name.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    function, calls = getattr(owner, name), []
    name_of_error = kind[0] if kind else "ValueError"
    error = getattr(builtins, name_of_error, None) or getattr(util, name_of_error)

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == int(number):
            raise error("broken by the test")
        return function(*args, **kwargs)

    setattr(owner, name, broken)


if __name__ == "__main__":
    if sys.argv[1]:
        break_call(sys.argv[1])
    sys.argv[1:] = sys.argv[2:]
    util.run_script(train.main)
