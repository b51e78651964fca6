"""Trains on local hosts while they are killed, stopped or made to fail; checks the results.

`python -m tests.long.interruptions hosts 16` and `... saves 20` are the long runs; the test suite
has short ones.  Every run must finish by itself, with the metrics of an undisturbed run, bit for
bit.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.checkpoint.native import Checkpoints
from mesh_transformer.config import Config
from mesh_transformer.network import Train
from mesh_transformer.pod import restarts
from tests.support.multihost import random_batches, started
from tests.support.multihost import run as run_hosts
from tests.support.small_run import VALUES, mixed_values, rows_of, write_config
from tests.support.waiting import SECONDS, wait_until

ROOT = Path(__file__).parents[2]
HEARTBEAT = 10
LONGEST = 60.0  # seconds until a run is further than when it was interrupted
KINDS = ("SIGKILL", "SIGSTOP", "SIGTERM", "exception")
SERVERS = ("gcs_server", "raylet")  # of Ray's head; killing one with SIGKILL is a kind too
HOSTS = 2
PIDS = "pids.json"  # file that `drive` writes: the hosts' process ids, by rank
MODEL = "model.txt"  # file with the model folder of a run, if that is in a bucket


def last_step(folder: Path) -> int:
    return max((row["step"] for row in rows_of(metrics_folder(folder))), default=0)


def metrics_folder(folder: Path) -> Path:
    """Return where the metrics of the run in a folder are; `MODEL` names a bucket of its model."""
    model = (folder / MODEL).read_text() if (folder / MODEL).exists() else ""
    return folder / "runs" / model.removeprefix("gs://") if model else folder


def members(session: int) -> dict[int, str]:
    """Return the live processes of a session and their titles (Linux only)."""
    processes = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(path.name)) == session:
                title = (path / "cmdline").read_bytes().split(b"\0")[0].decode()
                if title:  # a zombie has none
                    processes[int(path.name)] = title
    return processes


def sessions_of(driver: int) -> set[int]:
    """Return the sessions of the Ray heads among a process's children (Linux only)."""
    sessions: set[int] = set()
    with contextlib.suppress(OSError):
        for child in map(int, Path(f"/proc/{driver}/task/{driver}/children").read_text().split()):
            # Other children have sessions too, such as wandb's server.
            command = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if os.getsid(child) == child and b"mesh_transformer.pod.ray_head" in command:
                sessions.add(child)
    return sessions


class Training:
    """A driver in its own session, and the Ray sessions that it starts."""

    def __init__(self, folder: Path, *command: str, cwd: Path | None = None):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log.txt"
        in_bucket = (folder / MODEL).exists()  # then its metrics are below the current folder
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=cwd or (folder if in_bucket else ROOT),
                env=os.environ | ({"PYTHONPATH": str(ROOT)} if in_bucket else {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.sessions = {self.process.pid}  # its own, and those of the Ray heads

    def hosts(self) -> list[int]:
        """Return the process ids of the hosts, oldest first."""
        return self.ray_processes("ray::NetworkRunner")

    def ray_processes(self, name: str) -> list[int]:
        """Return the ids of Ray's processes whose names start with `name`, oldest first."""
        self.find_heads()
        processes = self.members()
        return sorted(
            p for p, title in processes.items() if os.path.basename(title).startswith(name)
        )

    def find_heads(self) -> None:
        """Record the current Ray heads, so that processes that they leave behind are noticed."""
        self.sessions |= sessions_of(self.process.pid)

    def members(self) -> dict[int, str]:
        """Return the live processes of all its sessions, and their titles."""
        return {pid: title for session in self.sessions for pid, title in members(session).items()}

    def end(self) -> None:
        """Kill all processes that still run."""
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def assert_nothing_is_left(self, seconds: float = 10.0) -> None:
        wait_until(lambda: not self.members(), "end of all processes", seconds)


@contextlib.contextmanager
def training(folder: Path, *command: str, cwd: Path | None = None) -> Iterator[Training]:
    run = Training(folder, *command, cwd=cwd)
    try:
        yield run
    finally:
        run.end()


def command(config: str, folder: Path | str, *more: str, hosts: int = HOSTS) -> list[str]:
    run = ["train.py", "--config", config, "--local-hosts", str(hosts)]
    return [*run, "--model-dir", str(folder), "--heartbeat", str(HEARTBEAT), *more]


def uninterrupted(folder: Path, **changes: Any) -> tuple[str, Path]:
    """Return a config and the folder of a complete run with it."""
    config = write_config(folder / "config.json", mixed_values(folder, **changes))
    with training(folder / "whole", *command(config, folder / "whole")) as run:
        assert run.process.wait(SECONDS) == 0, run.log.read_text()
        run.assert_nothing_is_left()
    return config, folder / "whole"


class Interruption(NamedTuple):
    """A failure after a step, of the host with a rank or of one of Ray's `SERVERS`."""

    kind: str
    step: int
    rank: int = 0


@dataclasses.dataclass
class Outcome:
    """An interruption's seconds until the run was further than before, and its message."""

    seconds: float
    line: str


def interrupt(
    config: str, whole: Path, folder: Path, interruptions: Sequence[Interruption]
) -> list[Outcome]:
    """Interrupt one run several times; checks that it recovers, and ends as if undisturbed.

    At most one of the interruptions may be an exception.
    """
    arguments = ["-m", "tests.long.interruptions", "drive", config, str(folder)]
    arguments += [
        str(n)
        for interruption in interruptions
        if interruption.kind == "exception"
        for n in interruption[1:]
    ]
    with training(folder, *arguments) as run:
        outcomes = [
            _disturb(run, interruption, number) for number, interruption in enumerate(interruptions)
        ]
        assert run.process.wait(SECONDS) == 0, run.log.read_text()
        run.assert_nothing_is_left()
    assert_same(folder, whole)
    return outcomes


def _disturb(run: Training, interruption: Interruption, before: int) -> Outcome:
    """Interrupt a run that `before` others have interrupted, and wait until it has recovered."""
    folder, (kind, step, rank) = run.folder, interruption
    said_before = len(run.log.read_text())

    def new_output() -> str:
        return run.log.read_text()[said_before:]

    if kind == "exception":
        # The rows of the steps in flight before it are never written, so the log is checked.
        wait_until(lambda: "ValueError" in new_output(), "the exception")
        began = time.monotonic()
    else:
        wait_until(lambda: run.find_heads() or run.ray_processes("raylet"), "Ray")
        # Looked up before the step, because after it every millisecond counts.
        servers = run.ray_processes(kind)
        wait_until(lambda: last_step(folder) >= step, f"step {step}; {run.log}")
        began = time.monotonic()
        if kind in SERVERS:
            os.kill(*servers, signal.SIGKILL)
        else:
            pids = json.loads((folder / PIDS).read_text())
            os.kill(pids[rank], getattr(signal, kind))
    wait_until(lambda: "restarting all hosts" in new_output(), f"failure {before + 1} in the log")
    reached = last_step(folder)
    wait_until(lambda: last_step(folder) > reached, "progress of the run")
    run.find_heads()  # a new one, if the old one has died
    seconds = time.monotonic() - began
    found = re.search(r"([^\r\n]*)\nrestarting all hosts", new_output())
    assert found is not None
    message = found[1]
    if kind not in SERVERS:
        assert re.search(rf"host {rank}\b", message), message
    return Outcome(seconds, message)


def assert_same(folder: Path, whole: Path) -> None:
    """Check that all rows equal the undisturbed run's bit for bit, since JSON keeps all digits."""
    actual, expected = rows_of(metrics_folder(folder)), rows_of(whole)
    assert [row["step"] for row in actual] == [row["step"] for row in expected]
    for actual_row, expected_row in zip(actual, expected, strict=True):
        assert actual_row == expected_row


def drive(config: str, folder: str, step: int | None = None, rank: int = 0) -> None:
    """Train like train.py, and write the process id of each rank to `PIDS`.

    Once after `step`, the host with that rank gets rows of different lengths, for which numpy
    raises ValueError.
    """
    from mesh_transformer.pod.launch import build_model, local_machines

    loaded = Config.load(config)
    done = []

    def make(hosts: list[Any]) -> Any:
        cluster = build_model(loaded, hosts, heartbeat=HEARTBEAT)
        (Path(folder) / PIDS).write_text(json.dumps(cluster._pids))
        submit = cluster._submit

        def spoiled(method: str, *arguments: Any) -> Any:
            own: Any = arguments[rank][0] if method == "run" else None
            if step is not None and isinstance(own, Train) and cluster.step > step + 1 and not done:
                done.append(step)
                own.batch["obs"] = [[0], [0, 1]]
            return submit(method, *arguments)

        cluster._submit = spoiled
        return cluster

    model = Path(folder) / MODEL
    with local_machines(loaded, HOSTS) as hosts:
        restarts.train(lambda: make(hosts()), model.read_text() if model.exists() else folder)


def planned(count: int, seed: int) -> list[tuple[str, int, int]]:
    """Return `count` interruptions (kind, step, rank); `seed` determines their order and steps.

    The first eight have every kind on every rank, and so do the next eight, and so on.
    """
    rng = random.Random(seed)
    plan = []
    while len(plan) < count:
        pairs = list(itertools.product(KINDS, range(HOSTS)))
        rng.shuffle(pairs)
        plan += [(kind, rng.randint(1, 25), rank) for kind, rank in pairs]
    return plan[:count]


def many_hosts(count: int, seed: int) -> None:
    """Run `count` interruptions at random steps, with every kind on every host."""
    plan = planned(count, seed)
    every = set(itertools.product(KINDS, range(HOSTS)))
    assert {(kind, rank) for kind, _, rank in plan} == every, f"give at least {len(every)}"
    with tempfile.TemporaryDirectory() as name:
        config, whole = uninterrupted(Path(name))
        for number, (kind, step, rank) in enumerate(plan):
            interruptions = [Interruption(kind, step, rank)]
            (outcome,) = interrupt(config, whole, Path(name) / f"{number}", interruptions)
            print(
                f"{kind} of host {rank} after step {step}: {outcome.seconds:.1f} s; {outcome.line}",
                flush=True,
            )
            assert outcome.seconds < LONGEST


def state_of(folder: Path | str, step: int) -> list[tuple[str, np.ndarray]]:
    """Return the paths and arrays of a checkpoint."""
    with Checkpoints(str(folder), read_only=True) as checkpoints:
        # Only the tests' own hosts save this entry.
        assert checkpoints.saved(step).aux.get("saved after", step) == step
        return [
            ("/".join(path), np.asarray(checkpoints.saved(step).open_leaf(path)))
            for path in sorted(checkpoints.saved(step).leaves)
        ]


# The first files that exist at each moment of a save of `step`, in a folder that keeps one step.
MOMENTS = {
    "a folder": "step_{step}*",
    "data": "step_{step}.*/state.*/ocdbt.process_*/d/*",
    "all data": "step_{step}.*/state.*/d/*",
    "the arrays' commit file": "step_{step}.*/state*/commit_success.txt",
    "the commit file": "step_{step}/commit_success.txt",
    "a deletion": "step_{step}/commit_success.txt",
}
COMMIT = "commit_success.txt"


def has_reached(model: Path, moment: str, step: int) -> bool:
    """Return whether a save of `step` has reached the moment."""
    with contextlib.suppress(FileNotFoundError):  # files that are moved or deleted meanwhile
        if moment == "a deletion" and (model / f"step_{step - 1}" / COMMIT).exists():
            return False
        return any(model.glob(MOMENTS[moment].format(step=step)))
    return False


def step_reached(model: Path, moment: str, first: int) -> int | None:
    """Return a step from `first` on whose save has reached the moment: some may pass unseen."""
    with contextlib.suppress(FileNotFoundError):
        names = [re.match(r"step_(\d+)", path.name) for path in model.iterdir()]
        steps = sorted({int(name[1]) for name in names if name})
        return next((n for n in steps if n >= first and has_reached(model, moment, n)), None)
    return None


def interrupted_saves(
    folder: Path, count: int, seed: int = 0, last: int = 60, moments: Sequence[str] = (*MOMENTS,)
) -> Iterator[str]:
    """Kill one of two hosts during a save, `count` times; yields a line about each.

    The checkpoint that can then be restored must equal the one that an undisturbed run saved at
    that step, bit for bit, and the next hosts resume from it.  The kills are shortly after each of
    the `moments` in turn.
    """
    rng = random.Random(seed)
    batches = random_batches(Config(**VALUES))
    saving = ("train_and_save", [str(folder / "whole_model"), last + 20])
    run_hosts(folder / "whole", VALUES | {"keep_n": 1000}, 2, batches, [("init", []), saving])
    model = folder / "model"
    saving = ("train_and_save", [str(model), 10**6])
    newest = 0
    for number in range(count):
        moment = moments[number % len(moments)]
        begin = ("restore", [str(model)]) if newest else ("init", [])
        config = VALUES | {"keep_n": 1}
        with started(folder / f"{number}", config, 2, batches, [begin, saving]) as hosts:
            # Late enough that there is a checkpoint before it, but within the undisturbed run.
            first = newest + rng.randint(2, max(2, (last - newest) // (count - number)))

            def reached() -> int | None:
                assert all(host.poll() is None for host in hosts), "a host has ended by itself"
                return step_reached(model, moment, first)  # noqa: B023

            step = wait_until(reached, moment, pause=0)
            time.sleep(rng.uniform(0, 0.005))
            # Only the first process commits and deletes.
            rank = 0 if "commit" in moment or "deletion" in moment else rng.randrange(2)
            hosts[rank].kill()
            hosts[rank].wait()
            files = folder_contents(model)
            time.sleep(rng.uniform(0, 0.5))  # during which the other host may still write
        with Checkpoints(str(model), read_only=True) as checkpoints:
            newest = checkpoints.newest() or 0
        assert newest >= step - 1
        if newest:
            pairs = zip(
                state_of(model, newest),
                state_of(folder / "whole_model", newest),
                strict=True,
            )
            for (name, actual), (expected_name, expected) in pairs:
                assert name == expected_name
                np.testing.assert_array_equal(actual, expected)
        yield f"host {rank} killed after {moment} of step {step}: {files}; step {newest} is whole"


def folder_contents(model: Path) -> str:
    """Describe a model folder's steps: their numbers of files, and whether they are committed."""
    steps = []
    for path in sorted(model.glob("step_*")):
        files = sum(map(Path.is_file, path.rglob("*")))
        commit = "" if (path / COMMIT).exists() else " without commit"
        steps.append(f"{path.name.partition('.')[0]} of {files} files{commit}")
    return ", ".join(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("hosts", "saves", "drive"))
    parser.add_argument("rest", nargs="*")
    args = parser.parse_args()
    if args.what == "drive":
        config, folder, *raises = args.rest
        drive(config, folder, *map(int, raises))
    elif args.what == "hosts":
        count, seed = (*map(int, args.rest), *(16, 0)[len(args.rest) :])
        many_hosts(count, seed)
    else:
        count, seed = (*map(int, args.rest), *(20, 0)[len(args.rest) :])
        with tempfile.TemporaryDirectory() as name:
            for line in interrupted_saves(Path(name), count, seed):
                print(line, flush=True)


if __name__ == "__main__":
    main()
